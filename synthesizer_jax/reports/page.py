"""The page that compares runs by what they logged."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from synthesizer_jax.costs.summary import Summary, summarize
from synthesizer_jax.evaluation.files import evaluation_folder
from synthesizer_jax.evaluation.texts import LOWER_IS_BETTER
from synthesizer_jax.files import describing
from synthesizer_jax.reports.figures import Cell, Section, line_chart, write_page
from synthesizer_jax.runs.metrics import METRICS_FILE, read_metrics
from synthesizer_jax.training.movement import Group, Movement, read_movement
from synthesizer_jax.training.run_directory import load_experiment

ANSWERS = 3
"""Examples of each task whose answers are shown."""

ROUNDING = 1e-6
"""A relative change below this is none: compiled into another program, initializers differ by so much."""

Series: TypeAlias = tuple[Sequence[float], Sequence[float]]
"""Steps and values of a measure, without the records in which it is null or absent."""


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """The costs and logged results of one run.

    Attributes:
      title: the run's name.
      costs: those of its model.
      training: measures of the training log by name.
      held_out: the loss of the evaluations, in nats per token.
      metrics: the first metric of each task that has one in the newest evaluation: its name, and its value
        in percent; texts have none.
      answers: the predictions of that evaluation by task and input, as in ``TASK.jsonl``.
      movement: how far its parameters moved; None: the run has not finished.
    """

    title: str
    costs: Summary
    training: Mapping[str, Series]
    held_out: Series
    metrics: Mapping[str, tuple[str, float]]
    answers: Mapping[str, Mapping[str, dict[str, Any]]]
    movement: Movement | None = None


def summarize_run(title: str, directory: pathlib.Path) -> RunSummary:
    """Returns the costs and the logged results of a run.

    Raises:
      FileNotFoundError: there is no run in the directory.
      ValueError: the run has logged no evaluation yet.
    """
    experiment = load_experiment(directory)
    lengths = experiment.data.lengths
    log = directory / METRICS_FILE
    records = read_metrics(log) if log.exists() else []

    def series(kind: str, name: str) -> Series:
        found = [r for r in records if r["kind"] == kind and r.get(name) is not None]
        return [r["step"] for r in found], [r[name] for r in found]

    names = ("loss", "steps_per_second", "tokens_per_second")
    training = {name: series("train", name) for name in names}
    evaluations = [record for record in records if record["kind"] == "eval"]
    if not (evaluations and all(values for _, values in training.values())):
        raise ValueError(f"{log} holds no evaluation; continue the run until its first evaluation")
    metrics: dict[str, tuple[str, float]] = {}
    for key, value in evaluations[-1].items():
        task, slash, metric = key.rpartition("/")
        if slash and value is not None and metric not in LOWER_IS_BETTER:
            metrics.setdefault(task, (metric, value))
    folder = evaluation_folder(directory, int(evaluations[-1]["step"]))
    return RunSummary(
        title=title,
        costs=summarize(
            experiment.model, inputs_length=lengths["inputs"], targets_length=lengths["targets"]
        ),
        training=training,
        held_out=series("eval", "loss"),
        metrics=metrics,
        answers={task: _read_answers(folder / f"{task}.jsonl") for task in metrics},
        movement=read_movement(directory),
    )


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
    titles = [run.title for run in runs]
    chart = line_chart(
        {run.title: run.training["loss"] for run in runs},
        points={run.title: run.held_out for run in runs},
        x_label="step",
        y_label="nats per target token",
    )
    costs = []
    for run in runs:
        speeds = (run.training[f"{unit}_per_second"][1] for unit in ("steps", "tokens"))
        steps, tokens = (float(np.median(values)) for values in speeds)
        flops, cache = run.costs.flops_per_token / 1000, run.costs.cache_bytes_per_token
        numbers = (f"{run.costs.parameters:,}", f"{flops:,.0f}", f"{cache:,}")
        costs.append((run.title, *numbers, f"{steps:.1f}", f"{tokens:,.0f}"))
    sections = [
        Section(
            "Metrics on held-out examples",
            "Of the newest evaluation, in percent. The best value of each row is bold. Each run has one "
            "seed, so differences of a few points may be due to chance.",
            headings=("task", "metric", *titles),
            rows=metric_rows(runs),
        ),
        Section(
            "Answers",
            "Of each task first those that only some runs answer right, by the labels that metrics "
            "compare. All are in evaluation/STEP/TASK.jsonl of a run.",
            headings=("input", "target", *titles),
            rows=list(_compare_answers(runs)),
            numbers=False,
        ),
        Section(
            "Loss",
            "Cross-entropy with teacher forcing: the lines are training, the points held-out examples.",
            charts=[chart],
        ),
        Section(
            "Cost and speed",
            "FLOPs are those of a forward pass per token of input and target; the cache is the memory "
            "that decoding needs per position and example. Speeds are medians over the lines of the "
            "training log, measured on this machine without compilation.",
            headings=(
                *("run", "parameters", "kFLOPs / token", "cache B / position"),
                *("steps / s", "tokens / s"),
            ),
            rows=costs,
        ),
    ]
    sections += [
        _movement_section(run.title, run.movement) for run in runs if run.movement is not None
    ]
    write_page(path, title=title, sections=[s for s in sections if s.rows or s.charts])


def _movement_section(title: str, movement: Movement) -> Section:
    return Section(
        f"Change of the parameters: {title}",
        f"Euclidean distance from {movement.since}, relative to the norm there, over all layers.",
        headings=("parameters", "number", "frozen", "change"),
        rows=[
            (g.path, f"{g.parameters:,}", f"{g.frozen / g.parameters:.0%}", format_change(g))
            for g in movement.groups
        ],
        folded=True,
    )


def metric_rows(runs: Sequence[RunSummary]) -> list[list[str | Cell]]:
    """Returns a row of each task: its name, its metric, and each run's value, the best as a `Cell`."""
    rows = []
    for task in dict.fromkeys(task for run in runs for task in run.metrics):
        found = [run.metrics.get(task, ("", math.nan)) for run in runs]
        values = [round(value, 1) for _, value in found]
        best = max((v for v in values if not math.isnan(v)), default=math.nan)
        texts = ["–" if math.isnan(value) else f"{value:.1f}" for value in values]
        cells = [Cell(t, "best") if v == best else t for t, v in zip(texts, values, strict=True)]
        rows.append([task, next(name for name, _ in found if name), *cells])
    return rows


