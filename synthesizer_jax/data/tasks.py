"""All tasks and mixtures by name: the package's, added ones, and those of SeqIO's registries."""

from __future__ import annotations

import logging
import os
import pathlib
from collections.abc import Iterable, Mapping

from synthesizer_jax.data import seqio_tasks
from synthesizer_jax.data.catalog import DEFINITIONS
from synthesizer_jax.data.definitions import TaskDefinition
from synthesizer_jax.data.mixtures import MIXTURES, ExamplesRate, FixedRates, Rates
from synthesizer_jax.data.task import Task
from synthesizer_jax.files import storage_path
from synthesizer_jax.messages import did_you_mean

TASKS: dict[str, TaskDefinition] = {d.name: d for d in DEFINITIONS}
"""All known tasks; `add` adds others."""

_log = logging.getLogger(__name__)


def add(definitions: Iterable[TaskDefinition], mixtures: Mapping[str, Rates] = {}) -> None:
    """Adds task definitions and mixtures, which recipes then name."""
    TASKS.update({d.name: d for d in definitions})
    MIXTURES.update(mixtures)


def find_task(name: str) -> Task:
    """Returns the task of that name: one of `TASKS`, or else of SeqIO's registry.

    Raises:
      ValueError: there is no such task; the message suggests a similar name.
    """
    if name in TASKS:
        return TASKS[name]
    if name in seqio_tasks.registered_names() and not seqio_tasks.is_mixture(name):
        return seqio_tasks.SeqioTask(name)
    known = [*TASKS, *seqio_tasks.registered_names()]
    raise ValueError(f"there is no task {name!r}{did_you_mean(name, known)}; {_REMEDY}")


def task_names() -> list[str]:
    """Returns the names of all tasks, those of SeqIO's registries last."""
    registered = [n for n in seqio_tasks.registered_names() if not seqio_tasks.is_mixture(n)]
    return list(dict.fromkeys([*TASKS, *registered]))


def mixture_names() -> list[str]:
    """Returns the names of all mixtures, those of SeqIO's registries last."""
    registered = [n for n in seqio_tasks.registered_names() if seqio_tasks.is_mixture(n)]
    return list(dict.fromkeys([*MIXTURES, *registered]))


_REMEDY = "tasks of a package of yours are found with --import PACKAGE"


def member_names(name: str) -> list[str]:
    """Returns the names of a mixture's tasks, or of a single task.

    Raises:
      ValueError: there is neither a mixture nor a task of that name.
    """
    if name in MIXTURES:
        return [task for task in MIXTURES[name] if task in TASKS]
    if name in TASKS:
        return [name]
    if seqio_tasks.is_mixture(name):
        return seqio_tasks.member_names(name)
    registered = seqio_tasks.registered_names()
    if name in registered:
        return [name]
    known = [*MIXTURES, *TASKS, *registered]
    raise ValueError(
        f"there is no mixture or task {name!r}{did_you_mean(name, known)}; mixtures: "
        f"{', '.join(MIXTURES)}; {_REMEDY}"
    )


def mixture_rates(name: str, data_dir: pathlib.Path | None = None) -> FixedRates:
    """Returns the rates of a mixture's tasks, or of a single task, as numbers.

    Members without a definition are left out, such as an unsupervised task of a mixture that is used
    without it.

    Args:
      name: a mixture or task.
      data_dir: the directory of the data sets, by default `default_data_dir`. Rates may depend on the
        numbers of training examples there (`ExamplesRate`, or functions of SeqIO's mixtures); a task
        without any has the rate 0.

    Raises:
      ValueError: there is neither a mixture nor a task of that name.
    """
    names = member_names(name)
    if names == [name]:
        return {name: 1.0}
    directory = default_data_dir() if data_dir is None else data_dir
    if name not in MIXTURES:
        return {**dict.fromkeys(names, 0.0), **seqio_tasks.mixture_rates(name, directory)}
    rates = MIXTURES[name]
    return {task: _rate(rates[task], task, directory) for task in names}


def _rate(rate: float | ExamplesRate, task: str, data_dir: pathlib.Path) -> float:
    """Returns a rate as a number."""
    if not isinstance(rate, ExamplesRate):
        return rate
    return rate(prepared_splits(task, data_dir).get("train") or 0)


def default_data_dir() -> pathlib.Path:
    """Returns the data directory of the environment, by default TFDS's.

    ``SYNTHESIZER_DATA_DIR`` takes precedence over ``TFDS_DATA_DIR``.
    """
    configured = os.environ.get("SYNTHESIZER_DATA_DIR") or os.environ.get("TFDS_DATA_DIR")
    return storage_path(configured or "~/tensorflow_datasets").expanduser()


def prepared_splits(name: str, data_dir: pathlib.Path) -> dict[str, int | None]:
    """Returns the number of rows of each of a task's splits that are on this machine; None: not known."""
    return find_task(name).prepared_splits(data_dir)


def available_members(
    name: str, data_dir: pathlib.Path, split: str | None = None
) -> dict[str, float]:
    """Returns the rates of those members of a mixture whose data is on this machine.

    Args:
      name: a mixture or task.
      data_dir: the directory of the data sets.
      split: only return members that have this split.
    """
    rates = {}
    for task, rate in mixture_rates(name, data_dir).items():
        splits = prepared_splits(task, data_dir)
        if splits and (split is None or split in splits):
            rates[task] = rate
    return rates


def sampled_members(name: str, data_dir: pathlib.Path, split: str) -> dict[str, float]:
    """Returns the positive rates of those members of a mixture that have a split on this machine.

    Warns of members that should have it.

    Args:
      name: a mixture or task.
      data_dir: the directory of the data sets.
      split: the split.

    Raises:
      ValueError: there is no such mixture.
      FileNotFoundError: there are none.
    """
    sampled = {t: rate for t, rate in available_members(name, data_dir, split).items() if rate}
    if not sampled:
        raise FileNotFoundError(
            f"no task of {name!r} has data for the split {split!r} in {data_dir}; "
            f"{import_remedy(member_names(name), data_dir)}, or name another --data-dir"
        )
    missing = _missing_members(name, sampled, data_dir=data_dir, split=split)
    if missing:
        _log.warning("%s goes without %s: no data in %s", name, ", ".join(missing), data_dir)
    return sampled


def import_remedy(names: Iterable[str], data_dir: pathlib.Path) -> str:
    """Returns how the data of tasks comes into a directory, for the end of an error message."""
    from synthesizer_jax.data.importers.known import find_importer

    if registered := [name for name in names if name not in TASKS]:
        return f"give the source of {registered[0]}, a task of SeqIO's registry, that split"
    found = [find_importer(find_task(task).source) for task in names]
    importers = list(dict.fromkeys(known.importer for known in found if known is not None))
    if not importers:
        return "write their TFDS data sets to it"
    others = f" (also {', '.join(importers[1:])})" if importers[1:] else ""
    return (
        f"import the original files with 'synthesizer-jax data import {importers[0]} --from DIR "
        f"--data-dir {data_dir}'{others}"
    )


def _missing_members(
    name: str, sampled: Iterable[str], *, data_dir: pathlib.Path, split: str
) -> list[str]:
    """Returns the members of a mixture that should have a split and are not sampled from."""
    if name not in MIXTURES:
        return [task for task in member_names(name) if not prepared_splits(task, data_dir)]
    return [
        task
        for task, rate in MIXTURES[name].items()
        if rate and task not in sampled and (task not in TASKS or split in TASKS[task].splits)
    ]
