"""Writes the HTML page that compares systems, based on the logs of their runs."""

from __future__ import annotations

import collections
import itertools
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from markupsafe import Markup

from synthesizer_jax.evaluation.scoring import LOWER_IS_BETTER
from synthesizer_jax.reports.figures import Cell, Line, line_chart, write_page
from synthesizer_jax.reports.logged import LoggedRun, Record, System, differences

Shared: TypeAlias = Mapping[str, list[list[list[Record]]]]
"""Maps each task to the records of the examples that all runs with the task share.

The lists are nested by example, by system and by the runs of the system.
"""


def write_report(path: pathlib.Path, systems: Sequence[System]) -> list[list[Cell]]:
    """Writes a page that compares systems, or shows one system.

    The file is replaced atomically, and all texts are escaped.

    Args:
      path: the HTML file to write.
      systems: one or more systems.

    Returns:
      The rows of the table of scores. In the first cell of a row, the text is the name of a task,
      and the note is the name of a metric. The other cells of a row contain the scores of the
      systems.
    """
    runs = [run for system in systems for run in system.runs]
    tasks = dict.fromkeys(task for run in runs for task in run.answers)
    shared = {task: _shared_answers(systems, task) for task in tasks}
    scores = _scores(systems)
    write_page(
        path,
        template="compare.html.jinja",
        title=f"Comparison of {len(systems)} systems" if len(systems) > 1 else systems[0].name,
        systems=[Cell(system.name, f"c{i % 8 + 1}") for i, system in enumerate(systems)],
        runs=len(runs),
        alone=min(len(system.runs) for system in systems) == 1,
        steps=sorted({max(run.evaluations) for run in runs if run.evaluations}),
        scores=scores,
        curves=_curves(systems),
        answers=list(_answers(shared)),
        speed=list(map(_speed, systems)),
        settings=[
            [Cell(path, "code"), *(Cell(value, "code") for value in values)]
            for path, values in differences([system.runs[0].experiment for system in systems])
        ],
    )
    return scores


def _scores(systems: Sequence[System]) -> list[list[Cell]]:
    """Returns the rows of the table of scores, one row for each task and metric.

    The first cell names the task and the metric. Every other cell belongs to a system, and contains
    the mean over the system's runs. If the system has several runs, the mean is followed by its
    standard error. If the metric is accuracy, the note is the confidence interval.
    """
    names = dict.fromkeys(name for s in systems for run in s.runs for name in run.newest)
    tasks = [name for name in names if "/" in name and not name.endswith("/loss")]
    overall = [name for name in ("GLUE", "SuperGLUE", "score", "loss") if name in names]
    # A measure that is computed over all tasks can be compared only between runs with the same
    # tasks.
    same_tasks = len({frozenset(run.newest) for s in systems for run in s.runs}) == 1
    rows = []
    for name in (*tasks, *overall):
        task, _, metric = name.rpartition("/")
        lower_is_better = metric in LOWER_IS_BETTER
        if metric == "loss":
            digits = 3
        else:
            digits = 2 if lower_is_better else 1

        # Find the runs of each system that have the measure, and compute the mean of each system.
        runs = [[run for run in system.runs if name in run.newest] for system in systems]
        means = [_mean([run.newest[name] for run in measured], digits) for measured in runs]
        numbers = [mean for mean in means if not math.isnan(mean)]
        best = None
        if len(set(numbers)) > 1 and (task or same_tasks):
            best = min(numbers) if lower_is_better else max(numbers)

        cells = [Cell(task or "all tasks", note=f"{metric} ↓" if lower_is_better else metric)]
        for mean, measured in zip(means, runs, strict=True):
            text = "–" if math.isnan(mean) else f"{mean:,.{digits}f}"
            if len(measured) > 1:
                values = [run.newest[name] for run in measured]
                error = np.std(values, ddof=1) / math.sqrt(len(values))
                text += f" ± {error:,.{digits}f}"
            note = _interval_of_runs(measured, task) if metric == "accuracy" else ""
            cells.append(Cell(text, "best" if mean == best else "", note))
        rows.append(cells)
    return rows


def _mean(values: Sequence[float], digits: int) -> float:
    """Returns the rounded mean of a list of values, or NaN if the list is empty."""
    return round(sum(values) / len(values), digits) if values else math.nan


def _interval_of_runs(runs: Sequence[LoggedRun], task: str) -> str:
    """Returns the confidence interval of the runs' accuracies as text, averaged over the runs.

    The text is empty if no run has labeled answers.
    """
    intervals = [_interval(list(run.answers[task].values())) for run in runs if task in run.answers]
    if not intervals:
        return ""
    low, high = np.mean(intervals, axis=0)
    return "" if math.isnan(low) else f"{low:.1f} to {high:.1f}"


def _interval(answers: Sequence[Record]) -> tuple[float, float]:
    """Returns Wilson's 95% confidence interval (1927) of an accuracy, in percent.

    Both bounds of the interval are NaN if the answers have no labels.
    """
    z = 1.96
    n = len(answers)
    share = _share_right(answers)
    center = share + z**2 / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    low, high = (100 * (center + end) / (1 + z**2 / n) for end in (-half, half))
    return low, high


