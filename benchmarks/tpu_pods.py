"""Compiles training steps for whole TPU slices without a TPU.

    pip install 'jax[tpu]'
    python benchmarks/tpu_pods.py --page docs/tpu.md

Every training step is compiled three times. The unchanged step shows the memory. The costs are
extrapolated from models with one and with two unrolled layers, because the compiler counts the body
of a loop only once. The size of the mesh axis `fsdp`, which shards the parameters, is the greatest
common divisor of d_model and the number of devices. The script chooses the first rematerialization
policy with which the plans of all variants fit into memory.

A compilation takes minutes. Results that are already in the file `--json` are therefore reused.
Memory plans and the page are always written again.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import pathlib
import re
import time
from typing import Any

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import report

jax.config.update("jax_platforms", "cpu")  # otherwise, an installed libtpu searches for a TPU

from synthesizer_jax.base.registry import replace  # noqa: E402
from synthesizer_jax.costs import chips  # noqa: E402
from synthesizer_jax.data.config import DataConfig  # noqa: E402
from synthesizer_jax.models import alignment, stacks_of, t5  # noqa: E402
from synthesizer_jax.models.zoo import T5_1_1  # noqa: E402
from synthesizer_jax.optimizers import Adafactor  # noqa: E402
from synthesizer_jax.sharding import MeshShape  # noqa: E402
from synthesizer_jax.training import plan  # noqa: E402
from synthesizer_jax.training.experiment import Experiment, Training  # noqa: E402
from synthesizer_jax.training.plan import REMATS, make_plan, with_remat  # noqa: E402

VARIANTS = ("v", "r", "rv")
TOPOLOGIES = ("v5e:16x16", "v6e:16x16", "v5p:4x8x8", "v4:4x8x8", "tpu7x:4x8x8")
GIB = 2**30
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2}
"""The number of bytes per element, by XLA's name of the dtype. Other dtypes have four."""


def main() -> None:
    """Compiles the missing configurations and writes the table."""
    args = parse_arguments()
    results: dict[str, Any] = {}
    if args.json.exists():
        results = json.loads(args.json.read_text(encoding="utf-8"))["rows"]
    rows = []
    for name in args.topologies:
        topology = chips.parse_topology(name)
        experiments = [make_experiment(args.size, v, args.rows, topology.devices) for v in VARIANTS]
        remat = find_remat(experiments, topology)
        group = []
        for variant, experiment in zip(VARIANTS, experiments, strict=True):
            experiment = with_remat(experiment, remat)
            key = f"{name} {args.size} {variant} {args.rows} {remat}"
            if key not in results:
                print(key, flush=True)
                results[key] = compile_step(experiment, topology)
                report.write_file(args.json, json.dumps({"rows": results}, indent=1) + "\n")
            planned = make_plan(experiment, topology)
            group.append(
                {
                    "topology": name,
                    "variant": variant,
                    "remat": remat or "none",
                    "planned": planned.needs.total / GIB,
                    "memory": planned.capacity / GIB,
                    **results[key],
                }
            )
        for row in group:
            row["against"] = row["roofline_ms"] / group[0]["roofline_ms"]
        rows += group
    columns = {
        "topology": "topology",
        "variant": "variant",
        "remat": "remat",
        "planned": "planned, GiB|.2f",
        "peak": "needed, GiB|.2f",
        "memory": "available, GiB|.0f",
        "teraflops": "TFLOP|.2f",
        "gigabytes": "GB|.1f",
        "collectives": "collectives, MB|,.0f",
        "roofline_ms": "roofline, ms|.1f",
        "against": "relative to v|.2f",
    }
    text = (
        f"T5 1.1 {args.size} with three kinds of self-attention: the dot product (*v*), Random "
        f"(*r*), and both (*rv*). Each device has {args.rows} rows of 512 input and 114 target "
        "tokens. The dtype is bfloat16 and the optimizer is Adafactor. [How to read the tables]"
        "(#how-to-read-the-tables) explains the columns."
        f"\n\n{report.table(rows, columns)}"
    )
    facts = {"jax": jax.__version__, "compiled by": "libtpu on a CPU"}
    args.json = None  # the file is already written
    report.write(f"tpu_pods {args.size}", text, result={}, options=args, facts=facts)


