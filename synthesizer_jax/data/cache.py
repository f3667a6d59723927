"""Caches of tokenized tasks in a data directory: where they are, and how they are read.

A cache holds the examples of a task's split for one vocabulary, tokenized, in stored order, in
``DATA_DIR/cached/VOCABULARY/TASK/SPLIT``: ArrayRecord files, which Grain reads, and ``info.json``.
`cache_writing` makes it with SeqIO; reading it needs neither SeqIO nor TensorFlow.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import logging
import pathlib
import zlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from synthesizer_jax.data import tasks
from synthesizer_jax.data.cache_records import decode_chunk, finish_chunk
from synthesizer_jax.data.digests import UnknownStateError, code_digest, data_digest
from synthesizer_jax.data.members import CHUNK, RESIDENT, Chunk, Examples, check_inputs
from synthesizer_jax.data.vocabularies import SentencePieceVocabulary, Vocabulary
from synthesizer_jax.files import in_bucket, size_of
from synthesizer_jax.registry import check_types, fields_of

DIRECTORY = "cached"
INFO = "info.json"
FORMAT = 3
"""Version of the files; others are not read."""

KEPT_CHUNKS = 64
"""Chunks in memory of a task that is too large to be held there."""

_log = logging.getLogger(__name__)


class OutdatedCacheError(ValueError):
    """A cache was made by other code, or from another version of the data set."""


@dataclasses.dataclass(frozen=True)
class CacheInfo:
    """What ``info.json`` says about a cache.

    Attributes:
      format: version of the files.
      task: name of the task.
      split: its split.
      vocabulary: digest of the vocabulary.
      vocab_size: its number of ids.
      dataset: digest of the data set's version and of the sizes of its split.
      code: digest of the task's definition and of the code that makes text of its rows.
      sentinel: id of the sentinel that follows the tokens; None: the task has none.
      has_inputs: whether its examples have inputs.
      examples: number of examples.
      tokens: number of tokens of the inputs and of the targets, before EOS and truncation.
      lengths: numbers of examples by the smallest power of two that is not less than the number of
        input and of target tokens.
      files: size in bytes and number of records of every file.
      checksum: CRC-32 of the first record.
    """

    format: int
    task: str
    split: str
    vocabulary: str
    vocab_size: int
    dataset: str
    code: str
    sentinel: int | None
    has_inputs: bool
    examples: int
    tokens: dict[str, int]
    lengths: dict[str, dict[str, int]]
    files: dict[str, tuple[int, int]]
    checksum: int

    def to_json(self) -> str:
        """Returns the contents of ``info.json``."""
        record = dataclasses.asdict(self)
        return json.dumps(record | {"crc32": _checksum(record)}, indent=1) + "\n"

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> CacheInfo:
        """Returns what `to_json` wrote, parsed.

        Raises:
          ValueError: something else wrote it; `KeyError` and `TypeError` likewise.
        """
        if record.pop("crc32", None) != _checksum(record):
            raise ValueError("its checksum is another")
        record["files"] = {name: tuple(counts) for name, counts in record["files"].items()}
        info = cls(**record)
        check_types(cls, fields_of(info), INFO)
        if any("/" in name or name.startswith(".") for name in info.files):
            raise ValueError("a file lies outside of the directory")
        return info


def _checksum(record: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


@dataclasses.dataclass(frozen=True)
class Caches:
    """The caches of a data directory for one vocabulary.

    Attributes:
      data_dir: the directory of the data sets.
      vocabulary: the vocabulary.
    """

    data_dir: pathlib.Path
    vocabulary: Vocabulary

    @functools.cached_property
    def digest(self) -> str:
        """The digest of the vocabulary."""
        return vocabulary_digest(self.vocabulary)

    @property
    def root(self) -> pathlib.Path:
        """The directory of all caches for the vocabulary."""
        return self.data_dir / DIRECTORY / self.digest

    def directory(self, task: str, split: str) -> pathlib.Path:
        """Returns the directory of a task's cache."""
        return self.root / task / split

    def find(self, task: str, split: str) -> CacheInfo | None:
        """Returns what is known of a task's cache, which is complete and current; None: there is none.

        Raises:
          OutdatedCacheError: it was made by other code, or from another version of the data set.
          ValueError: it is damaged, incomplete, or of another vocabulary, task or split.
        """
        directory = self.directory(task, split)
        if in_bucket(self.data_dir) or not directory.exists():
            return None
        remedy = self._remedy(task, split)
        info = _read_info(directory, remedy)
        if info.vocabulary != self.digest:
            raise ValueError(f"{directory} is the cache of another vocabulary; {remedy}")
        if (info.task, info.split) != (task, split):
            raise ValueError(
                f"{directory} is the cache of {info.task}'s split {info.split!r}; {remedy}"
            )
        _check_files(directory, info, remedy)
        self._check_current(info, directory, remedy)
        return info

    def open(
        self, task: str, split: str, lengths: Mapping[str, int] | None
    ) -> CachedExamples | None:
        """Returns the cached examples of a task; None: it has no cache.

        Args:
          task: name of the task.
          split: its split.
          lengths: see `CachedExamples`.

        Raises:
          ValueError: see `find`; also if the first record is damaged.
        """
        info = self.find(task, split)
        if info is None:
            return None
        remedy = self._remedy(task, split)
        return CachedExamples(info, self.directory(task, split), lengths, remedy=remedy)

    def _check_current(self, info: CacheInfo, directory: pathlib.Path, remedy: str) -> None:
        task = tasks.find_task(info.task)
        try:
            code = code_digest(task)
        except UnknownStateError:
            code = None
        if info.code != code:
            raise OutdatedCacheError(
                f"{directory} was made by another version of the task {info.task}; {remedy}"
            )
        if info.dataset != data_digest(task, info.split, self.data_dir):
            raise OutdatedCacheError(
                f"{directory} was made from another version of the data set {task.source}; {remedy}"
            )

    def _remedy(self, task: str, split: str) -> str:
        return (
            f"make it again with 'synthesizer-jax data cache {task} --split {split} --data-dir "
            f"{self.data_dir}' and the run's vocabulary, or delete it to read without a cache"
        )


