"""Batches of a task mixture: this project's stream and SeqIO's own pipeline.

    python benchmarks/input_pipeline.py --batch 128
    python benchmarks/input_pipeline.py --mixture glue_v002_proportional --data-dir DIR --vocabulary V

All read the same tasks with the same vocabulary and lengths, shuffled; they take turns, medians over
rounds are shown. Without `--data-dir` the mixture is the embedded one, written to a temporary
directory. `first batch` holds reading, tokenising and, for this project, keeping examples in memory.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import report

Batch = dict[str, np.ndarray]


def main() -> None:
    """Runs the race and prints it."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    args = parse()
    with tempfile.TemporaryDirectory() as aside:
        register(args, pathlib.Path(aside))
        rows = race(systems(args), rounds=args.rounds, batches=args.batches)
    base = next(r for r in rows if r["name"] == "SeqIO")
    for r in rows:
        r["speed"] = r["rows_per_second"] / base["rows_per_second"]
    text = (
        f"{args.mixture}, batch {args.batch}, lengths {args.inputs}/{args.targets}, "
        f"{args.batches} batches a round. Speed against SeqIO's pipeline, in rows.\n\n"
        + report.table(
            rows,
            {
                "name": "pipeline",
                "first_seconds": "first batch, s|.2f",
                "rows_per_second": "rows/s|,.0f",
                "speed": "speed|.2f",
                "tokens_per_second": "tokens/s|,.0f",
                "filled": "tokens that are no padding|.0%",
            },
        )
    )
    name = f"input_pipeline {args.mixture}"
    report.write(name, text, result={"rows": rows}, options=args, facts=report.machine())


def register(args: argparse.Namespace, aside: pathlib.Path) -> None:
    """Puts the mixture into SeqIO's registries."""
    from synthesizer_jax.data import embedded, tasks
    from synthesizer_jax.data.vocabularies import SentencePiece

    if args.data_dir is None:
        prepared = embedded.prepare(aside)
        tasks.register(args.mixture, prepared.vocabulary.build(), data_dir=aside)
    else:
        vocabulary = SentencePiece(str(args.vocabulary)).build()
        tasks.register(args.mixture, vocabulary, data_dir=args.data_dir)


def systems(args: argparse.Namespace) -> dict[str, Callable[[], Iterator[Batch]]]:
    """What makes each compared iterator."""
    import seqio

    from synthesizer_jax.data.pipeline import DataConfig, Stream

    def ours(**changes: Any) -> Callable[[], Iterator[Batch]]:
        config = DataConfig(args.mixture, args.inputs, args.targets, args.batch, **changes)
        return lambda: Stream(config)

    def theirs(pack: bool) -> Iterator[Batch]:
        seqio.set_tfds_read_config_override(None)  # as it comes, not as our tasks set it
        data = seqio.get_dataset(
            args.mixture,
            {"inputs": args.inputs, "targets": args.targets},
            dataset_split="train",
            shuffle=True,
            num_epochs=None,
            feature_converter=seqio.EncDecFeatureConverter(pack=pack),
            seed=0,
        )
        return data.batch(args.batch, drop_remainder=True).prefetch(2).as_numpy_iterator()

    return {
        "synthesizer_jax": ours(),
        "SeqIO": lambda: theirs(pack=False),
        "synthesizer_jax, packed": ours(pack=True),
        "SeqIO, packed": lambda: theirs(pack=True),
    }


def race(
    systems: dict[str, Callable[[], Iterator[Batch]]], *, rounds: int, batches: int
) -> list[dict[str, Any]]:
    """Medians of every system."""
    streams, first = {}, {}
    for name, make in systems.items():
        began = time.perf_counter()
        streams[name] = make()
        next(streams[name])
        first[name] = time.perf_counter() - began
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in systems}
    for _ in range(rounds):
        for name, stream in streams.items():
            began = time.perf_counter()
            taken = [next(stream) for _ in range(batches)]
            seconds = time.perf_counter() - began
            found[name].append(measures(taken, seconds))
    return [
        {
            "name": name,
            "first_seconds": first[name],
            **{
                key: statistics.median(values)
                for key, values in zip(
                    ("rows_per_second", "tokens_per_second", "filled"),
                    zip(*results, strict=True),
                    strict=True,
                )
            },
        }
        for name, results in found.items()
    ]


def measures(taken: list[Batch], seconds: float) -> tuple[float, float, float]:
    """Rows and real tokens per second, and the share of real tokens."""
    sides = [b[k] for b in taken for k in ("encoder_input_tokens", "decoder_target_tokens")]
    real, all_tokens = sum(int((x != 0).sum()) for x in sides), sum(x.size for x in sides)
    rows = sum(len(b["encoder_input_tokens"]) for b in taken)
    return rows / seconds, real / seconds, real / all_tokens


def parse() -> argparse.Namespace:
    """The command line."""
    parser = report.arguments(__doc__, batch=128, inputs=512, targets=62, batches=20, rounds=7)
    parser.add_argument("--mixture", default="embedded_co_training", help="a mixture or task")
    parser.add_argument("--data-dir", type=pathlib.Path, help="where prepared data sets lie")
    parser.add_argument("--vocabulary", type=pathlib.Path, help="a SentencePiece model")
    args = parser.parse_args()
    if args.data_dir and not args.vocabulary:
        parser.error("--data-dir needs --vocabulary, a SentencePiece model")
    return args


if __name__ == "__main__":
    main()
