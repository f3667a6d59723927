"""Definite pronoun resolution (Rahman and Ng 2012): blocks of four lines and a blank one."""

from __future__ import annotations

import itertools
import pathlib
from typing import Any

from synthesizer_jax.data.importers.layouts import Source, Split
from synthesizer_jax.data.importers.reading import broken, read_lines
from synthesizer_jax.data.importers.staged import Staged


def stage(builder: Any, split: Split, source: Source, target: pathlib.Path) -> Staged:
    """Copies `source` to `target`, checking every block.

    A block is a sentence, its pronoun, two candidates separated by a comma, the right one.

    Raises:
      ValueError: a block is broken.
    """
    del builder, split
    blocks = 0
    with target.open("w", encoding="utf-8", newline="\n") as out:
        lines = read_lines(source.path)
        while block := list(itertools.islice(lines, 5)):
            where = block[0][0]
            texts = [line.strip() for _, line in block] + [""] * (5 - len(block))
            sentence, pronoun, pair, answer, blank = texts
            candidates = [candidate.strip() for candidate in pair.split(",")]
            if blank or not (sentence and pronoun):
                reason = "a block of four lines and a blank one belongs here"
                raise broken(source.path, where, reason)
            if len(candidates) != 2 or answer not in candidates:
                raise broken(source.path, where, f"{answer!r} is not one of two in {pair!r}")
            out.write("\n".join(texts) + "\n")
            blocks += 1
    return Staged(source.path, {"filepath": str(target)}, blocks)
