"""Arrays that go into a Pallas kernel and come out of it, with a letter for each of their axes.

A kernel has many arguments, of different ranks, and some of them are absent. A letter per axis says
how an argument is cut, so that nobody writes its `BlockSpec` by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl

from synthesizer_jax.base.typing import PyTree


class LabeledArrays(NamedTuple):
    """A tree of arrays, and of what their axes are.

    Attributes:
      arrays: a tree of arrays or of `jax.ShapeDtypeStruct`; None for an array that is absent.
      axes: a tree like it, with one letter per axis, such as ``"bqhr"``.
    """

    arrays: PyTree
    axes: PyTree

    def specs(self, spec: Callable[[Any, str], pl.BlockSpec | None]) -> PyTree:
        """Returns the block specification of every array, a tree like the arrays."""
        return jax.tree.map(spec, self.arrays, self.axes, is_leaf=lambda x: x is None)

    def num_bytes(self) -> int:
        """Returns the size of all arrays together."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(self.arrays))

    def shapes_that_vary_like(self, inputs: LabeledArrays) -> PyTree:
        """Returns the shapes of a kernel's results, which differ between devices if its inputs do.

        Inside `jax.shard_map`, the type of an array says along which mesh axes it varies.
        """
        varying = jax.typeof(jax.tree.leaves(inputs.arrays)[0]).mat
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=varying), self.arrays
        )
