"""Makes device meshes over one or several slices of chips, and moves arrays to and from devices."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable
from typing import Annotated, TypeAlias

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh

from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import Choices, Count
from synthesizer_jax.sharding.rules import MESH_AXES, check_mesh_axes

_log = logging.getLogger(__name__)

AxisSize: TypeAlias = Annotated[int, Choices((-1,))] | Count
"""The size of a mesh axis. −1 means that the size is inferred from the number of devices."""

Sizes: TypeAlias = tuple[int, ...]
"""The sizes of all axes of a mesh."""


@register
@dataclasses.dataclass(frozen=True)
class MeshShape:
    """The sizes of the axes of a mesh, within a slice of chips and between slices.

    Fields that begin with ``dcn_`` are sizes between slices, and all other fields are sizes within
    a slice. The size of a mesh axis is its size within a slice times its size between slices. One
    size within a slice may be −1, which means that the size is inferred from the number of devices
    in a slice. One size between slices may also be −1, which means that the size is inferred from
    the number of slices.

    Slices are connected only by the data-center network. The tensor and sequence axes have no
    ``dcn_`` fields, because they transfer activations in every layer, and the data-center network
    is too slow for this traffic.

    Attributes:
      data: number of replicas of the model, which process different examples.
      fsdp: number of devices over which parameters and optimizer state are sharded. The devices on
        this axis process different examples.
      tensor: number of devices that partition matrix products by heads, hidden features and
        vocabulary.
      sequence: number of devices over which the positions of an encoder are partitioned, for long
        inputs.
      dcn_data: number of slices that are replicas of the model.
      dcn_fsdp: number of slices that shard parameters and optimizer state.
      extra: names and sizes of additional axes within a slice. Every name must be registered with
        `register_mesh_axis` first.
    """

    data: AxisSize = -1
    fsdp: AxisSize = 1
    tensor: AxisSize = 1
    sequence: AxisSize = 1
    dcn_data: AxisSize = -1
    dcn_fsdp: AxisSize = 1
    extra: tuple[tuple[str, int], ...] = ()

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The names of all axes, in the order of the mesh's dimensions."""
        return (*MESH_AXES, *(name for name, _ in self.extra))

    def sizes(self, devices: int, slices: int = 1) -> tuple[Sizes, Sizes]:
        """Returns the sizes of all axes within a slice and between slices.

        Args:
          devices: number of devices in all slices together.
          slices: number of slices.

        Raises:
          ValueError: if the product of the sizes is not the number of devices in a slice or the
            number of slices, or an additional axis is not registered.
        """
        if devices % slices:
            raise ValueError(
                f"{devices} devices cannot be divided into {slices} slices of equal size."
            )
        check_mesh_axes(self.axis_names)
        within = {
            "data": self.data,
            "fsdp": self.fsdp,
            "tensor": self.tensor,
            "sequence": self.sequence,
            **dict(self.extra),
        }
        between = {"dcn_data": self.dcn_data, "dcn_fsdp": self.dcn_fsdp}
        sizes_within = _infer_sizes(within, devices // slices, "devices of a slice")
        sizes_between = _infer_sizes(between, slices, "slices")
        # Only the first two mesh axes can extend over several slices.
        others = (1,) * (len(within) - len(between))
        return sizes_within, sizes_between + others


def _infer_sizes(sizes: dict[str, int], total: int, unit: str) -> Sizes:
    """Replaces a size of −1 so that the product of all sizes is `total`, and returns all sizes."""
    description = ", ".join(f"{name}={size}" for name, size in sizes.items())
    inferred = list(sizes.values())
    if inferred.count(-1) > 1 or any(size == 0 or size < -1 for size in inferred):
        raise ValueError(
            f"The mesh has the sizes {description}, but sizes must be positive, and only one of "
            "them may be -1."
        )
    if -1 in inferred:
        known = math.prod(size for size in inferred if size != -1)
        if total % known == 0:
            inferred[inferred.index(-1)] = total // known
    if math.prod(inferred) != total:
        raise ValueError(
            f"The mesh has the sizes {description}, but their product must be {total}, the number "
            f"of {unit}."
        )
    return tuple(inferred)


def make_mesh(shape: MeshShape, devices: list[jax.Device] | None = None) -> Mesh:
    """Returns a mesh of the devices.

    On TPUs, every mesh axis consists of whole dimensions of the slice's topology if possible. If
    dimensions must be split, a warning is issued, because collectives over an axis with split
    dimensions can use only some of the links between chips.

    Args:
      shape: the sizes of the mesh axes.
      devices: the devices. None means all devices.

    Raises:
      ValueError: if the sizes do not match the number of devices.
    """
    if devices is None:
        devices = jax.devices()
    # Only TPU devices are grouped into slices.
    slices = len({getattr(d, "slice_index", 0) for d in devices if d.platform == "tpu"}) or 1
    within, between = shape.sizes(len(devices), slices)

    make = functools.partial(mesh_utils.create_device_mesh, within)
    if math.prod(between) > 1:
        make = functools.partial(mesh_utils.create_hybrid_device_mesh, within, between)
    try:
        arranged = make(devices)
    except NotImplementedError:
        _log.warning(
            "The mesh %s splits dimensions of the slice, so some collectives can use only a part "
            "of the links between chips.",
            within,
        )
        arranged = make(devices, allow_split_physical_axes=True)

    # Since JAX 0.10, mesh axes are Explicit by default, but Linen's sharding constraints need Auto.
    return Mesh(arranged, shape.axis_names, axis_types=(AxisType.Auto,) * len(shape.axis_names))


def replicate_to_devices(x: jax.typing.ArrayLike, sharding: jax.sharding.Sharding) -> jax.Array:
    """Returns a global array from a host array that is the same in every process.

    Args:
      x: the array.
      sharding: the sharding of the result.
    """
    if jax.process_count() == 1:
        return jax.device_put(x, sharding)
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def read_to_devices(
    read: Callable[[tuple[slice, ...]], np.ndarray],
    shape: tuple[int, ...],
    sharding: jax.sharding.Sharding,
) -> jax.Array:
    """Returns a global array of which each process reads only what its own devices hold.

    Args:
      read: a function that reads the part of the array that an index selects. The function is
        called once for each different part.
      shape: the shape of the global array.
      sharding: the sharding of the result.
    """
    parts: dict[tuple[tuple[int, int, int], ...], np.ndarray] = {}
    shards = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None  # because the device belongs to this process
        # Devices that hold the same part have equal indices. Slices cannot be keys of a dictionary.
        key = tuple(axis.indices(n) for axis, n in zip(index, shape, strict=True))
        if key not in parts:
            parts[key] = read(index)
        shards.append(jax.device_put(parts[key], device))
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def gather_to_host(x: jax.Array) -> np.ndarray:
    """Returns a complete global array as a NumPy array in every process."""
    if jax.process_count() == 1:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))
