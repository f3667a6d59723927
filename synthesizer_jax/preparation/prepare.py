"""Prepares tasks by reading and tokenizing every example of a split and writing the tokens.

Large splits are written shard by shard. If the preparation is interrupted and started again,
complete shards are not written again.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import hashlib
import inspect
import json
import multiprocessing
import pathlib
import secrets
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epy

from synthesizer_jax.base.files import (
    describing,
    in_bucket,
    name_write_errors,
    open_atomic,
    temporary_directory,
    write_atomic,
)
from synthesizer_jax.data.examples import SIDES
from synthesizer_jax.data.prepared import (
    FORMAT,
    HIDDEN,
    Chunk,
    PreparedInfo,
    PreparedTasks,
    rows_file,
)
from synthesizer_jax.data.vocabularies import Vocabulary, index_by_tokens
from synthesizer_jax.preparation import synthetic
from synthesizer_jax.preparation.rows import Batch, num_files, read_task, reading_errors
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.postprocessors import UNKNOWN
from synthesizer_jax.tasks.seqio_tasks import RegisteredTask
from synthesizer_jax.tasks.splits import SplitRequest, is_current, requested_splits
from synthesizer_jax.tasks.synthetic import MIXTURES
from synthesizer_jax.tasks.task import Task

with epy.lazy_imports():
    import msgpack
    import seqio
    from array_record.python import array_record_module

ONE_SHARD = 1_000_000
"""The largest number of rows that a split can have to be written as a single shard."""


def prepare(
    mixture: str,
    prepared: PreparedTasks,
    *,
    training_splits: Sequence[str] = ("train",),
    evaluation_splits: Sequence[str] = ("validation",),
    lengths: Mapping[str, int] | None = None,
    epochs: int | None = None,
    only: Collection[str] = (),
    workers: int = 1,
    renew: bool = False,
    setup: Callable[[], object] | None = None,
    log: Callable[[str], None] = print,
) -> None:
    """Prepares the splits of a mixture's tasks, and writes the rates of the mixture.

    Args:
      mixture: the name of a mixture or task.
      prepared: the prepared tasks, which determine the data directory and the vocabulary.
      training_splits: the splits for training. Only the tokens of these splits are written.
      evaluation_splits: the splits for evaluation. For these splits, the tokens and everything that
        metrics need are written.
      lengths: the maximum lengths of inputs and targets. The lengths are needed only for tasks
        whose preprocessing depends on the lengths.
      epochs: how many times the rows are read. The random steps of the task draw different numbers
        in each epoch. The default is the number of epochs for which the split is already prepared,
        or 1.
      only: the names of the tasks to prepare. If `only` is empty, all tasks of the mixture are
        prepared (see `requested_splits`).
      workers: the number of processes that write shards.
      renew: whether to prepare splits again even if they are already prepared.
      setup: a function that each worker process calls first, for example to import tasks.
      log: a function that receives a line for every split.

    Raises:
      FileNotFoundError: if no task of the mixture has any of the splits.
      OSError: if the disk is full.
      ValueError: if a data set is damaged, or if a task needs `lengths`.
    """
    # The data sets of the synthetic mixtures are generated. All other data sets must already be
    # imported.
    if mixture in MIXTURES:
        synthetic.write(prepared.data_dir, MIXTURES[mixture])
    rates = task_registry.mixture_rates(mixture, prepared.data_dir)
    requests = requested_splits(
        mixture,
        prepared.data_dir,
        training_splits=training_splits,
        evaluation_splits=evaluation_splits,
        only=only,
    )
    for request in requests:
        words = task_registry.find_task(request.task).label_words or ()
        index_by_tokens(words, prepared.vocabulary, owner=f"The task {request.task!r}")
        title = f"{request.task}, {request.split}"
        if not renew and is_current(request, prepared, lengths=lengths, epochs=epochs):
            log(f"{title}: already prepared")
            continue
        with name_write_errors(prepared.root, "Files that were finished are kept"):
            info = _prepare_split(
                request,
                prepared,
                lengths=lengths,
                epochs=epochs,
                workers=workers,
                renew=renew,
                setup=setup,
            )
        log(f"{title}: {info.examples:,} examples, {sum(info.tokens.values()):,} tokens")
        if info.targets:
            counts = ", ".join(f"{count:,} {what}" for what, count in info.targets.items())
            log(f"  of {info.examples:,} targets, {counts}")
    prepared.save_rates(mixture, rates)


@dataclasses.dataclass(frozen=True)
class _ShardJob:
    """The information that a process needs to write one shard.

    Attributes:
      request: the split.
      prepared: the prepared tasks, which determine the data directory and the vocabulary.
      options: arguments of `read_task`.
      key: a string that identifies everything on which the contents of the shard depend. An
        existing shard is kept only if it has the same key.
    """

    request: SplitRequest
    prepared: PreparedTasks
    options: dict[str, Any]
    key: str


@dataclasses.dataclass(frozen=True)
class Shard:
    """A description of a shard that was written.

    Attributes:
      key: see `_ShardJob`.
      examples: the number of examples.
      tokens: the total number of input tokens, and the total number of target tokens.
      checksum: the CRC-32 of the first record.
      rows_digest: the SHA-256 of the file of rows, or `None` if no file of rows was written.
      targets: see `PreparedInfo`.
    """

    key: str
    examples: int
    tokens: dict[str, int]
    checksum: int
    rows_digest: str | None = None
    targets: dict[str, int] = dataclasses.field(default_factory=dict)


def _prepare_split(
    request: SplitRequest,
    prepared: PreparedTasks,
    *,
    lengths: Mapping[str, int] | None,
    epochs: int | None,
    workers: int,
    renew: bool,
    setup: Callable[[], object] | None,
) -> PreparedInfo:
    """Writes all shards of a split and then ``info.json``, and removes the previous files.

    The names of new files differ from the names of existing files, which are removed only at the
    end. The file ``info.json`` therefore always describes complete files.
    """
    task = task_registry.find_task(request.task)
    before = prepared.find(request.task, request.split)
    if epochs is None:
        epochs = before.epochs if before else 1
    old_names = set(before.files) if before else set()

    # The function `num_files` also checks the classes that the data set names.
    files = num_files(task, request.split, prepared)
    needs_lengths, keep_last = _truncation(task, prepared.vocabulary)
    fixed_lengths = dict(lengths or {}) if needs_lengths else None
    if fixed_lengths == {}:
        raise ValueError(
            f"The steps of the task {task.name!r} depend on the lengths of rows. Give "
            "--inputs-length and --targets-length."
        )

    # A small split has one shard per epoch. A large split has one shard per file and epoch.
    source = task.source_version(request.split, prepared.data_dir)
    num_rows = task.stored_splits(prepared.data_dir).get(request.split)
    is_large = num_rows is None or num_rows > ONE_SHARD
    num_shards = max(1, files) if is_large else 1
    count = epochs * num_shards
    names = [f"tokens-{i:05}-of-{count:05}.arrayrecord" for i in range(count)]
    # New files must not overwrite the files that the old info.json still describes.
    if old_names & set(names):
        names = [name.replace("tokens", "tokens-b") for name in names]

    # If `renew` is set, the key contains random digits, so that it differs from the keys of all
    # existing shards, and no existing shard is kept.
    salt = renew and secrets.token_hex(4)
    key = json.dumps([source, fixed_lengths, epochs, request.rows, FORMAT, salt])
    options = {"with_rows": request.rows, "lengths": fixed_lengths}
    jobs = [
        _ShardJob(
            request,
            prepared,
            options | {"seed": i, "shard": (i % num_shards, num_shards)},
            key=key,
        )
        for i in range(count)
    ]
    directory = prepared.directory(request.task, request.split)
    shards = _write_shards(jobs, [directory / name for name in names], workers, setup)

    # Empty shards are left out.
    filled = {n: s for n, s in zip(names, shards, strict=True) if s.examples}
    if not filled:
        raise ValueError(f"The split {request.split!r} of the task {request.task} has no examples.")
    targets = sum((collections.Counter(shard.targets) for shard in shards), collections.Counter())
    info = PreparedInfo(
        format=FORMAT,
        task=request.task,
        split=request.split,
        vocabulary=prepared.vocabulary.digest,
        vocab_size=prepared.vocabulary.vocab_size,
        source=source,
        source_rows=num_rows,
        epochs=epochs,
        lengths=fixed_lengths,
        keep_last=keep_last,
        has_inputs=task.has_inputs,
        has_rows=request.rows,
        examples=sum(shard.examples for shard in shards),
        tokens={side: sum(shard.tokens[side] for shard in shards) for side in SIDES},
        files={name: shard.examples for name, shard in filled.items()},
        checksum=next(iter(filled.values())).checksum,
        targets=dict(targets),
        rows_digests={n: s.rows_digest for n, s in filled.items() if s.rows_digest},
    )
    info.save(directory)
    for name in old_names - set(names):
        path = directory / name
        for stale in (path, path.with_suffix(".json"), path.with_name(rows_file(name))):
            stale.unlink(missing_ok=True)
    return info


def _write_shards(
    jobs: Sequence[_ShardJob],
    paths: Sequence[pathlib.Path],
    workers: int,
    setup: Callable[[], object] | None,
) -> list[Shard]:
    """Writes shards, in this process or in several others. See `prepare` for the arguments."""
    if min(workers, len(jobs)) == 1:
        return list(map(_write_shard, jobs, paths))
    # TensorFlow cannot be used in a forked process, so new processes are started.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, context, initializer=setup) as pool:
        return list(pool.map(_write_shard, jobs, paths))


def _write_shard(job: _ShardJob, path: pathlib.Path) -> Shard:
    """Writes a shard, unless it already exists and is complete.

    A file with the suffix ``.json`` beside the shard is written last, to show that the shard is
    complete.
    """
    done = path.with_suffix(".json")
    if done.is_file():
        with describing(done):
            shard = Shard(**json.loads(done.read_text(encoding="utf-8")))
        if shard.key == job.key and path.is_file():
            return shard
    task = task_registry.find_task(job.request.task)
    split = f"The split {job.request.split!r} of the task {task.name}"
    with reading_errors(f"{split} ({task.dataset} in {job.prepared.data_dir})"):
        batches = read_task(task, job.request.split, job.prepared, **job.options)
        rows_path = path.with_name(rows_file(path.name))
        chunks: Iterator[Chunk]
        if job.request.rows:
            chunks = _write_rows(batches, job, rows_path)
        else:
            chunks = (chunk for chunk, _ in batches)

        # The generator `_count_targets` fills the counter while `write_chunks` consumes the chunks.
        counts = collections.Counter[str]()
        shard = write_chunks(_count_targets(chunks, job, task, counts), path, key=job.key)
        digest = None
        if job.request.rows:
            digest = hashlib.sha256(rows_path.read_bytes()).hexdigest()
        shard = dataclasses.replace(shard, targets=dict(counts), rows_digest=digest)
    write_atomic(done, json.dumps(dataclasses.asdict(shard)) + "\n")
    return shard


def _write_rows(batches: Iterator[Batch], job: _ShardJob, path: pathlib.Path) -> Iterator[Chunk]:
    """Yields the tokens of rows unchanged, and writes all other features of the rows to a file."""
    with open_atomic(path) as file:
        for tokens, rows in batches:
            for i, row in enumerate(rows):
                texts = {
                    f"{side}_pretokenized": job.prepared.vocabulary.decode(ids)
                    for side, ids in zip(SIDES, tokens[i], strict=True)
                    # If the rows of a SeqIO task have only tokens, decode the texts from the
                    # tokens.
                    if f"{side}_pretokenized" not in row
                }
                file.write(msgpack.packb(texts | row, default=lambda value: value.tolist()))
            yield tokens


def _count_targets(
    chunks: Iterator[Chunk], job: _ShardJob, task: Task, counts: collections.Counter[str]
) -> Iterator[Chunk]:
    """Yields the chunks unchanged, and counts targets that a user should know about.

    The function counts targets that are hidden, and targets that contain text that the vocabulary
    does not cover. Targets that are too long are counted when they are read, because the same files
    are read with different lengths; see `PreparedExamples`.
    """
    vocabulary = job.prepared.vocabulary
    sentinel = [vocabulary.first_sentinel] if task.sentinel else []
    # A hidden target consists of the sentinel, if the task has one, and of the token ids of an
    # empty text or of `UNKNOWN`, with or without EOS.
    texts: list[list[int]] = [[], vocabulary.encode(UNKNOWN)]
    hidden = {(*sentinel, *text, *end) for text in texts for end in ((), (vocabulary.eos_id,))}
    longest_hidden = max(map(len, hidden))
    for chunk in chunks:
        ids, ends = chunk.targets
        lengths = np.diff(ends)
        # Only short targets can be hidden, so only short targets are compared with the hidden ones.
        short = np.flatnonzero(lengths <= longest_hidden).tolist()
        counts[HIDDEN] += sum(tuple(chunk[i][1].tolist()) in hidden for i in short)
        # The array `unknown` holds the number of unknown tokens before the end of each target. The
        # difference between two adjacent entries is the number of unknown tokens in a target.
        unknown = np.append(0, np.cumsum(ids == vocabulary.unk_id))[ends]
        counts["hold unknown pieces"] += int(np.count_nonzero(np.diff(unknown)))
        yield chunk


def write_chunks(chunks: Iterator[Chunk], path: pathlib.Path, *, key: str) -> Shard:
    """Writes chunks as an ArrayRecord file. If there are no chunks, the file has no records.

    Args:
      chunks: the examples.
      path: the file to write, on a disk or in a bucket.
      key: see `Shard`.
    """
    examples = checksum = 0
    tokens = dict.fromkeys(SIDES, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    # ArrayRecord writes only to disks, so a file for a bucket is copied afterwards.
    folder = pathlib.Path(tempfile.gettempdir()) if in_bucket(path) else path.parent
    with temporary_directory(folder, ".synthesizer_jax") as directory:
        partial = directory / path.name
        writer = array_record_module.ArrayRecordWriter(str(partial), "group_size:1")
        try:
            for chunk in chunks:
                record = chunk.to_bytes()
                writer.write(record)
                # The checksum of a shard is the checksum of its first record.
                if not examples:
                    checksum = zlib.crc32(record)
                examples += len(chunk)
                for side, ids in zip(SIDES, (chunk.inputs.ids, chunk.targets.ids), strict=True):
                    tokens[side] += len(ids)
        finally:
            writer.close()
        if in_bucket(path):
            path.write_bytes(partial.read_bytes())
        else:
            partial.replace(path)
    return Shard(key, examples, tokens, checksum)


def _truncation(task: Task, vocabulary: Vocabulary) -> tuple[bool, dict[str, int]]:
    """Returns whether a task must know the lengths of rows, and how it truncates examples.

    Returns:
      Two values. The first value says whether any step of the task, other than truncation, depends
      on the lengths of rows. The second value holds the numbers of tokens at the end of inputs and
      of targets that truncation never removes.
    """
    if not isinstance(task, RegisteredTask):
        after = {"inputs": len(vocabulary.around_inputs[1]), "targets": 1}
        return False, {side: count + task.sentinel for side, count in after.items()}
    append_eos_after_trim = seqio.preprocessors.append_eos_after_trim
    truncating = (append_eos_after_trim, seqio.preprocessors.append_eos)
    steps = [getattr(step, "func", step) for step in task.original.preprocessors]
    needs_lengths = any(
        "sequence_length" in inspect.signature(step).parameters
        for step in steps
        if step not in truncating
    )

    # EOS survives truncation only if the last step is `append_eos_after_trim`, which appends EOS
    # after truncating.
    features = task.original.output_features
    keeps_eos = steps[-1:] == [append_eos_after_trim]
    kept = {side: int(keeps_eos and side in features and features[side].add_eos) for side in SIDES}
    return needs_lengths, kept
