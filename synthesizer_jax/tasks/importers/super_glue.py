"""Copies of SuperGLUE's JSON lines, which TFDS's own code interprets."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

from synthesizer_jax.tasks.importers.layouts import Source, Split
from synthesizer_jax.tasks.importers.reading import parse_object, read_lines
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
    """Copies the lines of `source` to `target` uncompressed.

    Args:
      builder: the TFDS builder of the task.
      split: the split to read.
      source: the jsonl file.
      target: the file to write.

    Raises:
      ValueError: a line is no JSON object.
    """
    del builder
    if source.format != "jsonl":
        raise ValueError(f"{source.path}: SuperGLUE is read from jsonl; nothing was imported")
    with target.open("w", encoding="utf-8", newline="\n") as file:
        for number, line in read_lines(source.path):
            parse_object(source.path, number, line)
            file.write(line + "\n")
    return Staged(source.path, {"data_file": str(target), "split": split.name})
