"""Reads the logs and results of runs without loading the runs' models or users' code."""

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
"""A line of a log, which contains measures by name, or an example and a prediction."""


@dataclasses.dataclass(frozen=True)
class LoggedRun:
    """The logs and results of a run.

    Attributes:
      name: a name for the run, which is the last part of its path.
      experiment: the contents of ``experiment.json``.
      training: the metrics of training, by step.
      evaluations: the metrics of evaluations, by step. If the command ``eval`` has evaluated a step
        again, the metrics of this step are those of ``eval``.
      newest: the numeric measures of the newest evaluation, by name.
      answers: the labeled predictions of the newest evaluation, by task and example.
      parameters: the number of parameters of the model, or `None` if the run has no checkpoint.
      adapters: the number of parameters in the run's adapters, or `None` if the run does not train
        adapters.
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
    """One or more runs whose experiments differ only in their seeds.

    Attributes:
      name: a name for all of the runs together.
      runs: the runs.
    """

    name: str
    runs: tuple[LoggedRun, ...]

    def curve(self, kind: str, name: str, *, most: int = 10**9) -> Line:
        """Returns the mean of a measure over the runs, for each step that all runs have logged.

        Args:
          kind: ``training`` or ``evaluations``.
          name: the name of the measure.
          most: the largest number of points. If there are more steps than `most`, neighboring steps
            are averaged.

        Returns:
          A tuple of the steps and the means. If there are several runs, the tuple also contains the
          lowest and the highest values.
        """
        by_step = [
            {step: r[name] for step, r in getattr(run, kind).items() if r.get(name) is not None}
            for run in self.runs
        ]
        steps = sorted(set.intersection(*map(set, by_step)))
        if not steps:
            return [], []
        # The array has the shape [1 + runs, steps]. The first row contains the steps, and every
        # other row contains the values of a run.
        values = np.array([steps, *([run[step] for step in steps] for run in by_step)], float)
        parts = np.array_split(values, min(most, len(steps)), axis=1)
        x, *y = np.stack([part.mean(1) for part in parts], axis=1)
        band = [np.min(y, axis=0), np.max(y, axis=0)] if len(y) > 1 else []
        return tuple(side.tolist() for side in (x, np.mean(y, axis=0), *band))


def read_systems(directories: Sequence[pathlib.Path]) -> list[System]:
    """Reads runs, and groups the runs whose experiments differ only in their seeds.

    The runs of a group may also differ in fields that do not influence the results, such as the
    writers of metrics. If two runs of a group have exactly the same experiment, each run of the
    group becomes a separate system.

    Args:
      directories: the directories of the runs.

    Raises:
      FileNotFoundError: a directory does not contain a run.
      ValueError: a run has logged nothing yet, or a file is damaged.
    """
    # The name of a run consists of the last parts of its path, with as few parts as are needed to
    # tell all runs apart.
    paths = [absolute(directory).parts for directory in directories]
    distinct = (n for n in range(1, 9) if len({parts[-n:] for parts in paths}) == len(paths))
    length = next(distinct, 1)

    groups: dict[str, list[LoggedRun]] = {}
    for parts, directory in zip(paths, directories, strict=True):
        run = read_run("/".join(parts[-length:]), directory)
        training = {k: v for k, v in run.experiment["training"].items() if k not in WATCHING}
        described = json.dumps({**run.experiment, "training": training})
        without_seeds = re.sub(r'"seed": [^,}]*', "", described)
        groups.setdefault(without_seeds, []).append(run)

    systems: list[System] = []
    for runs in groups.values():
        # If runs have exactly the same experiment, the user probably wants to compare them. For
        # example, they may have been trained before and after a change of the code.
        alike = len({json.dumps(run.experiment) for run in runs}) < len(runs)
        for together in [[run] for run in runs] if alike else [runs]:
            name = together[0].name
            if len(together) > 1:
                # Name the system by the common beginning of the runs' names, without a number at
                # its end.
                shared = os.path.commonprefix([run.name for run in together])  # noqa: RUF071
                common = re.sub(r"[-_./]?\d*$", "", shared)
                if common and common not in {system.name for system in systems}:
                    name = common
            systems.append(System(name, tuple(together)))
    return systems


def read_run(name: str, directory: pathlib.Path) -> LoggedRun:
    """Reads the logs and results of one run.

    Args:
      name: a name for the run.
      directory: the directory of the run.

    Raises:
      FileNotFoundError: the directory does not contain a run.
      ValueError: the run has logged nothing yet, or a file is damaged.
    """
    experiment = read_experiment(directory, as_data=True)
    log = directory / METRICS_FILE
    records = read_metrics(log) if log.exists() else []
    training, evaluations = (
        {int(r["step"]): r for r in records if r["kind"] == kind} for kind in ("train", "eval")
    )
    for path in (directory / "evaluation").glob(f"*/{RESULTS_FILE}"):
        if path.parent.name.isdecimal():
            evaluations[int(path.parent.name)] = _read_results(path)
    if not (training or evaluations):
        raise ValueError(
            f"{directory} has logged nothing. Train the run, or measure it with 'synthesizer-jax "
            "eval'."
        )
    for record in evaluations.values():
        # If the tasks have no metrics, the score is the negative loss. Leave out such a score,
        # because it would only repeat the loss.
        if record.get("score") == -(record.get("loss") or math.nan):
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
    """Returns the number of parameters of the model whose adapters a run trains.

    The result is `None` if the run or the checkpoint that contains the model no longer exists.

    Args:
      experiment: the experiment of the run that trains adapters, as JSON data.
    """
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
    """Returns the measures in a file of results, with the names that ``metrics.jsonl`` uses."""
    with describing(path):
        results = json.loads(path.read_text(encoding="utf-8"))
        for task in results.pop("tasks"):
            for name, value in {**task["metrics"], "loss": task["loss"]}.items():
                results[f"{task['task']}/{name}"] = value
        return results


def _read_answers(path: pathlib.Path) -> dict[str, Record]:
    """Returns the labeled predictions of a task, by the index and the input of the example.

    The result is empty if the predictions were not written.
    """
    if not path.is_file():
        return {}
    with describing(path), path.open(encoding="utf-8") as file:
        return {
            json.dumps([r.get("idx"), r["input"]]): r
            for r in map(json.loads, file)
            if r.get("target") is not None and "prediction" in r
        }


def differences(values: Sequence[JSON], path: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yields the path of each field in which experiments differ, with its value in each experiment.

    Seeds are left out. If the values of a field are objects of different classes or lists of
    different lengths, the whole values are yielded.

    Args:
      values: the experiments, or a field of each, as JSON data.
      path: the path of the field. The path is empty if `values` are the experiments themselves.
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
    """Formats JSON data in one line. An object is written like a call of its class."""
    if isinstance(value, dict):
        fields = [f"{n}={_compact(v)}" for n, v in value.items() if n != "type" and v is not None]
        return f"{value.get('type', '')}({', '.join(fields)})"
    if isinstance(value, list):
        return f"[{', '.join(map(_compact, value))}]"
    return "–" if value is None else str(value)
