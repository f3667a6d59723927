"""A worker of `input_pipeline.py` that makes batches with this package or with SeqIO."""

import itertools
import os
import pathlib
import time
from collections.abc import Iterator

import numpy as np
import racing

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
options = racing.options()

from synthesizer_jax.data.config import DataConfig  # noqa: E402
from synthesizer_jax.data.vocabularies import SentencePiece  # noqa: E402
from synthesizer_jax.tasks import stored, task_registry  # noqa: E402
from synthesizer_jax.tasks.seqio_tasks import seqio_vocabulary  # noqa: E402
from synthesizer_jax.tasks.splits import open_stream  # noqa: E402

Batch = dict[str, np.ndarray]
mixture, pack = options["mixture"], options["pack"]
vocabulary = SentencePiece(options["vocabulary"]).build()
data_dir = pathlib.Path(options["data_dir"])
lengths = options["inputs"], options["targets"]

if options["system"] != "prepared":
    import seqio  # imports are not measured


def prepared() -> Iterator[Batch]:
    """Returns this package's stream of batches."""
    config = DataConfig(mixture, *lengths, options["batch"], pack=pack)
    return open_stream(config, vocabulary, data_dir=data_dir)


def by_seqio() -> Iterator[Batch]:
    """Returns the batches of SeqIO's pipeline with SeqIO's own settings."""
    seqio.set_tfds_read_config_override(None)  # our tasks have changed this configuration
    members = [
        (seqio_task(name), rate)
        for name, rate in task_registry.mixture_rates(mixture, data_dir).items()
        if rate
    ]
    data = seqio.get_dataset(
        seqio.Mixture(mixture, members),
        dict(zip(("inputs", "targets"), lengths, strict=True)),
        dataset_split="train",
        shuffle=True,
        num_epochs=None,
        feature_converter=seqio.EncDecFeatureConverter(pack=pack),
        seed=0,
    )
    return data.batch(options["batch"], drop_remainder=True).prefetch(2).as_numpy_iterator()


def seqio_task(name: str) -> seqio.Task:
    """Converts a task of this package to a SeqIO task."""
    task = task_registry.find_task(name)
    version = stored.newest_version(task.dataset, data_dir).name
    source = seqio.TfdsDataSource(f"{task.dataset}:{version}", str(data_dir))
    feature = seqio.Feature(seqio_vocabulary(vocabulary), add_eos=True)
    steps = [
        task.preprocess,
        seqio.preprocessors.tokenize,
        seqio.preprocessors.append_eos_after_trim,
    ]
    return seqio.Task(name, source, {"inputs": feature, "targets": feature}, steps)


def num_examples(batch: Batch) -> int:
    """Returns the number of examples in a batch."""
    segments = batch.get("encoder_segment_ids")
    if segments is None:
        return len(batch["encoder_input_tokens"])
    return int(segments.max(1).sum())


def real_tokens(batch: Batch) -> int:
    """Returns the number of input and target tokens that are not padding."""
    names = ("encoder_input_tokens", "decoder_target_tokens")
    return sum(np.count_nonzero(batch[name]) for name in names)


def run() -> dict[str, float]:
    """Makes the batches of one round, and returns how fast they were made."""
    began = time.perf_counter()
    taken = list(itertools.islice(stream, options["batches"]))
    seconds = time.perf_counter() - began
    inputs = [batch["encoder_input_tokens"] for batch in taken]
    return {
        "seconds": seconds,
        "later": sum(map(real_tokens, taken)) / seconds,
        "filled": sum(map(np.count_nonzero, inputs)) / sum(x.size for x in inputs),
    }


began = time.perf_counter()
stream = prepared() if options["system"] == "prepared" else by_seqio()
taken = [next(stream)]
first_batch = time.perf_counter()
count = 0
while count < options["first"]:
    taken.append(next(stream))
    count += num_examples(taken[-1])
ended = time.perf_counter()
tokens = [real_tokens(batch) for batch in taken]

racing.serve(
    {
        "first_batch_seconds": first_batch - began,
        "opened": sum(tokens) / (ended - began),
        "first": sum(tokens[1:]) / (ended - first_batch),
    },
    run,
)
