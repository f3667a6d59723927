"""Training batches from a mixture's tasks, in an order that can be saved, restored and split over hosts.

The stream consists of V virtual shards. Each shard draws a task by its rate, then that task's next
example for the shard, and the batch takes B/V rows of each shard in order. The order of examples is
therefore the same on any number of hosts. Examples come from a cache (`cache`), or from SeqIO, which
reads and tokenizes them; those of tasks without random steps are then held in memory and drawn by
counters (`members.InMemoryTaskStream`), so that a position is a few exact numbers, the same for both.
Other tasks remain SeqIO pipelines (`seqio_members.SeqioTaskStream`) with a TensorFlow checkpoint each.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from synthesizer_jax.data.batch import assemble_batch
from synthesizer_jax.data.bucketing import GROUP, smallest_bucket
from synthesizer_jax.data.cache import CachedExamples
from synthesizer_jax.data.classes import LONGEST_TARGET, Classes, ClassStream
from synthesizer_jax.data.members import CHUNK, Examples, InMemoryTaskStream, TaskStream
from synthesizer_jax.data.objectives import ExampleFormat, Objective, SegmentStream
from synthesizer_jax.data.packing import WINDOW
from synthesizer_jax.data.virtual_shard import ShardPosition, VirtualShard
from synthesizer_jax.messages import not_divisible
from synthesizer_jax.registry import check_types, fields_of

if TYPE_CHECKING:
    import seqio

    from synthesizer_jax.data.task import Task

STREAM_FILE = "stream.json"


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The data that a run is trained on.

    Attributes:
      mixture: name of a SeqIO mixture or task.
      inputs_length: encoder tokens per row; longer inputs are truncated before EOS. 0: there are none,
        for language models on tasks without inputs.
      targets_length: decoder tokens per row.
      batch_size: number of rows of the global batch.
      shards: V, the number of virtual shards, which must divide the batch size. It is fixed for a
        run.
      pack: whether to pack several examples into a row, kept apart by segment ids (see
        `packing.Packer`).
      seed: of shuffling and mixing.
      split: the split to read.
      shuffle: False reads every task in its stored order.
      max_segments: the maximum number of examples per packed row; None is one per 16 input
        tokens, or target tokens if there are no inputs.
      cached: whether examples come from caches (`synthesizer-jax data cache`): True requires them,
        False ignores them, None uses those that there are. The batches are the same, except for tasks
        that are too large for memory, whose order is another one.
      buckets: pairs of ``inputs_length`` and ``targets_length``, ascending: a batch, whose rows are of
        similar length, has the first pair of them that holds its rows, or else the full lengths. For
        models that refuse packed rows.
      classes: the label words of an encoder's classes, in the order of its outputs: every target becomes
        the number of its class, one a row (``targets_length=1``). Empty: targets are texts.
      objective: what makes examples of tasks without inputs that have no objective of their own, such as
        ``OBJECTIVES["span_3_15_u_u"]``; None: every text, truncated, is a target.
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
    max_segments: int | None = None
    cached: bool | None = None
    buckets: tuple[tuple[int, int], ...] = ()
    classes: tuple[str, ...] = ()
    objective: Objective | None = None

    def __post_init__(self) -> None:
        check_types(DataConfig, fields_of(self), "data")
        if self.inputs_length < 0:
            raise ValueError(f"data.inputs_length is {self.inputs_length}; allowed: 0 or more")
        for name in ("targets_length", "batch_size", "max_segments"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"data.{name} is {value}; allowed: 1 or more")
        self._check_buckets()
        self._check_classes()
        if self.seed < 0:
            raise ValueError(f"data.seed is {self.seed}; allowed: 0 or more")
        if not 1 <= self.shards <= CHUNK:
            raise ValueError(f"data.shards is {self.shards}; allowed: 1 to {CHUNK}")
        if self.batch_size % self.shards:
            shards = f"shards={self.shards}"
            raise ValueError(
                not_divisible("batch_size", self.batch_size, by=shards, divisor=self.shards)
            )

    def _check_buckets(self) -> None:
        if self.buckets and self.pack:
            raise ValueError(
                "data.buckets is for rows that are not packed; set data.pack=false or data.buckets=()"
            )
        shortest = min(self.inputs_length, 1)
        for inputs, targets in self.buckets:
            fits = shortest <= inputs <= self.inputs_length and 0 < targets <= self.targets_length
            if not fits:
                raise ValueError(
                    f"data.buckets holds ({inputs}, {targets}); allowed: {shortest} to inputs_length="
                    f"{self.inputs_length} and 1 to targets_length={self.targets_length}"
                )
        if list(self.buckets) != sorted(self.buckets):
            raise ValueError(f"data.buckets is {self.buckets}; give its pairs in ascending order")

    def _check_classes(self) -> None:
        if not self.classes:
            return
        if self.targets_length != 1 or self.pack:
            raise ValueError(
                f"data.classes gives every row one class, with data.targets_length={self.targets_length} "
                f"and data.pack={str(self.pack).lower()}; set data.targets_length=1 and data.pack=false"
            )
        if len(set(self.classes)) < max(2, len(self.classes)):
            raise ValueError(
                f"data.classes is {', '.join(self.classes)}; give two or more label words, each once"
            )

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """The lengths of inputs and targets that batches can have, the full lengths last."""
        full = (self.inputs_length, self.targets_length)
        return (*(bucket for bucket in self.buckets if bucket != full), full)

    @property
    def lengths(self) -> dict[str, int]:
        """SeqIO's feature lengths; label words are read as a whole before they become classes."""
        targets = LONGEST_TARGET if self.classes else self.targets_length
        return {"inputs": self.inputs_length, "targets": targets}

    def objective_of(self, task: Task) -> Objective | None:
        """Returns the objective by which a task's texts are trained; None: they are targets."""
        if task.objective is not None or task.has_inputs:
            return task.objective
        return self.objective

    @property
    def segments_per_row(self) -> int:
        """The largest segment id that a row can have; packing observes it exactly."""
        if not self.pack:
            return 1
        return self.max_segments or max(1, (self.inputs_length or self.targets_length) // 16)


Position: TypeAlias = dict[int, ShardPosition]
"""The positions of virtual shards by their indices."""


class OtherStreamError(ValueError):
    """The saved position belongs to another stream: other tasks, lengths, seed, shards, ..."""


class Stream:
    """An endless iterator over batches whose position is that of the last batch taken.

    A batch is a dictionary of NumPy arrays ``[batch, length]``: ``encoder_input_tokens``,
    ``decoder_input_tokens``, ``decoder_target_tokens`` (int32) and ``decoder_loss_weights``
    (float32); packed batches also have ``*_segment_ids`` (from 1; 0 is padding) and
    ``*_positions``. With `DataConfig.classes` the target is the class. `open_stream` makes it from a
    data directory.

    Args:
      config: what to read.
      rates: the tasks' rates; None: those of the mixture in SeqIO's registries (`tasks.register`).
      cached: examples of tasks from caches, by task.
      live: the other tasks, which SeqIO reads, by name.
      objectives: those of tasks that are read as documents, by task; their `cached` examples are
        documents. Of registered tasks, those without inputs have `config.objective`.
      vocab_size: the number of ids of the vocabulary, for objectives.
      shards: indices of the virtual shards that this process reads, in order; None is all of them.
        The batch then contains the rows of these shards only, and only their positions are
        restored (with buckets those of all shards).
      saved: indices of those shards whose positions this process saves; None is all that it reads.
      classes: what makes classes of targets; needed with `DataConfig.classes`.

    Attributes:
      is_cached: whether all examples come from caches, so that SeqIO is not needed.

    Raises:
      ValueError: no task of the mixture has this split, or a task has fewer examples than shards, or
        `classes` is missing.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        rates: Mapping[str, float] | None = None,
        cached: Mapping[str, CachedExamples] = {},
        live: Mapping[str, seqio.Task] = {},
        objectives: Mapping[str, Objective] = {},
        vocab_size: int | None = None,
        shards: Sequence[int] | None = None,
        saved: Sequence[int] | None = None,
        classes: Classes | None = None,
    ):
        if config.classes and classes is None:
            raise ValueError("data.classes needs a vocabulary; open the stream with open_stream")
        self.config, self._classes = config, classes
        if rates is None:
            registered = _registered_tasks(config)
            rates = {task.name: rate for task, rate in registered.items()}
            live = {task.name: task for task in registered}
            objectives, vocab_size = _registered_objectives(live, config)
        if not rates:
            raise ValueError(
                f"no task of {config.mixture!r} is drawn on the split {config.split!r}"
            )
        self._rates = dict(rates)
        self._objectives = dict(objectives)
        self._check_objectives()
        self._vocab_size = vocab_size
        self._live = {name: live[name] for name in rates if name not in cached}
        self.is_cached = not self._live
        self._examples: dict[str, Examples] = {
            **cached,
            **_read_examples(self._live, config, self._objectives),
        }
        own = range(config.shards) if shards is None else shards
        self._own = list(own)
        # The shape of a batch with buckets depends on the rows of all shards.
        indices = range(config.shards) if config.buckets else own
        self._shards = {index: self._make_shard(index) for index in indices}
        self._saved = self._own if saved is None else list(saved)

    @property
    def has_numeric_position(self) -> bool:
        """Whether `position` alone is enough to continue: no task remains a SeqIO pipeline."""
        return all(shard.is_numeric for shard in self._shards.values())

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        rows_per_shard = self.config.batch_size // self.config.shards
        rows = {
            index: [shard.next_row() for _ in range(rows_per_shard)]
            for index, shard in self._shards.items()
        }
        lengths = None
        if self.config.buckets:
            every_row = itertools.chain.from_iterable(rows.values())
            lengths = smallest_bucket(every_row, self.config.shapes)
        own = [row for index in self._own for row in rows[index]]
        return assemble_batch(own, self.config, lengths=lengths)

    def position(self) -> Position:
        """Returns the position after the last batch, for `save`."""
        return {index: self._shards[index].position() for index in self._saved}

    def save(self, directory: pathlib.Path, position: Position | None = None) -> None:
        """Writes a position: ``stream.json``, and a separate file for every virtual shard.

        A shard that moves to another host needs only its own file, and the files of its SeqIO task
        streams beside it. Among several processes the one that saves shard 0 writes
        ``stream.json``.

        Args:
          directory: where to.
          position: None: that after the last batch.
        """
        directory.mkdir(parents=True, exist_ok=True)
        for index, shard_position in (self.position() if position is None else position).items():
            self._shards[index].save(self._prefix(directory, index), shard_position)
        if 0 in self._saved:
            text = json.dumps(self.fingerprint(), indent=1)
            (directory / STREAM_FILE).write_text(text, encoding="utf-8")

    def restore(self, directory: pathlib.Path) -> None:
        """Continues after the last batch that was taken before `save`.

        Raises:
          OtherStreamError: the position is that of another stream.
          ValueError: the file of a shard is missing.
        """
        saved = json.loads((directory / STREAM_FILE).read_text(encoding="utf-8"))
        current = self.fingerprint()
        for key in sorted(saved.keys() | current.keys()):
            if saved.get(key) != current.get(key):
                raise OtherStreamError(
                    f"the saved data position belongs to another stream: {key} was "
                    f"{saved.get(key)} and is {current.get(key)}; restore the old value or start a "
                    "new run"
                )
        for index, shard in self._shards.items():
            shard.restore(self._prefix(directory, index))

    def fingerprint(self) -> dict[str, object]:
        """Returns everything that must be equal for a saved position to be valid, as flat JSON.

        The checksums are those of the tasks' first examples: they depend on vocabulary, data set
        and preprocessing. Whether examples come from a cache makes no difference.
        """
        settings = dataclasses.asdict(self.config)
        for name in ("cached", "buckets", "classes", "objective"):
            del settings[name]
        if self.config.classes:
            settings["classes"] = str(self.config.classes)
        if self.config.buckets:
            settings["buckets"] = f"{self.config.buckets} in groups of {GROUP} batches"
        if self.config.pack:
            settings["packing"] = f"best fit among {WINDOW} examples"
        rates = {f"rate of {name}": rate for name, rate in self._rates.items()}
        checksums = {f"checksum of {name}": e.checksum for name, e in self._examples.items()}
        objectives = {f"objective of {name}": repr(o) for name, o in self._objectives.items()}
        return {**settings, **rates, **checksums, **objectives}

    def _prefix(self, directory: pathlib.Path, index: int) -> pathlib.Path:
        return directory / f"shard-{index:05}-of-{self.config.shards:05}"

    def _make_shard(self, index: int) -> VirtualShard:
        config, shard = self.config, (index, self.config.shards)
        members: dict[str, TaskStream] = {}
        for task_number, name in enumerate(self._rates, 1):
            seed = np.random.SeedSequence(config.seed, spawn_key=(index, task_number))
            if name in self._objectives:
                members[name] = self._make_segments(name, shard, seed)
            elif name in self._examples:
                members[name] = InMemoryTaskStream(
                    self._examples[name], shard=shard, seed=seed if config.shuffle else None
                )
            else:
                members[name] = _make_pipeline(self._live[name], config, shard)
            if self._classes is not None:
                members[name] = ClassStream(members[name], self._classes, task=name)
        seed = np.random.SeedSequence(config.seed, spawn_key=(index, 0))
        return VirtualShard(members, config, rates=self._rates, seed=seed)

    def _check_objectives(self) -> None:
        if self.config.objective is not None and not self._objectives:
            raise ValueError(
                f"data.objective makes examples of texts without inputs, and {self.config.mixture!r} has "
                "no task of that kind; leave it out, or name another mixture"
            )

    def _make_segments(
        self, name: str, shard: tuple[int, int], seed: np.random.SeedSequence
    ) -> TaskStream:
        """Returns a shard of a task's documents as examples of its objective."""
        config = self.config
        assert self._vocab_size is not None
        return SegmentStream(
            self._examples[name],
            self._objectives[name],
            ExampleFormat(config.inputs_length, config.targets_length, self._vocab_size),
            shard=shard,
            seed=seed,
            shuffle=config.shuffle,
        )


def _registered_objectives(
    live: Mapping[str, seqio.Task], config: DataConfig
) -> tuple[dict[str, Objective], int | None]:
    """Returns the objectives of registered tasks, and the number of ids of their vocabulary."""
    if config.objective is None:
        return {}, None
    objectives = {
        name: config.objective
        for name, task in live.items()
        if "inputs" not in task.output_features
    }
    sizes = {live[name].output_features["targets"].vocabulary.vocab_size for name in objectives}
    return objectives, max(sizes, default=None)


def _registered_tasks(config: DataConfig) -> dict[seqio.Task, float]:
    """Returns the tasks of the registered mixture that have the split, and their positive rates."""
    import seqio

    provider = seqio.get_mixture_or_task(config.mixture)
    if isinstance(provider, seqio.Task):
        rates = {provider: 1.0}
    else:
        rates = {task: float(provider.get_rate(task)) for task in provider.tasks}
    return {t: rate for t, rate in rates.items() if rate > 0 and config.split in t.splits}


def _read_examples(
    live: Mapping[str, seqio.Task], config: DataConfig, objectives: Mapping[str, Objective]
) -> dict[str, Examples]:
    """Returns the examples of those tasks that fit memory; several are opened at a time.

    Raises:
      ValueError: a task with an objective does not.
    """
    if not live:
        return {}
    from synthesizer_jax.data.seqio_members import examples_of, fits_memory

    fitting = {name: task for name, task in live.items() if fits_memory(task, config.split)}
    for name in objectives:
        if name in live and name not in fitting:
            raise ValueError(
                f"{name}'s split {config.split!r} is too large for memory, or has random steps, so that no "
                f"objective can read it without a cache; make one with 'synthesizer-jax data cache {name} "
                f"--split {config.split}' and the run's vocabulary"
            )

    def open_one(name: str) -> Examples:
        lengths = None if name in objectives else config.lengths
        return examples_of(fitting[name], config.split, lengths)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        opened = pool.map(open_one, fitting)
        return dict(zip(fitting, opened, strict=True))


def _make_pipeline(task: seqio.Task, config: DataConfig, shard: tuple[int, int]) -> TaskStream:
    """Returns a task's own SeqIO pipeline for a shard."""
    from synthesizer_jax.data.seqio_members import SeqioTaskStream

    return SeqioTaskStream(
        task,
        config.split,
        config.lengths,
        shard=shard,
        seed=config.seed,
        shuffle=config.shuffle,
    )
