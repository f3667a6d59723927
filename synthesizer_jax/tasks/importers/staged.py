"""Checked copies of original files, in the exact format of TFDS's readers."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Staged:
    """A file that TFDS can read.

    Attributes:
      source: the original file, for error messages.
      arguments: arguments of the TFDS builder's `_generate_examples`.
      rows: number of examples that TFDS makes of the file.
      dropped: number of rows that TFDS drops.
    """

    source: pathlib.Path
    arguments: Mapping[str, object]
    rows: int
    dropped: int = 0
