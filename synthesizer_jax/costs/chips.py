"""Accelerator chips, and the names of TPU slices in Google Cloud.

This file only imports the standard library, because `tpu_scripts/launch.py` runs it as a program on
machines where the package is not installed.
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
"""Shapes of the slices of v5e and v6e, from the documentation of these chips."""


def _cubic_slices(largest: int, *small: tuple[int, int, int]) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of slices of chips with three-dimensional links.

    These are the small ones and those of whole cubes of 4 × 4 × 4 chips, whose sizes are multiples of
    four in ascending order ("TPU types and topologies",
    https://cloud.google.com/tpu/docs/types-topologies).

    Args:
      largest: number of chips of the largest slice.
      *small: shapes smaller than a cube.
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
    """A generation of TPU chips.

    Attributes:
      name: name of the generation, as in ``v5p:4x4x8``.
      type: the part of an accelerator type such as ``v5litepod-16`` before the hyphen.
      flops: peak FLOP/s of bfloat16 products; also of float32 products at JAX's default precision.
      memory: bytes of high-bandwidth memory.
      bandwidth: bytes/s between that memory and the cores.
      source: documentation of these numbers and of the shapes.
      kinds: the chip's ``device_kind`` in JAX; some versions use the second name.
      shapes: number of chips along every dimension, for all available slices.
      devices: number of JAX devices per chip.
      cores: factor of the number in an accelerator type: 2 if it counts TensorCores, 1 if chips.
      config: libtpu's name of the chip configuration for ahead-of-time compilation; None is its default.
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
        """The chip's ``device_kind`` in JAX."""
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
            shapes=_cubic_slices(4096, *SMALL),
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
            shapes=_cubic_slices(6144, *SMALL),
            cores=2,
        ),
        Chip(
            *("v6e", "v6e", 918e12, 32 * GIB, 1640e9, _PAGES + "v6e"),
            kinds=("TPU v6 lite", "TPU v6e"),
            shapes=SQUARE,
        ),
        Chip(
            *("tpu7x", "tpu7x", 2307e12, 192 * GIB, 7380e9, _PAGES + "tpu7x", ("TPU7x",)),
            shapes=_cubic_slices(9216, (1, 1, 1), *SMALL),
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
      shape: number of chips of a slice along each of its dimensions.
      slices: number of equal slices.
    """

    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def name(self) -> str:
        """Name of one slice, such as ``v5p:4x4x8``."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def type(self) -> str:
        """Accelerator type of one slice in Google Cloud, such as ``v5p-256``."""
        return f"{self.chip.type}-{math.prod(self.shape) * self.chip.cores}"

    @property
    def usual(self) -> bool:
        """Whether this is the default shape of the accelerator type: the most cubic one of its size."""
        return self.shape == _usual_shapes(self.chip)[math.prod(self.shape)]

    @property
    def chips(self) -> int:
        """Number of chips of all slices."""
        return math.prod(self.shape) * self.slices

    @property
    def devices(self) -> int:
        """Number of JAX devices of all slices."""
        return self.chips * self.chip.devices


@functools.cache
def _usual_shapes(chip: Chip) -> dict[int, tuple[int, ...]]:
    """Returns the default shape of an accelerator type, the most cubic one, by number of chips."""
    surface = lambda shape: sum(a * b for a, b in itertools.combinations(shape, 2))
    shapes = sorted(chip.shapes, key=surface, reverse=True)
    return dict(sorted((math.prod(shape), shape) for shape in shapes))


def parse_topology(text: str, slices: int = 1) -> Topology:
    """Returns the topology of a name such as ``v5p:4x4x8``, or of an accelerator type such as ``v5p-256``.

    The number in an accelerator type is the number of TensorCores, two per chip, for v2, v3, v4, v5p and
    tpu7x, and the number of chips for v5e (``v5litepod-16``) and v6e.

    Raises:
      ValueError: there is no such chip or slice; the message names slices of similar size.
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
        shape = _usual_shapes(chip).get(int(asked)) if asked.is_integer() else None
    if shape is None:
        near = " and ".join(
            f"{place.name} ({place.type})" for place in _nearest_slices(chip, asked)
        )
        raise ValueError(f"{chip.name} has no slice {text!r}; near it are {near}")
    return Topology(chip, shape, slices)


def _nearest_slices(chip: Chip, chips: float) -> Iterator[Topology]:
    """Yields the largest slice with at most `chips` chips and the smallest one with more, if they exist."""
    shapes = _usual_shapes(chip)
    fewer, more = [n for n in shapes if n <= chips], [n for n in shapes if n > chips]
    for size in fewer[-1:] + more[:1]:
        yield Topology(chip, shapes[size])


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A model of GPUs with its peak rates, without sparsity.

    Attributes:
      kinds: prefixes of its ``device_kind`` in JAX.
      bfloat16: peak FLOP/s of bfloat16 products; None if the tensor cores do not support bfloat16.
      float16: peak FLOP/s of float16 products.
      float32: peak FLOP/s of float32 products at JAX's default precision, which is TF32 since A100.
      source: documentation of these numbers.
    """

    kinds: tuple[str, ...]
    bfloat16: float | None
    float16: float
    float32: float
    source: str


_NVIDIA = "https://www.nvidia.com/en-us/data-center/"

GPUS = (
    # The first match is used, so special cards precede the rest of their generation. Data sheets that
    # include structured sparsity give twice these rates.
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
    """Returns the published peak FLOP/s of matrix products on one device.

    Args:
      kind: the device's ``device_kind``, such as ``TPU v5 lite`` or ``NVIDIA H100 80GB HBM3``.
      dtype: dtype of the computation: bfloat16, float16 or float32. At JAX's default precision TPUs
        multiply all of them as bfloat16.

    Returns:
      The rate; None if it is unknown, as for a MIG instance of a GPU.
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
"""Shape of the tiles into which a TPU's memory divides two axes of an array."""


def tiled_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Returns the bytes of an array in a TPU's memory, including the padding of its tiles.

    The compiler tiles the two axes with the least padding, as the argument sizes that libtpu reports show.
    Fewer than eight rows are padded to the next power of two. A one-dimensional array is padded to whole
    tiles, or below one tile to a power of two of its rows.
    """
    total = math.prod(shape)
    if len(shape) < 2:
        whole = TILE[0] * TILE[1]
        numbers = (
            max(TILE[1], _next_power_of_two(total))
            if total <= whole
            else -(-total // whole) * whole
        )
        return numbers * itemsize
    filled = (
        total // (rows * columns) * _padded_rows(rows) * math.ceil(columns / TILE[1]) * TILE[1]
        for rows, columns in itertools.permutations(shape, 2)
        if total
    )
    return min(filled, default=0) * itemsize


def _padded_rows(rows: int) -> int:
    return math.ceil(rows / TILE[0]) * TILE[0] if rows > TILE[0] else _next_power_of_two(rows)


def _next_power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


def main(words: Sequence[str]) -> int:
    """Runs ``chips.py TYPE [TOPOLOGY]``, which describes a slice for shell scripts.

    Prints its generation, accelerator type, shape, number of chips, and ``usual`` if the shape is the
    type's default one, else ``other``; or an error on standard error.

    Returns:
      The exit code.
    """
    try:
        place = _resolve_slice(*words)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    shape = place.name.partition(":")[2]
    print(place.chip.name, place.type, shape, place.chips, "usual" if place.usual else "other")
    return 0


def _resolve_slice(kind: str, shape: str = "") -> Topology:
    """Returns a slice by name or type, or by generation and shape; a type must agree with the shape."""
    if not shape:
        return parse_topology(kind)
    name = next((c.name for c in CHIPS.values() if re.match(rf"({c.name}|{c.type})\b", kind)), kind)
    place = parse_topology(f"{name}:{shape}")
    if re.search("[:-]", kind) and parse_topology(kind).chips != place.chips:
        raise ValueError(f"{kind} is not a slice of {shape}, which has {place.chips} chips")
    return place


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