def _compare_answers(runs: Sequence[RunSummary]) -> Iterator[list[str | Cell]]:
    """Yields input, target and each run's answer, first those that only some runs answer right."""
    for task in runs[0].answers:
        own = [run.answers.get(task, {}) for run in runs]
        shared = [text for text in own[0] if all(text in answers for answers in own)]
        cells = {text: [_judge(answers[text]) for answers in own] for text in shared}
        shared.sort(key=lambda text: len({cell.kind for cell in cells[text]}) == 1)
        for text in shared[:ANSWERS]:
            yield [text, own[0][text]["target"], *cells[text]]


def _judge(record: Mapping[str, Any]) -> Cell:
    """Returns an answer, marked as right or wrong where metrics compare labels."""
    answer = record["prediction"] or "(empty)"
    if "label" not in record:
        return Cell(answer, "")
    right = record["label"] == record["target_label"]
    return Cell(f"{'✓' if right else '✗'} {answer}", "right" if right else "wrong")


def format_change(group: Group) -> str:
    """Formats how far the parameters of a path moved; rounding errors of initial parameters are 0."""
    if math.isinf(group.change):
        return f"from 0 to a norm of {group.distance:.3g}"
    return "0" if group.change < ROUNDING else f"{100 * group.change:.3g} %"
