"""What a run reads of a mixture: splits of its tasks, whether they are prepared, and their stream."""

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


@dataclasses.dataclass(frozen=True)
class SplitRequest:
    """A split of a task; `rows` says whether what metrics need of a row is asked for too."""

    task: str
    split: str
    rows: bool


def task_splits(
    names: Sequence[str], splits: Mapping[str, Sequence[str]], split: str
) -> list[tuple[str, str]]:
    """Returns the pairs of task and split by which tasks are evaluated on a split.

    ``glue_mnli`` has no ``validation`` split and is evaluated by the tasks of its matched and mismatched
    parts. Where these have no data, its splits ``validation_matched`` and ``validation_mismatched`` are
    used. `splits` are those that each of the tasks has.
    """
    pairs = [(name, split) for name in names if split in splits.get(name, ())]
    parts = (f"{split}_matched", f"{split}_mismatched") if MNLI in names else ()
    for part in parts:
        if part in splits.get(MNLI, ()) and (measured_task(MNLI, part), split) not in pairs:
            pairs.append((MNLI, part))
    return pairs


def measured_task(name: str, split: str) -> str:
    """Returns the task that a split evaluates: ``glue_mnli_matched`` for MNLI's ``validation_matched``."""
    part = split.rpartition("_")[2]
    is_part = name == MNLI and part in ("matched", "mismatched")
    return name.replace("mnli", f"mnli_{part}") if is_part else name


STANDS_FOR = {
    "glue_mnli_matched_v002": (MNLI, 0.5),
    "glue_mnli_mismatched_v002": (MNLI, 0.5),
    "super_glue_wsc_v102_simple_eval": ("super_glue_wsc_v102_simple_train", 1.0),
}
"""For tasks that are only evaluated: the trained task that they evaluate, and their share of it."""


def names_of_split(task: str, split: str) -> set[str]:
    """Returns the names by which a user may mean a split: its task, and those it measures and trains."""
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
    """Returns the splits of a mixture's tasks, or of those in `only`, whose data sets are here.

    Raises:
      FileNotFoundError: there are none.
    """
    names = task_registry.member_names(mixture)
    splits = {name: list(task_registry.find_task(name).stored_splits(data_dir)) for name in names}
    requests: dict[tuple[str, str], SplitRequest] = {}
    for split in training_splits:
        for name in names:
            if split in splits[name]:
                requests[name, split] = SplitRequest(name, split, rows=False)
    for split in evaluation_splits:
        for name, part in task_splits(names, splits, split):
            requests[name, part] = SplitRequest(name, part, rows=True)
    if not requests:
        asked = ", ".join(dict.fromkeys([*training_splits, *evaluation_splits]))
        stored = sorted({split for parts in splits.values() for split in parts})
        choice = f"it has {', '.join(stored)}: choose one by evaluation.split or data.split"
        remedy = choice if stored else import_remedy(names, data_dir)
        raise FileNotFoundError(
            f"no task of {mixture!r} has data for the split {asked} in {data_dir}; {remedy}"
        )
    return [r for r in requests.values() if not only or names_of_split(r.task, r.split) & set(only)]


def import_remedy(names: Sequence[str], data_dir: pathlib.Path) -> str:
    """Returns how the data of tasks comes into a directory, for the end of an error message."""
    if registered := [name for name in names if name not in task_registry.TASKS]:
        return f"give the source of {registered[0]}, a task of SeqIO's registry, that split"
    datasets = [task_registry.find_task(name).dataset for name in names]
    if imported := [name for name in datasets if name.startswith(f"{task_registry.IMPORTED}/")]:
        name = imported[0].removeprefix(f"{task_registry.IMPORTED}/")
        return f"add it with 'synthesizer-jax data import mine --name {name} --from SPLIT=FILE …'"
    return (
        f"import {datasets[0]} with 'synthesizer-jax data import … --data-dir {data_dir}' or write it with "
        "TFDS, or name another --data-dir"
    )


def is_current(
    request: SplitRequest,
    prepared: PreparedTasks,
    *,
    lengths: Mapping[str, int] | None,
    epochs: int | None = None,
) -> bool:
    """Returns whether a split is prepared, for these lengths and epochs, from the data that is there."""
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
    """Returns the objective by which a task's texts are trained; None: they are targets."""
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
    """Returns the `Stream` of a mixture, of those of its tasks that `PreparedTasks` finds.

    Raises:
      FileNotFoundError: no task has the split.
      ValueError: all rates are 0, label words are the same to the vocabulary, or targets are hidden; see
        also `PreparedExamples` and `Stream`.
    """
    prepared = PreparedTasks(data_dir, vocabulary)
    rates = prepared.rates(config.mixture) or {}
    sampled = [n for n, rate in rates.items() if rate and prepared.find(n, config.split)]
    if not sampled and (prepared_tasks := [n for n in rates if prepared.find(n, config.split)]):
        raise ValueError(
            f"the mixture {config.mixture!r} has the rate 0 for every task with the split "
            f"{config.split!r}, {', '.join(prepared_tasks)}; give one of them a rate above 0, or name it "
            "as data.mixture"
        )
    if not sampled:
        raise FileNotFoundError(
            f"no task of {config.mixture!r} is prepared for the split {config.split!r} in "
            f"{prepared.root}; {prepared.remedy(config.mixture)}"
        )
    tasks = {n: task_registry.TASKS.get(n) for n, r in MIXTURES.get(config.mixture, {}).items() if r}
    missing = [n for n, t in tasks.items() if t and n not in sampled and config.split in t.splits]
    if missing:
        names = ", ".join(missing)
        _log.warning("%s goes without %s: no data in %s", config.mixture, names, data_dir)
    members = {}
    for name in sorted(sampled):  # SeqIO's order, on which the order of examples depends
        task = task_registry.find_task(name)
        words, length = task.label_words or (), config.lengths["targets"]
        index_by_tokens(words, vocabulary, owner=f"the task {name!r}", length=length)
        objective = task_objective(config, task)
        examples = prepared.open(name, config.split, config.lengths, documents=objective is not None)
        hidden = examples.info.targets.get(HIDDEN, 0)
        is_answered = task.has_inputs and task.dataset.startswith(f"{task_registry.IMPORTED}/")
        if hidden and (words or is_answered or hidden == len(examples)):
            raise ValueError(
                f"{examples.name} has {hidden:,} targets that {HIDDEN}; choose a data.split whose answers "
                "are known, or leave such rows out"
            )
        members[name] = Member(rates[name], examples, objective)
    return Stream(config, members, vocabulary=vocabulary, ids=ids, shards=shards, saved=saved)
