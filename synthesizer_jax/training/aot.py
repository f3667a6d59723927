"""Ahead-of-time compilation of the training step for TPUs; libtpu compiles on any machine."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import time
from collections.abc import Iterator

import jax
from jax.experimental import topologies

from synthesizer_jax.costs.chips import Topology
from synthesizer_jax.models import stacks_of
from synthesizer_jax.registry import replace
from synthesizer_jax.training.experiment import Experiment
from synthesizer_jax.training.trainer import Trainer

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
"""Bytes per element by XLA's name of a type."""


@dataclasses.dataclass(frozen=True)
class Costs:
    """The work of one device in a step.

    Attributes:
      flops: floating-point operations.
      bytes: bytes transferred between memory and cores.
      collectives: bytes of the results of collectives by kind.
    """

    flops: float
    bytes: float
    collectives: dict[str, float]

    def add(self, other: Costs, times: float = 1.0) -> Costs:
        """Returns ``self + times · other``."""
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
      seconds: duration of the compilation.
      arguments: bytes of the arguments, state and batch, on one device.
      peak: peak memory in bytes on one device, including the arguments.
      costs: the work of one device in a step.
      roofline: lower bound of a step's duration in seconds: the larger of the times of arithmetic and of
        memory transfers.
    """

    seconds: float
    arguments: int
    peak: int
    costs: Costs
    roofline: float


class TooLargeError(ValueError):
    """A step does not fit into a device's memory, according to the compiler."""


def compile_step(experiment: Experiment, topology: Topology) -> jax.stages.Compiled:
    """Compiles the training step for a topology without its devices.

    Raises:
      TooLargeError: the step does not fit into memory.
      ValueError: libtpu is not installed, or does not support the topology or the mesh on it.
    """
    lowered = Trainer(experiment, devices=devices_of(topology)).trace().lower()
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        refused = re.search(r"RESOURCE_EXHAUSTED: ([^\n]*)", str(error))
        # A kernel that exhausts on-chip memory, which is not HBM, is another kind of error.
        if refused is None or "hbm" not in refused[1].lower():
            raise
        raise TooLargeError(f"the compiler rejects the step: {refused[1]}") from error


def devices_of(topology: Topology) -> list[jax.Device]:
    """Returns the devices of a topology, for compilation only.

    Raises:
      ValueError: libtpu is not installed or does not support the topology.
    """
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no metadata server without a TPU
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    options: dict[str, int | str] = {}
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
    """Compiles a step and returns its memory and costs.

    The compiler's cost analysis counts the body of a loop once. Operations and bytes are therefore
    extrapolated from unrolled models of one and two layers. Memory and collectives are those of the
    model itself.
    """
    began = time.perf_counter()
    whole = compile_step(experiment, topology)
    seconds = time.perf_counter() - began
    memory = whole.memory_analysis()
    assert memory is not None
    costs = _extrapolate_costs(experiment, topology)
    costs = dataclasses.replace(costs, collectives=_program_costs(whole).collectives)
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


def _extrapolate_costs(experiment: Experiment, topology: Topology) -> Costs:
    """Returns the costs of all layers, from those of the first and the second layer of every run.

    Runs of the same length are measured together.
    """
    first = _program_costs(compile_step(_with_layers(experiment), topology))
    total = first
    runs = [run for stack in stacks_of(experiment.model).values() for run in stack.runs]
    for repeats in sorted({run.repeats for run in runs} - {1}):
        second = _program_costs(compile_step(_with_layers(experiment, repeats), topology))
        total = total.add(second.add(first, -1.0), repeats - 1)
    return total


def _with_layers(experiment: Experiment, repeats: int | None = None) -> Experiment:
    """Returns the experiment with one unrolled layer in every run, and two in runs of `repeats` layers."""
    changed = {}
    for name, stack in stacks_of(experiment.model).items():
        runs = tuple(replace(r, repeats=2 if r.repeats == repeats else 1) for r in stack.runs)
        changed[name] = replace(stack, runs=runs, scan=False)
    return replace(experiment, model=replace(experiment.model, **changed))


def _program_costs(compiled: jax.stages.Compiled) -> Costs:
    analysis = compiled.cost_analysis()
    assert analysis is not None
    found: dict[str, float] = {}
    for kind, size in _collective_operations(compiled.as_text() or ""):
        found[kind] = found.get(kind, 0.0) + size
    return Costs(analysis["flops"], analysis["bytes accessed"], found)


def _collective_operations(text: str) -> Iterator[tuple[str, int]]:
    """Yields the kind and the bytes of every collective of a compiled program, times its executions.

    An asynchronous all-gather occurs several times in the text with the same channel, and is counted
    once. Different all-reduces may share a channel.
    """
    seen = set()
    pattern = re.compile(rf"= (.+?) ({'|'.join(COLLECTIVES)})(-start)?\(.*?channel_id=(\d+)")
    for times, line in _instructions_with_counts(text):
        match = pattern.search(line)
        if match is None:
            continue
        shapes, kind, begun, channel = match.groups()
        if kind != "all-reduce":
            if channel in seen:
                continue
            seen.add(channel)
        sizes = _shape_sizes(shapes)
        # The shape of an asynchronous start includes its operands, which are no larger than its result.
        yield kind, times * (max(sizes) if begun and kind != "all-reduce" else sum(sizes))


def _instructions_with_counts(text: str) -> Iterator[tuple[int, str]]:
    """Yields the instructions of a program's text and how often each is executed.

    A computation is executed as often as its callers, and the body of a loop as often as the condition
    allows, which compares a counter with a constant.
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
                trips = _trip_count(computations[loop[1]]) if loop and other == loop[2] else 1
                callers.setdefault(other, []).append((name, trips))

    @functools.cache
    def runs(name: str) -> int:
        return max((runs(caller) * trips for caller, trips in callers.get(name, [])), default=1)

    for name, lines in computations.items():
        for line in lines:
            yield runs(name), line


def _trip_count(condition: list[str]) -> int:
    """Returns the trip count of a loop whose condition is ``counter < constant``."""
    found = [
        int(n) for line in condition for n in re.findall(r" s32\[\]\S* constant\((\d+)\)", line)
    ]
    return max(found, default=1)


def _shape_sizes(text: str) -> list[int]:
    """Returns the bytes of a shape, or of each shape of a tuple, in XLA's notation."""
    found = re.findall(r"([a-z]+\d*)\[([\d,]*)\]", text)
    return [
        WIDTHS.get(kind, 4) * math.prod(int(n) for n in sizes.split(",") if n)
        for kind, sizes in found
    ]
