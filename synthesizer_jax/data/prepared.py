"""Reads prepared tasks, which are tasks whose tokenized examples are stored in a data directory.

The directory ``DATA_DIR/prepared/VOCABULARY/TASK/SPLIT`` belongs to one split of a task and one
vocabulary. This directory holds ``info.json`` and ArrayRecord files, which contain the tokens in
stored order. If the split is evaluated, the directory also holds files of rows, with one record per
row. The file ``DATA_DIR/prepared/VOCABULARY/mixtures/NAME.json`` holds the rates of a mixture.
`preparation.prepare` writes these files with TensorFlow. Reading prepared tasks needs neither SeqIO
nor TensorFlow.

A record of a file of tokens holds up to `examples.CHUNK` examples. All numbers are little-endian. A
record has these parts in this order:

- two uint32 numbers, which are the number of examples and the number of bytes per token;
- the lengths of all inputs, then the lengths of all targets, as uint32;
- the tokens of all inputs, then the tokens of all targets, as uint16 if all ids of the record fit
  and as uint32 otherwise.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import math
import pathlib
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from synthesizer_jax.base.files import describing, in_bucket, write_atomic
from synthesizer_jax.base.registry import check_types, fields_of
from synthesizer_jax.data.examples import CHUNK, SIDES, Example
from synthesizer_jax.data.vocabularies import Vocabulary

if TYPE_CHECKING:
    from array_record.python.array_record_data_source import ArrayRecordDataSource

DIRECTORY, MIXTURES_FOLDER = "prepared", "mixtures"
INFO = "info.json"
FORMAT = 3
"""The version of the format of prepared files. Files in other versions are not read."""

HIDDEN = "are empty or '<unk>'"
"""A description of targets whose answer is not known (see `postprocessors.UNKNOWN`).

