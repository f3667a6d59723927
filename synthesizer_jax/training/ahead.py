"""The training step as TPU compilers see it, without a TPU: libtpu compiles on any machine."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import topologies

from synthesizer_jax.models import stacks
from synthesizer_jax.registry import replace
from synthesizer_jax.sharding.chips import Topology
from synthesizer_jax.training.experiment import Experiment
from synthesizer_jax.training.trainer import Trainer

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
"""Bytes of a number, by XLA's names."""


@dataclasses.dataclass(frozen=True)
class Costs:
    """What one device does in a step; sums and multiples make sense.

    Attributes:
      flops: floating-point operations.
      bytes: moved between memory and cores.
      collectives: bytes that collectives of a kind make on this device.
    """

    flops: float
    bytes: float
    collectives: dict[str, float]

    def plus(self, other: Costs, times: float = 1.0) -> Costs:
        """``self + times · other``."""
        names = self.collectives.keys() | other.collectives.keys()
        return Costs(
            self.flops + times * other.flops,
            self.bytes + times * other.bytes,
            {
                n: self.collectives.get(n, 0.0) + times * other.collectives.get(n, 0.0)
                for n in sorted(names)
            },
        )


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled training step.

    Attributes:
      seconds: that compiling took.
      arguments: bytes on a device of what the step is given: state and batch.
      peak: bytes on a device when the step needs most, with the arguments.
      costs: of a device in a step.
      roofline: seconds of a step if the busier of arithmetic and memory never waited.
    """

    seconds: float
    arguments: int
    peak: int
    costs: Costs
    roofline: float


class TooLargeError(ValueError):
    """The compiler finds that a step does not fit into a device's memory."""


def compile_step(experiment: Experiment, topology: Topology) -> jax.stages.Compiled:
    """Compiles the training step for chips that are not here.

    Raises:
      TooLargeError: it does not fit.
      ValueError: libtpu is not installed, or does not know the topology or the mesh on it.
    """
    lowered = Trainer(experiment, devices=devices_of(topology)).trace().lower()
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        refused = re.search(r"RESOURCE_EXHAUSTED: ([^\n]*)", str(error))
        # A kernel that asks for too much of its own memory, which is not HBM, is an error of another kind.
        if refused is None or "hbm" not in refused[1].lower():
            raise
        raise TooLargeError(f"the compiler refuses the step: {refused[1]}") from error


def devices_of(topology: Topology) -> list[Any]:
    """The devices of a topology, for compiling only.

    Raises:
      ValueError: libtpu is not installed or does not know the topology.
    """
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no metadata server: there is no TPU
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    options: dict[str, Any] = {}
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    if topology.chip.config is not None:
        options["chip_config_name"] = topology.chip.config
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology.name, **options)
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"{topology.name} cannot be compiled for ({' '.join(str(error).split())[:200]}); "
            "pip install 'jax[tpu]', and choose a topology that exists"
        ) from error
    return list(found.devices)


def compiled_plan(experiment: Experiment, topology: Topology) -> Compiled:
    """Compiles a step and reads what it needs and does.

    The compiler's analysis counts a loop's body once. So FLOPs and bytes are taken from models of one and
    two layers, unrolled, and multiplied out; memory and collectives from the model as it is.
    """
    began = time.perf_counter()
    whole = compile_step(experiment, topology)
    seconds = time.perf_counter() - began
    memory: Any = whole.memory_analysis()
    costs = extrapolated(experiment, topology)
    costs = dataclasses.replace(costs, collectives=costs_of(whole).collectives)
    chip = topology.chip
    times = (
        costs.flops * chip.devices / chip.flops,
        costs.bytes * chip.devices / chip.bandwidth,
    )
    return Compiled(
        seconds=seconds,
        arguments=memory.argument_size_in_bytes,
        peak=memory.peak_memory_in_bytes,
        costs=costs,
        roofline=max(times),
    )


