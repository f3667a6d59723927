"""What runs have left in their directories, read as data: without their models, and without their code."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from synthesizer_jax.base.files import absolute, describing, storage_path
from synthesizer_jax.base.registry import JSON, child_path
from synthesizer_jax.checkpoints.manager import finished_steps
from synthesizer_jax.checkpoints.placement import count_parameters
from synthesizer_jax.evaluation.scoring import RESULTS_FILE, evaluation_folder
from synthesizer_jax.reports.figures import Line
from synthesizer_jax.runs.metrics import METRICS_FILE, read_metrics
from synthesizer_jax.runs.saved import find_checkpoint, is_run, read_experiment
from synthesizer_jax.training.run_directory import WATCHING

Record: TypeAlias = Mapping[str, Any]
"""A line of a log: measures by name, or an example and its prediction."""


@dataclasses.dataclass(frozen=True)
class LoggedRun:
    """What a run has logged: its ``experiment.json``, and records of training and evaluations by step.

    Where ``eval`` has measured a step again, its results are the record. `newest` are the measures of the
    newest evaluation that are numbers, and `answers` its labeled predictions by task and example.
    `parameters` is the number of the model's, None if no checkpoint tells it; `adapters` that of a run that
    trains adapters of another run's parameters, None if it trains the parameters themselves.
    """

    name: str
    experiment: JSON
    training: Mapping[int, Record]
    evaluations: Mapping[int, Record]
    newest: Mapping[str, float]
    answers: Mapping[str, Mapping[str, Record]]
    parameters: int | None
    adapters: int | None = None


@dataclasses.dataclass(frozen=True)
class System:
    """Runs whose experiments differ in seeds alone, one or more, and their common name."""

    name: str
    runs: tuple[LoggedRun, ...]

    def curve(self, kind: str, name: str, *, most: int = 10**9) -> Line:
        """Returns a measure over the steps that all runs have: their mean, lowest and highest.

        The kind is ``training`` or ``evaluations``. Of more than `most` steps neighbors are averaged.
        """
        by_step = [
            {step: r[name] for step, r in getattr(run, kind).items() if r.get(name) is not None}
            for run in self.runs
        ]
        steps = sorted(set.intersection(*map(set, by_step)))
        if not steps:
            return [], []
        values = np.array([steps, *([run[step] for step in steps] for run in by_step)], float)
        parts = np.array_split(values, min(most, len(steps)), axis=1)
        x, *y = np.stack([part.mean(1) for part in parts], axis=1)
        band = [np.min(y, axis=0), np.max(y, axis=0)] if len(y) > 1 else []
        return tuple(side.tolist() for side in (x, np.mean(y, axis=0), *band))


def read_systems(directories: Sequence[pathlib.Path]) -> list[System]:
    """Reads runs, and puts those together that differ in seeds, and perhaps in who watched them.

    Raises:
      FileNotFoundError: there is no run in a directory.
      ValueError: a run has logged nothing yet, or a file is damaged.
    """
    paths = [absolute(directory).parts for directory in directories]
    distinct = (n for n in range(1, 9) if len({parts[-n:] for parts in paths}) == len(paths))
    length = next(distinct, 1)  # names are the ends of paths
    groups: dict[str, list[LoggedRun]] = {}
    for parts, directory in zip(paths, directories, strict=True):
        run = read_run("/".join(parts[-length:]), directory)
        training = {k: v for k, v in run.experiment["training"].items() if k not in WATCHING}
        described = json.dumps({**run.experiment, "training": training})
        without_seeds = re.sub(r'"seed": [^,}]*', "", described)
        groups.setdefault(without_seeds, []).append(run)
    systems: list[System] = []
    for runs in groups.values():
        # Runs that differ in nothing were made to be compared, such as before and after a change of code.
        alike = len({json.dumps(run.experiment) for run in runs}) < len(runs)
        for together in [[run] for run in runs] if alike else [runs]:
            shared = os.path.commonprefix([run.name for run in together])  # noqa: RUF071
            name = re.sub(r"[-_./]?\d*$", "", shared) if len(together) > 1 else shared
            taken = name in ("", *(system.name for system in systems))
            systems.append(System(together[0].name if taken else name, tuple(together)))
    return systems


def read_run(name: str, directory: pathlib.Path) -> LoggedRun:
    """Reads a run; see `read_systems`."""
    experiment, log = read_experiment(directory, as_data=True), directory / METRICS_FILE
    records = read_metrics(log) if log.exists() else []
    training, evaluations = (
        {int(r["step"]): r for r in records if r["kind"] == kind} for kind in ("train", "eval")
    )
    for path in (directory / "evaluation").glob(f"*/{RESULTS_FILE}"):
        if path.parent.name.isdecimal():
            evaluations[int(path.parent.name)] = _read_results(path)
    if not (training or evaluations):
        raise ValueError(
            f"{directory} has logged nothing; train the run, or measure it with synthesizer-jax eval"
        )
    for record in evaluations.values():
        if record.get("score") == -(record.get("loss") or math.nan):  # of texts alone
            del record["score"]
    saved = finished_steps(directory / "checkpoints")
    count = count_parameters(directory / "checkpoints" / str(saved[-1])) if saved else None
    has_base = bool(experiment["training"].get("adapters"))
    newest = max(evaluations, default=0)
    folder = evaluation_folder(directory, newest)
    numbers = {
        name: value
        for name, value in evaluations.get(newest, {}).items()
        if name != "step" and isinstance(value, int | float)
    }
    tasks = sorted({name.rpartition("/")[0] for name in numbers if "/" in name})
    answers = {task: _read_answers(folder / f"{task}.jsonl") for task in tasks}
    return LoggedRun(
        name=name,
        experiment=experiment,
        training=training,
        evaluations=evaluations,
        newest=numbers,
        answers={task: rows for task, rows in answers.items() if rows},
        parameters=_count_in_base(experiment) if has_base else count,
        adapters=count if has_base else None,
    )


def _count_in_base(experiment: JSON) -> int | None:
    """Returns the number of parameters of the base of a run with adapters; None if it is gone."""
    base = storage_path(experiment["init_from"])
    if not is_run(base):
        return None
    directory, step = find_checkpoint(base)
    of_base = read_experiment(directory, as_data=True)
    if of_base["training"].get("adapters"):
        return _count_in_base(of_base)
    steps = finished_steps(directory / "checkpoints")
    step = max(steps, default=None) if step is None else step
    return count_parameters(directory / "checkpoints" / str(step)) if step in steps else None


def _read_results(path: pathlib.Path) -> dict[str, Any]:
    """Returns the measures in a file of results, named as in ``metrics.jsonl``."""
    with describing(path):
        results = json.loads(path.read_text(encoding="utf-8"))
        for task in results.pop("tasks"):
            for name, value in {**task["metrics"], "loss": task["loss"]}.items():
                results[f"{task['task']}/{name}"] = value
        return results


def _read_answers(path: pathlib.Path) -> dict[str, Record]:
    """Returns the labeled predictions of a task; none if they were not written."""
    if not path.is_file():
        return {}
    with describing(path), path.open(encoding="utf-8") as file:
        return {
            json.dumps([r.get("idx"), r["input"]]): r
            for r in map(json.loads, file)
            if r.get("target") is not None and "prediction" in r
        }


def differences(values: Sequence[JSON], path: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yields the fields in which experiments differ, and what each has there; seeds are left out.

    Objects of different classes, and lists of different lengths, differ as a whole.
    """
    if all(value == values[0] for value in values):
        return
    lists = all(isinstance(value, list) and len(value) == len(values[0]) for value in values)
    parts: Sequence[JSON] = [dict(enumerate(value)) for value in values] if lists else values
    if all(isinstance(v, dict) and v.get("type") == parts[0].get("type") for v in parts):
        for name in dict.fromkeys(name for part in parts for name in part if name != "seed"):
            yield from differences([part.get(name) for part in parts], child_path(path, name))
    else:
        yield path, [_compact(value) for value in values]


def _compact(value: JSON) -> str:
    """Returns JSON data in one line, with objects as calls of their classes."""
    if isinstance(value, dict):
        fields = [f"{n}={_compact(v)}" for n, v in value.items() if n != "type" and v is not None]
        return f"{value.get('type', '')}({', '.join(fields)})"
    if isinstance(value, list):
        return f"[{', '.join(map(_compact, value))}]"
    return "–" if value is None else str(value)
