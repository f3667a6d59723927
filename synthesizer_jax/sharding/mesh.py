"""Device meshes, of one slice of chips or of several."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from synthesizer_jax.registry import register
from synthesizer_jax.sharding.chips import Topology

_log = logging.getLogger(__name__)

MESH_AXES = ("data", "fsdp", "tensor", "sequence")

Sizes = tuple[int, ...]
"""A size for each of `MESH_AXES`."""


@register
@dataclasses.dataclass(frozen=True)
class MeshShape:
    """How devices are arranged; in each of the two fours one size may be −1: what is left.

    An axis is as long as its two sizes multiplied. Between slices there is only the data-centre
    network: data belongs there; tensor and sequence, which move activations in every layer, do not.

    Attributes:
      data: replicas that see different examples and hold the whole model.
      fsdp: devices that see different examples and share parameters and optimiser state.
      tensor: devices that share every matrix product by heads, hidden features and vocabulary.
      sequence: devices that share the positions of an encoder's rows; for long inputs.
      dcn_data: slices that are different replicas.
      dcn_fsdp: slices that share parameters and optimiser state.
      dcn_tensor: slices that share matrix products.
      dcn_sequence: slices that share positions.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    sequence: int = 1
    dcn_data: int = -1
    dcn_fsdp: int = 1
    dcn_tensor: int = 1
    dcn_sequence: int = 1

    def sizes(self, devices: int, slices: int = 1) -> tuple[Sizes, Sizes]:
        """The sizes within a slice and between slices.

        Args:
          devices: of all slices.
          slices: how many.

        Raises:
          ValueError: the sizes do not multiply to these numbers.
        """
        if devices % slices:
            raise ValueError(f"{devices} devices do not make {slices} slices of equal size")
        within = filled(self._named(""), devices // slices, "devices of a slice")
        return within, filled(self._named("dcn_"), slices, "slices")

    def _named(self, prefix: str) -> dict[str, int]:
        return {prefix + axis: getattr(self, prefix + axis) for axis in MESH_AXES}


def filled(sizes: dict[str, int], number: int, what: str) -> Sizes:
    """The sizes with −1 replaced such that they multiply to a number.

    Raises:
      ValueError: they cannot.
    """
    text = "mesh " + ", ".join(f"{name}={size}" for name, size in sizes.items())
    found = list(sizes.values())
    if found.count(-1) > 1 or any(s == 0 or s < -1 for s in found):
        raise ValueError(f"{text}: sizes are positive, and at most one is -1")
    if -1 in found:
        rest = math.prod(s for s in found if s != -1)
        found[found.index(-1)] = number // rest if number % rest == 0 else 0
    if math.prod(found) != number:
        raise ValueError(
            f"{text} does not fit {number} {what}: the sizes must multiply to {number}"
        )
    return tuple(found)


def slices_of(devices: list[jax.Device]) -> int:
    """How many slices of chips the devices make up; 1 for all but TPUs."""
    return len({getattr(d, "slice_index", 0) for d in devices if d.platform == "tpu"}) or 1


def make_mesh(shape: MeshShape, devices: list[jax.Device] | None = None) -> Mesh:
    """A mesh with the axes `MESH_AXES` over all devices, or the given ones.

    On TPUs an axis takes whole dimensions of the slice where that can be; else dimensions are split, with
    a warning: collectives along such an axis have a part of the links.
    """
    devices = jax.devices() if devices is None else devices
    slices = slices_of(devices)
    within, between = shape.sizes(len(devices), slices)
    try:
        places = arrange(within, between, devices)
    except NotImplementedError:
        _log.warning(
            "mesh %s splits dimensions of the slice; `plan` names sizes that do not", within
        )
        places = arrange(within, between, devices, allow_split_physical_axes=True)
    # Since JAX 0.10 axes are Explicit unless said otherwise; Linen's constraints need Auto.
    return Mesh(places, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def arrange(
    within: Sizes, between: Sizes, devices: Sequence[Any], **options: bool
) -> np.ndarray[Any, Any]:
    """Devices in the order in which neighbours along an axis are near one another.

    Raises:
      NotImplementedError: an axis would split a dimension of a TPU slice, and `options` forbid that.
    """
    if math.prod(between) > 1:
        found = mesh_utils.create_hybrid_device_mesh(within, between, devices, **options)
    else:
        found = mesh_utils.create_device_mesh(within, devices, **options)
    return np.asarray(found)


@dataclasses.dataclass(frozen=True)
class PlannedDevice:
    """What `mesh_utils` asks of a TPU device, for slices that are not here."""

    id: int
    device_kind: str
    coords: tuple[int, int, int]
    core_on_chip: int
    platform: str = "tpu"


def planned_devices(topology: Topology) -> list[PlannedDevice]:
    """The devices of one slice of a topology."""
    chip = topology.chip
    x, y, z = (*topology.shape, 1)[:3]
    places = itertools.product(range(z), range(y), range(x), range(chip.devices))
    return [
        PlannedDevice(n, chip.kind, (i, j, k), core) for n, (k, j, i, core) in enumerate(places)
    ]


def on_whole_axes(within: Sizes, topology: Topology) -> bool:
    """Whether axes of these sizes take whole dimensions of a slice of this topology."""
    try:
        arrange(within, (1,), planned_devices(topology))
    except NotImplementedError:
        return False
    return True
