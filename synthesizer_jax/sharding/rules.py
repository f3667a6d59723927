"""The rules that map logical axes of parameters and activations to mesh axes."""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Iterator, Sequence

import flax.linen as nn
import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from synthesizer_jax.base.messages import did_you_mean, not_divisible
from synthesizer_jax.base.registry import EXTRA_MESH_AXES
from synthesizer_jax.base.typing import KeyPath, PyTree
from synthesizer_jax.primitives.parameters import LOGICAL_AXES, Axes, is_axes

MESH_AXES = ("data", "fsdp", "tensor", "sequence")
"""The axes of every mesh that `make_mesh` returns.

A mesh that was not made by `make_mesh` may lack some of the axes in `MESH_AXES` or have other axes.
Arrays are sharded only over axes that the mesh has and whose names are in `MESH_AXES` or
registered.
"""

BATCH_AXES = ("data", "fsdp")
"""The mesh axes over which the examples of a batch are divided; see `batch_axes`."""

RULES: types.MappingProxyType[str, str] = types.MappingProxyType(
    {
        "vocab": "tensor",
        "heads": "tensor",
        "mlp": "tensor",
        "embed": "fsdp",
        # The tables of Synthesizers have the axis ``query_length``. If the tables of Synthesizers
        # were sharded only by heads, the tables of an xxl model would not fit into the memory of a
        # chip.
        "query_length": "fsdp",
    }
)
"""The mesh axis that shards each logical axis of parameters.

Logical axes that are not in `RULES` are not sharded.
"""

ACTIVATIONS: types.MappingProxyType[str, tuple[str, ...]] = types.MappingProxyType(
    {"batch": BATCH_AXES, "sequence": ("sequence",)}
)
"""The mesh axes that shard each logical axis of activations, except ``heads``.

Activations are sharded over the axis ``heads`` in the same way as parameters; see
`primitives.mesh`.
"""


def register_mesh_axis(name: str, *logical_axes: str) -> None:
    """Registers an additional mesh axis that shards logical axes of parameters.

    For example, after ``register_mesh_axis("expert", "mlp")``, a mesh of the shape
    ``MeshShape(extra=(("expert", 2),))`` shards the hidden features of feed-forward layers over two
    devices. If the registered axis of a mesh has a size greater than 1, it shards the logical axes
    instead of the mesh axis in `RULES`. Meshes without the registered axis are not affected.

    Args:
      name: the name of the mesh axis.
      *logical_axes: names from `LOGICAL_AXES`.

    Raises:
      ValueError: if the name is already in use for other logical axes, or a logical axis is
        unknown.
    """
    if name in MESH_AXES or EXTRA_MESH_AXES.get(name, logical_axes) != logical_axes:
        raise ValueError(
            f"register_mesh_axis: There is already a mesh axis {name!r}. Use another name."
        )
    for axis in logical_axes:
        if axis not in LOGICAL_AXES:
            raise ValueError(
                f"register_mesh_axis: There is no logical axis {axis!r}"
                f"{did_you_mean(axis, LOGICAL_AXES) or '.'}"
            )
    EXTRA_MESH_AXES[name] = logical_axes


def check_mesh_axes(names: Sequence[str]) -> None:
    """Raises a `ValueError` if a name of a mesh axis is unknown or repeated."""
    known = (*MESH_AXES, *EXTRA_MESH_AXES)
    for name in names:
        if name not in known:
            raise ValueError(
                f"mesh: There is no mesh axis {name!r}{did_you_mean(name, known) or '.'} You can "
                "add axes of your own with register_mesh_axis."
            )
        if names.count(name) > 1:
            raise ValueError(f"mesh: The axis {name!r} is repeated. Name every axis only once.")


def _mesh_axis(logical_axis: str, mesh: Mesh | AbstractMesh) -> str | None:
    """Returns the mesh axis that shards a logical axis of parameters, or None if no axis does."""
    for name, logical_axes in EXTRA_MESH_AXES.items():
        if logical_axis in logical_axes and mesh.shape.get(name, 1) > 1:
            return name
    mesh_axis = RULES.get(logical_axis)
    return mesh_axis if mesh_axis in mesh.shape else None