def extrapolated(experiment: Experiment, topology: Topology) -> Costs:
    """The costs of all layers, from those of the first and the second layer of every run.

    Runs that are equally long are compiled together.
    """
    first = costs_of(compile_step(with_layers(experiment), topology))
    total = first
    runs = [run for stack in stacks(experiment.model).values() for run in stack.runs]
    for repeats in sorted({run.repeats for run in runs} - {1}):
        second = costs_of(compile_step(with_layers(experiment, repeats), topology))
        total = total.plus(second.plus(first, -1.0), repeats - 1)
    return total


def with_layers(experiment: Experiment, repeats: int | None = None) -> Experiment:
    """The experiment with one layer in every run, unrolled; with two in runs of so many `repeats`."""
    changed = {}
    for name, stack in stacks(experiment.model).items():
        runs = tuple(replace(r, repeats=2 if r.repeats == repeats else 1) for r in stack.runs)
        changed[name] = replace(stack, runs=runs, scan=False)
    return replace(experiment, model=replace(experiment.model, **changed))


def costs_of(compiled: jax.stages.Compiled) -> Costs:
    """What the compiler says of a program, and its collectives."""
    analysis: Any = compiled.cost_analysis()
    found: dict[str, float] = {}
    for kind, size in collectives(compiled.as_text() or ""):
        found[kind] = found.get(kind, 0.0) + size
    return Costs(analysis["flops"], analysis["bytes accessed"], found)


def collectives(text: str) -> Iterator[tuple[str, int]]:
    """Kind and bytes of every collective of a compiled program's text, those in loops as often as they run.

    A gather that runs beside other work stands in the text several times, with one channel; sums of
    different things may share a channel.
    """
    seen = set()
    pattern = re.compile(rf"= (.+?) ({'|'.join(COLLECTIVES)})(-start)?\(.*?channel_id=(\d+)")
    for times, line in counted_lines(text):
        match = pattern.search(line)
        if match is None:
            continue
        shapes, kind, begun, channel = match.groups()
        if kind != "all-reduce":
            if channel in seen:
                continue
            seen.add(channel)
        sizes = shape_sizes(shapes)
        # What is begun names its operands too; the result of a gather is larger, others are as large.
        yield kind, times * (max(sizes) if begun and kind != "all-reduce" else sum(sizes))


def counted_lines(text: str) -> Iterator[tuple[int, str]]:
    """The instructions of a program's text, and how often each runs.

    A computation runs as often as those that name it; a loop's body as often as its condition says, which
    compares a counter with a constant.
    """
    computations = {
        match[1]: match[2].splitlines()
        for match in re.finditer(r"^(?:ENTRY )?(%[\w.\-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S)
    }
    callers: dict[str, list[tuple[str, int]]] = {}
    for name, lines in computations.items():
        for line in lines:
            called = set(re.findall(r"%[\w.\-]+", line.partition(" = ")[2])) & computations.keys()
            loop = re.search(r"condition=(%[\w.\-]+), body=(%[\w.\-]+)", line)
            for other in called:
                trips = trip_count(computations[loop[1]]) if loop and other == loop[2] else 1
                callers.setdefault(other, []).append((name, trips))

    @functools.cache
    def runs(name: str) -> int:
        return max((runs(caller) * trips for caller, trips in callers.get(name, [])), default=1)

    for name, lines in computations.items():
        for line in lines:
            yield runs(name), line


def trip_count(condition: list[str]) -> int:
    """How often a loop runs whose condition is ``counter < constant``."""
    found = [
        int(n) for line in condition for n in re.findall(r" s32\[\]\S* constant\((\d+)\)", line)
    ]
    return max(found, default=1)


def shape_sizes(text: str) -> list[int]:
    """Bytes of a shape, or of each shape of a tuple, in XLA's notation."""
    found = re.findall(r"([a-z]+\d*)\[([\d,]*)\]", text)
    return [
        WIDTHS.get(kind, 4) * math.prod(int(n) for n in sizes.split(",") if n)
        for kind, sizes in found
    ]
