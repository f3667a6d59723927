"""Compares training steps and decoding of this package's T5 1.1 with transformers, CTranslate2, keras-hub.

    make bench-peers
    python benchmarks/peers.py --systems v v+small transformers --dropout 0.1
    python benchmarks/peers.py --decode --inputs 128 --systems v ctranslate2 transformers --beams 1

Every system runs in a process of its own; rounds alternate, and medians are reported. All have the same
sizes, random weights and random batches, and the numbers of parameters are checked. A variant of this
package is a key of `models.VARIANTS` (`v`: dot product, `r`: Random, …); `+small` selects scanned layers
that save only matrix products for the backward pass. A training step is AdamW's. The FLOPs of a step are
six times the multiply-adds of its forward pass; they are reported relative to the rate of a matrix
product, which the system's process measures before the first round, or with `--peak` TFLOP/s as MFU. When
decoding, no sequence ends before `--new-tokens`, and a round includes the encoder.
"""

from __future__ import annotations

import argparse
from typing import Any

import racing
import report

from synthesizer_jax import models

SIZES = {
    "tiny": (64, 2, 128, 4, 16),
    "small": (512, 8, 1024, 6, 64),
    "base": (768, 12, 2048, 12, 64),
    "large": (1024, 24, 2816, 16, 64),
}
"""T5 1.1: d_model, layers, d_ff, heads, head_dim."""

PEERS = {"transformers": "pytorch.py", "ctranslate2": "pytorch.py", "keras-hub": "keras_t5.py"}
"""Their workers."""


def main() -> None:
    """Runs the comparison and writes the table."""
    args = parse_arguments()
    facts = report.machine()
    rows = racing.race([make_system(args, name) for name in args.systems], rounds=args.rounds)
    counts = {r["name"]: r["parameters"] for r in rows if is_dot_product(r["name"])}
    if len(set(counts.values())) > 1:
        raise SystemExit(f"the parameter counts differ: {counts}")
    base = next(r for r in rows if r["name"] == args.base)
    for r in rows:
        r["speed"] = base["seconds"] / r["seconds"]
        r["memory"] = r["peak_mb"] / base["peak_mb"] if r["peak_mb"] else None
        if "flops" in r:
            r["work"] = r["flops"] / next(x["flops"] for x in rows if "flops" in x)
            share = r["flops"] / (args.peak * 1e12) if args.peak else r["utilization"]
            r["utilization"] = share / r["seconds"]
    versions = ", ".join(dict.fromkeys(", ".join(r["versions"] for r in rows).split(", ")))
    if args.decode:
        name, caption, columns = describe_decoding(args)
    else:
        name, caption, columns = describe_training(args)
    section = f"{caption} Versions: {versions}.\n\n{report.table(rows, columns)}"
    report.write(name, section, result={"rows": rows}, options=args, facts=facts)


def describe_decoding(args: argparse.Namespace) -> tuple[str, str, dict[str, str]]:
    """Returns the name, the caption and the columns of the table of decoding."""
    if args.beams == 1:
        method = "greedy"
        title = f"Greedy decoding with T5 1.1 {args.size}"
    else:
        method = f"beam {args.beams}"
        title = f"Beam search with T5 1.1 {args.size} and {args.beams} beams"
    name = f"decode {args.size} {method} {args.inputs}/{args.new_tokens} {args.dtype}"
    caption = (
        f"{title}, in {args.dtype}. The batch has {args.batch} rows of {args.inputs} input tokens, "
        f"and each row gets {args.new_tokens} new tokens. *Speed* is relative to {args.base}."
    )
    columns = {
        "name": "system",
        "parameters": "parameters|,d",
        "tokens_per_second": "tokens/s|,.0f",
        "seconds": "batch, s|.3f",
        "speed": "speed|.2f",
        "cache_bytes": "cache, bytes per position|,d",
        "peak_mb": "peak memory, MB|,.0f",
    }
    return name, caption, columns


def describe_training(args: argparse.Namespace) -> tuple[str, str, dict[str, str]]:
    """Returns the name, the caption and the columns of the table of training steps."""
    systems = " ".join(args.systems)
    name = (
        f"train_step {args.size} {args.inputs}/{args.targets} {args.dropout} {args.dtype} {systems}"
    )
    caption = (
        f"One training step of T5 1.1 {args.size} with AdamW, in {args.dtype} with dropout "
        f"{args.dropout}. The batch has {args.batch} rows of {args.inputs} input and "
        f"{args.targets} target tokens. *Speed* and *memory* are relative to {args.base}."
    )
    if args.peak:
        utilization = "MFU|.0%"
    else:
        utilization = "FLOP rate|.0%"
        caption += " *FLOP rate* is relative to the rate of a large matrix product."
    columns = {
        "name": "system",
        "parameters": "parameters|,d",
        "seconds": "step, s|.3f",
        "speed": "speed|.2f",
        "work": "FLOPs|.2f",
        "utilization": utilization,
        "peak_mb": "peak memory, MB|,.0f",
        "memory": "memory|.2f",
        "compile_seconds": "compiling, s|.1f",
    }
    return name, caption, columns


def is_dot_product(name: str) -> bool:
    """Whether a system has the attention of the published T5s."""
    return name.split("+")[0] in ("v", *PEERS)


def make_system(args: argparse.Namespace, name: str) -> racing.System:
    """Returns the worker of a system."""
    kind, _, suffix = name.partition("+")
    sizes = dict(
        zip(("d_model", "layers", "d_ff", "heads", "head_dim"), SIZES[args.size], strict=True)
    )
    options: dict[str, Any] = {**sizes, **vars(args), "system": kind}
    small = suffix == "small"
    options |= {"scan": small, "remat": "dots" if small else None}
    del options["json"], options["page"]
    peer = kind in PEERS
    if suffix not in ("", "small") or not (peer or kind in models.VARIANTS):
        known = ", ".join([*PEERS, *models.VARIANTS])
        raise SystemExit(f"{name} is no system; choose from {known}; a variant also +small")
    if kind == "keras-hub" and args.decode:
        raise SystemExit("keras-hub is compared in training only")
    if peer:
        return racing.System(name, PEERS[kind], options, str(racing.PEERS))
    return racing.System(name, "ours.py", options)


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    numbers = {"batch": 8, "inputs": 512, "targets": 114, "new_tokens": 64, "beams": 1}
    parser = report.arguments(__doc__, **numbers, rounds=7, threads=2)
    parser.add_argument("--decode", action="store_true", help="decode instead of training")
    parser.add_argument("--systems", nargs="+", default=["v", "transformers"])
    parser.add_argument("--base", help="the system that the others are compared with")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--peak", type=float, help="TFLOP/s that MFU counts against")
    args = parser.parse_args()
    args.base = args.base or args.systems[-1]
    return args


if __name__ == "__main__":
    main()
