"""Device meshes."""

from __future__ import annotations

import dataclasses
import math

import jax
from jax.sharding import AxisType, Mesh

from synthesizer_jax.registry import register

MESH_AXES = ("data", "fsdp", "tensor")


@register
@dataclasses.dataclass(frozen=True)
class MeshShape:
    """How devices are arranged; one size may be −1, which takes what is left.

    Attributes:
      data: replicas that see different examples and hold the whole model.
      fsdp: devices that see different examples and share parameters and optimiser state.
      tensor: devices that share every matrix product by heads, hidden features and vocabulary.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1

    def sizes(self, devices: int) -> tuple[int, int, int]:
        """The three sizes for a number of devices.

        Raises:
          ValueError: the sizes do not multiply to that number.
        """
        sizes = [self.data, self.fsdp, self.tensor]
        if sizes.count(-1) > 1 or any(s == 0 or s < -1 for s in sizes):
            raise ValueError(
                f"mesh data={self.data}, fsdp={self.fsdp}, tensor={self.tensor}: sizes are "
                "positive, and at most one is -1"
            )
        if -1 in sizes:
            rest = math.prod(s for s in sizes if s != -1)
            sizes[sizes.index(-1)] = devices // rest if devices % rest == 0 else 0
        if math.prod(sizes) != devices:
            raise ValueError(
                f"mesh data={self.data}, fsdp={self.fsdp}, tensor={self.tensor} does not fit "
                f"{devices} devices: the sizes must multiply to {devices}"
            )
        return sizes[0], sizes[1], sizes[2]


def make_mesh(shape: MeshShape, devices: list[jax.Device] | None = None) -> Mesh:
    """A mesh with the axes ``data``, ``fsdp`` and ``tensor`` over all devices, or the given ones."""
    devices = jax.devices() if devices is None else devices
    # Since JAX 0.10 axes are Explicit unless said otherwise; Linen's constraints need Auto.
    return jax.make_mesh(
        shape.sizes(len(devices)),
        MESH_AXES,
        axis_types=(AxisType.Auto,) * len(MESH_AXES),
        devices=devices,
    )
