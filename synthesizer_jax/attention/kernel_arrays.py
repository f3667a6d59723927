"""Labels the axes of the inputs and outputs of Pallas kernels, and runs the kernels.

A kernel has many arguments with different numbers of axes, and some arguments may be absent. Each
axis of an argument is named by a letter. The letters determine how an argument is cut into blocks,
so that no `BlockSpec` is written by hand. The kernels for TPUs and the kernels for GPUs cut their
arguments in different ways, but `run_kernel` runs both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl

from synthesizer_jax.base.typing import PyTree


class LabeledArrays(NamedTuple):
    """A tree of arrays, with letters that name the axes of each array.

    Attributes:
      arrays: a tree of arrays or of `jax.ShapeDtypeStruct`, with None for each absent array.
      axes: a tree with the structure of `arrays` and a string for each array. The string has one
        letter per axis, such as ``"bqhr"``.
    """

    arrays: PyTree
    axes: PyTree

    def specs(self, spec: Callable[[Any, str], pl.BlockSpec | None]) -> PyTree:
        """Returns a tree with the block specification of each array."""
        return jax.tree.map(spec, self.arrays, self.axes, is_leaf=lambda x: x is None)

    def num_bytes(self) -> int:
        """Returns the total number of bytes of all arrays."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(self.arrays))

    def shapes_that_vary_like(self, inputs: LabeledArrays) -> PyTree:
        """Returns the shapes of a kernel's results, with the varying mesh axes of the inputs.

        Inside `jax.shard_map`, the type of an array contains the mesh axes along which the array
        varies. The results vary along the same mesh axes as the inputs. Outside of `jax.shard_map`,
        no array varies along a mesh axis.
        """
        # `mat` is the manual axis type of an array. The routes have called `match_varying_axes`, so
        # all inputs have the same manual axis type, and any input can provide it.
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
      inputs: a tuple of pytrees of arrays.
      outputs: a tuple of pytrees of arrays or of `jax.ShapeDtypeStruct`, which have the shapes and
        dtypes of the results.
      spec: a function that maps an array and the letters of its axes to a block specification, or
        to None if the array is absent.
      grid: the numbers of programs along each axis of the grid.
      flops: the number of FLOPs of all programs together.
      exponentials: the number of exponentials that all programs compute.
      compiler_params: the parameters of the platform's compiler.
      scratch: a tuple of scratch memory, whose contents are kept from one program to the next.
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