class CachedExamples(Examples):
    """A task's examples, read from a cache chunk by chunk when they are needed.

    They equal those that `seqio_members.SeqioExamples` makes, bit for bit. All that were read are kept in
    memory if there are no more than `RESIDENT`; else the last `KEPT_CHUNKS` chunks.

    Args:
      info: describes the cache.
      directory: its directory.
      lengths: the maximum numbers of ``inputs`` and ``targets``, including EOS. None: documents for an
        objective, which are whole and have no EOS.
      remedy: the end of messages about damage.

    Raises:
      ValueError: the first record is damaged.
    """

    def __init__(
        self,
        info: CacheInfo,
        directory: pathlib.Path,
        lengths: Mapping[str, int] | None,
        *,
        remedy: str,
    ):
        from grain.sources import ArrayRecordDataSource

        super().__init__(f"{info.task}'s split {info.split!r}")
        if info.has_inputs and lengths is not None:
            check_inputs(info.task, lengths)
        self.is_resident = info.examples <= RESIDENT
        self.info, self._directory, self._remedy = info, directory, remedy
        self._lengths = lengths
        # With the numbers of records the files are not opened before they are read.
        files = [f"{directory / name}[0:{count}]" for name, (_, count) in info.files.items()]
        self._records = ArrayRecordDataSource(files)
        self._chunks[0] = self._read(0)

    def __len__(self) -> int:
        return self.info.examples

    def read_until(self, index: int) -> bool:
        """Returns whether there is an example `index`; nothing has to be read for that."""
        return index < self.info.examples

    def _read_chunk(self, index: int) -> Chunk:
        if not 0 <= index < self.info.examples:
            raise IndexError(index)
        number = index // CHUNK
        chunk = self._read(number)
        with self._lock:
            self._chunks[number] = chunk
            if not self.is_resident and len(self._chunks) > KEPT_CHUNKS:
                del self._chunks[next(iter(self._chunks))]
        return chunk

    def _read(self, number: int) -> Chunk:
        try:
            record = self._records[number]
            if number == 0 and zlib.crc32(record) != self.info.checksum:
                raise ValueError("its checksum is another")
            chunk = decode_chunk(record, vocab_size=self.info.vocab_size)
        except (
            RuntimeError,
            ValueError,
            IndexError,
            OSError,
        ) as error:  # of array_record and above
            raise ValueError(
                f"record {number} of the cache {self._directory} is damaged "
                f"({_first_sentence(error)}); {self._remedy}"
            ) from error
        if self._lengths is None:
            return chunk
        return finish_chunk(
            chunk, self._lengths, sentinel=self.info.sentinel, has_inputs=self.info.has_inputs
        )


