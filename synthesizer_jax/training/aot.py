"""Ahead-of-time compilation of the training step for TPUs; libtpu compiles on any machine."""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import re
import time

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
    """Compiles a step and returns its memory and costs, see `step_costs`."""
    began = time.perf_counter()
    memory = compile_step(experiment, topology).memory_analysis()
    seconds = time.perf_counter() - began
    assert memory is not None
    costs, chip = step_costs(experiment, topology), topology.chip
    return Compiled(
        seconds=seconds,
        arguments=memory.argument_size_in_bytes,
        peak=memory.peak_memory_in_bytes,
        costs=costs,
        roofline=chip.devices * max(costs.flops / chip.flops, costs.bytes / chip.bandwidth),
    )


def step_costs(experiment: Experiment, topology: Topology) -> Costs:
    """Returns the costs of a step, extrapolated from compiled models of one and two layers.

    The compiler's analysis counts the body of a loop once, so layers are unrolled, and runs of the same
    length measured together. Micro-batches are a loop too, and are counted once.
    """
    first = _program_costs(compile_step(_with_layers(experiment), topology))
    total = collections.Counter(first)
    runs = [run for stack in stacks_of(experiment.model).values() for run in stack.runs]
    for repeats in sorted({run.repeats for run in runs} - {1}):
        second = _program_costs(compile_step(_with_layers(experiment, repeats), topology))
        for name in first.keys() | second.keys():
            total[name] += (repeats - 1) * (second[name] - first[name])
    collectives = {name: float(total[name]) for name in COLLECTIVES if total[name]}
    return Costs(total["flops"], total["bytes accessed"], collectives)


def _with_layers(experiment: Experiment, repeats: int | None = None) -> Experiment:
    """Returns the experiment with one unrolled layer in every run, and two in runs of `repeats` layers."""
    changed = {}
    for name, stack in stacks_of(experiment.model).items():
        runs = tuple(replace(r, repeats=2 if r.repeats == repeats else 1) for r in stack.runs)
        changed[name] = replace(stack, runs=runs, scan=False)
    return replace(experiment, model=replace(experiment.model, **changed))


def _program_costs(compiled: jax.stages.Compiled) -> collections.Counter[str]:
    """Returns ``flops``, ``bytes accessed`` and the bytes of the results of collectives by kind.

    An asynchronous all-gather occurs several times in the text with the same channel, and is counted
    once. Different all-reduces may share a channel.
    """
    analysis, seen = compiled.cost_analysis(), set()
    assert analysis is not None
    found = collections.Counter[str]({k: analysis[k] for k in ("flops", "bytes accessed")})
    pattern = rf"= (.+?) ({'|'.join(COLLECTIVES)})(-start)?\(.*?channel_id=(\d+)"
    for shapes, kind, begun, channel in re.findall(pattern, compiled.as_text() or ""):
        if kind != "all-reduce":
            if channel in seen:
                continue
            seen.add(channel)
        sizes = [
            WIDTHS.get(dtype, 4) * math.prod(int(n) for n in dims.split(",") if n)
            for dtype, dims in re.findall(r"([a-z]+\d*)\[([\d,]*)\]", shapes)
        ]
        # The shape of an asynchronous start includes its operands, which are no larger than its result.
        found[kind] += max(sizes) if begun and kind != "all-reduce" else sum(sizes)
    return found
