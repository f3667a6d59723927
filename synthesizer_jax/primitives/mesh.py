"""Partitions the work of layers over the mesh that is current when the layers are traced.

Layers do not store a mesh. Under `jax.set_mesh`, layers partition their work over the mesh axes
that logical axis rules (`flax.linen.logical_axis_rules`) assign to ``batch``, ``heads`` and
``sequence``. If the mesh axes are explicit, layers follow the sharding in the type of their input
instead. With explicit axes, users do not have to set the mesh, because the type of the input
contains the mesh.
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
    """Returns the axes of the current mesh that are assigned to a logical axis.

    If there are several rules for the logical axis, the first rule decides. Mesh axes of size 1 are
    left out, and so are mesh axes that are manual because of an enclosing `jax.shard_map`. Without
    a mesh, the result is empty.
    """
    mesh = jax.sharding.get_abstract_mesh()
    # A rule assigns one mesh axis, a tuple of mesh axes, or None.
    assigned = next((axes for key, axes in nn.get_logical_axis_rules() if key == name), None)
    names = (assigned,) if isinstance(assigned, str) else tuple(assigned or ())
    auto = axes_of_type(AxisType.Auto)
    return tuple(axis for axis in names if axis in auto and mesh.shape[axis] > 1)


def partition(*, batch: int = 0, heads: int = 0) -> Partition | None:
    """Returns the partition of attention over the current mesh.

    The result is None without a mesh, or if the logical axis rules assign no mesh axes.

    Args:
      batch: the number of examples. Mesh axes that do not divide the number of examples evenly are
        not used.
      heads: the number of heads. Mesh axes that do not divide the number of heads evenly are not
        used.
    """
    mesh_partition = Partition(
        batch=mesh_axes("batch"), heads=mesh_axes("heads"), sequence=mesh_axes("sequence")
    )
    if not mesh_partition.axis_names:
        return None
    return mesh_partition.restricted_to(batch=batch, heads=heads)


def constrain(x: jax.Array) -> jax.Array:
    """Constrains the sharding of the residual stream ``[batch, length, ...]``.

    Without a mesh, the array is returned unchanged.
    """
    mesh_partition = partition()
    return x if mesh_partition is None else mesh_partition.constrain(x)


def map_over_batch(function: Callable[..., PyTree], shared: PyTree, *arrays: jax.Array) -> PyTree:
    """Applies a function to the examples of each device; see `Partition.map_rows`.

    Without a mesh, or without mesh axes for the batch, the function is called directly.
    """
    mesh_partition = partition()
    if mesh_partition is None or not mesh_partition.batch:
        return function(shared, *arrays)
    return mesh_partition.map_rows(function, shared, *arrays)


def on_any_mesh(function: Function) -> Function:
    """Makes a function work with explicit mesh axes, which are JAX's default.

    The function is a method of a module, or a function of variables. The first argument is the
    module or the variables. The second argument contains tokens or vectors,
    ``[batch, length, ...]``. If no mesh is set, the mesh is read from the types of the first two
    arguments.

    If the mesh axes are explicit, they are converted to automatic axes while the function runs.
    Examples and positions are partitioned according to the type of the second argument, and heads
    according to the types of the kernels. The result is sharded like the second argument. Variables
    that a method creates are replicated.

    If there is no mesh in these types either, or if no axis is explicit, the function is called
    directly.
    """

    # `functools.wraps` also copies the attribute `compact`, with which `nn.compact` marks a method.
    # Flax therefore treats the wrapper as compact if `on_any_mesh` is above `nn.compact`.
    @functools.wraps(function)
    def wrapped(owner: PyTree, x: jax.Array, *args: object, **kwargs: object) -> PyTree:
        """Calls the function directly, or with automatic axes if the mesh axes are explicit."""
        is_module = isinstance(owner, nn.Module)
        variables = owner.variables if is_module else owner
        with mesh_of_arguments(x, variables):
            if not axes_of_type(AxisType.Explicit):
                return function(owner, x, *args, **kwargs)
            rules, spec_of = _input_layout(x, variables)

            def call_with_rules(owner: PyTree, *args_and_kwargs: PyTree) -> PyTree:
                """Calls the function with the logical axis rules of its arguments' types."""
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
    """Returns the partitioning that follows from the types of the input and of the variables.

    Returns:
      The logical axis rules, and a function from a result to its `PartitionSpec`.
    """
    # Tokens are [batch, length], and vectors are [batch..., length, d_model].
    num_leading = 2 if x.ndim == 2 else x.ndim - 1

    # The rules from the type of the input precede the user's rules, because the first rule for a
    # logical axis decides.
    batch = axes_along(x, 0)
    sequence = axes_along(x, num_leading - 1)
    user_rules = list(nn.get_logical_axis_rules())
    rules: _Rules = [("batch", batch), ("sequence", sequence), *user_rules]
    if all(name != "heads" for name, _ in user_rules):
        rules.append(("heads", _heads_axes(variables.get("params", {}))))

    def spec_of(y: jax.Array) -> PartitionSpec:
        """Returns the sharding of a result, which shares its leading axes with the input."""
        if y.ndim == 0 or y.shape[0] != x.shape[0]:
            return PartitionSpec()
        if y.ndim >= num_leading and y.shape[:num_leading] == x.shape[:num_leading]:
            return PartitionSpec(batch, *[None] * (num_leading - 2), sequence)
        return PartitionSpec(batch)

    return rules, spec_of


def _heads_axes(params: PyTree) -> tuple[str, ...]:
    """Returns the mesh axes that shard the heads.

    The mesh axes are read from the type of the first output projection,
    ``[..., heads, kv, embed]``, among the parameters.
    """
    for path, param in jax.tree.leaves_with_path(params):
        names = [getattr(entry, "key", None) for entry in path]
        if names[-2:] == ["out", "kernel"] and param.ndim >= 3:
            return axes_along(param, -3)
    return ()


def _lift_to_auto_mode(
    function: Callable[..., PyTree], scope: Scope, *args: PyTree, spec_of: _SpecOf
) -> PyTree:
    """Runs a function ``(scope, *args)`` with automatic mesh axes, as a lifted transform of Flax.

    Variables and random streams are passed as arguments of a pure function, which `in_auto_mode`
    can call.
    """

    def apply_packed(
        scope_fn: Callable[[PyTree, PyTree], Scope],
        repack_fn: Callable[[Scope], PyTree],
        variables: PyTree,
        rngs: PyTree,
        *args: PyTree,
    ) -> PyTree:
        """Applies the function with the variables and random streams of a scope as arguments."""

        def apply(variables: PyTree, rngs: PyTree, *args: PyTree) -> PyTree:
            """Applies the function in a new scope, and also returns the variables of the scope."""
            scope = scope_fn(variables, rngs)
            return function(scope, *args), repack_fn(scope)

        call = in_auto_mode(apply, lambda result: jax.tree.map(spec_of, result))
        return call(variables, rngs, *args)

    # The three filters `(True,)` select all variables to pass in, all variables to return, and all
    # random streams, each as a single group.
    return lift.pack(apply_packed, (True,), (True,), (True,), name="on_any_mesh")(scope, *args)
