"""What the surrounding mesh is, and how functions run on it whatever the types of its axes.

A mesh axis is *explicit* if the types of arrays say how it divides them, *automatic* if the compiler
decides, and *manual* inside of `jax.shard_map`.
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
    """Returns the axes of a type of the mesh that `jax.set_mesh` or `jax.shard_map` has set."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(n for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == kind)


def axes_along(x: jax.Array, axis: int) -> tuple[str, ...]:
    """Returns the explicit mesh axes that divide a dimension of an array."""
    entry = jax.typeof(x).sharding.spec[axis]
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def mesh_of_arguments(*arguments: PyTree) -> contextlib.AbstractContextManager[object]:
    """Returns a context in which the mesh of the arguments' types is set, unless a mesh is set already.

    Arrays that were placed with `jax.device_put` on a mesh with explicit axes have the mesh in their types,
    so that users need not set it. With automatic axes the types say nothing, and nothing is set.
    """
    if not jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()

    for x in jax.tree.leaves(arguments):
        if isinstance(x, jax.Array) and AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types:
            return jax.sharding.use_abstract_mesh(jax.typeof(x).sharding.mesh)
    return contextlib.nullcontext()


def match_varying_axes(*trees: PyTree) -> PyTree:
    """Returns the trees with all arrays varying over the manual mesh axes over which any of them varies.

    Loops and conditionals need that inside `jax.shard_map`; an array that devices share then gets the sum
    of their cotangents. Elsewhere nothing changes.
    """

    def varying(x: jax.Array) -> frozenset[str]:
        return frozenset(jax.typeof(x).mat.varying)

    axes = frozenset().union(*map(varying, jax.tree.leaves(trees)))

    def vary(x: jax.Array) -> jax.Array:
        missing = tuple(axes - varying(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, trees) if axes else trees


def in_auto_mode(
    function: Callable[..., PyTree], spec: Callable[[PyTree], PyTree]
) -> Callable[..., PyTree]:
    """Returns the function, of pytrees, with all explicit mesh axes made automatic inside.

    `spec` maps the result to its sharding, a `PartitionSpec` or a pytree of them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    explicit = axes_of_type(AxisType.Explicit)
    auto = mesh.update_axis_types(dict.fromkeys(explicit, AxisType.Auto))

    def call(*args: PyTree) -> PyTree:
        with jax.sharding.use_abstract_mesh(auto):
            out = function(*jax.tree.map(_without_types, args))
        return jax.sharding.reshard(out, spec(out))

    return call


def _without_types(x: PyTree) -> PyTree:
    """Returns an array in an automatic mesh with the sharding that its type had in an explicit one."""
    if not isinstance(x, jax.Array):
        return x
    laid_out = jax.typeof(x).sharding.spec
    x = jax.sharding.reshard(x, PartitionSpec())
    if all(entry is None for entry in laid_out) or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    return jax.lax.with_sharding_constraint(x, laid_out)


def on_every_device(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Returns the function, of arrays, with all automatic axes of the current mesh manual inside.

    The compiler cannot divide a kernel, and for TPUs it refuses to try. An axis that is still automatic
    where a kernel is called divides neither examples nor heads, because the axes that do are manual by
    then. Every device along such an axis therefore computes the same, from whole arguments. This is always
    right, but it may gather arrays that were divided, hence the warning.

    The mesh is that of the call of this function: the returned one may be traced later.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = axes_of_type(AxisType.Auto)
    if not axes:
        return function
    unused = [f"{axis!r} ({mesh.shape[axis]} devices)" for axis in axes if mesh.shape[axis] > 1]

    def call(*args: PyTree) -> PyTree:
        if unused:
            warn_once(
                f"attend: a kernel is not divided over mesh axes {', '.join(unused)}, so all devices along "
                "them compute the same; set logical axis rules for 'batch' and 'heads', and choose numbers "
                "of examples and heads that the axes divide"
            )
        with jax.sharding.use_abstract_mesh(mesh):
            sharded = jax.shard_map(
                function, in_specs=PartitionSpec(), out_specs=PartitionSpec(), axis_names=set(axes)
            )
            # Outside of a compiled function JAX makes all axes of a mesh manual or none.
            return jax.jit(sharded, inline=True)(*args)

    return call
