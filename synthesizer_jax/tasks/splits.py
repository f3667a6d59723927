"""Finds the splits of a mixture's tasks that a run reads, and opens the stream of a mixture."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from collections.abc import Collection, Mapping, Sequence

from synthesizer_jax.base.ids import T5_IDS, SpecialIds
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.objectives import Objective
from synthesizer_jax.data.pipeline import Member, Stream
from synthesizer_jax.data.prepared import HIDDEN, PreparedTasks
from synthesizer_jax.data.vocabularies import Vocabulary, index_by_tokens
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.mixtures import MIXTURES
from synthesizer_jax.tasks.task import Task

_log = logging.getLogger(__name__)

MNLI = "glue_mnli_v002"
"""The MNLI task for training. Two other tasks evaluate it."""


@dataclasses.dataclass(frozen=True)
class SplitRequest:
    """A split of a task that a run needs.

    Attributes:
      task: the name of the task.
      split: the name of the split.
      rows: whether the run also needs the rows that metrics use.
    """

    task: str
    split: str
    rows: bool


def task_splits(
    names: Sequence[str], splits: Mapping[str, Sequence[str]], split: str
) -> list[tuple[str, str]]:
    """Returns the splits to evaluate, as pairs of the name of a task and the name of a split.

    ``glue_mnli`` has no split ``validation``. Separate tasks for the matched and the mismatched
    part of MNLI evaluate ``glue_mnli``. If these two tasks have no data, the splits
    ``validation_matched`` and ``validation_mismatched`` of ``glue_mnli`` are used instead.

    Args:
      names: the names of the tasks.
      splits: the names of the splits of each task.
      split: the name of the split on which the tasks are to be evaluated.
    """
    pairs = [(name, split) for name in names if split in splits.get(name, ())]
    parts = (f"{split}_matched", f"{split}_mismatched") if MNLI in names else ()
    for part in parts:
        if part in splits.get(MNLI, ()) and (measured_task(MNLI, part), split) not in pairs:
            pairs.append((MNLI, part))
    return pairs


def measured_task(name: str, split: str) -> str:
    """Returns the name of the task that a split evaluates.

    For MNLI's split ``validation_matched``, the result is ``glue_mnli_matched``. For all other
    tasks, the result is `name`.
    """
    part = split.rpartition("_")[2]
    is_part = name == MNLI and part in ("matched", "mismatched")
    return name.replace("mnli", f"mnli_{part}") if is_part else name


STANDS_FOR = {
    "glue_mnli_matched_v002": (MNLI, 0.5),
    "glue_mnli_mismatched_v002": (MNLI, 0.5),
    "super_glue_wsc_v102_simple_eval": ("super_glue_wsc_v102_simple_train", 1.0),
}
"""Maps each task that is only evaluated to the trained task that it evaluates, and to a share.

