"""Training steps on whole TPU slices, as their compiler sees them, without a TPU.

    pip install 'jax[tpu]'
    python benchmarks/tpu_pods.py --page docs/tpu.md

Every step is compiled three times: as it is for its memory, and with one and two unrolled layers for what
it does (a loop's body counts once). Parameters are shared (`fsdp`) by as many devices as divide the model's
width; of the ways to rematerialise, the first is taken with which all variants fit by their plans.
Compiling takes minutes each, so that results already in `--json` are kept and only missing ones made; plans
and the page are made anew every time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import pathlib
from typing import Any

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import report

jax.config.update("jax_platforms", "cpu")  # an installed libtpu would look for a TPU

from synthesizer_jax.data.pipeline import DataConfig  # noqa: E402
from synthesizer_jax.models import alignment, summarize, t5  # noqa: E402
from synthesizer_jax.models.zoo import T5_1_1  # noqa: E402
from synthesizer_jax.sharding import MeshShape, chips  # noqa: E402
from synthesizer_jax.training.ahead import compiled_plan  # noqa: E402
from synthesizer_jax.training.experiment import Experiment, Training  # noqa: E402
from synthesizer_jax.training.optimizers import Adafactor  # noqa: E402
from synthesizer_jax.training.plan import REMATS, make_plan, with_remat  # noqa: E402

VARIANTS = ("v", "r", "rv")
TOPOLOGIES = ("v5e:16x16", "v6e:16x16", "v5p:4x8x8", "v4:4x8x8", "tpu7x:4x8x8")
GIB = 2**30


def main() -> None:
    """Compiles what is missing and writes the table."""
    args = parse()
    found: dict[str, Any] = {}
    if args.json.exists():
        found = json.loads(args.json.read_text(encoding="utf-8"))["rows"]
    rows = []
    for size, name in itertools.product(args.sizes, args.topologies):
        place, group = chips.topology(name), []
        asked = [recipe(size, v, args.rows, place.devices) for v in VARIANTS]
        remat = lightest(asked, place)
        for variant, plain in zip(VARIANTS, asked, strict=True):
            experiment = with_remat(plain, remat)
            key = f"{name} {size} {variant} {args.rows} {remat}"
            if key not in found:
                print(key, flush=True)
                found[key] = measured(experiment, place)
                report.place(args.json, json.dumps({"rows": found}, indent=1) + "\n")
            shown = {"topology": name, "size": size, "variant": variant, "remat": remat or "none"}
            group.append({**shown, **planned(experiment, place), **found[key]})
        rows += [{**r, "against": r["roofline_ms"] / group[0]["roofline_ms"]} for r in group]
    text = (
        f"T5 1.1 with its self-attention replaced, lengths 512/114, {args.rows} rows a device, bfloat16, "
        "Adafactor. *v* is the dot product, *r* Random, *rv* both. Everything is of one device; "
        "*needed* is the compiler's peak, *arithmetic* the time of the FLOPs at the chip's peak, "
        "*roofline* that or, where it is longer, the time of the bytes at the bandwidth of its memory, the "
        "links between chips being free; *of v* is the roofline against the dot product's.\n\n"
        + report.table(
            rows,
            {
                "topology": "topology",
                "size": "size",
                "variant": "variant",
                "parameters": "parameters|,d",
                "remat": "remat",
                "planned": "planned, GiB|.2f",
                "state": "state, GiB|.2f",
                "peak": "needed, GiB|.2f",
                "memory": "of|.0f",
                "teraflops": "TFLOP|.2f",
                "gigabytes": "GB|.1f",
                "collectives": "collectives, MB|,.0f",
                "arithmetic_ms": "arithmetic, ms|.1f",
                "roofline_ms": "roofline, ms|.1f",
                "against": "of v|.2f",
            },
        )
    )
    facts = {"jax": jax.__version__, "compiled by": "libtpu on a CPU"}
    args.json, path = None, args.json
    section = f"tpu_pods {' '.join(args.sizes)}"
    report.write(section, text, result={}, options=args, facts=facts)
    print(f"kept in {path}")


def measured(experiment: Experiment, place: chips.Topology) -> dict[str, Any]:
    """One compiled step."""
    compiled = compiled_plan(experiment, place)
    costs = compiled.costs
    return {
        "state": compiled.arguments / GIB,
        "peak": compiled.peak / GIB,
        "teraflops": costs.flops / 1e12,
        "gigabytes": costs.bytes / 1e9,
        "collectives": sum(costs.collectives.values()) / 1e6,
        "kinds": costs.collectives,
        "arithmetic_ms": 1e3 * costs.flops * place.chip.devices / place.chip.flops,
        "roofline_ms": 1e3 * compiled.roofline,
        "seconds": compiled.seconds,
    }


def planned(experiment: Experiment, place: chips.Topology) -> dict[str, Any]:
    """What is known without a compiler."""
    plan = make_plan(experiment, place)
    return {
        "parameters": summarize(experiment.model).parameters,
        "planned": plan.needs.total / GIB,
        "memory": plan.capacity / GIB,
    }


def recipe(size: str, variant: str, rows: int, devices: int) -> Experiment:
    """The run."""
    shape = T5_1_1[size]
    kind = alignment(variant, head_dim=shape.head_dim)
    return Experiment(
        model=t5(shape, encoder=kind, dropout_rate=0.1, dtype="bfloat16", scan=True),
        data=DataConfig("none", 512, 114, rows * devices),
        training=Training(steps=1, optimizer=Adafactor()),
        mesh=MeshShape(data=-1, fsdp=math.gcd(devices, shape.d_model)),
    )


def lightest(experiments: list[Experiment], place: chips.Topology) -> str | None:
    """The first way to rematerialise with which all experiments fit by their plans."""
    for remat in REMATS:
        if all(make_plan(with_remat(e, remat), place).fits for e in experiments):
            return remat
    raise SystemExit(f"nothing fits on {place.name}; give fewer --rows")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = report.arguments(__doc__, rows=8)
    parser.set_defaults(json=pathlib.Path("docs/tpu.json"))
    parser.add_argument("--topologies", nargs="+", default=list(TOPOLOGIES))
    parser.add_argument("--sizes", nargs="+", choices=T5_1_1, default=["base", "xxl"])
    return parser.parse_args()


if __name__ == "__main__":
    main()
