"""The page that compares runs by what they logged: the data of ``report.html.jinja``."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import flax
import jax
import numpy as np

from synthesizer_jax.costs.summary import Summary, summarize
from synthesizer_jax.evaluation.files import evaluation_folder
from synthesizer_jax.evaluation.scoring import LOWER_IS_BETTER
from synthesizer_jax.files import describing, write_atomic
from synthesizer_jax.reports.figures import ENVIRONMENT, line_chart
from synthesizer_jax.runs.metrics import METRICS_FILE, read_metrics
from synthesizer_jax.training.run_directory import load_experiment
from synthesizer_jax.version import __version__

ANSWERS = 3
"""Examples of each task whose answers are shown."""


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """The costs and logged results of one run.

    Attributes:
      title: the run's name.
      costs: those of its model.
      losses: ``(steps, nats per token)`` of training.
      held_out: ``(steps, nats per token)`` of the evaluations.
      steps_per_second: one value per line of the training log, without compilation.
      tokens_per_second: the same for real tokens.
      metric_names: the name of the first metric by task that has one; texts have none.
      metrics: its value in the newest evaluation, in percent.
      answers: the predictions of that evaluation by task and input, as in ``TASK.jsonl``.
    """

    title: str
    costs: Summary
    losses: tuple[Sequence[float], Sequence[float]]
    held_out: tuple[Sequence[float], Sequence[float]]
    steps_per_second: Sequence[float]
    tokens_per_second: Sequence[float]
    metric_names: Mapping[str, str]
    metrics: Mapping[str, float]
    answers: Mapping[str, Mapping[str, dict[str, Any]]]


def summarize_run(title: str, directory: pathlib.Path) -> RunSummary:
    """Returns the costs and the logged results of a run.

    Raises:
      FileNotFoundError: there is no run in the directory.
      ValueError: the run has logged no evaluation yet.
    """
    experiment = load_experiment(directory)
    lengths = experiment.data.lengths
    costs = summarize(
        experiment.model, inputs_length=lengths["inputs"], targets_length=lengths["targets"]
    )
    log = directory / METRICS_FILE
    records = read_metrics(log) if log.exists() else []
    training = [record for record in records if record["kind"] == "train"]
    evaluations = [record for record in records if record["kind"] == "eval"]
    _, steps_per_second = _series(training, "steps_per_second")
    _, tokens_per_second = _series(training, "tokens_per_second")
    if not (steps_per_second and tokens_per_second and evaluations):
        raise ValueError(f"{log} holds no evaluation; continue the run until its first evaluation")
    newest = evaluations[-1]
    metric_names: dict[str, str] = {}
    for key, value in newest.items():
        task, slash, metric = key.rpartition("/")
        if slash and value is not None and metric not in LOWER_IS_BETTER:
            metric_names.setdefault(task, metric)
    folder = evaluation_folder(directory, int(newest["step"]))
    return RunSummary(
        title=title,
        costs=costs,
        losses=_series(training, "loss"),
        held_out=_series(evaluations, "loss"),
        steps_per_second=steps_per_second,
        tokens_per_second=tokens_per_second,
        metric_names=metric_names,
        metrics={task: newest[f"{task}/{name}"] for task, name in metric_names.items()},
        answers={task: _read_answers(folder / f"{task}.jsonl") for task in metric_names},
    )


def _series(records: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Returns the steps and values of a metric, without the records in which it is null or absent."""
    present = [record for record in records if record.get(name) is not None]
    return [record["step"] for record in present], [record[name] for record in present]


