"""Batches of a mixture, by this project's stream or by SeqIO's own pipeline."""

import itertools
import os
import pathlib
import time
from collections.abc import Iterator

import numpy as np
import racing

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
options = racing.options()

import seqio  # noqa: E402

from synthesizer_jax.data import synthetic, tasks  # noqa: E402, F401 (knows the synthetic mixture)
from synthesizer_jax.data.pipeline import DataConfig, Stream  # noqa: E402
from synthesizer_jax.data.vocabularies import SentencePiece  # noqa: E402

Batch = dict[str, np.ndarray]
mixture, pack = options["mixture"], options["pack"]
vocabulary = SentencePiece(**options["vocabulary"]).build()
tasks.register(mixture, vocabulary, data_dir=pathlib.Path(options["data_dir"]))


def ours() -> Iterator[Batch]:
    """This project's stream."""
    lengths = options["inputs"], options["targets"]
    return Stream(DataConfig(mixture, *lengths, options["batch"], pack=pack))


def theirs() -> Iterator[Batch]:
    """SeqIO's pipeline as it comes, not as our tasks set it."""
    seqio.set_tfds_read_config_override(None)
    data = seqio.get_dataset(
        mixture,
        {"inputs": options["inputs"], "targets": options["targets"]},
        dataset_split="train",
        shuffle=True,
        num_epochs=None,
        feature_converter=seqio.EncDecFeatureConverter(pack=pack),
        seed=0,
    )
    return data.batch(options["batch"], drop_remainder=True).prefetch(2).as_numpy_iterator()


def examples(batch: Batch) -> int:
    """How many examples a batch holds."""
    segments = batch.get("encoder_segment_ids")
    return len(batch["encoder_input_tokens"]) if segments is None else int(segments.max(1).sum())


def measures(taken: list[Batch], seconds: float) -> dict[str, float]:
    """Examples and real tokens per second, and the share of real tokens."""
    sides = [b[k] for b in taken for k in ("encoder_input_tokens", "decoder_target_tokens")]
    real = sum(int((x != 0).sum()) for x in sides)
    return {
        "seconds": seconds,
        "examples_per_second": sum(map(examples, taken)) / seconds,
        "tokens_per_second": real / seconds,
        "filled": real / sum(x.size for x in sides),
    }


began = time.perf_counter()
stream = {"synthesizer_jax": ours, "SeqIO": theirs}[options["system"]]()
next(stream)
first_batch = time.perf_counter() - began
began, count = time.perf_counter(), 0
while count < options["first"]:
    count += examples(next(stream))
first = count / (time.perf_counter() - began)


def run() -> dict[str, float]:
    """Some batches."""
    began = time.perf_counter()
    taken = list(itertools.islice(stream, options["batches"]))
    return measures(taken, time.perf_counter() - began)


racing.serve({"first_batch_seconds": first_batch, "first_examples_per_second": first}, run)
