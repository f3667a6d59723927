"""A checked copy of one original file, in the exact form TFDS's own reader expects."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any


@dataclasses.dataclass(frozen=True)
class Staged:
    """A file that TFDS can read.

    Attributes:
      source: the original file, for messages.
      arguments: of the TFDS builder's `_generate_examples`.
      rows: examples that TFDS will make of it.
      dropped: rows that TFDS will leave out.
    """

    source: pathlib.Path
    arguments: dict[str, Any]
    rows: int
    dropped: int = 0
