"""Compiles training steps for whole TPU slices without a TPU.

    pip install 'jax[tpu]'
    python benchmarks/tpu_pods.py --page docs/tpu.md

Every step is compiled three times: as it is for its memory, and with one and two unrolled layers for its
costs, because the compiler counts the body of a loop once. Parameters are sharded (`fsdp`) over as many
devices as divide d_model. The first rematerialization policy with which all variants fit according to
their plans is used. As a compilation takes minutes, results that are already in `--json` are reused;
plans and the page are always updated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
from typing import Any

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import report

jax.config.update("jax_platforms", "cpu")  # otherwise an installed libtpu searches for a TPU

from synthesizer_jax.costs import chips  # noqa: E402
from synthesizer_jax.data.config import DataConfig  # noqa: E402
from synthesizer_jax.models import alignment, t5  # noqa: E402
from synthesizer_jax.models.zoo import T5_1_1  # noqa: E402
from synthesizer_jax.optimizers import Adafactor  # noqa: E402
from synthesizer_jax.sharding import MeshShape  # noqa: E402
from synthesizer_jax.training.aot import compiled_plan  # noqa: E402
from synthesizer_jax.training.experiment import Experiment, Training  # noqa: E402
from synthesizer_jax.training.plan import REMATS, make_plan, with_remat  # noqa: E402

VARIANTS = ("v", "r", "rv")
TOPOLOGIES = ("v5e:16x16", "v6e:16x16", "v5p:4x8x8", "v4:4x8x8", "tpu7x:4x8x8")
GIB = 2**30


def main() -> None:
    """Compiles the missing configurations and writes the table."""
    args = parse_arguments()
    results: dict[str, Any] = {}
    if args.json.exists():
        results = json.loads(args.json.read_text(encoding="utf-8"))["rows"]
    rows = []
    for name in args.topologies:
        topology, group = chips.parse_topology(name), []
        experiments = [make_experiment(args.size, v, args.rows, topology.devices) for v in VARIANTS]
        remat = find_remat(experiments, topology)
        for variant, experiment in zip(VARIANTS, experiments, strict=True):
            experiment = with_remat(experiment, remat)
            key = f"{name} {args.size} {variant} {args.rows} {remat}"
            if key not in results:
                print(key, flush=True)
                results[key] = compile_step(experiment, topology)
                report.write_file(args.json, json.dumps({"rows": results}, indent=1) + "\n")
            plan = make_plan(experiment, topology)
            labels = {"topology": name, "variant": variant, "remat": remat or "none"}
            memory = {"planned": plan.needs.total / GIB, "memory": plan.capacity / GIB}
            group.append({**labels, **memory, **results[key]})
        rows += [{**r, "against": r["roofline_ms"] / group[0]["roofline_ms"]} for r in group]
    columns = {
        "topology": "topology",
        "variant": "variant",
        "remat": "remat",
        "planned": "planned, GiB|.2f",
        "peak": "needed, GiB|.2f",
        "memory": "of|.0f",
        "teraflops": "TFLOP|.2f",
        "gigabytes": "GB|.1f",
        "collectives": "collectives, MB|,.0f",
        "roofline_ms": "roofline, ms|.1f",
        "against": "of v|.2f",
    }
    text = (
        f"T5 1.1 {args.size} with its self-attention replaced, lengths 512/114, {args.rows} rows a device, "
        "bfloat16, Adafactor. *v* is the dot product, *r* Random, *rv* both. Everything is of one device; "
        "*needed* is the compiler's peak, *roofline* the time of the FLOPs at the chip's peak or, where it "
        "is longer, of the bytes at its memory's bandwidth, the links between chips being free; *of v* is "
        f"the roofline against the dot product's.\n\n{report.table(rows, columns)}"
    )
    facts = {"jax": jax.__version__, "compiled by": "libtpu on a CPU"}
    args.json = None  # written already
    report.write(f"tpu_pods {args.size}", text, result={}, options=args, facts=facts)


def compile_step(experiment: Experiment, topology: chips.Topology) -> dict[str, Any]:
    """Compiles a step and returns its costs."""
    compiled = compiled_plan(experiment, topology)
    costs = compiled.costs
    return {
        "state": compiled.arguments / GIB,
        "peak": compiled.peak / GIB,
        "teraflops": costs.flops / 1e12,
        "gigabytes": costs.bytes / 1e9,
        "collectives": sum(costs.collectives.values()) / 1e6,
        "kinds": costs.collectives,
        "arithmetic_ms": 1e3 * costs.flops * topology.chip.devices / topology.chip.flops,
        "roofline_ms": 1e3 * compiled.roofline,
        "seconds": compiled.seconds,
    }


def make_experiment(size: str, variant: str, rows: int, devices: int) -> Experiment:
    """Returns the experiment of a size and variant."""
    shape = T5_1_1[size]
    self_attention = alignment(variant, head_dim=shape.head_dim)
    return Experiment(
        model=t5(shape, encoder=self_attention, dropout_rate=0.1, dtype="bfloat16", scan=True),
        data=DataConfig("none", 512, 114, rows * devices),
        training=Training(steps=1, optimizer=Adafactor()),
        mesh=MeshShape(data=-1, fsdp=math.gcd(devices, shape.d_model)),
    )


def find_remat(experiments: list[Experiment], topology: chips.Topology) -> str | None:
    """Finds the first rematerialization policy with which all experiments fit."""
    for remat in REMATS:
        if all(make_plan(with_remat(e, remat), topology).fits for e in experiments):
            return remat
    raise SystemExit(f"nothing fits on {topology.name}; use fewer --rows")


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = report.arguments(__doc__, rows=8)
    parser.set_defaults(json=pathlib.Path("docs/tpu.json"))
    parser.add_argument("--topologies", nargs="+", default=list(TOPOLOGIES))
    parser.add_argument("--size", choices=T5_1_1, default="xxl")
    return parser.parse_args()


if __name__ == "__main__":
    main()
