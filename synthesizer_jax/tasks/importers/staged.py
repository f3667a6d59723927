"""Copies of original files, in the exact format of TFDS's readers."""

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
      lines: number of its rows, of which TFDS may drop some; None: TFDS makes all of them examples.
    """

    source: pathlib.Path
    arguments: Mapping[str, object]
    lines: int | None = None
