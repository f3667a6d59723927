"""Definite pronoun resolution (Rahman and Ng 2012).

The files consist of blocks of four lines, separated by blank lines.
"""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

from synthesizer_jax.tasks.importers.layouts import Source, Split
from synthesizer_jax.tasks.importers.reading import read_lines
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
    """Copies `source` to `target` uncompressed.

    The lines of a block are a sentence, its pronoun, two candidates separated by a comma, and the
    correct candidate.
    """
    del builder, split
    with target.open("w", encoding="utf-8", newline="\n") as out:
        out.writelines(f"{line}\n" for _, line in read_lines(source.path))
    return Staged(source.path, {"filepath": str(target)})
