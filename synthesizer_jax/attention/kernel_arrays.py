"""Arrays that go into a Pallas kernel and come out of it, and the call of a kernel.

A kernel has many arguments, of different ranks, and some of them are absent. A letter for each of
their axes says how an argument is cut, so that nobody writes its `BlockSpec` by hand. The kernels
for TPUs and GPUs cut their arguments in different ways, but they are called in the same way.
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


def run_kernel(
    kernel: Callable[..., None],
    inputs: LabeledArrays,
    outputs: LabeledArrays,
    *,
    spec: Callable[[Any, str], pl.BlockSpec | None],
    grid: tuple[int, ...],
    flops: int,
    exponentials: int,
    compiler_params: Any,
    scratch: PyTree = (),
    interpret: bool,
) -> Any:
    """Runs a kernel and returns its results.

    Args:
      kernel: a function of references to the inputs, the outputs and the scratch memory.
      inputs: a tuple of trees of arrays.
      outputs: a tuple of trees of arrays or of `jax.ShapeDtypeStruct`, whose shapes the results
        have.
      spec: returns how an array with the given letters of axes is cut, or None if there is no
        array.
      grid: numbers of programs.
      flops: FLOPs of all programs.
      exponentials: number of exponentials that all programs compute.
      compiler_params: the parameters of the platform's compiler.
      scratch: a tuple of memory that a program keeps for the next one.
      interpret: whether to run the kernel in Python, without the device.
    """
    cost = pl.CostEstimate(
        flops=flops,
        transcendentals=exponentials,
        bytes_accessed=inputs.num_bytes() + outputs.num_bytes(),
    )
    return pl.pallas_call(
        kernel,
        out_shape=outputs.shapes_that_vary_like(inputs),
        grid=grid,
        in_specs=inputs.specs(spec),
        out_specs=outputs.specs(spec),
        scratch_shapes=scratch,
        cost_estimate=cost,
        compiler_params=compiler_params,
        interpret=interpret,
    )(*inputs.arrays)
