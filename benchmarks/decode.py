"""Compares decoding with this package, transformers and CTranslate2.

    make bench-peers
    python benchmarks/decode.py --systems v ctranslate2 transformers --beams 1

Every system runs in a process of its own; rounds alternate, and medians are reported. A T5 1.1 with random
weights decodes a batch of random inputs; no sequence ends before `--new-tokens`. A round includes the
encoder.
"""

from __future__ import annotations

import argparse

import racing
import report
import train_step

PEERS = ("transformers", "ctranslate2")


def main() -> None:
    """Runs the comparison and writes the table."""
    args = parse_arguments()
    rows = racing.race([make_system(args, name) for name in args.systems], rounds=args.rounds)
    facts = report.machine()
    parameter_counts = {r["name"]: r["parameters"] for r in rows if r["name"] in ("v", *PEERS)}
    if len(set(parameter_counts.values())) > 1:
        raise SystemExit(f"the parameter counts differ: {parameter_counts}")
    base = next(r for r in rows if r["name"] == args.base)
    for r in rows:
        r["speed"] = base["seconds"] / r["seconds"]
    method = "greedy" if args.beams == 1 else f"beam {args.beams}"
    section = (
        f"T5 1.1 {args.size}, {method}, batch {args.batch}, {args.inputs} input and "
        f"{args.new_tokens} new tokens, {args.dtype}. Speed against {base['name']}.\n\n"
        + report.table(
            rows,
            {
                "name": "system",
                "parameters": "parameters|,d",
                "tokens_per_second": "tokens/s|,.0f",
                "seconds": "batch, s|.3f",
                "speed": "speed|.2f",
                "cache_bytes": "cache, bytes a position|,d",
                "peak_mb": "peak memory, MB|,.0f",
                "versions": "versions",
            },
        )
    )
    name = f"decode {args.size} {method} {args.inputs}/{args.new_tokens} {args.dtype}"
    report.write(name, section, result={"rows": rows}, options=args, facts=facts)


def make_system(args: argparse.Namespace, name: str) -> racing.System:
    """Returns the worker of a system."""
    shared = train_step.size_options(args.size)
    shared |= {k: getattr(args, k) for k in ("batch", "inputs", "new_tokens", "beams")}
    if name in PEERS:
        options = {**shared, "engine": name, "threads": args.threads}
        return racing.System(name, "decode_transformers.py", options, str(racing.PEERS))
    options = {**shared, "variant": name, "dtype": args.dtype}
    return racing.System(name, "decode_synthesizer_jax.py", options)


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = report.arguments(
        __doc__, batch=8, inputs=128, new_tokens=64, beams=1, rounds=9, threads=2
    )
    parser.add_argument("--systems", nargs="+", default=["v", "ctranslate2", "transformers"])
    parser.add_argument("--base", default=None, help="the system that the others are compared with")
    parser.add_argument("--size", choices=train_step.SIZES, default="small")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    args = parser.parse_args()
    peers = [name for name in args.systems if name in PEERS]
    args.base = args.base or (peers or args.systems)[0]
    return args


if __name__ == "__main__":
    main()
