"""Compares training steps of this package's models with T5 of transformers on PyTorch.

    make bench-peers
    python benchmarks/train_step.py --systems v transformers transformers+pages --dropout 0.1

Every system runs in a process of its own; rounds alternate, and medians are reported. All have the same
sizes, batches, AdamW and float32, and the numbers of parameters are checked. A variant of this package is
a key of `models.VARIANTS` (`v`: dot product, `r`: Random, `rv`: Random + dot product, ...); `+small`
selects a configuration with low memory use: scanned layers that save only matrix products for the
backward pass. This package runs with large pages. `transformers` runs with its
defaults, `transformers+pages` with large pages. The FLOPs of a step are six times the multiply-adds of
its forward pass; they are reported relative to the rate of a matrix product, which the system's process
measures before the first round, or with `--peak` TFLOP/s as MFU.
"""

from __future__ import annotations

import argparse
from typing import Any

import racing
import report

from synthesizer_jax import models

PEERS = ("transformers", "transformers+pages")

SIZES = {
    "tiny": (64, 2, 128, 4, 16),
    "small": (512, 8, 1024, 6, 64),
    "base": (768, 12, 2048, 12, 64),
    "large": (1024, 24, 2816, 16, 64),
}
"""T5 1.1: d_model, layers, d_ff, heads, head_dim."""


def main() -> None:
    """Runs the comparison and writes the table."""
    args = parse_arguments()
    rows = racing.race([make_system(args, name) for name in args.systems], rounds=args.rounds)
    parameter_counts = {
        r["name"]: r["parameters"] for r in rows if r["name"] in ("v", "v+small", *PEERS)
    }
    if len(set(parameter_counts.values())) > 1:
        raise SystemExit(f"the parameter counts differ: {parameter_counts}")
    base = next((r for r in rows if r["name"] == args.base), rows[0])
    for r in rows:
        r["speed"] = base["seconds"] / r["seconds"]
        r["memory"] = r["peak_mb"] / base["peak_mb"] if r["peak_mb"] else None
        if "flops" in r:
            r["work"] = r["flops"] / next(x["flops"] for x in rows if "flops" in x)
            share = r["flops"] / (args.peak * 1e12) if args.peak else r["utilization"]
            r["utilization"] = share / r["seconds"]
    size = ", ".join(map(str, SIZES[args.size]))
    section = (
        f"T5 1.1 {args.size} ({size}), batch {args.batch}, lengths {args.inputs}/{args.targets}, "
        f"dropout {args.dropout}, {args.dtype}, AdamW. Speed and memory against {base['name']}.\n\n"
        + report.table(
            rows,
            {
                "name": "system",
                "parameters": "parameters|,d",
                "seconds": "step, s|.3f",
                "speed": "speed|.2f",
                "work": "FLOPs|.2f",
                "utilization": "MFU|.0%" if args.peak else "of a product|.0%",
                "peak_mb": "peak memory, MB|,.0f",
                "memory": "memory|.2f",
                "compile_seconds": "compiling, s|.1f",
                "versions": "versions",
                "dropout": "dropout's draws",
            },
        )
    )
    name = f"train_step {args.size} {args.inputs}/{args.targets} {args.dropout} {args.dtype}"
    name += " " + " ".join(args.systems)
    report.write(name, section, result={"rows": rows}, options=args, facts=report.machine())


def size_options(name: str) -> dict[str, Any]:
    """Returns the numbers of a size by name."""
    return dict(zip(("d_model", "layers", "d_ff", "heads", "head_dim"), SIZES[name], strict=True))


def make_system(args: argparse.Namespace, name: str) -> racing.System:
    """Returns the worker of a system."""
    shared = {**size_options(args.size), "dropout": args.dropout, "batch": args.batch}
    shared |= {"inputs": args.inputs, "targets": args.targets}
    in_large_pages = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    if name in PEERS:
        options = {**shared, "threads": args.threads}
        environment = in_large_pages if name == "transformers+pages" else {}
        return racing.System(name, "step_transformers.py", options, str(racing.PEERS), environment)
    variant, plus, suffix = name.partition("+")
    if variant not in models.VARIANTS or plus + suffix not in ("", "+small"):
        known = ", ".join([*PEERS, *models.VARIANTS])
        raise SystemExit(f"{name} is no system; choose from {known}, a variant also with +small")
    options = {**shared, "variant": variant, "dtype": args.dtype, "small": bool(suffix)}
    return racing.System(name, "step_synthesizer_jax.py", options, environment=in_large_pages)


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = report.arguments(__doc__, batch=8, inputs=512, targets=114, rounds=7, threads=2)
    parser.add_argument("--systems", nargs="+", default=["v", "transformers"])
    parser.add_argument("--base", default=None, help="the system that the others are compared with")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--peak", type=float, default=None, help="TFLOP/s that MFU counts against")
    args = parser.parse_args()
    args.base = args.base or args.systems[-1]
    return args


if __name__ == "__main__":
    main()
