"""Training batches from SeqIO tasks, in an order that can be saved, restored and split over hosts.

The stream is cut once into V virtual shards. Each draws a task by its rate, then that task's next
example of the shard, and the batch takes B/V rows of each shard in order: so the order of examples
is the same on any number of hosts. SeqIO reads and tokenises; the examples of tasks without random
steps are then kept in memory and drawn by counters (`members.Resident`), so that a position is a few
exact numbers. Other tasks stay SeqIO pipelines (`members.Live`), a TensorFlow checkpoint each.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from synthesizer_jax.data.members import (
    CHUNK,
    Example,
    Examples,
    Live,
    Member,
    Resident,
    bits,
    examples_of,
    fits_memory,
)
from synthesizer_jax.registry import check_types, fields_of
from synthesizer_jax.suggestions import nearest_multiples

STREAM_FILE = "stream.json"


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What a run reads.

    Attributes:
      mixture: name of a SeqIO mixture or task.
      inputs_length: encoder tokens per row; longer inputs are cut before EOS.
      targets_length: decoder tokens per row.
      batch_size: rows of the global batch.
      shards: V, the number of virtual shards; the batch must divide by it. Fixed for a run.
      pack: several examples per row, kept apart by segment ids.
      seed: of shuffling and mixing.
      split: which split.
      shuffle: False reads every task in its stored order.
      max_segments: most examples packed into a row; None is one for every 32 input tokens.
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
            raise ValueError(
                f"batch_size={self.batch_size} does not divide by shards={self.shards}; "
                f"{nearest_multiples(self.batch_size, self.shards)}"
            )

    @property
    def lengths(self) -> dict[str, int]:
        """SeqIO's feature lengths."""
        return {"inputs": self.inputs_length, "targets": self.targets_length}

    @property
    def segments_per_row(self) -> int:
        """The largest segment id that a row can hold: exactly what packing observes."""
        if not self.pack:
            return 1
        return self.max_segments or max(1, self.inputs_length // 32)


class Shard:
    """One virtual shard: examples of its members, each drawn by its rate.

    Args:
      members: by task name.
      rates: of the same names, relative.
      seed: of the draws.
    """

    def __init__(
        self, members: dict[str, Member], *, rates: dict[str, float], seed: np.random.SeedSequence
    ):
        self._members, self._seed = members, seed
        self._names = list(members)
        weights = np.cumsum([rates[name] for name in self._names], dtype=np.float64)
        self._limits = weights[:-1] / weights[-1]
        self._draws, self._block = 0, -1
        self._pending: Example | None = None

    def __next__(self) -> Example:
        example, self._pending = self._pending, None
        if example is not None:
            return example
        block, place = divmod(self._draws, CHUNK)
        if block != self._block:
            self._block, self._choices = block, choices(self._limits, self._seed, block)
        self._draws += 1
        return next(self._members[self._names[self._choices[place]]])

    def put_back(self, example: Example) -> None:
        """Gives an example back; it is the next one."""
        self._pending = example

    def save(self, prefix: pathlib.Path) -> None:
        """Writes the position to ``prefix.json`` and, for live members, files beside it."""
        members = {
            name: self._members[name].save(prefix.with_name(f"{prefix.name}.{i}"))
            for i, name in enumerate(self._names)
        }
        pending = self._pending and [ids.tolist() for ids in self._pending]
        position = {"draws": self._draws, "members": members, "pending": pending}
        path = prefix.with_name(prefix.name + ".json")
        path.write_text(json.dumps(position), encoding="utf-8")

    def restore(self, prefix: pathlib.Path) -> None:
        """Continues with the example after the saved position."""
        path = prefix.with_name(prefix.name + ".json")
        if not path.is_file():
            raise ValueError(f"the saved data position lacks {path}; restore that file")
        position = json.loads(path.read_text(encoding="utf-8"))
        self._draws = position["draws"]
        pending = position["pending"]
        if pending is not None:
            inputs, targets = (np.asarray(ids, np.int32) for ids in pending)
            pending = (inputs, targets)
        self._pending = pending
        for i, name in enumerate(self._names):
            place = prefix.with_name(f"{prefix.name}.{i}")
            self._members[name].restore(place, position["members"][name])


def choices(limits: np.ndarray, seed: np.random.SeedSequence, block: int) -> np.ndarray:
    """Member indices of one block of draws; `limits` are the inner cumulative rates."""
    uniform = (bits(seed, block, count=CHUNK) >> np.uint64(11)) * 2.0**-53
    return np.searchsorted(limits, uniform, side="right")


class OtherStreamError(ValueError):
    """A saved position belongs to another stream: other tasks, lengths, seed, shards, ..."""


class Stream:
    """An endless iterator of batches whose position is that of the last batch taken.

    A batch is a dictionary of NumPy arrays ``[batch, length]``: ``encoder_input_tokens``,
    ``decoder_input_tokens``, ``decoder_target_tokens`` (int32) and ``decoder_loss_weights``
    (float32); packed ones also ``*_segment_ids`` (from 1; 0 is padding) and ``*_positions``.

    Args:
      config: what to read; its tasks are registered (`tasks.register`).
      shards: the virtual shards that this process reads, in order; None is all of them. The batch
        then holds their rows only, and only their positions are restored.
      saved: those of them whose positions it saves; None is all that it reads.

    Raises:
      ValueError: the mixture has no task with this split, or a task fewer examples than shards.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        shards: Sequence[int] | None = None,
        saved: Sequence[int] | None = None,
    ):
        self.config = config
        tasks, self._rates = drawn_tasks(config)
        fixed = [task for task in tasks if fits_memory(task, config.split)]
        self._examples = read_examples(fixed, config)
        mine = range(config.shards) if shards is None else shards
        self._shards = {index: self._make_shard(index, tasks) for index in mine}
        self._saved = list(self._shards) if saved is None else list(saved)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        rows = self.config.batch_size // self.config.shards
        return assemble(
            [self._row(shard) for shard in self._shards.values() for _ in range(rows)], self.config
        )

    def save(self, directory: pathlib.Path) -> None:
        """Writes the position: ``stream.json`` and, for every virtual shard, its own file.

        A shard that moves to another host takes its file (and live tasks' files beside it) along.
        Of several processes the one that saves shard 0 writes ``stream.json``.
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
          ValueError: a shard's file is missing.
        """
        saved = json.loads((directory / STREAM_FILE).read_text(encoding="utf-8"))
        mine = self.fingerprint()
        for key in sorted(saved.keys() | mine.keys()):
            if saved.get(key) != mine.get(key):
                raise OtherStreamError(
                    f"the saved data position belongs to another stream: {key} was "
                    f"{saved.get(key)} and is {mine.get(key)}; restore the old value or start a "
                    "new run"
                )
        for index, shard in self._shards.items():
            shard.restore(self._prefix(directory, index))

    def fingerprint(self) -> dict[str, Any]:
        """What must be equal for a saved position to make sense, as flat JSON.

        The checksums are of a task's first examples: another vocabulary, data set or preprocessing
        changes them.
        """
        rates = {f"rate of {name}": rate for name, rate in self._rates.items()}
        checks = {f"checksum of {name}": e.checksum for name, e in self._examples.items()}
        return {**dataclasses.asdict(self.config), **rates, **checks}

    def _prefix(self, directory: pathlib.Path, index: int) -> pathlib.Path:
        return directory / f"shard-{index:05}-of-{self.config.shards:05}"

    def _make_shard(self, index: int, tasks: list[Any]) -> Shard:
        config, shard = self.config, (index, self.config.shards)
        members: dict[str, Member] = {}
        for number, task in enumerate(tasks, 1):
            if task.name in self._examples:
                seed = np.random.SeedSequence(config.seed, spawn_key=(index, number))
                members[task.name] = Resident(
                    self._examples[task.name], shard=shard, seed=seed if config.shuffle else None
                )
            else:
                members[task.name] = Live(
                    task,
                    config.split,
                    config.lengths,
                    shard=shard,
                    seed=config.seed,
                    shuffle=config.shuffle,
                )
        seed = np.random.SeedSequence(config.seed, spawn_key=(index, 0))
        return Shard(members, rates=self._rates, seed=seed)

    def _row(self, shard: Shard) -> list[Example]:
        """The examples of one row: one, or as many as fit in the order in which they come."""
        row = [next(shard)]
        inputs, targets = (len(ids) for ids in row[0])
        while len(row) < self.config.segments_per_row:
            example = next(shard)
            inputs, targets = inputs + len(example[0]), targets + len(example[1])
            if inputs > self.config.inputs_length or targets > self.config.targets_length:
                shard.put_back(example)
                break
            row.append(example)
        return row


def drawn_tasks(config: DataConfig) -> tuple[list[Any], dict[str, float]]:
    """The SeqIO tasks of a mixture that have the split and a rate above 0, and their rates."""
    import seqio

    provider = seqio.get_mixture_or_task(config.mixture)
    if isinstance(provider, seqio.Task):
        rates = {provider.name: 1.0}
        tasks = [provider]
    else:
        rates = {task.name: float(provider.get_rate(task)) for task in provider.tasks}
        tasks = provider.tasks
    tasks = [task for task in tasks if rates[task.name] > 0 and config.split in task.splits]
    if not tasks:
        raise ValueError(f"no task of {config.mixture!r} is drawn on the split {config.split!r}")
    return tasks, {task.name: rates[task.name] for task in tasks}


def read_examples(tasks: list[Any], config: DataConfig) -> dict[str, Examples]:
    """Opens tasks and reads their first examples, several at a time."""
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        opened = pool.map(lambda task: examples_of(task, config.split, config.lengths), tasks)
        return {task.name: examples for task, examples in zip(tasks, opened, strict=True)}


def assemble(rows: Sequence[Sequence[Example]], config: DataConfig) -> dict[str, np.ndarray]:
    """Arrays of rows that hold one example after another; an empty row is padding."""
    sides = {"encoder_input_tokens": config.inputs_length}
    names = ("decoder_input_tokens", "decoder_target_tokens", "decoder_loss_weights")
    sides |= dict.fromkeys(names, config.targets_length)
    if config.pack:
        for name in ("segment_ids", "positions"):
            sides |= {f"encoder_{name}": config.inputs_length}
            sides |= {f"decoder_{name}": config.targets_length}
    batch = {
        name: np.zeros((len(rows), length), np.float32 if name.endswith("weights") else np.int32)
        for name, length in sides.items()
    }
    for r, row in enumerate(rows):
        i = t = 0
        for segment, (inputs, targets) in enumerate(row, 1):
            source, target = slice(i, i + len(inputs)), slice(t, t + len(targets))
            batch["encoder_input_tokens"][r, source] = inputs
            batch["decoder_target_tokens"][r, target] = targets
            batch["decoder_input_tokens"][r, t + 1 : target.stop] = targets[:-1]
            batch["decoder_loss_weights"][r, target] = 1
            if config.pack:
                for side, span, ids in (("encoder", source, inputs), ("decoder", target, targets)):
                    batch[f"{side}_segment_ids"][r, span] = segment
                    batch[f"{side}_positions"][r, span] = np.arange(len(ids))
            i, t = source.stop, target.stop
    return batch