def open_caches(
    names: Iterable[str],
    caches: Caches,
    *,
    split: str,
    lengths: Mapping[str, int],
    required: bool,
    documents: Collection[str] = (),
) -> dict[str, CachedExamples]:
    """Returns the cached examples of those tasks that have a current cache.

    Args:
      names: of the tasks.
      caches: where the caches are.
      split: the split.
      lengths: the maximum numbers of ``inputs`` and ``targets``, including EOS.
      required: whether every task must have one; otherwise an outdated one is left out with a warning.
      documents: names of tasks that are read as documents for an objective.

    Raises:
      FileNotFoundError: a task has no cache.
      ValueError: a cache is damaged, or outdated and required.
    """

    def open_one(name: str) -> CachedExamples | None:
        try:
            examples = caches.open(name, split, None if name in documents else lengths)
        except OutdatedCacheError as error:
            if required:
                raise
            _log.warning("%s; until then it is read without a cache", error)
            return None
        if examples is None and required:
            raise FileNotFoundError(
                f"{name}'s split {split!r} has no cache for this vocabulary in {caches.data_dir}; make "
                f"it with 'synthesizer-jax data cache {name} --split {split} --data-dir "
                f"{caches.data_dir}' and the run's vocabulary, or set data.cached=null"
            )
        return examples

    names = list(names)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        opened = zip(names, pool.map(open_one, names), strict=True)
        return {name: examples for name, examples in opened if examples is not None}


def vocabulary_digest(vocabulary: Vocabulary) -> str:
    """Returns 16 hexadecimal digits that depend on what a vocabulary encodes, not on its path."""
    if isinstance(vocabulary, SentencePieceVocabulary):
        contents = vocabulary.processor.serialized_model_proto()
    else:
        contents = repr(vocabulary).encode()
    return hashlib.sha256(contents).hexdigest()[:16]


def _read_info(directory: pathlib.Path, remedy: str) -> CacheInfo:
    path = directory / INFO
    if not path.is_file():
        raise ValueError(f"the cache {directory} is incomplete, it lacks {INFO}; {remedy}")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        version = record.get("format")
        if isinstance(version, int) and version != FORMAT:
            raise OutdatedCacheError(
                f"{directory} has version {version} of the cache's format, and this release reads "
                f"version {FORMAT}; {remedy}"
            )
        return CacheInfo.from_record(record)
    except OutdatedCacheError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({_first_sentence(error)}); {remedy}") from error


def _check_files(directory: pathlib.Path, info: CacheInfo, remedy: str) -> None:
    """Raises a `ValueError` if a file is missing or has another size than it was written with."""
    for name, (size, _) in info.files.items():
        path = directory / name
        if not path.is_file():
            raise ValueError(f"the cache {directory} is incomplete, it lacks {name}; {remedy}")
        if size_of(path) != size:
            raise ValueError(
                f"{path} is damaged: it has {size_of(path):,} bytes instead of {size:,}; {remedy}"
            )


def _first_sentence(error: BaseException) -> str:
    return str(error).split(";")[0].split("\n")[0]
