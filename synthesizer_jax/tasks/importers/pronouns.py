"""Definite pronoun resolution (Rahman and Ng 2012).

The files consist of blocks of four lines, separated by blank lines.
"""

from __future__ import annotations

import itertools
import pathlib
from typing import TYPE_CHECKING

from synthesizer_jax.tasks.importers.layouts import Source, Split
from synthesizer_jax.tasks.importers.reading import import_error, read_lines
from synthesizer_jax.tasks.importers.staged import Staged

if TYPE_CHECKING:
    import tensorflow_datasets as tfds


def stage(
    builder: tfds.core.GeneratorBasedBuilder,
    split: Split,
    source: Source,
    *,
    target: pathlib.Path,
) -> Staged:
    """Copies `source` to `target` and checks every block.

    The lines of a block are a sentence, its pronoun, two candidates separated by a comma, and the
    correct candidate.

    Raises:
      ValueError: a block is invalid.
    """
    del builder, split
    num_blocks = 0
    with target.open("w", encoding="utf-8", newline="\n") as out:
        lines = read_lines(source.path)
        while block := list(itertools.islice(lines, 5)):
            where = block[0][0]
            texts = [line.strip() for _, line in block] + [""] * (5 - len(block))
            sentence, pronoun, candidate_line, answer, blank = texts
            candidates = [candidate.strip() for candidate in candidate_line.split(",")]
            if blank or not (sentence and pronoun):
                reason = "a block of four lines and a blank one belongs here"
                raise import_error(source.path, where, reason)
            if len(candidates) != 2 or answer not in candidates:
                raise import_error(
                    source.path, where, f"{answer!r} is not one of two in {candidate_line!r}"
                )
            out.write("\n".join(texts) + "\n")
            num_blocks += 1
    return Staged(source.path, {"filepath": str(target)}, num_blocks)
