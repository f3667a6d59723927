"""Finds all tasks and mixtures by name.

The module finds the tasks of this package, tasks that were added with `add`, tasks that were
imported from users' files, and the tasks of SeqIO's registries. An imported task is a TFDS data set
in ``DATA_DIR/imported/NAME/1.0.0``, whose rows have the strings ``inputs`` and ``targets``. The
file ``task.json`` beside the data says which metrics and label words the task has. An imported task
can therefore be found by name wherever its data directory is used.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
from collections.abc import Iterable, Mapping

from synthesizer_jax.base.files import describing, storage_path
from synthesizer_jax.base.messages import did_you_mean
from synthesizer_jax.data.prepared import check_rates
from synthesizer_jax.tasks import metrics, postprocessors, preprocessors, seqio_tasks, synthetic
from synthesizer_jax.tasks.definitions import DEFINITIONS
from synthesizer_jax.tasks.mixtures import MIXTURES, ExamplesRate, Rates
from synthesizer_jax.tasks.stored import stored_splits
from synthesizer_jax.tasks.task import Task

TASKS: dict[str, Task] = {
    task.name: task for task in (*DEFINITIONS, *synthetic.DEFINITIONS.values())
}
"""All tasks by name, except tasks that are only in SeqIO's registry. `add` adds more tasks."""

IMPORTED, DEFINITION_FILE, IMPORTED_VERSION = "imported", "task.json", "1.0.0"

METRICS: Mapping[str, tuple[metrics.Metric, str]] = {
    "accuracy": (metrics.accuracy, "anything"),
    "bleu": (metrics.bleu, "texts"),
    "bleu_13a": (metrics.bleu_13a, "texts"),
    "chrf": (metrics.chrf, "texts"),
    "f1": (metrics.f1_with_invalid, "two labels"),
    "matthews": (metrics.matthews, "labels"),
    "pearson": (metrics.pearson, "numbers"),
    "rouge": (metrics.rouge, "texts"),
    "spearman": (metrics.spearman, "numbers"),
}
"""The metrics that ``--metric`` accepts, by name, with a description of what each one compares."""

_REMEDY = (
    "If your own package defines it, add --import PACKAGE, or in Python call "
    "runs.code.load_user_code(['PACKAGE']) first."
)


def add(tasks: Iterable[Task], mixtures: Mapping[str, Rates] = {}) -> None:
    """Adds tasks and mixtures, so that recipes can refer to them by name.

    Raises:
      ValueError: if a rate is negative, or if all rates of a mixture are 0.
    """
    for name, rates in mixtures.items():
        numbers = [rate for rate in rates.values() if isinstance(rate, float | int)]
        if not any(rates.values()) or any(number < 0 for number in numbers):
            raise ValueError(
                f"The rates of the mixture {name!r} are {rates}. No rate may be below 0, and at "
                "least one must be above 0."
            )
    TASKS.update({task.name: task for task in tasks})
    MIXTURES.update(mixtures)


def add_imported(data_dir: pathlib.Path) -> list[str]:
    """Adds the imported tasks of a data directory, and returns their names.

    Raises:
      ValueError: if a definition is damaged.
    """
    paths = sorted((data_dir / IMPORTED).glob(f"*/{IMPORTED_VERSION}/{DEFINITION_FILE}"))
    definitions = [read_definition(path) for path in paths]
    add(definitions)
    return [definition.name for definition in definitions]


def read_definition(path: pathlib.Path) -> Task:
    """Returns the imported task that a file ``task.json`` defines.

    Raises:
      ValueError: if the file is damaged.
    """
    name = path.parent.parent.name
    with describing(path, "Import the task again, or delete its directory."):
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["name"] != name:
            raise ValueError(f"It describes the task {data['name']!r}.")
        is_numeric = any(METRICS[metric][1] == "numbers" for metric in data["metrics"])
        has_inputs = bool(data["has_inputs"])
        texts = functools.partial(preprocessors.language_modeling, feature="targets")
        return Task(
            name,
            f"{IMPORTED}/{name}",
            None if has_inputs else texts,
            metrics=tuple(METRICS[metric][0] for metric in data["metrics"]),
            splits=tuple(stored_splits(path.parent)),
            label_words=tuple(data["words"]) or None,
            postprocess_fn=postprocessors.number if is_numeric else None,
            has_inputs=has_inputs,
        )


