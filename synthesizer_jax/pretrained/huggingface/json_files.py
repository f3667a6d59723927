"""JSON files of folders, checked as they are read."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable

from synthesizer_jax.messages import did_you_mean
from synthesizer_jax.registry import format_value

LARGEST_FILE = 2**28
"""Bytes; no JSON file of a model is larger (a tokenizer's is the largest, of some 20 MB)."""


def read_json(path: pathlib.Path) -> dict[str, object]:
    """Reads a JSON object.

    Raises:
      ValueError: the file is not one.
    """
    if path.stat().st_size > LARGEST_FILE:
        raise ValueError(f"{path} is larger than any JSON file of a model; download it again")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not JSON; copy or download it again") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds no JSON object; copy or download it again")
    return data


class Fields:
    """The fields of a JSON file, checked as they are read.

    Args:
      path: the file.

    Raises:
      ValueError: the file is not a JSON object.
    """

    def __init__(self, path: pathlib.Path):
        self.path, self.fields = path, read_json(path)

    def integer(self, name: str, default: int | None = None, *, most: int = 2**20) -> int:
        """Returns a positive integer."""
        value = self.fields.get(name, default)
        if value is None and default is None and name not in self.fields:
            raise ValueError(f"{self.path} has no {name}; it is not the configuration of a T5")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
            raise ValueError(
                f"{self.path}: {name} is {format_value(value)}; expected a positive integer up to {most:,}"
            )
        return value

    def number(self, name: str, default: float, *, low: float, high: float) -> float:
        """Returns a number from `low` to less than `high`."""
        value = self.fields.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value < high:
            raise ValueError(
                f"{self.path}: {name} is {format_value(value)}; expected a number from {low:g} to less "
                f"than {high:g}"
            )
        return float(value)

    def choice(self, name: str, choices: Iterable[str], default: str) -> str:
        """Returns one of several strings."""
        value, choices = self.fields.get(name, default), tuple(choices)
        if not isinstance(value, str) or value not in choices:
            raise ValueError(
                f"{self.path}: {name} is {format_value(value)}{did_you_mean(str(value), choices)}; "
                f"supported: {', '.join(choices)}"
            )
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Returns true or false."""
        value = self.fields.get(name, default)
        if not isinstance(value, bool):
            raise ValueError(
                f"{self.path}: {name} is {format_value(value)}; expected true or false"
            )
        return value
