"""The mesh that surrounds a function: its axes by type, and how arrays vary over them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from synthesizer_jax.typing import PyTree


def axes_of_type(kind: AxisType) -> tuple[str, ...]:
    """Returns the axes of a type of the mesh that `jax.set_mesh` or `jax.shard_map` has set."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(n for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == kind)


def axes_along(x: jax.Array, axis: int) -> tuple[str, ...]:
    """Returns the explicit mesh axes that divide a dimension of an array."""
    entry = jax.typeof(x).sharding.spec[axis]
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def match_varying_axes(*trees: PyTree) -> PyTree:
    """Returns the trees with all arrays varying over the manual mesh axes over which any of them varies.

    Loops and conditionals need that inside `jax.shard_map`; an array that devices share then gets the sum
    of their cotangents. Elsewhere nothing changes.
    """
    varying = lambda x: frozenset(jax.typeof(x).mat.varying)
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
