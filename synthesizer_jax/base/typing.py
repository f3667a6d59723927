"""Types that several modules share, including numbers and strings with a limited set of values.

For example, type checkers read the annotation ``steps: Count`` as an int. `registry.check_types`
also checks that the value is in the range that `Count` allows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container
from typing import Annotated, Any, TypeAlias

PyTree: TypeAlias = Any
"""A pytree of any structure: nested containers whose leaves are arrays.

The leaves can also be objects that describe arrays, such as `jax.ShapeDtypeStruct`.
"""

KeyPath: TypeAlias = tuple[Any, ...]
"""The path of a leaf, in the form in which `jax.tree.map_with_path` passes it."""


class Limit(Container[Any]):
    """Base class of limits, which restrict the values of an annotated type.

    A subclass defines the methods ``__contains__`` and ``__str__``. ``__contains__`` says whether a
    value is allowed. The string from ``__str__`` completes an error message that begins with "it
    must be ".
    """


@dataclasses.dataclass(frozen=True)
class Range(Limit):
    """Allows the numbers from a minimum to a maximum.

    Attributes:
      low: the minimum.
      high: the maximum.
      above: whether the minimum itself is excluded.
      below: whether the maximum itself is excluded.
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
            return f"above {self.low} and at most {self.high:,}"
        if self.below:
            return f"at least {self.low} and below {self.high:,}"
        return f"{self.low} to {self.high:,}"


@dataclasses.dataclass(frozen=True)
class Choices(Limit):
    """Allows only the values that are listed.

    Attributes:
      values: the allowed values.
    """

    values: tuple[object, ...]

    def __contains__(self, value: Any) -> bool:
        return value in self.values

    def __str__(self) -> str:
        values = ", ".join(map(repr, self.values))
        return values if len(self.values) == 1 else f"one of {values}"


class NotEmpty(Limit):
    """Allows tuples with at least one entry, and strings with at least one character."""

    def __contains__(self, value: Any) -> bool:
        return bool(value)

    def __str__(self) -> str:
        return "not empty"


# Counts and lengths must fit into 32-bit integers, because devices compute with 32-bit integers.
_LARGEST = 2**31 - 1

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
"""The name of a dtype, or ``auto``.

When the platform is known, `models.resolve_dtype` replaces ``auto`` by the name of a dtype.
"""
