"""Partitions the work of layers over the mesh that is current when they are traced.

Layers hold no mesh. Under `jax.set_mesh` they partition their work over the mesh axes that the user's
logical axis rules (`flax.linen.logical_axis_rules`) assign to ``batch``, ``heads`` and ``sequence``. If
mesh axes are explicit, the sharding in the type of the layer's input determines the axes instead, and the
mesh need not be set, because the type has it too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TypeAlias

import flax.linen as nn
import jax
from flax.core import Scope, lift
from flax.linen.transforms import lift_direct_transform
from jax.sharding import AxisType, PartitionSpec

from synthesizer_jax.attention import Partition
from synthesizer_jax.attention.mesh_axes import (
    axes_along,
    axes_of_type,
    in_auto_mode,
    mesh_of_arguments,
)
from synthesizer_jax.attention.partition import Function
from synthesizer_jax.base.typing import PyTree

_Rules: TypeAlias = list[tuple[str, str | tuple[str, ...] | None]]
_SpecOf: TypeAlias = Callable[[jax.Array], PartitionSpec]


def mesh_axes(name: str) -> tuple[str, ...]:
    """Returns the axes of the current mesh that the first rule for a logical axis assigns to it.

    Axes of size 1, and those that are manual because of an enclosing `jax.shard_map`, are left out.
    """
    mesh = jax.sharding.get_abstract_mesh()
    assigned = next((axes for key, axes in nn.get_logical_axis_rules() if key == name), None)
    names = (assigned,) if isinstance(assigned, str) else tuple(assigned or ())
    auto = axes_of_type(AxisType.Auto)
    return tuple(axis for axis in names if axis in auto and mesh.shape[axis] > 1)


def partition(*, batch: int = 0, heads: int = 0) -> Partition | None:
    """Returns the partition of attention over the current mesh, or None if it is not partitioned.

    Args:
      batch: number of examples; mesh axes that do not divide it are not used.
      heads: number of heads; mesh axes that do not divide it are not used.
    """
    mesh_partition = Partition(*(mesh_axes(name) for name in ("batch", "heads", "sequence")))
    if not mesh_partition.axis_names:
        return None
    return mesh_partition.restricted_to(batch=batch, heads=heads)


def constrain(x: jax.Array) -> jax.Array:
    """Constrains the sharding of the residual stream ``[batch, length, ...]``."""
    mesh_partition = partition()
    return x if mesh_partition is None else mesh_partition.constrain(x)


def map_over_batch(function: Callable[..., PyTree], shared: PyTree, *arrays: jax.Array) -> PyTree:
    """Applies `Partition.map_rows` for the current mesh; without a mesh, calls the function."""
    mesh_partition = partition()
    if mesh_partition is None or not mesh_partition.batch:
        return function(shared, *arrays)
    return mesh_partition.map_rows(function, shared, *arrays)


def on_any_mesh(function: Function) -> Function:
    """Makes a module's method, or a function of variables, usable with explicit mesh axes, JAX's default.

    The first argument is the module or its variables, the second tokens or vectors
    ``[batch, length, ...]``. The mesh is the one that is set, or else the one in the types of these two.
    The function runs with automatic axes. Examples, positions and heads are
    partitioned according to the types of the second argument and of the kernels. The result is sharded
    like that argument, and variables that a method creates are replicated.
    """

    @functools.wraps(function)
    def wrapped(owner: PyTree, x: jax.Array, *args: object, **kwargs: object) -> PyTree:
        is_module = isinstance(owner, nn.Module)
        variables = owner.variables if is_module else owner
        with mesh_of_arguments(x, variables):
            if not axes_of_type(AxisType.Explicit):
                return function(owner, x, *args, **kwargs)
            rules, spec_of = _input_layout(x, variables)

            def call_with_rules(owner: PyTree, *args_and_kwargs: PyTree) -> PyTree:
                *args, kwargs = args_and_kwargs
                with nn.logical_axis_rules(rules):
                    return function(owner, *args, **kwargs)

            if is_module:
                lifted = functools.partial(_lift_to_auto_mode, spec_of=spec_of)
                return lift_direct_transform(lifted, (call_with_rules,), owner, x, *args, kwargs)
            call = in_auto_mode(call_with_rules, lambda result: jax.tree.map(spec_of, result))
            return call(owner, x, *args, kwargs)

    return wrapped  # type: ignore[return-value]


def _input_layout(x: jax.Array, variables: Mapping[str, PyTree]) -> tuple[_Rules, _SpecOf]:
    """The logical axis rules that the input's and the variables' types imply, and the results' specs."""
    num_leading = 2 if x.ndim == 2 else x.ndim - 1  # tokens, or [batch..., length, d_model]
    batch, sequence = axes_along(x, 0), axes_along(x, num_leading - 1)
    user_rules = list(nn.get_logical_axis_rules())
    rules: _Rules = [("batch", batch), ("sequence", sequence), *user_rules]
    if all(name != "heads" for name, _ in user_rules):
        rules.append(("heads", _heads_axes(variables.get("params", {}))))

    def spec_of(y: jax.Array) -> PartitionSpec:
        if y.ndim == 0 or y.shape[0] != x.shape[0]:
            return PartitionSpec()
        if y.ndim >= num_leading and y.shape[:num_leading] == x.shape[:num_leading]:
            return PartitionSpec(batch, *[None] * (num_leading - 2), sequence)
        return PartitionSpec(batch)

    return rules, spec_of


def _heads_axes(params: PyTree) -> tuple[str, ...]:
    """The mesh axes over which the first output projection ``[..., heads, kv, embed]`` is sharded."""
    for path, param in jax.tree.leaves_with_path(params):
        names = [getattr(entry, "key", None) for entry in path]
        if names[-2:] == ["out", "kernel"] and param.ndim >= 3:
            return axes_along(param, -3)
    return ()


def _lift_to_auto_mode(
    function: Callable[..., PyTree], scope: Scope, *args: PyTree, spec_of: _SpecOf
) -> PyTree:
    """Lifts a function ``(scope, *args)`` with its variables and random streams to automatic axes."""

    def apply_packed(
        scope_fn: Callable[[PyTree, PyTree], Scope],
        repack_fn: Callable[[Scope], PyTree],
        variables: PyTree,
        rngs: PyTree,
        *args: PyTree,
    ) -> PyTree:
        def apply(variables: PyTree, rngs: PyTree, *args: PyTree) -> PyTree:
            scope = scope_fn(variables, rngs)
            return function(scope, *args), repack_fn(scope)

        call = in_auto_mode(apply, lambda result: jax.tree.map(spec_of, result))
        return call(variables, rngs, *args)

    return lift.pack(apply_packed, (True,), (True,), (True,), name="on_any_mesh")(scope, *args)
