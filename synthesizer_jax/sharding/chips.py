"""TPU chips, and slices of them by the names that Cloud gives them."""

from __future__ import annotations

import dataclasses
import math

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """What one chip can do.

    Attributes:
      name: of its generation, as in ``v5p:4x4x8``.
      flops: FLOP/s of bfloat16 products.
      memory: bytes of high-bandwidth memory.
      bandwidth: bytes/s between that memory and the cores.
      source: where these numbers stand.
      devices: how many devices JAX shows for it.
      axes: dimensions of its slices.
      kind: what JAX calls it.
    """

    name: str
    flops: float
    memory: int
    bandwidth: float
    source: str
    kind: str
    devices: int = 1
    axes: int = 2


_PAGES = "https://docs.cloud.google.com/tpu/docs/"

CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", 275e12, 32 * GIB, 1228e9, _PAGES + "v4", "TPU v4", axes=3),
        Chip("v5e", 197e12, 16 * GIB, 819e9, _PAGES + "v5e", "TPU v5 lite"),
        Chip("v5p", 459e12, 95 * GIB, 2765e9, _PAGES + "v5p", "TPU v5", axes=3),
        Chip("v6e", 918e12, 32 * GIB, 1640e9, _PAGES + "v6e", "TPU v6 lite"),
        Chip("tpu7x", 2307e12, 192 * GIB, 7380e9, _PAGES + "tpu7x", "TPU7x", devices=2, axes=3),
    )
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Slices of chips.

    Attributes:
      chip: the generation.
      shape: chips of a slice along each of its dimensions.
      slices: how many equal slices.
    """

    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def name(self) -> str:
        """Such as ``v5p:4x4x8``, of one slice."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def chips(self) -> int:
        """Chips of all slices."""
        return math.prod(self.shape) * self.slices

    @property
    def devices(self) -> int:
        """Devices as JAX counts them, of all slices."""
        return self.chips * self.chip.devices


def topology(text: str, slices: int = 1) -> Topology:
    """A topology from a name such as ``v5e:16x16`` or ``v5p:4x4x8``.

    Raises:
      ValueError: no such chip, or not a shape of its slices.
    """
    name, _, shape = text.partition(":")
    if name not in CHIPS:
        raise ValueError(f"topology {text!r}: unknown chip; choose from {', '.join(CHIPS)}")
    chip, sizes = CHIPS[name], shape.split("x")
    if len(sizes) != chip.axes or not all(s.isdigit() and int(s) > 0 for s in sizes):
        example = "x".join(["4"] * chip.axes)
        raise ValueError(
            f"topology {text!r}: slices of {name} have {chip.axes} dimensions, as in {name}:{example}"
        )
    if slices < 1:
        raise ValueError(f"{slices} slices; give 1 or more")
    return Topology(chip, tuple(map(int, sizes)), slices)
