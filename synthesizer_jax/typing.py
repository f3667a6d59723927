"""Types that several modules share."""

from __future__ import annotations

from typing import Any, TypeAlias

PyTree: TypeAlias = Any
"""A pytree of any structure: nested containers with arrays, or what stands for arrays, as leaves."""

KeyPath: TypeAlias = tuple[Any, ...]
"""The path of a leaf, as `jax.tree.map_with_path` gives it."""
