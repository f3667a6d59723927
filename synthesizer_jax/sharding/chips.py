"""Accelerator chips, and slices of TPUs by the names that Cloud gives them.

The standard library suffices here: `tpu_scripts/launch` runs this file as a program, on machines where the
package is not installed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import sys
from collections.abc import Iterator, Sequence

GIB = 2**30
_PAGES = "https://docs.cloud.google.com/tpu/docs/"

SQUARE = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
"""Slices of v5e and v6e, from the pages of these chips."""


def cubic(largest: int, *small: tuple[int, int, int]) -> tuple[tuple[int, ...], ...]:
    """Slices of chips whose links have three dimensions: the small ones, and whole cubes of 4 × 4 × 4.

    Their sizes are in ascending order and multiples of four ("TPU types and topologies",
    https://cloud.google.com/tpu/docs/types-topologies).

    Args:
      largest: chips of the largest slice.
      small: what there is below a cube.
    """
    cubes = range(1, largest // 64 + 1)
    return *small, *(
        (4 * a, 4 * b, 4 * c)
        for a, b, c in itertools.combinations_with_replacement(cubes, 3)
        if 64 * a * b * c <= largest
    )


SMALL = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))


@dataclasses.dataclass(frozen=True)
class Chip:
    """What one TPU chip can do.

    Attributes:
      name: of its generation, as in ``v5p:4x4x8``.
      type: of its slices, the part of ``v5litepod-16`` before the hyphen.
      flops: FLOP/s of bfloat16 products, which float32 products of JAX' default precision are too.
      memory: bytes of high-bandwidth memory.
      bandwidth: bytes/s between that memory and the cores.
      source: where these numbers stand, and the shapes.
      kinds: what JAX calls it (``device_kind``), in some versions by the second name.
      shapes: chips of a slice along its dimensions, for every slice that there is.
      devices: how many devices JAX shows for it.
      cores: how many the number in a type's name counts for it: 2, TensorCores, or 1, chips.
      config: what libtpu calls it when it compiles for chips that are not here; None is its default.
    """

    name: str
    type: str
    flops: float
    memory: int
    bandwidth: float
    source: str
    kinds: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    devices: int = 1
    cores: int = 1
    config: str | None = None

    @property
    def kind(self) -> str:
        """What JAX calls it."""
        return self.kinds[0]


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            *("v2", "v2", 45e12, 16 * GIB, 700e9, _PAGES + "v2", ("TPU v2",)),
            shapes=((2, 2), (4, 4), (8, 8), (8, 16), (16, 16)),
            devices=2,
            cores=2,
        ),
        Chip(
            *("v3", "v3", 123e12, 32 * GIB, 900e9, _PAGES + "v3", ("TPU v3",)),
            shapes=((2, 2), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16), (16, 32), (32, 32)),
            devices=2,
            cores=2,
        ),
        Chip(
            *("v4", "v4", 275e12, 32 * GIB, 1228e9, _PAGES + "v4", ("TPU v4",)),
            shapes=cubic(4096, *SMALL),
            cores=2,
            config="megacore",
        ),
        Chip(
            *("v5e", "v5litepod", 197e12, 16 * GIB, 819e9, _PAGES + "v5e"),
            kinds=("TPU v5 lite", "TPU v5e"),
            shapes=SQUARE,
        ),
        Chip(
            *("v5p", "v5p", 459e12, 95 * GIB, 2765e9, _PAGES + "v5p", ("TPU v5", "TPU v5p")),
            shapes=cubic(6144, *SMALL),
            cores=2,
        ),
        Chip(
            *("v6e", "v6e", 918e12, 32 * GIB, 1640e9, _PAGES + "v6e"),
            kinds=("TPU v6 lite", "TPU v6e"),
            shapes=SQUARE,
        ),
        Chip(
            *("tpu7x", "tpu7x", 2307e12, 192 * GIB, 7380e9, _PAGES + "tpu7x", ("TPU7x",)),
            shapes=cubic(9216, (1, 1, 1), *SMALL),
            devices=2,
            cores=2,
        ),
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
    def type(self) -> str:
        """The accelerator type that Cloud gives one slice, such as ``v5p-256``."""
        return f"{self.chip.type}-{math.prod(self.shape) * self.chip.cores}"

    @property
    def usual(self) -> bool:
        """Whether the accelerator type alone means this shape: that of its size nearest to a cube."""
        return self.shape == usual_shapes(self.chip)[math.prod(self.shape)]

    @property
    def chips(self) -> int:
        """Chips of all slices."""
        return math.prod(self.shape) * self.slices

    @property
    def devices(self) -> int:
        """Devices as JAX counts them, of all slices."""
        return self.chips * self.chip.devices


@functools.cache
def usual_shapes(chip: Chip) -> dict[int, tuple[int, ...]]:
    """By number of chips, the slice that is nearest to a cube: what an accelerator type stands for."""
    surface = lambda shape: sum(a * b for a, b in itertools.combinations(shape, 2))
    shapes = sorted(chip.shapes, key=surface, reverse=True)
    return dict(sorted((math.prod(shape), shape) for shape in shapes))


def topology(text: str, slices: int = 1) -> Topology:
    """A topology from its name, ``v5p:4x4x8``, or from an accelerator type of Cloud TPU, ``v5p-256``.

    The number in a type's name counts TensorCores, two a chip, on v2, v3, v4, v5p and tpu7x, and chips on
    v5e (``v5litepod-16``) and v6e.

    Raises:
      ValueError: no such chip, or no such slice of it; the message names the slices near it.
    """
    if slices < 1:
        raise ValueError(f"{slices} slices; give 1 or more")
    name, sign, size = re.fullmatch(r"([^:-]*)([:-]?)(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    chip = next((c for c in CHIPS.values() if name in (c.name, c.type)), None)
    if chip is None:
        raise ValueError(f"unknown chip in {text!r}; choose from {', '.join(CHIPS)}")
    pattern = r"[1-9][0-9]{0,5}(x[1-9][0-9]{0,5})*" if sign == ":" else r"[1-9][0-9]{0,8}"
    if not sign or not re.fullmatch(pattern, size):
        first = Topology(chip, chip.shapes[2])
        raise ValueError(
            f"{text!r} names no slice; give chips as in {first.name}, or a type such as {first.type}"
        )
    if sign == ":":
        shape: tuple[int, ...] | None = tuple(map(int, size.split("x")))
        asked = float(math.prod(shape or ()))
        shape = shape if shape in chip.shapes else None
    else:
        asked = int(size) / chip.cores
        shape = usual_shapes(chip).get(int(asked)) if asked.is_integer() else None
    if shape is None:
        near = " and ".join(f"{place.name} ({place.type})" for place in neighbours(chip, asked))
        raise ValueError(f"{chip.name} has no slice {text!r}; near it are {near}")
    return Topology(chip, shape, slices)


def neighbours(chip: Chip, chips: float) -> Iterator[Topology]:
    """The slice with at most so many chips, and the one with more; one of them may be missing."""
    shapes = usual_shapes(chip)
    fewer, more = [n for n in shapes if n <= chips], [n for n in shapes if n > chips]
    for size in fewer[-1:] + more[:1]:
        yield Topology(chip, shapes[size])


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What one GPU can do at most, without sparsity.

    Attributes:
      kinds: beginnings of its names in JAX (``device_kind``).
      bfloat16: FLOP/s of products; None: its tensor cores have no bfloat16.
      float16: FLOP/s of products.
      float32: FLOP/s of products in JAX' default precision, which on tensor cores from A100 on is TF32.
      source: where these numbers stand.
    """

    kinds: tuple[str, ...]
    bfloat16: float | None
    float16: float
    float32: float
    source: str


_NVIDIA = "https://www.nvidia.com/en-us/data-center/"

GPUS = (
    # The first that fits counts: cards with a name of their own before the rest of their generation. Data
    # sheets that count structured sparsity say twice as much.
    Gpu(("NVIDIA GB200",), 2500e12, 2500e12, 1250e12, _NVIDIA + "gb200-nvl72/"),
    Gpu(("NVIDIA B200",), 2250e12, 2250e12, 1100e12, _NVIDIA + "hgx/"),
    Gpu(("NVIDIA H200 NVL",), 835.5e12, 835.5e12, 417.5e12, _NVIDIA + "h200/"),
    Gpu(("NVIDIA H200", "NVIDIA GH200"), 989.5e12, 989.5e12, 494.5e12, _NVIDIA + "h200/"),
    Gpu(("NVIDIA H100 NVL",), 835.5e12, 835.5e12, 417.5e12, _NVIDIA + "h100/"),
    Gpu(("NVIDIA H100 PCIe",), 756e12, 756e12, 378e12, _NVIDIA + "h100/"),
    Gpu(("NVIDIA H100",), 989.5e12, 989.5e12, 494.5e12, _NVIDIA + "h100/"),
    Gpu(("NVIDIA A100",), 312e12, 312e12, 156e12, _NVIDIA + "a100/"),
    Gpu(("NVIDIA L4",), 121e12, 121e12, 60e12, _NVIDIA + "l4/"),
    Gpu(("Tesla T4", "NVIDIA T4"), None, 65e12, 8.1e12, _NVIDIA + "tesla-t4/"),
    Gpu(("Tesla V100-PCIE",), None, 112e12, 14e12, _NVIDIA + "v100/"),
    Gpu(("Tesla V100",), None, 125e12, 15.7e12, _NVIDIA + "v100/"),
)


def peak_flops(kind: str, dtype: str) -> float | None:
    """The published FLOP/s of matrix products on one device; None: not known, as of a part of a GPU.

    Args:
      kind: the device's ``device_kind``, such as ``TPU v5 lite`` or ``NVIDIA H100 80GB HBM3``.
      dtype: that the model computes in: bfloat16, float16 or float32. TPUs multiply all of them as
        bfloat16, unless JAX is asked for more than its default precision.
    """
    for chip in CHIPS.values():
        if kind in chip.kinds and dtype in ("bfloat16", "float16", "float32"):
            return chip.flops / chip.devices
    for gpu in GPUS:
        if re.match(rf"({'|'.join(gpu.kinds)})(?!\w)(?!.*\bMIG\b)", kind):
            rates = {"bfloat16": gpu.bfloat16, "float16": gpu.float16, "float32": gpu.float32}
            return rates.get(dtype)
    return None


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


def main(words: Sequence[str]) -> int:
    """``chips.py TYPE [TOPOLOGY]``: a slice in words for the shell, or what is wrong with it.

    Prints its generation, accelerator type, shape, number of chips, and whether the type alone means it.
    """
    try:
        place = named(*words)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    shape = place.name.partition(":")[2]
    print(place.chip.name, place.type, shape, place.chips, "usual" if place.usual else "other")
    return 0


def named(kind: str, shape: str = "") -> Topology:
    """A slice from its name or type, or from generation and shape; given both, they must agree."""
    if not shape:
        return topology(kind)
    name = next((c.name for c in CHIPS.values() if re.match(rf"({c.name}|{c.type})\b", kind)), kind)
    place = topology(f"{name}:{shape}")
    if re.search("[:-]", kind) and topology(kind).chips != place.chips:
        raise ValueError(f"{kind} is not a slice of {shape}, which has {place.chips} chips")
    return place


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
