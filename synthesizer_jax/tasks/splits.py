"""Which splits of a mixture's tasks are trained on and evaluated, and whether they are prepared."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Collection, Mapping, Sequence

from synthesizer_jax.data.prepared import PreparedTasks
from synthesizer_jax.tasks import task_registry

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
    found = [(name, split) for name in names if split in splits.get(name, ())]
    there = {name for name, _ in found}
    for part in (f"{split}_matched", f"{split}_mismatched"):
        measured = measured_task(MNLI, part)
        if MNLI in names and part in splits.get(MNLI, ()) and measured not in there:
            found.append((MNLI, part))
    return found


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
        wanted = ", ".join(dict.fromkeys([*training_splits, *evaluation_splits]))
        known = sorted({split for found in splits.values() for split in found})
        choice = f"it has {', '.join(known)}: choose one by evaluation.split or data.split"
        has = choice if known else import_remedy(names, data_dir)
        raise FileNotFoundError(
            f"no task of {mixture!r} has data for the split {wanted} in {data_dir}; {has}"
        )
    asked = [r for r in requests.values() if names_of_split(r.task, r.split) & set(only)]
    return asked if only else list(requests.values())


def import_remedy(names: Sequence[str], data_dir: pathlib.Path) -> str:
    """Returns how the data of tasks comes into a directory, for the end of an error message."""
    if registered := [name for name in names if name not in task_registry.TASKS]:
        return f"give the source of {registered[0]}, a task of SeqIO's registry, that split"
    datasets = [task_registry.find_task(name).dataset for name in names]
    if own := [name for name in datasets if name.startswith(f"{task_registry.IMPORTED}/")]:
        name = own[0].removeprefix(f"{task_registry.IMPORTED}/")
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
