"""Device meshes over one or several slices of chips, and arrays moved to and from their devices."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
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
"""Of one axis -1 is what remains of the devices."""

Sizes: TypeAlias = tuple[int, ...]
"""The sizes of a mesh's axes."""


@register
@dataclasses.dataclass(frozen=True)
class MeshShape:
    """The sizes of a mesh's axes, within a slice of chips and (``dcn_``) between slices.

    The size of an axis is the product of both. Among the sizes within a slice, and among those between
    slices, one may be −1: it is inferred from the number of devices or slices. Slices are connected by
    the data-center network only, which the tensor and sequence axes, that transfer activations in every
    layer, would not tolerate.

    Attributes:
      data: number of replicas of the model, which process different examples.
      fsdp: number of devices that process different examples and shard parameters and optimizer state.
      tensor: number of devices that partition matrix products by heads, hidden features and vocabulary.
      sequence: number of devices that partition an encoder's positions; for long inputs.
      dcn_data: number of slices that are replicas.
      dcn_fsdp: number of slices that shard parameters and optimizer state.
      extra: names and sizes, within a slice, of further axes; each is known to `register_mesh_axis`.
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
        """The names of all axes."""
        return (*MESH_AXES, *(name for name, _ in self.extra))

    def sizes(self, devices: int, slices: int = 1) -> tuple[Sizes, Sizes]:
        """Returns the sizes of all axes within a slice and between slices.

        Raises:
          ValueError: the products of the sizes are not the numbers of devices and slices, or an extra
            axis is not registered.
        """
        if devices % slices:
            raise ValueError(f"{devices} devices cannot form {slices} slices of equal size")
        check_mesh_axes(self.axis_names)
        within = {"data": self.data, "fsdp": self.fsdp}
        within |= {"tensor": self.tensor, "sequence": self.sequence, **dict(self.extra)}
        between = {"dcn_data": self.dcn_data, "dcn_fsdp": self.dcn_fsdp}
        return (
            _infer_sizes(within, devices // slices, "devices of a slice"),
            _infer_sizes(between, slices, "slices") + (1,) * (len(within) - len(between)),
        )


def _infer_sizes(sizes: dict[str, int], total: int, unit: str) -> Sizes:
    """Returns the sizes, with −1 replaced such that their product is the total."""
    description = "mesh " + ", ".join(f"{name}={size}" for name, size in sizes.items())
    inferred = list(sizes.values())
    if inferred.count(-1) > 1 or any(size == 0 or size < -1 for size in inferred):
        raise ValueError(f"{description}: sizes must be positive, and at most one is -1")
    if -1 in inferred:
        known = math.prod(size for size in inferred if size != -1)
        inferred[inferred.index(-1)] = total // known if total % known == 0 else 0
    if math.prod(inferred) != total:
        raise ValueError(f"{description} does not fit {total} {unit}: the sizes must multiply to {total}")
    return tuple(inferred)


def make_mesh(shape: MeshShape, devices: list[jax.Device] | None = None) -> Mesh:
    """Makes a mesh of the devices; None: of all.

    On TPUs, every axis consists of whole dimensions of the slice if possible. Otherwise dimensions are
    split, with a warning, because collectives over such an axis can use only some of the links.

    Raises:
      ValueError: the sizes do not match the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    slices = len({getattr(d, "slice_index", 0) for d in devices if d.platform == "tpu"}) or 1
    within, between = shape.sizes(len(devices), slices)
    make = (
        functools.partial(mesh_utils.create_hybrid_device_mesh, within, between)
        if math.prod(between) > 1
        else functools.partial(mesh_utils.create_device_mesh, within)
    )
    try:
        arranged = make(devices)
    except NotImplementedError:
        _log.warning("mesh %s splits dimensions of the slice", within)
        arranged = make(devices, allow_split_physical_axes=True)
    # Since JAX 0.10 axes are Explicit by default; Linen's sharding constraints need Auto.
    return Mesh(arranged, shape.axis_names, axis_types=(AxisType.Auto,) * len(shape.axis_names))


def replicate_to_devices(x: jax.typing.ArrayLike, sharding: jax.sharding.Sharding) -> jax.Array:
    """Makes a global array of an array that is the same on every process."""
    if jax.process_count() == 1:
        return jax.device_put(x, sharding)
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def gather_to_host(x: jax.Array) -> np.ndarray:
    """Gathers a global array to the host of every process."""
    if jax.process_count() == 1:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))
