"""Training batches from SeqIO, in an order that can be saved, restored and split over hosts."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

STREAM_FILE = "stream.json"
SHUFFLE_BUFFER = 1000  # examples per task and shard, SeqIO's default


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What a run reads.

    Attributes:
      mixture: name of a SeqIO mixture or task.
      inputs_length: encoder tokens per row; longer inputs are cut before EOS.
      targets_length: decoder tokens per row.
      batch_size: rows of the global batch.
      shards: the stream is cut once into this many virtual shards, each a pipeline of its own; the
        batch takes ``batch_size / shards`` rows of each, in order. So the order of examples does not
        depend on the number of hosts. Fixed for a run.
      pack: several examples per row, kept apart by segment ids.
      seed: of shuffling and mixing.
      split: which split.
      shuffle: False reads in the stored order.
    """

    mixture: str
    inputs_length: int
    targets_length: int
    batch_size: int
    shards: int = 8
    pack: bool = False
    seed: int = 0
    split: str = "train"
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.shards < 1 or self.batch_size % self.shards:
            below = max(self.batch_size // max(self.shards, 1), 1) * self.shards
            raise ValueError(
                f"batch_size={self.batch_size} does not divide by shards={self.shards}; the nearest "
                f"batch sizes that do are {below} and {below + self.shards}"
            )

    @property
    def lengths(self) -> dict[str, int]:
        """SeqIO's feature lengths."""
        return {"inputs": self.inputs_length, "targets": self.targets_length}


class Stream:
    """An endless iterator of batches whose position is that of the last batch taken.

    A batch is a dictionary of NumPy arrays ``[batch, length]``: ``encoder_input_tokens``,
    ``decoder_input_tokens``, ``decoder_target_tokens`` (int32) and ``decoder_loss_weights``
    (float32); packed ones also ``*_segment_ids`` and ``*_positions``.

    Args:
      config: what to read; its tasks are registered (`tasks.register`).
    """

    def __init__(self, config: DataConfig):
        self.config = config
        self._iterators = [iter(shard_dataset(config, i)) for i in range(config.shards)]

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        parts = [next(iterator) for iterator in self._iterators]
        return {name: as_host(name, [part[name] for part in parts]) for name in parts[0]}

    def save(self, directory: pathlib.Path) -> None:
        """Writes the position: ``stream.json`` and one TensorFlow checkpoint per virtual shard."""
        import tensorflow as tf

        directory.mkdir(parents=True, exist_ok=True)
        for i, iterator in enumerate(self._iterators):
            tf.train.Checkpoint(iterator=iterator).write(str(directory / f"shard_{i}"))
        text = json.dumps(fingerprint(self.config), indent=1)
        (directory / STREAM_FILE).write_text(text, encoding="utf-8")

    def restore(self, directory: pathlib.Path) -> None:
        """Continues after the last batch that was taken before `save`.

        Raises:
          ValueError: the position is that of another stream.
        """
        import tensorflow as tf

        saved = json.loads((directory / STREAM_FILE).read_text(encoding="utf-8"))
        mine = fingerprint(self.config)
        different = sorted(k for k in saved.keys() | mine.keys() if saved.get(k) != mine.get(k))
        if different:
            key = different[0]
            raise ValueError(
                f"the saved data position belongs to another stream: {key} was {saved.get(key)} "
                f"and is {mine.get(key)}; restore the old value or start a new workdir"
            )
        for i, iterator in enumerate(self._iterators):
            path = str(directory / f"shard_{i}")
            tf.train.Checkpoint(iterator=iterator).read(path).assert_consumed()


def as_host(name: str, parts: list[Any]) -> np.ndarray:
    """One array of the shards' parts, in order: loss weights as float32, all others as int32."""
    array = np.concatenate([np.asarray(part) for part in parts])
    return array.astype(np.float32 if name.endswith("weights") else np.int32)


def shard_dataset(config: DataConfig, index: int) -> Any:
    """The endless `tf.data.Dataset` of one virtual shard's part of the batch."""
    import seqio
    import tensorflow as tf

    dataset = converted(
        config,
        shuffle=config.shuffle,
        num_epochs=None,
        pack=config.pack,
        shard_info=seqio.ShardInfo(index=index, num_shards=config.shards),
    )
    options = tf.data.Options()
    options.deterministic = True
    options.threading.private_threadpool_size = 1
    rows = config.batch_size // config.shards
    return dataset.batch(rows, drop_remainder=True).prefetch(2).with_options(options)


def converted(config: DataConfig, *, num_epochs: int | None, pack: bool, **options: Any) -> Any:
    """Tokenised examples of the mixture as features of an encoder-decoder, not batched."""
    import seqio

    converter = seqio.EncDecFeatureConverter(pack=pack)
    dataset = seqio.get_mixture_or_task(config.mixture).get_dataset(
        config.lengths,
        split=config.split,
        num_epochs=num_epochs,
        seed=config.seed,
        use_cached=False,
        # SeqIO would hold small splits in memory and write them into every saved position.
        try_in_mem_cache=False,
        **options,
    )
    return converter(dataset, task_feature_lengths=config.lengths)


def fingerprint(config: DataConfig) -> dict[str, Any]:
    """What must be equal for a saved position to make sense."""
    import seqio

    provider = seqio.get_mixture_or_task(config.mixture)
    if isinstance(provider, seqio.Mixture):
        rates = {task.name: float(provider.get_rate(task)) for task in provider.tasks}
    else:
        rates = {config.mixture: 1.0}
    sizes = {k: v.vocabulary.vocab_size for k, v in provider.output_features.items()}
    return {**dataclasses.asdict(config), "rates": rates, "vocabulary_sizes": sizes}