`PreparedInfo.targets` counts hidden targets under this key. Error messages contain the same words.
"""

RESIDENT = 2_000_000
"""The largest number of examples of a task that are all held in memory."""

KEPT_CHUNKS = 64
"""The number of chunks that are held in memory for a task with more than `RESIDENT` examples."""

_log = logging.getLogger(__name__)

_COUNT = np.dtype("<u4")
_TOKENS: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
"""The dtype of tokens in a record, by the number of bytes per token."""


@dataclasses.dataclass(frozen=True)
class PreparedInfo:
    """The contents of ``info.json``, which describes a prepared split.

    Attributes:
      format: the version of the format of the files (see `FORMAT`).
      task: the name of the task.
      split: the name of the split.
      vocabulary: the digest of the vocabulary.
      vocab_size: the number of ids of the vocabulary.
      source: a description of the source data, such as the data set with its version and the
        numbers of rows of the split's files. The description changes if the data is written again.
        `None` means that it is not known.
      source_rows: the number of stored rows, or `None` if it is not known.
      epochs: how many times the rows were read. The random steps of the task draw different numbers
        in each epoch.
      lengths: the maximum lengths of inputs and targets for which the split was prepared. `None`
        means that the split can be read with any lengths.
      keep_last: the numbers of tokens at the end of inputs and of targets that truncation never
        removes. These tokens are EOS and anything else that the task appends.
      has_inputs: whether the examples have inputs.
      has_rows: whether the rows that evaluation needs were written.
      examples: the number of examples.
      tokens: the total number of input tokens, and the total number of target tokens.
      files: the number of examples of each file, by file name and in stored order.
      checksum: the CRC-32 of the first record.
      targets: a dictionary that maps a description of targets, such as `HIDDEN`, to the number of
        targets that it describes. Earlier versions did not count targets.
      rows_digests: the SHA-256 of each file of rows, by the name of its file of tokens. Earlier
        versions did not write digests, and a file without a digest is not verified.
    """

    format: int
    task: str
    split: str
    vocabulary: str
    vocab_size: int
    source: str | None
    source_rows: int | None
    epochs: int
    lengths: dict[str, int] | None
    keep_last: dict[str, int]
    has_inputs: bool
    has_rows: bool
    examples: int
    tokens: dict[str, int]
    files: dict[str, int]
    checksum: int
    targets: dict[str, int] = dataclasses.field(default_factory=dict)
    rows_digests: dict[str, str] = dataclasses.field(default_factory=dict)

    def save(self, directory: pathlib.Path) -> None:
        """Writes ``info.json`` to the directory of the split."""
        write_atomic(directory / INFO, json.dumps(dataclasses.asdict(self), indent=1) + "\n")


@dataclasses.dataclass(frozen=True)
class PreparedTasks:
    """Finds and opens the prepared tasks of a data directory for one vocabulary.

    Attributes:
      data_dir: the data directory.
      vocabulary: the vocabulary.
    """

    data_dir: pathlib.Path
    vocabulary: Vocabulary

    @functools.cached_property
    def root(self) -> pathlib.Path:
        """The directory of everything that is prepared for the vocabulary."""
        return self.data_dir / DIRECTORY / self.vocabulary.digest

    def directory(self, task: str, split: str) -> pathlib.Path:
        """Returns the directory of a prepared split."""
        return self.root / task / split

    def find(self, task: str, split: str) -> PreparedInfo | None:
        """Returns the description of a prepared split.

        The result is `None` if the split is not prepared, or if the prepared files have a different
        version of the format.

        Raises:
          ValueError: if ``info.json`` is damaged.
        """
        path = self.directory(task, split) / INFO
        if not path.is_file():
            return None
        with describing(path):
            record = json.loads(path.read_text(encoding="utf-8"))
            if record.get("format") != FORMAT:
                return None
            info = PreparedInfo(**record)
            check_types(PreparedInfo, fields_of(info))
            if info.examples != sum(info.files.values()):
                raise ValueError("The numbers of examples of its files do not add up.")
            for name, sides in (("keep_last", info.keep_last), ("tokens", info.tokens)):
                if any(type(sides.get(side)) is not int for side in SIDES):
                    raise ValueError(
                        f"{name} is {sides}, but it must have numbers for inputs and targets."
                    )
            return info

    def open(
        self, task: str, split: str, lengths: Mapping[str, int] | None, *, documents: bool = False
    ) -> PreparedExamples:
        """Returns the examples of a prepared split.

        Args:
          task: the name of the task.
          split: the name of the split.
          lengths: see `PreparedExamples`.
          documents: see `PreparedExamples`.

        Raises:
          FileNotFoundError: if the split is not prepared.
          ValueError: see `find` and `PreparedExamples`.
        """
        info = self.find(task, split)
        if info is None:
            raise FileNotFoundError(
                f"The split {split!r} of the task {task} is not prepared in {self.root}. "
                f"{self.remedy(task)}"
            )
        return PreparedExamples(self, info, lengths, documents=documents)

    def remedy(self, name: str, *options: str) -> str:
        """Returns the last sentence of an error message, which says how to prepare data.

        Args:
          name: the name of the task or mixture.
          *options: options to add to the command.
        """
        command = ["synthesizer-jax data prepare", name, f"--data-dir {self.data_dir}", *options]
        return f"Run '{' '.join(command)}' with the run's vocabulary."

    def rates(self, mixture: str) -> dict[str, float] | None:
        """Returns the rate of each task of a mixture, or `None` if the mixture is not prepared.

        Raises:
          ValueError: if the file is damaged, or a rate is negative or infinite (see `check_rates`).
        """
        path = self.root / MIXTURES_FOLDER / f"{mixture}.json"
        if not path.is_file():
            return None
        with describing(path):
            rates = {str(k): float(v) for k, v in json.loads(path.read_text("utf-8")).items()}
        check_rates(mixture, rates)
        return rates

    def save_rates(self, mixture: str, rates: Mapping[str, float]) -> None:
        """Writes the rate of each task of a mixture."""
        path = self.root / MIXTURES_FOLDER / f"{mixture}.json"
        write_atomic(path, json.dumps(dict(rates), indent=1) + "\n")


def check_rates(mixture: str, rates: Mapping[str, float]) -> None:
    """Raises a `ValueError` that names the first task with a negative or infinite rate."""
    for task, rate in rates.items():
        if not 0 <= rate < math.inf:
            raise ValueError(
                f"The mixture {mixture!r} gives the task {task!r} the rate {rate:g}, but rates "
                "must be finite and at least 0. Change the rate, or leave the task out."
            )


class RaggedTokens(NamedTuple):
    """Several sequences of token ids in one array. Sequence i is ``ids[ends[i]:ends[i + 1]]``.

    Attributes:
      ids: the token ids of all sequences, one after another, int32 ``[tokens]``.
      ends: where the sequences end, int64 ``[sequences + 1]``. The first entry is 0.
    """

    ids: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int] | np.ndarray]) -> RaggedTokens:
        """Returns the given sequences as a `RaggedTokens`."""
        ends = np.cumsum([0, *map(len, sequences)], dtype=np.int64)
        return cls(np.fromiter(itertools.chain.from_iterable(sequences), np.int32, ends[-1]), ends)

    def truncate(self, limit: int, *, keep_last: int) -> RaggedTokens:
        """Returns the sequences after truncating each of them to at most `limit` tokens.

        The last `keep_last` tokens of a sequence always remain. If a sequence is too long, tokens
        before its last `keep_last` tokens are dropped, so that EOS remains at the end.
        """
        before, after = self._offsets()
        keep_last = min(keep_last, limit)
        return self._select((before < limit - keep_last) | (after < keep_last))

    def without_eos(self, eos: int) -> RaggedTokens:
        """Returns the sequences without the EOS at their ends."""
        _, after = self._offsets()
        return self._select((after > 0) | (self.ids != eos))

    def _offsets(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns how many tokens come before and after every token in its own sequence.

        Both returned arrays are int64 ``[tokens]``.
        """
        starts, stops = (np.repeat(x, np.diff(self.ends)) for x in (self.ends[:-1], self.ends[1:]))
        indices = np.arange(len(self.ids))
        return indices - starts, stops - 1 - indices

    def _select(self, kept: np.ndarray) -> RaggedTokens:
        """Returns the sequences with only some of their tokens.

        Args:
          kept: a mask of the tokens to keep, bool ``[tokens]``.
        """
        return RaggedTokens(self.ids[kept], np.concatenate([[0], np.cumsum(kept)])[self.ends])


