"""Measures how time and memory of a sub-layer scale, and how compilation scales with depth.

    python benchmarks/scaling.py --variants DotProduct Random Gaussian

Length, batch and heads are varied one at a time. *Exponent* is the slope of a least-squares line through
the logarithms of the larger half of the points, at least three: 1 is linear, 2 is quadratic.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import attention
import jax
import jax.numpy as jnp
import numpy as np
import report

from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.models import Size, t5
from synthesizer_jax.optimizers import AdamW
from synthesizer_jax.training.experiment import Experiment, Training
from synthesizer_jax.training.trainer import Trainer

POINTS = {
    "length": (128, 256, 512, 1024, 2048, 4096, 8192),
    "batch": (1, 2, 4, 8, 16),
    "heads": (2, 4, 8, 16),
}
DEPTHS = (2, 6, 12, 24)


def main() -> None:
    """Runs the measurements and writes the tables."""
    args = parse_arguments()
    if args.longest < POINTS["length"][2]:
        raise SystemExit(f"--longest {args.longest} leaves too few lengths; use at least 512")
    rows = []
    for axis in args.axes:
        points = [p for p in POINTS[axis] if axis != "length" or p <= args.longest]
        rows += [measure_axis(args, name, axis, points) for name in args.variants]
    with tempfile.TemporaryDirectory() as cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        compiling = [
            measure_compilation(depth, scan=scan) for scan in (False, True) for depth in DEPTHS
        ]
    section = (
        f"Sub-layer, forward + backward, d {args.d_model}, heads of {args.head_dim}, float32; where it "
        f"does not vary: length {args.length}, batch {args.batch}, {args.heads} heads.\n\n"
        + report.table(
            rows,
            {
                "axis": "what varies",
                "name": "variant",
                "points": "points",
                "times": "ms",
                "time": "exponent|.2f",
                "temporaries": "temporaries, MB",
                "memory": "exponent|.2f",
            },
        )
        + "\n\nCompiling a training step (T5 1.1 of d 64, lengths 512/114), *cold* and, *warm*, with the "
        "compilation cache filled:\n\n"
        + report.table(
            compiling,
            {
                "layers": "layers of each stack|d",
                "form": "layers are",
                "tracing": "tracing, s|.1f",
                "compiling": "lowering + compiling: cold, s|.1f",
                "warm": "warm, s|.1f",
                "ratio": "ratio|.2f",
                "all": "ratio with tracing|.2f",
            },
        )
    )
    result = {"rows": rows, "compiling": compiling}
    report.write("scaling", section, result=result, options=args, facts=report.machine())


def measure_axis(
    args: argparse.Namespace, name: str, axis: str, points: Sequence[int]
) -> dict[str, Any]:
    """Measures a variant at every point of an axis."""
    times, temporaries = [], []
    for point in points:
        point_args = argparse.Namespace(**{**vars(args), axis: point})
        key = jax.random.key(0)
        x = jax.random.normal(key, (point_args.batch, point_args.length, point_args.d_model))
        lengths = jnp.full(point_args.batch, point_args.length - point_args.length // 8, jnp.int32)
        point_args.variants, point_args.implementations = [name], ["auto"]
        (row,) = attention.measure(
            attention.variant_cases(point_args, x, key), x, lengths, args.rounds
        )
        times.append(row["both_ms"])
        temporaries.append(row["temporaries_mb"])
    return {
        "axis": axis,
        "name": name,
        "points": ", ".join(map(str, points)),
        "times": ", ".join(f"{t:.0f}" for t in times),
        "time": fit_exponent(points, times),
        "temporaries": ", ".join(f"{m:.0f}" for m in temporaries),
        "memory": fit_exponent(points, temporaries),
    }


def fit_exponent(points: Sequence[int], values: Sequence[float]) -> float:
    """Fits the slope of the logarithms over the larger half of the points."""
    half = min(len(points) // 2, len(points) - 3)
    return float(np.polyfit(np.log(points[half:]), np.log(values[half:]), 1)[0])


def measure_compilation(layers: int, *, scan: bool) -> dict[str, Any]:
    """Measures the compilation of a T5's training step, with an empty and a filled cache."""
    model = t5(Size(64, layers, 128, 4, 16), vocab_size=256, dropout_rate=0.1, scan=scan)
    data = DataConfig("none", 512, 114, batch_size=2, shards=1)
    experiment = Experiment(model, data, Training(steps=1, optimizer=AdamW()))

    def trace_and_compile() -> tuple[float, float]:
        jax.clear_caches()
        trainer = Trainer(experiment)
        start = time.perf_counter()
        traced = trainer.trace()
        traced_at = time.perf_counter()
        traced.lower().compile()
        return traced_at - start, time.perf_counter() - traced_at

    cold, warm = trace_and_compile(), trace_and_compile()
    return {
        "layers": layers,
        "form": "scanned" if scan else "unrolled",
        "tracing": cold[0],
        "compiling": cold[1],
        "warm": warm[1],
        "ratio": warm[1] / cold[1],
        "all": sum(warm) / sum(cold),
    }


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = report.arguments(
        __doc__, batch=2, length=512, heads=8, head_dim=64, d_model=512, rounds=3, longest=8192
    )
    defaults = ["DotProduct", "Random", "Gaussian", "LightweightConvolution"]
    parser.add_argument("--variants", nargs="+", choices=attention.VARIANTS, default=defaults)
    parser.add_argument("--axes", nargs="+", choices=POINTS, default=list(POINTS))
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--bias", action="store_true", help="T5's relative bias")
    return parser.parse_args()


if __name__ == "__main__":
    main()