def _curves(systems: Sequence[System]) -> tuple[list[Markup], list[Markup]]:
    """Returns two lists of charts with the training step on the x axis.

    The first list contains a chart of the mean score over all tasks, and a chart of the loss. If
    there is only one task, the first chart shows the score of this task. If there are several
    tasks, the second list contains a chart for each of them. Charts of scores are left out if there
    was only one evaluation.
    """
    names = dict.fromkeys(name for s in systems for run in s.runs for name in run.newest)
    # Keep only the first measure of every task.
    first = {name.rpartition("/")[0]: name for name in reversed(names) if "/" in name}
    shown = list(reversed(first.values()))
    if len(first) > 1:
        shown.insert(0, "score")
    blank: dict[str, Line] = {system.name: ([], []) for system in systems}
    charts = []
    for name in shown:
        points = {system.name: system.curve("evaluations", name) for system in systems}
        task, _, metric = name.rpartition("/")
        if max(len(x) for x, *_ in points.values()) > 1:
            chart = line_chart(
                blank,
                points=points,
                x_label="step",
                y_label=metric,
                title=task or "mean over tasks",
                logarithmic=metric in LOWER_IS_BETTER,
            )
            charts.append(chart)
    loss = line_chart(
        {system.name: system.curve("training", "loss", most=120) for system in systems},
        points={system.name: system.curve("evaluations", "loss") for system in systems},
        x_label="step",
        y_label="nats per target token",
        title="loss",
    )
    return [*charts[:1], loss], charts[1:]


def _shared_answers(systems: Sequence[System], task: str) -> list[list[list[Record]]]:
    """Returns the answers to the examples of a task, in the form that `Shared` describes."""
    runs = [[run.answers[task] for run in s.runs if task in run.answers] for s in systems]
    every = list(itertools.chain(*runs))
    keys = [key for key in every[0] if all(key in answers for answers in every)]
    return [[[answers[key] for answers in of_system] for of_system in runs] for key in keys]


def _share_right(records: Sequence[Record]) -> float:
    """Returns the fraction of records whose answer is right, or NaN if no record has a label."""
    right = [r["label"] == r["target_label"] for r in records if "label" in r]
    return sum(right) / len(right) if right else math.nan


def _answers(shared: Shared) -> Iterator[list[str | Cell | list[Cell]]]:
    """Yields the rows of a table of examples: the input, the target and each system's answers.

    The table shows the four examples of each task in which the systems differ most.
    """

    def order(example: list[list[Record]]) -> tuple[float, float]:
        """Returns a sort key that is smaller for examples in which systems differ more.

        If the examples have labels, the key is based on the difference between the lowest and the
        highest fraction of right answers of a system. If there are no labels, the key is based on
        the number of different predictions.
        """
        shares = list(map(_share_right, filter(None, example)))
        if math.isnan(shares[0]):
            return -len({record["prediction"] for of_system in example for record in of_system}), 0
        return min(shares) - max(shares), sum(shares)

    for task, examples in shared.items():
        for example in sorted(examples, key=order)[:4]:
            record = next(filter(None, example))[0]
            cells = [_judge(of_system) or "–" for of_system in example]
            yield [Cell(record["input"], note=task), record["target"], *cells]


def _judge(records: Sequence[Record]) -> list[Cell]:
    """Returns the distinct answers of a system's runs, with the number of runs that gave each one.

    If the task has labels, an answer is marked as right or wrong.
    """
    kinds = {1.0: "right", 0.0: "wrong"}
    counts = collections.Counter(
        (record["prediction"] or "(empty)", kinds.get(_share_right([record]), ""))
        for record in records
    )
    num_runs = len(records)
    return [
        Cell(text, kind, f"{count} of {num_runs}" if num_runs > 1 else "")
        for (text, kind), count in counts.most_common()
    ]


def _speed(system: System) -> list[str | Cell]:
    """Returns the row of a system in the table that compares training speed.

    The row contains the name, the number of runs, the steps, the parameters and the rates. The text
    of a rate is the median over all logged steps, and its note contains the quartiles.
    """
    sizes, adapters = (
        " or ".join(f"{number:,}" for number in sorted({*numbers} - {None}))
        for numbers in zip(*((run.parameters, run.adapters) for run in system.runs), strict=True)
    )
    steps = max(max([*run.training, *run.evaluations]) for run in system.runs)
    row: list[str | Cell] = [system.name, str(len(system.runs)), f"{steps:,}"]
    row.append(Cell(sizes or "–", note=f"{adapters} in adapters" if adapters else ""))
    for name, digits in (("steps_per_second", 1), ("tokens_per_second", 0)):
        rates = [r[name] for run in system.runs for r in run.training.values() if r.get(name)]
        low, median, high = (f"{x:,.{digits}f}" for x in np.percentile(rates or [0], (25, 50, 75)))
        row.append(Cell(median, note=f"{low} to {high}") if rates else "–")
    return row