def _read_answers(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Returns the labeled predictions of a task by input; none if they were not written."""
    if not path.is_file():
        return {}
    with describing(path), path.open(encoding="utf-8") as file:
        records = map(json.loads, file)
        return {r["input"]: r for r in records if r.get("target") is not None and "prediction" in r}


def write_report(path: pathlib.Path, runs: Sequence[RunSummary], *, title: str) -> None:
    """Writes the page atomically: if this fails, an existing file stays as it is.

    Args:
      path: the file.
      runs: the compared runs; all their text is escaped.
      title: the heading.
    """
    names: dict[str, str] = {}
    for run in reversed(runs):
        names |= run.metric_names
    tasks = [task for run in runs for task in run.metric_names]
    chart = line_chart(
        {run.title: run.losses for run in runs},
        points={run.title: run.held_out for run in runs},
        x_label="step",
        y_label="nats per target token",
    )
    page = ENVIRONMENT.get_template("report.html.jinja").render(
        title=title,
        comparison=compare(runs),
        runs=runs,
        metrics=[(task, names[task], _scores(runs, task)) for task in dict.fromkeys(tasks)],
        answers=list(_compare_answers(runs)),
        loss_chart=chart,
        quartiles=_format_quartiles,
        facts=provenance(),
    )
    write_atomic(path, page)


def compare(runs: Sequence[RunSummary]) -> str:
    """Returns sentences on how many tasks each run is ahead, and on their sizes and speeds."""
    first, *others = runs
    tasks = set(first.metrics).union(*(run.metrics for run in others))
    winners = [
        [r.title for r, (_, best) in zip(runs, _scores(runs, t), strict=True) if best]
        for t in tasks
    ]
    wins = [(run.title, winners.count([run.title])) for run in runs]
    if ties := sum(len(winner) > 1 for winner in winners):
        wins.append(("no run", ties))
    clauses = [f"{wins[0][0]} is ahead on {wins[0][1]} of {len(tasks)} tasks"]
    clauses[0] += "".join(f", {name} on {number}" for name, number in wins[1:])
    for other in others:
        size = first.costs.parameters / other.costs.parameters
        speed = np.median(first.steps_per_second) / np.median(other.steps_per_second)
        clauses.append(
            f"{first.title} has {size:.2f} times the parameters of {other.title} and trained at "
            f"{speed:.2f} times its speed on this machine"
        )
    sentence = "; ".join(clauses) + ". " if others and tasks else ""
    return f"{sentence}Each run has one seed, so differences of a few points may be due to chance."


def _scores(runs: Sequence[RunSummary], task: str) -> list[tuple[str, bool]]:
    """Returns the runs' metrics of a task as shown, and whether each is the best of them."""
    values = [round(run.metrics.get(task, math.nan), 1) for run in runs]
    best = max((v for v in values if not math.isnan(v)), default=math.nan)
    return [("–" if math.isnan(v) else f"{v:.1f}", v == best) for v in values]


def _compare_answers(runs: Sequence[RunSummary]) -> Iterator[tuple[str, str, str, list[Any]]]:
    """Yields task, input, target and each run's answer, first those that only some runs answer right."""
    for task in runs[0].answers:
        own = [run.answers.get(task, {}) for run in runs]
        shared = [text for text in own[0] if all(text in answers for answers in own)]
        answers = {text: [_judge(answers[text]) for answers in own] for text in shared}
        shared.sort(key=lambda text: len({right for _, right in answers[text]}) == 1)
        for text in shared[:ANSWERS]:
            yield task, text, own[0][text]["target"], answers[text]


def _judge(record: Mapping[str, Any]) -> tuple[str, bool | None]:
    """Returns an answer, and whether it is right; None where metrics do not compare labels."""
    right = record["label"] == record["target_label"] if "label" in record else None
    return record["prediction"], right


def _format_quartiles(values: Sequence[float], format_spec: str) -> str:
    """Formats the median and, in brackets, the first and the third quartile."""
    low, middle, high = (format(float(x), format_spec) for x in np.percentile(values, (25, 50, 75)))
    return f"{middle} ({low}–{high})"


def provenance() -> dict[str, str]:
    """Returns the versions of the libraries that a page is made with."""
    return {
        "synthesizer_jax": __version__,
        "jax": jax.__version__,
        "flax": flax.__version__,
        "Python": platform.python_version(),
    }