def find_task(name: str) -> Task:
    """Returns the task called `name` from `TASKS`, or from SeqIO's registry if it is only there.

    Raises:
      ValueError: if there is no such task. The message suggests a similar name.
    """
    if name in TASKS:
        return TASKS[name]
    if name in seqio_tasks.task_names():
        return seqio_tasks.find_registered(name)
    hint = did_you_mean(name, task_names()) or "."
    raise ValueError(f"There is no task {name!r}{hint} {_REMEDY}")


def task_names() -> list[str]:
    """Returns the names of all tasks. The tasks of SeqIO's registry come last."""
    return list(dict.fromkeys([*TASKS, *seqio_tasks.task_names()]))


def mixture_names() -> list[str]:
    """Returns the names of all mixtures. The mixtures of SeqIO's registry come last."""
    return list(dict.fromkeys([*MIXTURES, *seqio_tasks.mixture_names()]))


def member_names(name: str) -> list[str]:
    """Returns the names of a mixture's tasks. If `name` is a task, the result contains only `name`.

    Raises:
      ValueError: if there is neither a mixture nor a task of that name.
    """
    if name in MIXTURES:
        return [find_task(task).name for task in MIXTURES[name]]
    if name in seqio_tasks.mixture_names():
        return seqio_tasks.member_names(name)
    if name in TASKS or name in seqio_tasks.task_names():
        return [name]
    known = [*mixture_names(), *task_names()]
    hint = did_you_mean(name, known) or "."
    raise ValueError(
        f"There is no mixture or task {name!r}{hint} The mixtures are {', '.join(MIXTURES)}. "
        "Tasks from your own files are in the data directory, so give the --data-dir into which "
        f"you imported them. {_REMEDY}"
    )


def mixture_rates(name: str, data_dir: pathlib.Path) -> dict[str, float]:
    """Returns the rates of a mixture's tasks. Tasks whose data sets are not available are left out.

    The argument `name` can also be the name of a single task. Rates may depend on the number of
    training examples, either through an `ExamplesRate` or through a function of a SeqIO mixture. A
    rate that depends on this number is 0 if the task has no training examples.

    Raises:
      ValueError: if there is neither a mixture nor a task of that name, or if a rate is negative.
    """
    names = [n for n in member_names(name) if find_task(n).stored_splits(data_dir)]
    if name not in MIXTURES and name in seqio_tasks.mixture_names():
        rates = seqio_tasks.mixture_rates(name, names, data_dir)
    else:
        given: Rates = MIXTURES.get(name, {name: 1.0})
        rates = {task: _number_of_rate(given[task], task, data_dir) for task in names}
    check_rates(name, rates)
    return rates


def _number_of_rate(rate: float | ExamplesRate, task: str, data_dir: pathlib.Path) -> float:
    """Returns the rate of a task as a number. See `mixture_rates`."""
    if isinstance(rate, ExamplesRate):
        return rate(find_task(task).stored_splits(data_dir).get("train") or 0)
    return float(rate)


def default_data_dir() -> pathlib.Path:
    """Returns the default data directory.

    The default is the value of the environment variable ``SYNTHESIZER_DATA_DIR``, or else the
    environment variable ``TFDS_DATA_DIR``. If neither is set, the default is TFDS's default,
    ``~/tensorflow_datasets``.
    """
    configured = os.environ.get("SYNTHESIZER_DATA_DIR") or os.environ.get("TFDS_DATA_DIR")
    return storage_path(configured or "~/tensorflow_datasets").expanduser()
