"""Accelerator chips, and the names of TPU slices in Google Cloud and of groups of GPUs.

This file imports only the standard library, because `tpu_scripts/launch.py` runs this file as a
program on machines where the package is not installed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import sys
from collections.abc import Mapping, Sequence

GIB = 2**30

SQUARE = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
"""Shapes of the slices of v5e and v6e, from the documentation of these chips."""

SMALL = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
"""Shapes of the slices that are smaller than a cube, for chips with three-dimensional links."""

HOST = 8
"""The number of GPUs in a whole host."""

HOSTS = ((1,), (2,), (4,), *((HOST * n,) for n in range(1, 2049)))
"""Possible numbers of GPUs, which are a part of one host or all GPUs of one or more hosts."""


def _cubic_slices(largest: int) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of all slices with three-dimensional links and at most `largest` chips.

    The result has the shapes in `SMALL`, and the shapes that consist of whole cubes of 4 × 4 × 4
    chips. The sizes of the shapes with whole cubes are multiples of four in ascending order ("TPU
    types and topologies", https://cloud.google.com/tpu/docs/types-topologies).
    """
    cubes = itertools.combinations_with_replacement(range(1, largest // 64 + 1), 3)
    return *SMALL, *((4 * a, 4 * b, 4 * c) for a, b, c in cubes if 64 * a * b * c <= largest)


@dataclasses.dataclass(frozen=True)
class Chip:
    """A generation of TPU chips, or a GPU.

    Attributes:
      name: the name of the generation, as in ``v5p:4x4x8``, or the name of the GPU, as in
        ``h100:8``.
      flops: peak FLOP/s of bfloat16 products.
      memory: bytes of high-bandwidth memory.
      bandwidth: the bytes per second between the high-bandwidth memory and the cores.
      kinds: names of the chip in JAX (``device_kind``), which may differ between versions of JAX.
        For a GPU, the only entry is the beginning of the name.
      shapes: the shapes of all available slices, as numbers of chips along each dimension.
      devices: the number of JAX devices per chip.
      cores: how much each chip adds to the number in an accelerator type such as ``v5p-256``.
        `cores` is 2 if the number counts TensorCores, and 1 if the number counts chips.
      config: the configuration of the chip for ahead-of-time compilation. For a TPU, `config` is
        libtpu's name of the chip configuration, and `None` means libtpu's default. For a GPU,
        `config` contains fields of XLA's ``GpuDeviceInfoProto``.
      tf32: peak FLOP/s of float32 products at JAX's default precision, for which GPUs use TF32.
        TPUs use bfloat16 for such products, so their `tf32` is `None`.
    """

    name: str
    flops: float
    memory: int
    bandwidth: float
    kinds: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    devices: int = 1
    cores: int = 2
    config: str | None = None
    tf32: float | None = None

    @property
    def is_gpu(self) -> bool:
        """Whether the chip is a GPU and not a TPU."""
        return self.tf32 is not None

    @property
    def type(self) -> str:
        """The part before the hyphen in an accelerator type such as ``v5litepod-16``."""
        return "v5litepod" if self.name == "v5e" else self.name

    @property
    def source(self) -> str:
        """The address of the documentation with the rates and shapes of the chip."""
        if self.is_gpu:
            return "https://www.nvidia.com/en-us/data-center/"
        return f"https://docs.cloud.google.com/tpu/docs/{self.name}"

    def peak(self, dtype: str) -> float:
        """Returns the peak FLOP/s of matrix products in a dtype at JAX's default precision."""
        return self.tf32 if self.tf32 is not None and dtype == "float32" else self.flops


_V2 = ((2, 2), (4, 4), (8, 8), (8, 16), (16, 16))
_V3 = ((2, 2), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16), (16, 32), (32, 32))
_TPU7X = ((1, 1, 1), *_cubic_slices(9216))

# name, FLOP/s, memory, bandwidth, kinds, shapes
_TPUS = (
    Chip("v2", 45e12, 16 * GIB, 700e9, ("TPU v2",), _V2, devices=2),
    Chip("v3", 123e12, 32 * GIB, 900e9, ("TPU v3",), _V3, devices=2),
    Chip("v4", 275e12, 32 * GIB, 1228e9, ("TPU v4",), _cubic_slices(4096), config="megacore"),
    Chip("v5e", 197e12, 16 * GIB, 819e9, ("TPU v5 lite", "TPU v5e"), SQUARE, cores=1),
    Chip("v5p", 459e12, 95 * GIB, 2765e9, ("TPU v5", "TPU v5p"), _cubic_slices(6144)),
    Chip("v6e", 918e12, 32 * GIB, 1640e9, ("TPU v6 lite", "TPU v6e"), SQUARE, cores=1),
    Chip("tpu7x", 2307e12, 192 * GIB, 7380e9, ("TPU7x",), _TPU7X, devices=2),
)
TPUS = {chip.name: chip for chip in _TPUS}


def _gpu(name: str, flops: float, tf32: float, memory: int, bandwidth: float, config: str) -> Chip:
    """Returns a GPU; `memory` is in GiB."""
    kinds = (f"NVIDIA {name.upper()}",)
    return Chip(
        name, flops, memory * GIB, bandwidth, kinds, HOSTS, cores=1, config=config, tf32=tf32
    )


# XLA has the same values for these three GPU architectures in
# xla/backends/gpu/target_config/specs.
_AMPERE = """
  cuda_compute_capability { major: 8 } core_count: 108 fpus_per_core: 64 clock_rate_ghz: 1.41
  shared_memory_per_core: 167936 shared_memory_per_block_optin: 166912 l2_cache_size: 41943040
  device_interconnect_info { active_links: 12 }
"""
_HOPPER = """
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448 l2_cache_size: 52428800
  device_interconnect_info { active_links: 18 }
"""
_BLACKWELL = """
  cuda_compute_capability { major: 10 feature_extension: ACCELERATED_FEATURES }
  core_count: 148 fpus_per_core: 128 clock_rate_ghz: 1.965
  shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448 l2_cache_size: 132644864
  device_interconnect_info { active_links: 18 }
"""

# The rates are from data sheets of NVIDIA, for GPUs with NVLink between all GPUs of a host (SXM).
# Some data sheets give rates with structured sparsity, which are twice as high.
_GPUS = (
    _gpu("a100", 312e12, 156e12, 80, 2039e9, _AMPERE),
    _gpu("h100", 989.5e12, 494.5e12, 80, 3350e9, _HOPPER),
    _gpu("h200", 989.5e12, 494.5e12, 141, 4800e9, _HOPPER),
    _gpu("b200", 2250e12, 1100e12, 180, 8000e9, _BLACKWELL),
)
CHIPS = TPUS | {chip.name: chip for chip in _GPUS}


@dataclasses.dataclass(frozen=True)
class Topology:
    """One or more equal slices of chips.

    Attributes:
      chip: the chip.
      shape: the number of chips along each dimension of a slice.
      slices: the number of slices.
    """

    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def name(self) -> str:
        """The name of one slice, such as ``v5p:4x4x8``."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def type(self) -> str:
        """The accelerator type of one slice in Google Cloud, such as ``v5p-256``."""
        return f"{self.chip.type}-{math.prod(self.shape) * self.chip.cores}"

    @property
    def usual(self) -> bool:
        """Whether the shape is the most cubic shape of its size, which is the type's default."""
        return self.shape == _usual_shapes(self.chip)[math.prod(self.shape)]

    @property
    def chips(self) -> int:
        """The number of chips in all slices together."""
        return math.prod(self.shape) * self.slices

    @property
    def devices(self) -> int:
        """The number of JAX devices in all slices together."""
        return self.chips * self.chip.devices


@functools.cache
def _usual_shapes(chip: Chip) -> dict[int, tuple[int, ...]]:
    """Returns the default shape for each number of chips, which is the most cubic shape."""

    def surface(shape: tuple[int, ...]) -> int:
        """Returns half the surface of a slice, which is smaller for more cubic slices."""
        return sum(a * b for a, b in itertools.combinations(shape, 2))

    # The most cubic shape comes last, and the dictionary keeps the last shape of each size.
    shapes = sorted(chip.shapes, key=surface, reverse=True)
    usual = {math.prod(shape): shape for shape in shapes}
    return dict(sorted(usual.items()))


def parse_topology(text: str, slices: int = 1, *, chips: Mapping[str, Chip] = CHIPS) -> Topology:
    """Returns the topology with a given name.

    The `text` is the name of a slice, such as ``v5p:4x4x8``, or an accelerator type, such as
    ``v5p-256``. In an accelerator type, the number counts TensorCores for v2, v3, v4, v5p and
    tpu7x, whose chips have two TensorCores. For v5e (``v5litepod-16``) and v6e, the number counts
    chips. GPUs are written ``h100:8`` or ``h100-8``.

    Args:
      text: the name or type.
      slices: the number of slices. The number must be 1 for GPUs, because all GPUs form one slice.
      chips: the chips to choose from, by name.

    Raises:
      ValueError: if no chip or slice has this name. If only the size is wrong, the message names
        slices of similar size.
    """
    if slices < 1:
        raise ValueError(f"The number of slices is {slices}, but it must be at least 1.")
    # For example, "v5p:4x4x8" is the chip v5p and the shape 4x4x8, and "v5p-256" is the chip v5p
    # and the number 256. Without a separator, both `separator` and `size` are empty.
    match = re.fullmatch(r"([^:-]*)([:-]?)(.*)", text, re.DOTALL)
    assert match is not None  # the expression matches every text
    name, separator, size = match.groups()

    chip = next((chip for chip in chips.values() if name in (chip.name, chip.type)), None)
    if chip is None:
        raise ValueError(
            f"The chip in {text!r} is not known. The known chips are {', '.join(chips)}."
        )
    if chip.is_gpu and slices > 1:
        raise ValueError(
            f"The number of slices is {slices}, but GPUs form only one slice. Give the number of "
            f"all GPUs instead, for example {name}:16."
        )

    shape: tuple[int, ...] | None = None
    if separator == ":" and re.fullmatch(r"[1-9][0-9]{0,5}(x[1-9][0-9]{0,5})*", size):
        given = tuple(map(int, size.split("x")))
        num_chips = float(math.prod(given))
        if given in chip.shapes:
            shape = given
    elif separator == "-" and re.fullmatch(r"[1-9][0-9]{0,8}", size):
        num_chips = int(size) / chip.cores
        if num_chips.is_integer():
            shape = _usual_shapes(chip).get(int(num_chips))
    else:
        example = Topology(chip, chip.shapes[2])
        raise ValueError(
            f"{text!r} is not the name of a slice. Give its chips, for example {example.name}, or "
            f"its type, for example {example.type}."
        )
    if shape is None:
        near = " or ".join(f"{other.name} ({other.type})" for other in _near(chip, num_chips))
        raise ValueError(
            f"There is no slice {text!r} of {chip.name}. Use a slice of similar size: {near}."
        )
    return Topology(chip, shape, slices)


def _near(chip: Chip, num_chips: float) -> list[Topology]:
    """Returns the default slices whose sizes are nearest to a number of chips.

    The slices are the largest slice with at most `num_chips` chips, and the smallest slice with
    more.
    """
    usual = _usual_shapes(chip)
    smaller = [size for size in usual if size <= num_chips]
    larger = [size for size in usual if size > num_chips]
    return [Topology(chip, usual[size]) for size in smaller[-1:] + larger[:1]]


# The rates are from data sheets of NVIDIA. The first entry that matches the beginning of a device
# kind is used, and `CHIPS` is only searched if no entry matches. For example, "NVIDIA H200 NVL"
# must be found before "NVIDIA H200".
GPUS: dict[str, tuple[float | None, float, float]] = {
    "NVIDIA GB200": (2500e12, 2500e12, 1250e12),
    "NVIDIA GH200": (989.5e12, 989.5e12, 494.5e12),
    "NVIDIA H200 NVL": (835.5e12, 835.5e12, 417.5e12),
    "NVIDIA H100 NVL": (835.5e12, 835.5e12, 417.5e12),
    "NVIDIA H100 PCIe": (756e12, 756e12, 378e12),
    "NVIDIA L4": (121e12, 121e12, 60e12),
    "(Tesla|NVIDIA) T4": (None, 65e12, 8.1e12),
    "Tesla V100-PCIE": (None, 112e12, 14e12),
    "Tesla V100": (None, 125e12, 15.7e12),
}
"""Peak FLOP/s of matrix products of GPUs that are not in `CHIPS`.

The keys are regular expressions for the beginning of the ``device_kind``.

The three rates are for bfloat16, float16, and float32 at JAX's default precision. `None` means that
the GPU does not support the dtype.
"""


def peak_flops(kind: str, dtype: str) -> float | None:
    """Returns the published peak FLOP/s of matrix products on one device.

    At JAX's default precision, TPUs multiply all dtypes as bfloat16.

    Args:
      kind: the ``device_kind`` of the device in JAX.
      dtype: ``bfloat16``, ``float16`` or ``float32``.

    Returns:
      The rate, or `None` if the device does not support the dtype or the rate is unknown. For
      example, the rate of a MIG instance of a GPU is unknown.
    """
    dtypes = ("bfloat16", "float16", "float32")
    if dtype not in dtypes:
        return None

    def is_gpu(name: str) -> bool:
        """Returns whether the device is a whole GPU whose name begins with a regular expression."""
        return re.match(rf"{name}(?!\w)(?!.*\bMIG\b)", kind) is not None

    for name, rates in GPUS.items():
        if is_gpu(name):
            return dict(zip(dtypes, rates, strict=True))[dtype]
    for chip in CHIPS.values():
        # For a GPU, the name in `kinds` is only the beginning of the device kind.
        is_chip = any(map(is_gpu, chip.kinds)) if chip.is_gpu else kind in chip.kinds
        if is_chip:
            return chip.peak(dtype) / chip.devices
    return None


TILE = (8, 128)
"""The shape of the tiles in which a TPU's memory stores two axes of an array."""


def tiled_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Returns the bytes of an array in a TPU's memory, including the padding of its tiles.

    The compiler tiles the two axes that need the least padding. Fewer than eight rows are padded to
    the next power of two. A one-dimensional array with more elements than one tile is padded to
    whole tiles. A shorter array is padded to the next power of two, but at least to one row of a
    tile. The padded sizes agree with the argument sizes that libtpu reports.

    Args:
      shape: the shape of the array.
      itemsize: the bytes of one element.
    """
    total = math.prod(shape)
    tile_rows, tile_columns = TILE
    if len(shape) < 2:
        tile = tile_rows * tile_columns
        if total <= tile:
            return max(tile_columns, _next_power_of_two(total)) * itemsize
        return _round_up(total, tile) * itemsize

    if total == 0:
        return 0
    # `padded` has the number of elements with padding, for every pair of axes that could be tiled.
    padded = []
    for rows, columns in itertools.permutations(shape, 2):
        if rows > tile_rows:
            padded_rows = _round_up(rows, tile_rows)
        else:
            padded_rows = _next_power_of_two(rows)
        matrices = total // (rows * columns)
        padded.append(matrices * padded_rows * _round_up(columns, tile_columns))
    return min(padded) * itemsize


def _round_up(number: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is not below `number`."""
    return math.ceil(number / multiple) * multiple


def _next_power_of_two(count: int) -> int:
    """Returns the smallest power of two that is not below a count."""
    return 1 << max(0, count - 1).bit_length()


def main(name: str) -> None:
    """Prints a description of a TPU slice for scripts, or ends with an error.

    The line has five words: the generation, the accelerator type, the shape, the number of chips,
    and ``usual`` if the shape is the default of the accelerator type, otherwise ``other``.

    Args:
      name: the name or accelerator type of the slice; see `parse_topology`.
    """
    try:
        topology = parse_topology(name, chips=TPUS)
    except ValueError as error:
        sys.exit(f"error: {error}")
    shape = topology.name.partition(":")[2]
    usual = "usual" if topology.usual else "other"
    print(topology.chip.name, topology.type, shape, topology.chips, usual)


if __name__ == "__main__":
    main(sys.argv[1])