The share is the evaluated task's share of the trained task's rate. The rates of trained tasks
weight the losses of the tasks.
"""


def names_of_split(task: str, split: str) -> set[str]:
    """Returns the names by which a user may refer to a split.

    The result contains the name of the split's task, the name of the task that the split evaluates,
    and the name of the task that is trained.
    """
    measured = measured_task(task, split)
    return {task, measured, STANDS_FOR.get(measured, (measured, 1.0))[0]}


def requested_splits(
    mixture: str,
    data_dir: pathlib.Path,
    *,
    training_splits: Sequence[str],
    evaluation_splits: Sequence[str],
    only: Collection[str] = (),
) -> list[SplitRequest]:
    """Returns the requested splits of a mixture's tasks for which data is available.

    Args:
      mixture: the name of the mixture or task.
      data_dir: the directory of the data sets.
      training_splits: the splits that are used for training.
      evaluation_splits: the splits that are used for evaluation.
      only: the names of tasks. If `only` is not empty, the splits of other tasks are left out.

    Raises:
      FileNotFoundError: if no task has data for any of the splits.
    """
    names = task_registry.member_names(mixture)
    splits = {name: list(task_registry.find_task(name).stored_splits(data_dir)) for name in names}
    requests: dict[tuple[str, str], SplitRequest] = {}
    for split in training_splits:
        for name in names:
            if split in splits[name]:
                requests[name, split] = SplitRequest(name, split, rows=False)
    # If a split is used for both training and evaluation, the request for evaluation replaces the
    # request for training, because only evaluation needs the rows of the split.
    for split in evaluation_splits:
        for name, part in task_splits(names, splits, split):
            requests[name, part] = SplitRequest(name, part, rows=True)
    if not requests:
        asked = " or ".join(dict.fromkeys([*training_splits, *evaluation_splits]))
        stored = sorted({split for parts in splits.values() for split in parts})
        if stored:
            remedy = (
                f"The splits that have data are {', '.join(stored)}. Choose one of them with "
                "data.split or evaluation.split."
            )
        else:
            remedy = import_remedy(names, data_dir)
        raise FileNotFoundError(
            f"No task of {mixture!r} has data for the split {asked} in {data_dir}. {remedy}"
        )
    return [r for r in requests.values() if not only or names_of_split(r.task, r.split) & set(only)]


def import_remedy(names: Sequence[str], data_dir: pathlib.Path) -> str:
    """Returns the last sentence of an error message, which says how to get the data of tasks."""
    for name in names:
        if name not in task_registry.TASKS:
            return f"{name} is a task of SeqIO's registry. Add the split to its source."
    datasets = [task_registry.find_task(name).dataset for name in names]
    for dataset in datasets:
        folder, _, name = dataset.partition("/")
        if folder == task_registry.IMPORTED:
            return (
                f"Add the data with 'synthesizer-jax data import mine --name {name} --from "
                "SPLIT=FILE …'."
            )
    return (
        f"Import {datasets[0]} with 'synthesizer-jax data import … --data-dir {data_dir}', write "
        "it with TFDS, or give another --data-dir."
    )


def is_current(
    request: SplitRequest,
    prepared: PreparedTasks,
    *,
    lengths: Mapping[str, int] | None,
    epochs: int | None = None,
) -> bool:
    """Returns whether a split is prepared, and its source data has not changed since then.

    Args:
      request: the split, and whether the rows of the split are needed.
      prepared: the prepared tasks.
      lengths: the maximum lengths of inputs and targets for which the split must be prepared.
      epochs: the number of epochs that must be prepared. `None` means that any number of epochs is
        enough.
    """
    info = prepared.find(request.task, request.split)
    if info is None:
        return False
    task = task_registry.find_task(request.task)
    return (
        info.has_rows >= request.rows
        and info.lengths in (None, dict(lengths or {}))
        and epochs in (None, info.epochs)
        and info.source == task.source_version(request.split, prepared.data_dir)
    )


def task_objective(config: DataConfig, task: Task) -> Objective | None:
    """Returns the objective that turns the texts of a task into training examples.

    The result is `None` if the task has inputs, or if the texts are used as targets without change.
    """
    if task.objective is not None or task.has_inputs:
        return task.objective
    return config.objective


def open_stream(
    config: DataConfig,
    vocabulary: Vocabulary,
    *,
    data_dir: pathlib.Path,
    ids: SpecialIds = T5_IDS,
    shards: Sequence[int] | None = None,
    saved: Sequence[int] | None = None,
) -> Stream:
    """Returns a `Stream` of the prepared tasks of a mixture.

    Args:
      config: the configuration of the data.
      vocabulary: the vocabulary of the token ids.
      data_dir: the data directory.
      ids: the special ids of the model that reads the batches.
      shards: see `Stream`.
      saved: see `Stream`.

    Raises:
      FileNotFoundError: if no task is prepared for the split.
      ValueError: if all rates are 0, if two label words of a task have the same tokens, or if
        targets are hidden. See also `PreparedExamples` and `Stream`.
    """
    prepared = PreparedTasks(data_dir, vocabulary)
    rates = prepared.rates(config.mixture) or {}
    names = _sampled_tasks(config, prepared, rates)
    members = {}
    # Sort the tasks by name, as SeqIO does, because the order of examples depends on the order of
    # tasks.
    for name in sorted(names):
        task = task_registry.find_task(name)
        words, length = task.label_words or (), config.lengths["targets"]
        index_by_tokens(words, vocabulary, owner=f"The task {name!r}", length=length)
        objective = task_objective(config, task)
        examples = prepared.open(
            name, config.split, config.lengths, documents=objective is not None
        )

        # Hidden targets are an error if the task has label words, if a user has imported the task
        # with its answers, or if all targets of the task are hidden.
        hidden = examples.info.targets.get(HIDDEN, 0)
        is_answered = task.has_inputs and task.dataset.startswith(f"{task_registry.IMPORTED}/")
        if hidden and (words or is_answered or hidden == len(examples)):
            raise ValueError(
                f"{examples.name} has {hidden:,} targets that {HIDDEN}. Choose a data.split whose "
                "answers are known, or remove the rows without answers."
            )
        members[name] = Member(rates[name], examples, objective)
    return Stream(config, members, vocabulary=vocabulary, ids=ids, shards=shards, saved=saved)


def _sampled_tasks(
    config: DataConfig, prepared: PreparedTasks, rates: Mapping[str, float]
) -> list[str]:
    """Returns the tasks of a mixture that are prepared for the split and have a positive rate.

    If tasks of a mixture of this package have no data, a warning is logged.

    Args:
      config: the configuration of the data.
      prepared: the prepared tasks.
      rates: the rates of the mixture's tasks.

    Raises:
      FileNotFoundError: if no task is prepared for the split.
      ValueError: if all rates are 0.
    """
    sampled = [name for name, rate in rates.items() if rate and prepared.find(name, config.split)]
    if not sampled:
        others = [name for name in rates if prepared.find(name, config.split)]
        if not others:
            raise FileNotFoundError(
                f"No task of {config.mixture!r} is prepared for the split {config.split!r} in "
                f"{prepared.root}. {prepared.remedy(config.mixture)}"
            )
        raise ValueError(
            f"The mixture {config.mixture!r} has the rate 0 for all tasks that have the split "
            f"{config.split!r}: {', '.join(others)}. Give one of them a rate above 0, or set "
            "data.mixture to its name."
        )
    missing = []
    for name, rate in MIXTURES.get(config.mixture, {}).items():
        task = task_registry.TASKS.get(name)
        if rate and task and name not in sampled and config.split in task.splits:
            missing.append(name)
    if missing:
        _log.warning(
            "The mixture %s is used without these tasks, which lack the split %r in %s: %s",
            config.mixture,
            config.split,
            str(prepared.data_dir),
            ", ".join(missing),
        )
    return sampled
