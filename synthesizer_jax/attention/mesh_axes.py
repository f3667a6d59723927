"""Functions that handle the three axis types of the surrounding mesh.

A mesh axis is *explicit* if the types of arrays say how the axis divides the arrays. A mesh axis is
*automatic* if the compiler decides how the axis divides the arrays. A mesh axis is *manual* inside
of a `jax.shard_map` over the axis.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from synthesizer_jax.attention.explanations import warn_once
from synthesizer_jax.base.typing import PyTree


def axes_of_type(kind: AxisType) -> tuple[str, ...]:
    """Returns the axes of the current mesh that have a given axis type.

    The current mesh is the mesh that `jax.set_mesh` or `jax.shard_map` has set. Without a mesh, the
    result is empty.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, axis_type in axes if axis_type == kind)


def axes_along(x: jax.Array, axis: int) -> tuple[str, ...]:
    """Returns the explicit mesh axes that divide one axis of an array, as stated in its type.

    Without a mesh, or if all mesh axes are automatic, the type contains no mesh axes, and the
    result is empty.
    """
    entry = jax.typeof(x).sharding.spec[axis]
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def mesh_of_arguments(*arguments: PyTree) -> contextlib.AbstractContextManager[object]:
    """Returns a context that sets the mesh of the arguments, unless a mesh is set already.

    If an array was placed on a mesh with explicit axes by `jax.device_put`, the type of the array
    contains the mesh, so users need not set the mesh. If all axes are automatic, the types do not
    contain the mesh, and the context sets no mesh.
    """
    if not jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()

    for x in jax.tree.leaves(arguments):
        if isinstance(x, jax.Array) and AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types:
            return jax.sharding.use_abstract_mesh(jax.typeof(x).sharding.mesh)
    return contextlib.nullcontext()


def match_varying_axes(*trees: PyTree) -> PyTree:
    """Makes all arrays vary over the same manual mesh axes, which loops and conditionals require.

    Inside of `jax.shard_map`, an array varies over a mesh axis if its values differ between the
    devices along the axis. If any of the arrays varies over a mesh axis, this function marks all
    arrays as varying over the axis. The cotangent of an array that the devices share is then summed
    over the devices. Outside of `jax.shard_map`, the arrays are returned unchanged.

    Args:
      *trees: pytrees of arrays.

    Returns:
      A tuple of the pytrees.
    """

    def varying(x: jax.Array) -> frozenset[str]:
        """Returns the manual mesh axes over which an array varies."""
        # `mat` is the manual axis type of an array, a part of its JAX type. The set `mat.varying`
        # is empty outside of `jax.shard_map`.
        return frozenset(jax.typeof(x).mat.varying)

    axes = frozenset().union(*map(varying, jax.tree.leaves(trees)))

    def vary(x: jax.Array) -> jax.Array:
        """Returns the array, marked as varying over all axes."""
        missing = tuple(axes - varying(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, trees) if axes else trees


def in_auto_mode(
    function: Callable[..., PyTree], spec: Callable[[PyTree], PyTree]
) -> Callable[..., PyTree]:
    """Returns a function that runs with automatic mesh axes instead of explicit mesh axes.

    The current mesh must have explicit axes. If there is no mesh or no explicit axis, call the
    function directly instead.

    Args:
      function: a function of pytrees.
      spec: maps the result to its sharding, which is a `PartitionSpec` or a pytree of
        `PartitionSpec`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    explicit = axes_of_type(AxisType.Explicit)
    auto = mesh.update_axis_types(dict.fromkeys(explicit, AxisType.Auto))

    def call(*args: PyTree) -> PyTree:
        """Calls the function with automatic axes, and then makes the axes explicit again."""
        with jax.sharding.use_abstract_mesh(auto):
            out = function(*jax.tree.map(_without_types, args))
        return jax.sharding.reshard(out, spec(out))

    return call


def _without_types(x: PyTree) -> PyTree:
    """Removes explicit mesh axes from the type of an array, without changing its sharding."""
    if not isinstance(x, jax.Array):
        return x
    laid_out = jax.typeof(x).sharding.spec

    # The type of an array must not contain axes that are now automatic, so the sharding is removed
    # from the type. The sharding constraint below keeps the array sharded as before, so that the
    # compiler moves no data.
    x = jax.sharding.reshard(x, PartitionSpec())
    if all(entry is None for entry in laid_out) or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    return jax.lax.with_sharding_constraint(x, laid_out)


def on_every_device(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Returns a function that runs on every device, with manual instead of automatic mesh axes.

    The compiler cannot partition a kernel. On TPUs, partitioning a kernel even raises an error.
    When a kernel is called, the mesh axes that divide examples or heads are already manual. Along
    all other mesh axes, every device computes the same results from the complete arguments. These
    results are correct, but the function logs a warning, because arrays may have to be gathered on
    every device.

    The current mesh is read when `on_every_device` is called, because the returned function may be
    traced later. Without a mesh, or if no axis is automatic, the function is returned unchanged.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = axes_of_type(AxisType.Auto)
    if not axes:
        return function
    unused = [f"{axis!r} ({mesh.shape[axis]} devices)" for axis in axes if mesh.shape[axis] > 1]

    def call(*args: PyTree) -> PyTree:
        if unused:
            warn_once(
                "attend: the work of a kernel is not divided over the mesh axes "
                f"{', '.join(unused)}, so all devices along them compute the same results. Set "
                "logical axis rules for 'batch' and 'heads', and choose numbers of examples and "
                "heads that are multiples of the sizes of these axes."
            )
        with jax.sharding.use_abstract_mesh(mesh):
            sharded = jax.shard_map(
                function, in_specs=PartitionSpec(), out_specs=PartitionSpec(), axis_names=set(axes)
            )

            # Outside of `jax.jit`, `jax.shard_map` cannot make only some of the mesh axes manual.
            return jax.jit(sharded, inline=True)(*args)

    return call
