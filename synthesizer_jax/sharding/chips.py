"""TPU chips, and slices of them by the names that Cloud gives them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

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
      config: what libtpu calls it when it compiles for chips that are not here; None is its default.
    """

    name: str
    flops: float
    memory: int
    bandwidth: float
    source: str
    kind: str
    devices: int = 1
    axes: int = 2
    config: str | None = None


_PAGES = "https://docs.cloud.google.com/tpu/docs/"

CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", 275e12, 32 * GIB, 1228e9, _PAGES + "v4", "TPU v4", axes=3, config="megacore"),
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


TILE = (8, 128)
"""Numbers of a tile, in which a TPU's memory holds two axes of an array."""


def held_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Bytes of an array in a TPU's memory, where tiles are filled up.

    The compiler puts those two axes in tiles that waste least (seen in the sizes of arguments that libtpu
    reports); fewer than eight rows take the next power of two. A single axis fills a tile or a power of two
    of its rows.
    """
    total = math.prod(shape)
    if len(shape) < 2:
        whole = TILE[0] * TILE[1]
        numbers = max(TILE[1], next_power(total)) if total <= whole else -(-total // whole) * whole
        return numbers * itemsize
    filled = (
        total // (rows * columns) * filled_rows(rows) * math.ceil(columns / TILE[1]) * TILE[1]
        for rows, columns in itertools.permutations(shape, 2)
        if total
    )
    return min(filled, default=0) * itemsize


def filled_rows(rows: int) -> int:
    """Rows of the tiles that hold so many."""
    return math.ceil(rows / TILE[0]) * TILE[0] if rows > TILE[0] else next_power(rows)


def next_power(count: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << max(0, count - 1).bit_length()
