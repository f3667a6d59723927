"""Layers under the mesh that surrounds them.

A layer holds no mesh. Where `jax.set_mesh` has set one, it divides its work along the mesh axes that
the user's logical axis rules (`flax.linen.logical_axis_rules`) give to ``batch``, ``heads`` and
``sequence``; where mesh axes are explicit, along those that its input's type names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import flax.linen as nn
import jax
from flax.core import lift
from flax.linen.transforms import lift_direct_transform
from jax.sharding import AxisType, PartitionSpec

from synthesizer_jax.attention import Partition
from synthesizer_jax.attention.partition import axes_along, axes_of_type, in_auto_mode

Method = TypeVar("Method", bound=Callable[..., Any])


def mesh_axes(name: str) -> tuple[str, ...]:
    """The axes of the surrounding mesh that the logical axis rules give to a logical axis.

    Args:
      name: such as ``batch``; its first rule counts. Axes of length 1, and those that
        `jax.shard_map` has taken already, are left out.
    """
    mesh = jax.sharding.get_abstract_mesh()
    found = next((axes for key, axes in nn.get_logical_axis_rules() if key == name), None)
    names = (found,) if isinstance(found, str) else tuple(found or ())
    auto = axes_of_type(AxisType.Auto)
    return tuple(axis for axis in names if axis in auto and mesh.shape[axis] > 1)


def partition(*, batch: int = 0, heads: int = 0) -> Partition | None:
    """How the surrounding mesh divides attention; None: it does not.

    Args:
      batch: number of examples; where the batch's axes do not divide it, they are left out.
      heads: likewise the number of heads.
    """
    found = Partition(*(mesh_axes(name) for name in ("batch", "heads", "sequence")))
    return found.fitting(batch=batch, heads=heads) if found.names else None


def constrain(x: jax.Array) -> jax.Array:
    """The residual stream ``[batch, length, ...]``, its rows on the devices of their examples."""
    found = partition()
    return x if found is None else found.constrain(x)


def over_rows(function: Callable[..., Any], shared: Any, *arrays: jax.Array) -> Any:
    """`Partition.rows` under the surrounding mesh; without one, the function itself."""
    found = partition()
    if found is None or not found.batch:
        return function(shared, *arrays)
    return found.rows(function, shared, *arrays)


def on_any_mesh(method: Method) -> Method:
    """A module's method that also runs where mesh axes are explicit, JAX's default.

    Inside, the compiler lays arrays out; examples, positions and heads are divided as the types of the
    first argument ``[batch, length, ...]`` and of the kernels say. The result has the layout of that
    argument, variables that the method makes are replicated.
    """

    @functools.wraps(method)
    def wrapped(self: nn.Module, x: jax.Array, *args: Any, **kwargs: Any) -> Any:
        if not axes_of_type(AxisType.Explicit):
            return method(self, x, *args, **kwargs)
        lead = 2 if x.ndim == 2 else x.ndim - 1  # tokens, or [batch..., length, d_model]
        batch, sequence = axes_along(x, 0), axes_along(x, lead - 1)
        between = [None] * (lead - 2)
        given = list(nn.get_logical_axis_rules())
        heads = [] if any(name == "heads" for name, _ in given) else [("heads", _heads_axes(self))]
        rules = [("batch", batch), ("sequence", sequence), *heads, *given]

        def body(module: nn.Module, *args: Any) -> Any:
            *arrays, kwargs = args
            with nn.logical_axis_rules(rules):
                return method(module, *arrays, **kwargs)

        def spec(y: jax.Array) -> PartitionSpec:
            if y.ndim == 0 or y.shape[0] != x.shape[0]:
                return PartitionSpec()
            if y.ndim >= lead and y.shape[:lead] == x.shape[:lead]:
                return PartitionSpec(batch, *between, sequence)
            return PartitionSpec(batch)

        lifted = functools.partial(_lift, spec=spec)
        return lift_direct_transform(lifted, (body,), self, x, *args, kwargs)

    return wrapped  # type: ignore[return-value]


def _heads_axes(module: nn.Module) -> tuple[str, ...]:
    """The mesh axes along which the first output projection ``[heads, kv, embed]`` is divided."""
    for path, leaf in jax.tree.leaves_with_path(module.variables.get("params", {})):
        names = [getattr(key, "key", None) for key in path]
        if names[-2:] == ["out", "kernel"] and leaf.ndim >= 3:
            return axes_along(leaf, -3)
    return ()


def _lift(
    function: Callable[..., Any], scope: Any, *args: Any, spec: Callable[[Any], PartitionSpec]
) -> Any:
    """A function ``(scope, *args)`` in automatic mode, with its variables and random streams."""

    def inner(scope_fn: Any, repack_fn: Any, variables: Any, rngs: Any, *args: Any) -> Any:
        def call(variables: Any, rngs: Any, *args: Any) -> Any:
            scope = scope_fn(variables, rngs)
            return function(scope, *args), repack_fn(scope)

        return in_auto_mode(call, lambda result: jax.tree.map(spec, result))(variables, rngs, *args)

    return lift.pack(inner, (True,), (True,), (True,), name="on_any_mesh")(scope, *args)
