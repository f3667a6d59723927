"""Training batches from SeqIO tasks, in an order that can be saved, restored and split over hosts.

The stream consists of V virtual shards. Each shard draws a task by its rate, then that task's next
example for the shard, and the batch takes B/V rows of each shard in order. The order of examples is
therefore the same on any number of hosts. SeqIO reads and tokenizes the data. Examples of tasks
without random steps are then cached in memory and drawn by counters (`members.InMemoryTaskStream`),
so that a position is a few exact numbers. Other tasks remain SeqIO pipelines
(`members.SeqioTaskStream`) with a TensorFlow checkpoint each.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from synthesizer_jax.data.batch import batch_fields
from synthesizer_jax.data.members import (
    CHUNK,
    Example,
    Examples,
    InMemoryTaskStream,
    SeqioTaskStream,
    TaskStream,
    examples_of,
    fits_memory,
    random_bits,
)
from synthesizer_jax.messages import not_divisible
from synthesizer_jax.registry import check_types, fields_of

if TYPE_CHECKING:
    import seqio

STREAM_FILE = "stream.json"


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The data that a run is trained on.

    Attributes:
      mixture: name of a SeqIO mixture or task.
      inputs_length: encoder tokens per row; longer inputs are truncated before EOS.
      targets_length: decoder tokens per row.
      batch_size: number of rows of the global batch.
      shards: V, the number of virtual shards, which must divide the batch size. It is fixed for a
        run.
      pack: whether to pack several examples into a row, kept apart by segment ids.
      seed: of shuffling and mixing.
      split: the split to read.
      shuffle: False reads every task in its stored order.
      max_segments: the maximum number of examples per packed row; None is one per 32 input tokens.
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

    def __post_init__(self) -> None:
        check_types(DataConfig, fields_of(self), "data")
        for name in ("inputs_length", "targets_length", "batch_size", "max_segments"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"data.{name} is {value}; allowed: 1 or more")
        if self.seed < 0:
            raise ValueError(f"data.seed is {self.seed}; allowed: 0 or more")
        if not 1 <= self.shards <= CHUNK:
            raise ValueError(f"data.shards is {self.shards}; allowed: 1 to {CHUNK}")
        if self.batch_size % self.shards:
            shards = f"shards={self.shards}"
            raise ValueError(
                not_divisible("batch_size", self.batch_size, by=shards, divisor=self.shards)
            )

    @property
    def lengths(self) -> dict[str, int]:
        """SeqIO's feature lengths."""
        return {"inputs": self.inputs_length, "targets": self.targets_length}

    @property
    def segments_per_row(self) -> int:
        """The largest segment id that a row can have; packing observes it exactly."""
        if not self.pack:
            return 1
        return self.max_segments or max(1, self.inputs_length // 32)


class _VirtualShard:
    """One virtual shard: an iterator that draws its next task by the rates.

    Args:
      members: task streams by task name.
      rates: relative rates by task name.
      seed: of the draws.
    """

    def __init__(
        self,
        members: dict[str, TaskStream],
        *,
        rates: dict[str, float],
        seed: np.random.SeedSequence,
    ):
        self._members, self._seed = members, seed
        self._names = list(members)
        cumulative_rates = np.cumsum([rates[name] for name in self._names], dtype=np.float64)
        self._boundaries = cumulative_rates[:-1] / cumulative_rates[-1]
        self._num_draws, self._block = 0, -1
        self._pending: Example | None = None

    def __next__(self) -> Example:
        example, self._pending = self._pending, None
        if example is not None:
            return example
        block, offset = divmod(self._num_draws, CHUNK)
        if block != self._block:
            self._block, self._choices = block, _draw_members(self._boundaries, self._seed, block)
        self._num_draws += 1
        return next(self._members[self._names[self._choices[offset]]])

    def put_back(self, example: Example) -> None:
        """Puts an example back; the next call of `__next__` returns it."""
        self._pending = example

    def save(self, prefix: pathlib.Path) -> None:
        """Writes the position to ``prefix.json`` and, for SeqIO pipelines, to files beside it."""
        members = {
            name: self._members[name].save(prefix.with_name(f"{prefix.name}.{i}"))
            for i, name in enumerate(self._names)
        }
        pending = self._pending and [ids.tolist() for ids in self._pending]
        position = {"draws": self._num_draws, "members": members, "pending": pending}
        path = prefix.with_name(prefix.name + ".json")
        path.write_text(json.dumps(position), encoding="utf-8")

    def restore(self, prefix: pathlib.Path) -> None:
        """Continues with the example after the saved position."""
        path = prefix.with_name(prefix.name + ".json")
        if not path.is_file():
            raise ValueError(f"the saved data position lacks {path}; restore that file")
        position = json.loads(path.read_text(encoding="utf-8"))
        self._num_draws = position["draws"]
        pending = position["pending"]
        if pending is not None:
            inputs, targets = (np.asarray(ids, np.int32) for ids in pending)
            pending = (inputs, targets)
        self._pending = pending
        for i, name in enumerate(self._names):
            member_prefix = prefix.with_name(f"{prefix.name}.{i}")
            self._members[name].restore(member_prefix, position["members"][name])


def _draw_members(boundaries: np.ndarray, seed: np.random.SeedSequence, block: int) -> np.ndarray:
    """Returns the member indices of one block of draws.

    Args:
      boundaries: cumulative rates in (0, 1) that separate the members.
      seed: of the draws.
      block: index of the block of `CHUNK` draws.
    """
    uniform = (random_bits(seed, block, count=CHUNK) >> np.uint64(11)) * 2.0**-53
    return np.searchsorted(boundaries, uniform, side="right")


class OtherStreamError(ValueError):
    """The saved position belongs to another stream: other tasks, lengths, seed, shards, ..."""


class Stream:
    """An endless iterator over batches whose position is that of the last batch taken.

    A batch is a dictionary of NumPy arrays ``[batch, length]``: ``encoder_input_tokens``,
    ``decoder_input_tokens``, ``decoder_target_tokens`` (int32) and ``decoder_loss_weights``
    (float32); packed batches also have ``*_segment_ids`` (from 1; 0 is padding) and
    ``*_positions``.

    Args:
      config: what to read.
      tasks: the tasks of the mixture and their rates (`tasks.open_tasks`); None: those of SeqIO's
        registries (`tasks.register`).
      shards: indices of the virtual shards that this process reads, in order; None is all of them.
        The batch then contains the rows of these shards only, and only their positions are
        restored.
      saved: indices of those shards whose positions this process saves; None is all that it reads.

    Raises:
      ValueError: no task of the mixture has this split, or a task has fewer examples than shards.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        tasks: Mapping[seqio.Task, float] | None = None,
        shards: Sequence[int] | None = None,
        saved: Sequence[int] | None = None,
    ):
        self.config = config
        rates = _registered_tasks(config.mixture) if tasks is None else tasks
        sampled, self._rates = _sampled_tasks(rates, config)
        in_memory = [task for task in sampled if fits_memory(task, config.split)]
        self._examples = _read_examples(in_memory, config)
        indices = range(config.shards) if shards is None else shards
        self._shards = {index: self._make_shard(index, sampled) for index in indices}
        self._saved = list(self._shards) if saved is None else list(saved)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        rows_per_shard = self.config.batch_size // self.config.shards
        return _assemble_batch(
            [
                self._fill_row(shard)
                for shard in self._shards.values()
                for _ in range(rows_per_shard)
            ],
            self.config,
        )

    def save(self, directory: pathlib.Path) -> None:
        """Writes the position: ``stream.json``, and a separate file for every virtual shard.

        A shard that moves to another host needs only its own file, and the files of its SeqIO task
        streams beside it. Among several processes the one that saves shard 0 writes
        ``stream.json``.
        """
        directory.mkdir(parents=True, exist_ok=True)
        for index in self._saved:
            self._shards[index].save(self._prefix(directory, index))
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
        and preprocessing.
        """
        rates = {f"rate of {name}": rate for name, rate in self._rates.items()}
        checksums = {f"checksum of {name}": e.checksum for name, e in self._examples.items()}
        return {**dataclasses.asdict(self.config), **rates, **checksums}

    def _prefix(self, directory: pathlib.Path, index: int) -> pathlib.Path:
        return directory / f"shard-{index:05}-of-{self.config.shards:05}"

    def _make_shard(self, index: int, tasks: list[seqio.Task]) -> _VirtualShard:
        config, shard = self.config, (index, self.config.shards)
        members: dict[str, TaskStream] = {}
        for task_number, task in enumerate(tasks, 1):
            if task.name in self._examples:
                seed = np.random.SeedSequence(config.seed, spawn_key=(index, task_number))
                members[task.name] = InMemoryTaskStream(
                    self._examples[task.name], shard=shard, seed=seed if config.shuffle else None
                )
            else:
                members[task.name] = SeqioTaskStream(
                    task,
                    config.split,
                    config.lengths,
                    shard=shard,
                    seed=config.seed,
                    shuffle=config.shuffle,
                )
        seed = np.random.SeedSequence(config.seed, spawn_key=(index, 0))
        return _VirtualShard(members, rates=self._rates, seed=seed)

    def _fill_row(self, shard: _VirtualShard) -> list[Example]:
        """Returns the examples of one row: one, or as many consecutive ones as fit."""
        row = [next(shard)]
        num_inputs, num_targets = (len(ids) for ids in row[0])
        while len(row) < self.config.segments_per_row:
            example = next(shard)
            num_inputs, num_targets = (
                num_inputs + len(example[0]),
                num_targets + len(example[1]),
            )
            if num_inputs > self.config.inputs_length or num_targets > self.config.targets_length:
                shard.put_back(example)
                break
            row.append(example)
        return row


def _registered_tasks(name: str) -> dict[seqio.Task, float]:
    """Returns the tasks of a mixture, or a single task, of SeqIO's registries with their rates."""
    import seqio

    provider = seqio.get_mixture_or_task(name)
    if isinstance(provider, seqio.Task):
        return {provider: 1.0}
    return {task: float(provider.get_rate(task)) for task in provider.tasks}


def _sampled_tasks(
    rates: Mapping[seqio.Task, float], config: DataConfig
) -> tuple[list[seqio.Task], dict[str, float]]:
    """Returns the tasks that have the split and a positive rate, by name, and their rates."""
    tasks = sorted(
        (task for task, rate in rates.items() if rate > 0 and config.split in task.splits),
        key=lambda task: task.name,
    )
    if not tasks:
        raise ValueError(f"no task of {config.mixture!r} is drawn on the split {config.split!r}")
    return tasks, {task.name: rates[task] for task in tasks}


def _read_examples(tasks: list[seqio.Task], config: DataConfig) -> dict[str, Examples]:
    """Returns the examples of tasks by name; several tasks are opened at a time."""
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        opened = pool.map(lambda task: examples_of(task, config.split, config.lengths), tasks)
        return {task.name: examples for task, examples in zip(tasks, opened, strict=True)}


def _assemble_batch(rows: Sequence[Sequence[Example]], config: DataConfig) -> dict[str, np.ndarray]:
    """Returns the arrays of rows of concatenated examples; an empty row is padding."""
    fields = batch_fields(config, rows=len(rows))
    batch = {name: field.zeros() for name, field in fields.items()}
    for r, row in enumerate(rows):
        i = t = 0
        for segment, (inputs, targets) in enumerate(row, 1):
            inputs_slice, targets_slice = (
                slice(i, i + len(inputs)),
                slice(t, t + len(targets)),
            )
            batch["encoder_input_tokens"][r, inputs_slice] = inputs
            batch["decoder_target_tokens"][r, targets_slice] = targets
            batch["decoder_input_tokens"][r, t + 1 : targets_slice.stop] = targets[:-1]
            batch["decoder_loss_weights"][r, targets_slice] = 1
            if config.pack:
                for side, positions, ids in (
                    ("encoder", inputs_slice, inputs),
                    ("decoder", targets_slice, targets),
                ):
                    batch[f"{side}_segment_ids"][r, positions] = segment
                    batch[f"{side}_positions"][r, positions] = np.arange(len(ids))
            i, t = inputs_slice.stop, targets_slice.stop
    return batch
