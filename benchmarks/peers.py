"""Compares this package's T5 1.1 with transformers, CTranslate2 and keras-hub.

    make bench-peers
    python benchmarks/peers.py --systems v v+small transformers --dropout 0.1
    python benchmarks/peers.py --decode --inputs 128 --systems v ctranslate2 transformers --beams 1

The script measures training steps with AdamW. With `--decode`, it measures decoding instead. Every
system runs in a separate process. The systems take turns, and the table has medians over the
rounds. All systems have the same sizes, random weights and random batches, and the script checks
that they have the same number of parameters.

A variant of this package is a key of `models.VARIANTS`, such as `v` for the dot product and `r` for
Random. The suffix `+small` selects scanned layers that save only the results of matrix products for
the backward pass.

The FLOPs of a step are six times the multiply-adds of its forward pass. The table shows the FLOP
rate of a step divided by the FLOP rate of a matrix product, which every system's process measures
before the first round. With `--peak`, the FLOP rate of a step is divided by the given number of
TFLOP/s, and the ratio is the MFU.

When decoding, every sequence continues until it has `--new-tokens` tokens. The time includes the
encoder.
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
"""The sizes of T5 1.1: d_model, layers, d_ff, heads and head_dim."""

PEERS = {"transformers": "pytorch.py", "ctranslate2": "pytorch.py", "keras-hub": "keras_t5.py"}
"""The files of the workers of other libraries."""


def main() -> None:
    """Runs the comparison and writes the table."""
    args = parse_arguments()
    facts = report.machine()
    rows = racing.race([make_system(args, name) for name in args.systems], rounds=args.rounds)
    counts = {r["name"]: r["parameters"] for r in rows if is_dot_product(r["name"])}
    if len(set(counts.values())) > 1:
        raise SystemExit(f"The systems have different numbers of parameters: {counts}")
    add_ratios(rows, args)
    versions = ", ".join(dict.fromkeys(", ".join(r["versions"] for r in rows).split(", ")))
    if args.decode:
        name, caption, columns = describe_decoding(args)
    else:
        name, caption, columns = describe_training(args)
    section = f"{caption} Versions: {versions}.\n\n{report.table(rows, columns)}"
    report.write(name, section, result={"rows": rows}, options=args, facts=facts)


def add_ratios(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Adds the columns that compare a row with other rows."""
    base = next(row for row in rows if row["name"] == args.base)
    first_flops = next((row["flops"] for row in rows if "flops" in row), None)
    for row in rows:
        row["speed"] = base["seconds"] / row["seconds"]
        row["memory"] = row["peak_mb"] / base["peak_mb"] if row["peak_mb"] else None
        if "flops" in row:
            row["work"] = row["flops"] / first_flops
            # In `utilization`, the worker reports how many seconds the step would take if it
            # reached the FLOP rate of a matrix product.
            seconds = row["flops"] / (args.peak * 1e12) if args.peak else row["utilization"]
            row["utilization"] = seconds / row["seconds"]


def describe_decoding(args: argparse.Namespace) -> tuple[str, str, dict[str, str]]:
    """Returns the name, the caption and the columns of the table for decoding."""
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
    """Returns the name, the caption and the columns of the table for training steps."""
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
    """Returns whether a system has the same attention as the published T5 models."""
    return name.split("+")[0] in ("v", *PEERS)


def make_system(args: argparse.Namespace, name: str) -> racing.System:
    """Returns the `racing.System` for the name of a system."""
    kind, _, suffix = name.partition("+")
    if suffix not in ("", "small") or kind not in (*PEERS, *models.VARIANTS):
        known = ", ".join([*PEERS, *models.VARIANTS])
        raise SystemExit(
            f"There is no system {name!r}. Choose from {known}. Variants of this package may end "
            "in +small."
        )
    if kind == "keras-hub" and args.decode:
        raise SystemExit("keras-hub can only be compared in training. Remove it or --decode.")
    names = ("d_model", "layers", "d_ff", "heads", "head_dim")
    is_small = suffix == "small"
    options: dict[str, Any] = {
        **dict(zip(names, SIZES[args.size], strict=True)),
        **vars(args),
        "system": kind,
        "scan": is_small,
        "remat": "dots" if is_small else None,
    }
    del options["json"], options["page"]
    if kind in PEERS:
        return racing.System(name, PEERS[kind], options, str(racing.PEERS))
    return racing.System(name, "ours.py", options)


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    numbers = {"batch": 8, "inputs": 512, "targets": 114, "new_tokens": 64, "beams": 1}
    parser = report.arguments(__doc__, **numbers, rounds=7, threads=2)
    parser.add_argument("--decode", action="store_true", help="decode instead of training")
    parser.add_argument(
        "--systems", nargs="+", default=["v", "transformers"], help="systems to compare"
    )
    parser.add_argument(
        "--base", help="system that the others are compared with, by default the last one"
    )
    parser.add_argument("--size", choices=SIZES, default="small", help="size of T5 1.1")
    parser.add_argument("--dropout", type=float, default=0.1, help="dropout rate of training")
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16"), help="dtype of the model"
    )
    parser.add_argument("--peak", type=float, help="peak TFLOP/s of the device, to report MFU")
    args = parser.parse_args()
    args.base = args.base or args.systems[-1]
    return args


if __name__ == "__main__":
    main()
