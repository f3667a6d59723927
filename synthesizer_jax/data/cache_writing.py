"""Writing of caches: every example of a task's split is tokenized once, with SeqIO."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from synthesizer_jax.data import tasks
from synthesizer_jax.data.cache import (
    FORMAT,
    INFO,
    CacheInfo,
    Caches,
)
from synthesizer_jax.data.cache_records import encode_chunk
from synthesizer_jax.data.digests import UnknownStateError, code_digest, data_digest
from synthesizer_jax.data.members import SIDES, Chunk
from synthesizer_jax.data.staging import Staging, staging
from synthesizer_jax.data.stored import reading_errors
from synthesizer_jax.data.vocabularies import EOS

if TYPE_CHECKING:
    import seqio

FILE_RECORDS = 256
"""Most records of a file, each of at most `members.CHUNK` examples."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What `write_caches` did.

    Attributes:
      written: what was cached.
      live: names of the tasks that cannot be cached, with the reason.
      kept: names of the tasks whose cache was current.
    """

    written: list[CacheInfo]
    live: dict[str, str]
    kept: list[str]


def write_caches(mixture: str, caches: Caches, *, split: str, renew: bool = False) -> Report:
    """Caches all tasks of a mixture that have the split.

    All caches are written aside and put into place together, as new data sets are; an interrupted
    call leaves those that were there.

    Args:
      mixture: name of a mixture or task.
      caches: data directory and vocabulary.
      split: the split.
      renew: whether to write current caches again.

    Raises:
      FileNotFoundError: no task has the split.
      ValueError: the data directory is in a bucket, or a data set is damaged.
      OSError: something cannot be written; nothing was changed.
    """

    tasks.sampled_members(mixture, caches.data_dir, split)
    names = list(tasks.available_members(mixture, caches.data_dir, split))
    report = Report([], {}, [])
    with staging(caches.data_dir, "cache") as stage:
        directories = []
        for name in names:
            task = tasks.find_task(name).to_seqio(caches.vocabulary, caches.data_dir)
            reason = _why_live(task)
            if reason is not None:
                report.live[name] = reason
            elif not renew and is_current(caches, name, split):
                report.kept.append(name)
            else:
                info = _write(task, caches, split=split, stage=stage)
                report.written.append(info)
                directories.append(_staged(caches, name, split, stage))
        stage.commit(directories)
    return report


def is_current(caches: Caches, task: str, split: str) -> bool:
    """Returns whether a task has a cache that need not be written again."""
    try:
        return caches.find(task, split) is not None
    except ValueError:
        return False


def _why_live(task: seqio.Task) -> str | None:
    """Returns why a task cannot be cached; None: it can."""
    from synthesizer_jax.data import seqio_members

    if not seqio_members.is_deterministic(task):
        return "it has no cache point, or random steps after it"
    if not _ends_as_expected(task):
        return "what follows its cache point is not T5's trimming and EOS"
    try:
        code_digest(tasks.find_task(task.name))
    except UnknownStateError as error:
        return f"it depends on {error}, of which it cannot be told whether it changes"
    return None


def _ends_as_expected(task: seqio.Task) -> bool:
    """Returns whether `cache_records.finish_chunk` does what follows the task's cache point."""
    from seqio import preprocessors

    from synthesizer_jax.data import seqio_members
    from synthesizer_jax.data.preprocessors import append_sentinel

    functions = [function for function, _ in seqio_members.steps_after_cache(task) or ()]
    features = [task.output_features[s] for s in SIDES if s in task.output_features]
    return (
        functions[-1:] == [preprocessors.append_eos_after_trim]
        and functions[:-1] in ([], [append_sentinel])
        and all(feature.add_eos and feature.vocabulary.eos_id == EOS for feature in features)
    )


def _staged(caches: Caches, task: str, split: str, stage: Staging) -> pathlib.Path:
    return stage.data / caches.directory(task, split).relative_to(caches.data_dir)


def _write(task: seqio.Task, caches: Caches, *, split: str, stage: Staging) -> CacheInfo:
    """Writes one cache into the staging directory."""
    from synthesizer_jax.data import seqio_members

    directory = _staged(caches, task.name, split, stage)
    directory.mkdir(parents=True)
    steps = seqio_members.steps_after_cache(task) or ()
    sentinels = [arguments["sentinel"] for _, arguments in steps if "sentinel" in arguments]
    counts = _Counts()
    location = seqio_members.storage_location(task)
    with reading_errors(f"{task.name}'s split {split!r}", location):
        dataset = task.preprocess_precache(task.source.get_dataset(split=split, shuffle=False), 0)
        records = counts.records(seqio_members.ragged_chunks(dataset))
        files = _write_files(directory, records)
    info = CacheInfo(
        format=FORMAT,
        task=task.name,
        split=split,
        vocabulary=caches.digest,
        vocab_size=caches.vocabulary.vocab_size,
        dataset=data_digest(tasks.find_task(task.name), split, caches.data_dir),
        code=code_digest(tasks.find_task(task.name)),
        sentinel=int(str(sentinels[0])) if sentinels else None,
        has_inputs=seqio_members.has_inputs(dataset),
        examples=counts.examples,
        tokens=dict(counts.tokens),
        lengths={side: counts.histogram(side) for side in SIDES},
        files=files,
        checksum=counts.checksum,
    )
    (directory / INFO).write_text(info.to_json(), encoding="utf-8")
    return info


class _Counts:
    """What is counted while records are written."""

    def __init__(self) -> None:
        self.examples, self.checksum = 0, 0
        self.tokens: collections.Counter[str] = collections.Counter()
        self._lengths: dict[str, collections.Counter[int]] = {
            side: collections.Counter() for side in SIDES
        }

    def records(self, chunks: Iterator[Chunk]) -> Iterator[bytes]:
        """Yields the records of chunks, and counts them."""
        for chunk in chunks:
            record = encode_chunk(chunk)
            if not self.examples:
                self.checksum = zlib.crc32(record)
            self.examples += len(chunk)
            for name, side in zip(SIDES, (chunk.inputs, chunk.targets), strict=True):
                self.tokens[name] += len(side.ids)
                powers = np.ceil(np.log2(np.maximum(np.diff(side.ends), 1))).astype(int)
                self._lengths[name].update((2**powers).tolist())
            yield record

    def histogram(self, side: str) -> dict[str, int]:
        """Returns the numbers of examples by the power of two that bounds their length."""
        return {str(bound): count for bound, count in sorted(self._lengths[side].items())}


def _write_files(directory: pathlib.Path, records: Iterator[bytes]) -> dict[str, tuple[int, int]]:
    """Writes records; returns the size and the number of records of every file."""
    from array_record.python.array_record_module import ArrayRecordWriter

    paths: list[pathlib.Path] = []
    counts: list[int] = []
    writer = None
    for number, record in enumerate(records):
        if number % FILE_RECORDS == 0:
            if writer is not None:
                writer.close()
            paths.append(directory / f"part-{len(paths):05}.array_record")
            counts.append(0)
            writer = ArrayRecordWriter(str(paths[-1]), "group_size:1")
        assert writer is not None
        writer.write(record)
        counts[-1] += 1
    if writer is not None:
        writer.close()
    files = {}
    for number, (path, count) in enumerate(zip(paths, counts, strict=True)):
        path = path.rename(directory / f"examples-{number:05}-of-{len(paths):05}.array_record")
        files[path.name] = (path.stat().st_size, count)
    return files