class Chunk:
    """The inputs and targets of at most `CHUNK` consecutive examples of a task."""

    def __init__(self, inputs: RaggedTokens, targets: RaggedTokens):
        self.inputs, self.targets = inputs, targets
        # Slicing with Python's integers takes a third of the time of slicing with NumPy's integers.
        self._input_ends, self._target_ends = inputs.ends.tolist(), targets.ends.tolist()

    def __len__(self) -> int:
        return len(self._input_ends) - 1

    def __getitem__(self, index: int) -> Example:
        """Returns the inputs and the targets of an example, as views of the chunk's arrays."""
        starts, ends = self._input_ends, self._target_ends
        return (
            self.inputs.ids[starts[index] : starts[index + 1]],
            self.targets.ids[ends[index] : ends[index + 1]],
        )

    def truncate(self, lengths: Mapping[str, int], *, keep_last: Mapping[str, int]) -> Chunk:
        """Returns the examples with truncated inputs and targets (see `RaggedTokens.truncate`).

        Args:
          lengths: the largest numbers of tokens of ``inputs`` and ``targets``.
          keep_last: the numbers of tokens at the end of ``inputs`` and ``targets`` that are never
            dropped.
        """
        return Chunk(
            self.inputs.truncate(lengths["inputs"], keep_last=keep_last["inputs"]),
            self.targets.truncate(lengths["targets"], keep_last=keep_last["targets"]),
        )

    def documents(self, eos: int) -> Chunk:
        """Returns the examples as documents for an objective.

        Documents have no inputs, and their targets have no EOS.
        """
        return Chunk(RaggedTokens.of([()] * len(self)), self.targets.without_eos(eos))

    def to_bytes(self) -> bytes:
        """Returns the examples as a record.

        The docstring of this module describes the format of a record.
        """
        sides = (self.inputs, self.targets)
        largest = max(int(side.ids.max(initial=0)) for side in sides)
        width = 2 if largest < 2**16 else 4
        parts = [np.array([len(self), width], _COUNT)]
        parts += [np.diff(side.ends).astype(_COUNT) for side in sides]
        parts += [side.ids.astype(_TOKENS[width]) for side in sides]
        return b"".join(part.tobytes() for part in parts)

    @classmethod
    def from_bytes(cls, record: bytes, *, vocab_size: int) -> Chunk:
        """Returns the examples that a record holds.

        Raises:
          ValueError: if the record is damaged.
        """
        count, width = np.frombuffer(record, _COUNT, 2).tolist()
        if not 1 <= count <= CHUNK or width not in _TOKENS:
            raise ValueError(f"Its header says {count} examples of {width} bytes per token.")
        lengths = np.frombuffer(record, _COUNT, 2 * count, offset=2 * _COUNT.itemsize)
        tokens = np.frombuffer(record[(2 + 2 * count) * _COUNT.itemsize :], _TOKENS[width])
        ends = [np.cumsum([0, *part], dtype=np.int64) for part in np.split(lengths, 2)]
        if ends[0][-1] + ends[1][-1] != len(tokens):
            raise ValueError(f"It holds {len(tokens)} tokens, not {ends[0][-1] + ends[1][-1]}.")
        if len(tokens) and tokens.max() >= vocab_size:
            raise ValueError(
                f"It holds the token {tokens.max()}, but the vocabulary has {vocab_size} ids."
            )
        ids = np.split(tokens.astype(np.int32), [ends[0][-1]])
        return cls(*map(RaggedTokens, ids, ends))