def batch_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Returns the axes of a mesh that divide the examples of a batch.

    The result contains the axes in `BATCH_AXES` that the mesh has.
    """
    return tuple(name for name in BATCH_AXES if name in mesh.shape)


def batch_shards(mesh: Mesh | AbstractMesh) -> int:
    """Returns the number of parts into which a mesh divides the examples of a batch."""
    return math.prod(mesh.shape[name] for name in batch_axes(mesh))


def partition_spec(
    axes: Axes, shape: tuple[int, ...], mesh: Mesh | AbstractMesh, *, name: str = ""
) -> PartitionSpec:
    """Returns the `PartitionSpec` that says how an array is partitioned over a mesh.

    Args:
      axes: the logical axes of the array. None means that the dimension is not sharded.
      shape: the shape of the array.
      mesh: the mesh.
      name: the name of the array, for error messages.

    Raises:
      ValueError: if two dimensions would be sharded over the same mesh axis, or the size of a
        dimension is not divisible by the size of its mesh axis.
    """
    entries: list[str | None] = []
    for axis, size in zip(axes, shape, strict=True):
        mesh_axis = None if axis is None else _mesh_axis(axis, mesh)
        shards = 1 if mesh_axis is None else mesh.shape[mesh_axis]
        if shards > 1 and mesh_axis in entries:
            raise ValueError(
                f"{name}: The logical axes {axes} would shard two dimensions over the mesh axis "
                f"{mesh_axis!r}."
            )
        if size % shards:
            by = f"the mesh's {mesh_axis}={shards}"
            raise ValueError(
                f"{name}: {not_divisible(axis or '', size, by=by, divisor=shards)} You can also "
                f"set {mesh_axis}={math.gcd(size, shards)}, which divides {size}."
            )
        entries.append(mesh_axis if shards > 1 else None)
    return PartitionSpec(*entries)


def shardings(axes: PyTree, shapes: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """Returns the shardings of a pytree of arrays over a mesh.

    Args:
      axes: a pytree of logical axes.
      shapes: a pytree of arrays, or of `jax.ShapeDtypeStruct`.
      mesh: the mesh.

    Returns:
      A pytree of `NamedSharding`.

    Raises:
      ValueError: if an array cannot be sharded; see `partition_spec`. The error message contains
        the path of the array.
    """

    def named_sharding(
        path: KeyPath, names: Axes, array: jax.Array | jax.ShapeDtypeStruct
    ) -> NamedSharding:
        """Returns the sharding of the array at a path."""
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return NamedSharding(mesh, partition_spec(names, array.shape, mesh, name=name))

    return jax.tree.map_with_path(named_sharding, axes, shapes, is_leaf=is_axes)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding that divides the examples of a batch over the data and fsdp axes.

    If the mesh lacks the data axis or the fsdp axis, the batch is divided only over the axis that
    the mesh has.
    """
    return NamedSharding(mesh, PartitionSpec(batch_axes(mesh)))


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Returns the sharding of arrays that are replicated on every device."""
    return NamedSharding(mesh, PartitionSpec())


def check_batch(batch_size: int, mesh: Mesh | AbstractMesh, *, micro_batches: int = 1) -> None:
    """Raises a `ValueError` if a batch cannot be divided over the mesh and the micro-batches.

    The batch size must be a multiple of the number of batch shards times the number of
    micro-batches.
    """
    divisor = batch_shards(mesh) * micro_batches
    if batch_size % divisor:
        factors = {name: mesh.shape[name] for name in batch_axes(mesh)}
        factors["training.micro_batches"] = micro_batches
        by = f"{' × '.join(factors)} = {' × '.join(map(str, factors.values()))}"
        by += f" = {divisor}" if len(factors) > 1 else ""
        raise ValueError(not_divisible("data.batch_size", batch_size, by=by, divisor=divisor))


@contextlib.contextmanager
def use_mesh(mesh: Mesh) -> Iterator[None]:
    """Context manager that lets layers partition their work over a mesh when they are traced.

    The context manager sets JAX's current mesh and Flax's logical axis rules. A mesh with a single
    device has no effect.
    """
    if mesh.size == 1:
        yield
        return

    parameter_rules = {name: _mesh_axis(name, mesh) for name in LOGICAL_AXES}
    activation_rules = {
        name: tuple(axis for axis in axes if axis in mesh.shape)
        for name, axes in ACTIVATIONS.items()
    }
    # Logical axes that the mesh does not shard get no rule.
    rules = [(name, axes) for name, axes in {**parameter_rules, **activation_rules}.items() if axes]
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        yield