def compile_step(experiment: Experiment, topology: chips.Topology) -> dict[str, Any]:
    """Compiles a training step, and returns its memory and its costs."""
    began = time.perf_counter()
    memory = plan.compile_step(experiment, topology).memory_analysis()
    seconds = time.perf_counter() - began
    costs = step_costs(experiment, topology)
    chip = topology.chip
    kinds = {kind: costs[kind] for kind in COLLECTIVES if costs[kind]}
    # The peak rates of a chip are for all its devices together, but the costs are for a single
    # device.
    arithmetic = costs["flops"] * chip.devices / chip.flops
    transfer = costs["bytes accessed"] * chip.devices / chip.bandwidth
    return {
        "state": memory.argument_size_in_bytes / GIB,
        "peak": memory.peak_memory_in_bytes / GIB,
        "teraflops": costs["flops"] / 1e12,
        "gigabytes": costs["bytes accessed"] / 1e9,
        "collectives": sum(kinds.values()) / 1e6,
        "kinds": kinds,
        "arithmetic_ms": 1e3 * arithmetic,
        "roofline_ms": 1e3 * max(arithmetic, transfer),
        "seconds": seconds,
    }


def step_costs(experiment: Experiment, topology: chips.Topology) -> collections.Counter[str]:
    """Returns the costs of a step, extrapolated from models with one and two unrolled layers."""

    def costs(repeats: int | None = None) -> collections.Counter[str]:
        """Returns the costs of a model that has only one layer in each run of blocks.

        A run of blocks that the original model repeats `repeats` times gets two layers instead of
        one.
        """
        changed = {}
        for name, stack in stacks_of(experiment.model).items():
            runs = tuple(replace(r, repeats=1 + (r.repeats == repeats)) for r in stack.runs)
            changed[name] = replace(stack, runs=runs, scan=False)
        small = replace(experiment, model=replace(experiment.model, **changed))
        return program_costs(plan.compile_step(small, topology))

    total = first = costs()
    runs = [run for stack in stacks_of(experiment.model).values() for run in stack.runs]
    for repeats in sorted({run.repeats for run in runs} - {1}):
        second = costs(repeats)
        added = {k: (repeats - 1) * (second[k] - first[k]) for k in first.keys() | second.keys()}
        total = collections.Counter({k: total[k] + x for k, x in added.items()})
    return total


def program_costs(compiled: jax.stages.Compiled) -> collections.Counter[str]:
    """Returns a program's FLOPs, the bytes that it accesses, and the bytes that collectives return.

    The body of a loop counts once. An asynchronous all-gather appears several times in the
    program's text, always with the same channel, so each channel is counted once. All-reduces are
    an exception: different all-reduces may share a channel, so each of them is counted.
    """
    analysis = compiled.cost_analysis()
    found = collections.Counter({k: analysis[k] for k in ("flops", "bytes accessed")})
    seen = set()
    pattern = rf"= (.+?) ({'|'.join(COLLECTIVES)})(-start)?\(.*?channel_id=(\d+)"
    for shapes, kind, begun, channel in re.findall(pattern, compiled.as_text()):
        if kind != "all-reduce":
            if channel in seen:
                continue
            seen.add(channel)
        sizes = [
            WIDTHS.get(dtype, 4) * math.prod(int(n) for n in dims.split(",") if n)
            for dtype, dims in re.findall(r"([a-z]+\d*)\[([\d,]*)\]", shapes)
        ]
        if begun and kind != "all-reduce":
            # Use the largest shape. The shapes include the operands, which are not larger than the
            # result.
            found[kind] += max(sizes)
        else:
            found[kind] += sum(sizes)
    return found


def make_experiment(size: str, variant: str, rows: int, devices: int) -> Experiment:
    """Returns an experiment with the given size, variant, and number of rows for each device."""
    shape = T5_1_1[size]
    self_attention = alignment(variant, head_dim=shape.head_dim)
    return Experiment(
        model=t5(shape, encoder=self_attention, dropout_rate=0.1, dtype="bfloat16", scan=True),
        data=DataConfig("none", 512, 114, rows * devices),
        training=Training(steps=1, optimizer=Adafactor()),
        mesh=MeshShape(data=-1, fsdp=math.gcd(devices, shape.d_model)),
    )


def find_remat(experiments: list[Experiment], topology: chips.Topology) -> str | None:
    """Returns the first rematerialization policy with which all experiments fit into memory."""
    for remat in REMATS:
        if all(make_plan(with_remat(e, remat), topology).fits for e in experiments):
            return remat
    raise SystemExit(f"No rematerialization policy fits on {topology.name}. Use fewer --rows.")


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = report.arguments(__doc__, rows=8)
    parser.set_defaults(json=pathlib.Path("docs/tpu.json"))
    parser.add_argument(
        "--topologies",
        nargs="+",
        default=list(TOPOLOGIES),
        help=f"slices to compile for (default: {' '.join(TOPOLOGIES)})",
    )
    parser.add_argument("--size", choices=T5_1_1, default="xxl", help="size of T5 1.1")
    return parser.parse_args()


if __name__ == "__main__":
    main()
