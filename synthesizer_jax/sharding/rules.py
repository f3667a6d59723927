"""From logical axis names to mesh axes."""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from synthesizer_jax.parameters import LOGICAL_AXES, Axes, is_axes
from synthesizer_jax.suggestions import nearest_multiples

BATCH_AXES = ("data", "fsdp")

RULES: types.MappingProxyType[str, str | None] = types.MappingProxyType(
    {
        "vocab": "tensor",
        "heads": "tensor",
        "mlp": "tensor",
        "embed": "fsdp",
        # Synthesizer tables: by heads alone an xxl model's tables would fill a chip.
        "query_length": "fsdp",
        "length": None,
        "key_length": None,
        "kv": None,
        "synth_hidden": None,
        "rank": None,
        "norm": None,
        "relpos_buckets": None,
        "parts": None,
        "talk_from": None,
        "talk_to": None,
        "taps": None,
        "layers": None,
    }
)
"""Where each logical axis of a parameter is stored."""

assert set(RULES) == set(LOGICAL_AXES)

ACTIVATIONS: types.MappingProxyType[str, tuple[str, ...]] = types.MappingProxyType(
    {"batch": BATCH_AXES, "sequence": ("sequence",)}
)
"""What divides activations besides ``heads``; see `ambient`."""


def spec(
    axes: Axes, shape: tuple[int, ...], mesh: Mesh | AbstractMesh, *, name: str = ""
) -> PartitionSpec:
    """The partition of one array.

    Args:
      axes: a logical name, or None, for every dimension.
      shape: the array's shape.
      mesh: the device mesh.
      name: what to call the array in errors.

    Raises:
      ValueError: two dimensions would use the same mesh axis, or a size does not divide.
    """
    entries: list[str | None] = []
    for axis, size in zip(axes, shape, strict=True):
        target = RULES[axis] if axis is not None else None
        if target is not None and mesh.shape[target] == 1:
            target = None
        if target is not None and target in entries:
            raise ValueError(f"{name}: axes {axes} use the mesh axis {target!r} twice")
        if target is not None and size % mesh.shape[target]:
            ways = mesh.shape[target]
            raise ValueError(
                f"{name}: {axis}={size} does not divide by the mesh's {target}={ways}; "
                f"{nearest_multiples(size, ways)}, and {target}={math.gcd(size, ways)} divides it"
            )
        entries.append(target)
    return PartitionSpec(*entries)


def shardings(axes: Any, shapes: Any, mesh: Mesh | AbstractMesh) -> Any:
    """A tree of `NamedSharding` for trees of logical axes and of shapes."""

    def one(path: Any, names: Axes, leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return NamedSharding(mesh, spec(names, leaf.shape, mesh, name=name))

    return jax.tree.map_with_path(one, axes, shapes, is_leaf=is_axes)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Examples over the data and fsdp axes."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """The same value on every device."""
    return NamedSharding(mesh, PartitionSpec())


def check_batch(batch_size: int, mesh: Mesh | AbstractMesh, *, micro_batches: int = 1) -> None:
    """Raises a `ValueError` when a batch cannot be cut over the mesh and the micro-batches."""
    ways = mesh.shape["data"] * mesh.shape["fsdp"] * micro_batches
    if batch_size % ways:
        raise ValueError(
            f"batch_size={batch_size} does not divide by data × fsdp × micro_batches = "
            f"{mesh.shape['data']} × {mesh.shape['fsdp']} × {micro_batches} = {ways}; "
            f"{nearest_multiples(batch_size, ways)}"
        )


@contextlib.contextmanager
def on_mesh(mesh: Mesh) -> Iterator[None]:
    """Within this context functions are traced for a mesh, and layers divide their work over it.

    A mesh of one device changes nothing.
    """
    if mesh.size == 1:
        yield
        return
    rules = [(name, axes) for name, axes in {**RULES, **ACTIVATIONS}.items() if axes is not None]
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        yield
