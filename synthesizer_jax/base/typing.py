"""Types that several modules share, among them numbers and words with the values that they may have.

``steps: Count`` is an int for type checkers; `registry.check_types` checks that it lies in the range.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container
from typing import Annotated, Any, TypeAlias

PyTree: TypeAlias = Any
"""A pytree of any structure: nested containers with arrays, or what stands for arrays, as leaves."""

KeyPath: TypeAlias = tuple[Any, ...]
"""The path of a leaf, as `jax.tree.map_with_path` gives it."""


class Limit(Container[Any]):
    """What a value of an annotated type must be besides; its string completes "allowed: …"."""


@dataclasses.dataclass(frozen=True)
class Range(Limit):
    """Numbers between two ends.

    Attributes:
      low: the minimum.
      high: the maximum.
      above: whether the minimum does not belong to it.
      below: whether the maximum does not belong to it.
    """

    low: float
    high: float = math.inf
    above: bool = False
    below: bool = False

    def __contains__(self, value: Any) -> bool:
        excluded = (value == self.low and self.above) or (value == self.high and self.below)
        return not excluded and self.low <= value <= self.high

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"above {self.low}" if self.above else f"{self.low} or more"
        if self.above:
            return f"above {self.low}, at most {self.high:,}"
        return f"{self.low} to {'below ' if self.below else ''}{self.high:,}"


@dataclasses.dataclass(frozen=True)
class Choices(Limit):
    """Some values."""

    values: tuple[object, ...]

    def __contains__(self, value: Any) -> bool:
        return value in self.values

    def __str__(self) -> str:
        return ", ".join(map(repr, self.values))


class NotEmpty(Limit):
    """Tuples with an entry, texts with a character."""

    def __contains__(self, value: Any) -> bool:
        return bool(value)

    def __str__(self) -> str:
        return "not empty"


_LARGEST = 2**31 - 1  # counts and lengths are 32-bit integers on devices

Count: TypeAlias = Annotated[int, Range(1, _LARGEST)]
Number: TypeAlias = Annotated[int, Range(0, _LARGEST)]
Length: TypeAlias = Annotated[int, Range(1, 2**20)]
Seed: TypeAlias = Annotated[int, Range(0, 2**32 - 1)]
Share: TypeAlias = Annotated[float, Range(0, 1)]
Rate: TypeAlias = Annotated[float, Range(0, 1, below=True)]
NotNegative: TypeAlias = Annotated[float, Range(0)]
Positive: TypeAlias = Annotated[float, Range(0, above=True)]
Dtype: TypeAlias = Annotated[str, Choices(("float32", "bfloat16"))]
AUTO = "auto"
AutoDtype: TypeAlias = Annotated[str, Choices((AUTO, "float32", "bfloat16"))]
"""A `Dtype`, or ``auto``, which becomes one when the platform is known; see `models.resolve_dtype`."""
