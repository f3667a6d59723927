"""Training steps on whole TPU slices, as their compiler sees them, without a TPU.

    pip install 'jax[tpu]'
    python benchmarks/tpu_pods.py --json pods.json --page docs/tpu.md

Every step is compiled three times: as it is for its memory, and with one and two unrolled layers for what
it does (a loop's body counts once). Parameters are shared (`fsdp`) by as many devices as divide the model's
width; of the ways to rematerialise, the first that fits is taken. Compiling takes minutes each, so that
results already in `--json` are kept and only missing ones made; the page is written anew every time.
"""

from __future__ import annotations

import argparse
import contextlib
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
from synthesizer_jax.models import alignment, t5  # noqa: E402
from synthesizer_jax.models.zoo import T5_1_1  # noqa: E402
from synthesizer_jax.sharding import MeshShape, chips  # noqa: E402
from synthesizer_jax.training.ahead import Compiled, TooLargeError, compiled_plan  # noqa: E402
from synthesizer_jax.training.experiment import Experiment, Training  # noqa: E402
from synthesizer_jax.training.optimizers import Adafactor  # noqa: E402
from synthesizer_jax.training.plan import REMATS, Plan, make_plan, with_remat  # noqa: E402

TOPOLOGIES = ("v5e:16x16", "v6e:16x16", "v5p:4x8x8", "v4:4x8x8", "tpu7x:4x8x8")
GIB = 2**30


def main() -> None:
    """Compiles what is missing and writes the table."""
    args = parse()
    found: dict[str, Any] = {}
    if args.json.exists():
        found = json.loads(args.json.read_text(encoding="utf-8"))["rows"]
    rows = []
    for size, name, variant in itertools.product(args.sizes, args.topologies, args.variants):
        key = f"{name} {size} {variant} {args.rows}"
        if key not in found:
            print(key, flush=True)
            found[key] = measured(args, name, size, variant)
            report.place(args.json, json.dumps({"rows": found}, indent=1) + "\n")
        base = found.get(f"{name} {size} v {args.rows}")
        against = found[key]["roofline_ms"] / base["roofline_ms"] if base else None
        rows.append({**found[key], "against": against})
    text = (
        f"T5 1.1 with its self-attention replaced, lengths 512/114, {args.rows} rows a device, bfloat16, "
        "Adafactor. *v* is the dot product, *r* Random, *rv* both. Everything is of one device; "
        "*needed* is the compiler's peak, *roofline* the time if the busier of arithmetic and memory "
        "never waited and the links between chips were free, *of v* that against the dot product's.\n\n"
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
                "roofline_ms": "roofline, ms|.1f",
                "against": "of v|.2f",
                "seconds": "compiling, s|.0f",
            },
        )
    )
    facts = {"jax": jax.__version__, "compiled by": "libtpu on a CPU"}
    args.json, path = None, args.json
    report.write("tpu_pods", text, result={}, options=args, facts=facts)
    print(f"kept in {path}")


def measured(args: argparse.Namespace, name: str, size: str, variant: str) -> dict[str, Any]:
    """One compiled step."""
    place = chips.topology(name)
    asked = recipe(size, variant, args.rows, place.devices)
    experiment, plan, compiled = fitting(asked, place)
    costs = compiled.costs
    return {
        "topology": name,
        "size": size,
        "variant": variant,
        "parameters": parameters(experiment),
        "remat": experiment.model.encoder.remat or "none",
        "planned": plan.needs.total / GIB,
        "state": compiled.arguments / GIB,
        "peak": compiled.peak / GIB,
        "memory": plan.capacity / GIB,
        "teraflops": costs.flops / 1e12,
        "gigabytes": costs.bytes / 1e9,
        "collectives": sum(costs.collectives.values()) / 1e6,
        "kinds": costs.collectives,
        "roofline_ms": 1e3 * compiled.roofline,
        "seconds": compiled.seconds,
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


def fitting(experiment: Experiment, place: chips.Topology) -> tuple[Experiment, Plan, Compiled]:
    """The experiment with the first way to rematerialise that plan and compiler find to fit."""
    for remat in REMATS:
        changed = with_remat(experiment, remat)
        plan = make_plan(changed, place)
        if plan.fits:
            with contextlib.suppress(TooLargeError):
                return changed, plan, compiled_plan(changed, place)
    raise SystemExit(f"nothing fits on {place.name}; give fewer --rows")


def parameters(experiment: Experiment) -> int:
    """Trained numbers of the model."""
    from synthesizer_jax.models import summarize

    return summarize(experiment.model).parameters


def parse() -> argparse.Namespace:
    """The command line."""
    parser = report.arguments(__doc__, rows=8)
    parser.set_defaults(json=pathlib.Path("pods.json"))
    parser.add_argument("--topologies", nargs="+", default=list(TOPOLOGIES))
    parser.add_argument("--sizes", nargs="+", choices=T5_1_1, default=["base", "xxl"])
    parser.add_argument("--variants", nargs="+", default=["v", "r", "rv"])
    return parser.parse_args()


if __name__ == "__main__":
    main()