class PreparedExamples:
    """The examples of a prepared split, which are read when they are needed.

    The examples are read record by record. If there are at most `RESIDENT` examples, all records
    that were read stay in memory. If there are more examples, only the last `KEPT_CHUNKS` records
    stay in memory.

    If examples are truncated, a warning says how many, for the first record with such examples.

    Args:
      prepared: where the files are.
      info: the description of the split.
      lengths: the maximum lengths of ``inputs`` and ``targets``, including EOS. `None` means that
        examples are not truncated.
      documents: whether the examples are read as documents for an objective. Documents are not
        truncated and have no EOS.

    Attributes:
      info: the description of the split.
      name: the name of the task and its split, for messages.
      is_resident: whether all examples stay in memory. If they do not, it is faster to read the
        examples of a record together.

    Raises:
      ValueError: if the examples have inputs and the length of ``inputs`` is 0, or if they were
        prepared for other lengths.
    """

    def __init__(
        self,
        prepared: PreparedTasks,
        info: PreparedInfo,
        lengths: Mapping[str, int] | None,
        *,
        documents: bool = False,
    ):
        self.info = info
        self.is_resident = info.examples <= RESIDENT
        self.name = f"{info.task}'s split {info.split!r}"
        self._directory = prepared.directory(info.task, info.split)
        if documents:
            lengths = None
        self._lengths = lengths
        self._eos = prepared.vocabulary.eos_id
        self._documents = documents
        self._remedy = prepared.remedy(info.task, "--renew")
        if lengths is not None and info.has_inputs and not lengths["inputs"]:
            raise ValueError(
                f"The task {info.task} has inputs, but data.inputs_length is 0. Set it to a "
                "positive number, or read a task that has only targets."
            )
        if lengths is not None and info.lengths not in (None, dict(lengths)):
            options = [f"--{side}-length={length}" for side, length in lengths.items()]
            raise ValueError(
                f"{self.name} is prepared for the lengths {info.lengths}. "
                f"{prepared.remedy(info.task, '--renew', *options)}"
            )
        # This list holds the index of the first example of every record.
        self._starts = [0]
        # This list holds the file of every record, and the number of the record in the file.
        self._locations: list[tuple[str, int]] = []
        for name, count in info.files.items():
            for number in range(-(-count // CHUNK)):
                self._locations.append((name, number))
                self._starts.append(self._starts[-1] + min(CHUNK, count - number * CHUNK))
        self._has_warned = False
        self._files: dict[str, ArrayRecordDataSource] = {}
        self._chunks: dict[int, Chunk] = {}

    def __len__(self) -> int:
        return self.info.examples

    def __getitem__(self, index: int) -> Example:
        """Returns the inputs and the targets of an example, int32 token ids."""
        if not 0 <= index < self.info.examples:
            raise IndexError(index)
        number = bisect.bisect_right(self._starts, index) - 1
        chunk = self._chunks.get(number)
        if chunk is None:
            chunk = self._read(number)
        return chunk[index - self._starts[number]]

    def rows(self, count: int | None = None) -> Iterator[dict[str, Any]]:
        """Yields the features of every row that evaluation needs, in the same form as SeqIO.

        Args:
          count: the number of rows to read from the beginning, or `None` for all rows.

        Raises:
          ValueError: if a file is damaged.
        """
        import msgpack

        left = self.info.examples if count is None else count
        for name, size in self.info.files.items():
            num_rows = min(size, left)
            path = _on_disk(self._directory / rows_file(name))
            with describing(path, remedy=self._remedy), path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                if self.info.rows_digests.get(name, digest) != digest:
                    raise ValueError("Its checksum is wrong.")
                file.seek(0)
                unpacker = msgpack.Unpacker(file, max_buffer_size=2**31 - 1)
                for number in range(num_rows):
                    row = next(unpacker, None)
                    if row is None:
                        raise ValueError(f"It holds {number} rows instead of {size}.")
                    yield {k: np.asarray(v) if _is_numeric(v) else v for k, v in row.items()}
            left -= num_rows

    def _read(self, number: int) -> Chunk:
        """Reads a record, and keeps it in memory."""
        name, record_number = self._locations[number]
        with describing(self._directory / name, remedy=self._remedy):
            record = self._records(name)[record_number]
            if number == 0 and zlib.crc32(record) != self.info.checksum:
                raise ValueError("Its checksum is wrong.")
            chunk = Chunk.from_bytes(record, vocab_size=self.info.vocab_size)
            expected = self._starts[number + 1] - self._starts[number]
            if len(chunk) != expected:
                raise ValueError(
                    f"The record {record_number} holds {len(chunk)} examples instead of {expected}."
                )
        if self._documents:
            chunk = chunk.documents(self._eos)
        elif self._lengths is not None:
            self._warn_of_truncation(chunk, self._lengths)
            chunk = chunk.truncate(self._lengths, keep_last=self.info.keep_last)
        self._chunks[number] = chunk
        if not self.is_resident and len(self._chunks) > KEPT_CHUNKS:
            # A dictionary keeps the order of insertion, so its first key belongs to the record that
            # was read first. This record is dropped.
            del self._chunks[next(iter(self._chunks))]
        return chunk

    def _warn_of_truncation(self, chunk: Chunk, lengths: Mapping[str, int]) -> None:
        """Logs how many examples of a record are too long. Only the first such record is logged.

        The user is told while the examples are read, because the lengths of a run can differ from
        the lengths for which `data prepare` was called.
        """
        if self._has_warned:
            return
        counts = {
            side: int((np.diff(tokens.ends) > lengths[side]).sum())
            for side, tokens in (("inputs", chunk.inputs), ("targets", chunk.targets))
        }
        truncated = [
            f"the limit of {lengths[side]} tokens truncates {count:,} of {len(chunk):,} {side}"
            for side, count in counts.items()
            if count
        ]
        if truncated:
            self._has_warned = True
            _log.warning(
                "In %s, %s. Set data.inputs_length and data.targets_length to larger numbers to "
                "keep the whole texts.",
                self.name,
                ", and ".join(truncated),
            )

    def _records(self, name: str) -> ArrayRecordDataSource:
        """Returns the records of a file. The file is opened at the first call."""
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        if name not in self._files:
            path = _on_disk(self._directory / name)
            records = -(-self.info.files[name] // CHUNK)
            # In the path, the numbers in brackets are the range of records to read.
            self._files[name] = ArrayRecordDataSource([f"{path}[0:{records}]"])
        return self._files[name]


def rows_file(name: str) -> str:
    """Returns the name of the file of rows that belongs to a file of tokens."""
    return name.replace("tokens", "rows").replace(".arrayrecord", ".msgpack")


def _is_numeric(value: object) -> bool:
    """Returns whether a value of a row is a list of numbers, which is converted to an array."""
    return isinstance(value, list) and not any(isinstance(x, bytes | str) for x in value)


def _on_disk(path: pathlib.Path) -> pathlib.Path:
    """Returns the path of a file on a local disk. A file in a bucket is copied first.

    ArrayRecord reads files only from disks.
    """
    if not in_bucket(path):
        return path
    copy = pathlib.Path(_copies().name) / str(path).replace("/", "_")
    if not copy.exists():
        write_atomic(copy, path.read_bytes())
    return copy


@functools.cache
def _copies() -> tempfile.TemporaryDirectory[str]:
    """Returns the directory for this process' copies of files in buckets.

    The directory is removed when the process ends.
    """
    return tempfile.TemporaryDirectory(prefix="synthesizer_jax_")
