"""The HTML report, one self-contained page: the data of the template ``report.html.jinja``."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import jinja2
import numpy as np
from markupsafe import Markup

from synthesizer_jax.files import write_atomic
from synthesizer_jax.reports.charts import bar_chart, heat_maps, line_chart
from synthesizer_jax.reports.text import printable
from synthesizer_jax.training.movement import Group, Movement

BASELINES = {
    "Majority": "always predicts the most frequent training answer.",
    "Bag of words": "is a linear classifier of the words in the input, trained separately for each task.",
}
"""Descriptions of the baselines, without their names."""

ROUNDING = 1e-6
"""A relative change below this is none: compiled into another program, initializers differ by so much."""

ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("synthesizer_jax.reports", "."),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    finalize=lambda value: value if isinstance(value, Markup) else printable(value),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


@dataclasses.dataclass(frozen=True)
class Answer:
    """A run's answer to an example, and whether it is correct by the rule of the task's metric."""

    text: str
    right: bool


@dataclasses.dataclass(frozen=True)
class RunReport:
    """The costs and results of one run.

    Attributes:
      title: the run's name.
      parameters: number of trainable parameters.
      cache_bytes: size of the decoding cache per position and example.
      flops: FLOPs of a forward pass per token.
      losses: ``(steps, nats per token)`` of training.
      held_out: ``(steps, nats per token)`` of the evaluations.
      steps_per_second: one value per line of the training log, without compilation.
      tokens_per_second: the same for real tokens.
      metrics: the main metric by task, in percent.
      attention: the weights of encoder self-attention on one example, ``[heads, q, k]`` per layer.
      tables: the softmax of the learned table alone, for each layer that has a table.
      answers: one per example of the report.
      movement: how far its parameters moved; None: the run has not finished.
    """

    title: str
    parameters: int
    cache_bytes: int
    flops: int
    losses: tuple[Sequence[float], Sequence[float]]
    held_out: tuple[Sequence[float], Sequence[float]]
    steps_per_second: Sequence[float]
    tokens_per_second: Sequence[float]
    metrics: Mapping[str, float]
    attention: Sequence[np.ndarray] = ()
    tables: Sequence[np.ndarray] = ()
    answers: Sequence[Answer] = ()
    movement: Movement | None = None


@dataclasses.dataclass(frozen=True)
class Example:
    """An example: its task, its input, and the expected answer, or ``not`` and a wrong answer."""

    task: str
    text: str
    answer: str


@dataclasses.dataclass(frozen=True)
class Report:
    """The content of the report.

    Attributes:
      title: the heading.
      lead: one or two sentences below the heading.
      runs: the compared runs.
      metric_names: the name of the main metric by task.
      facts: labels and values, such as versions and hardware.
      baselines: the main metric by task, by baseline name.
      counts: the number of held-out examples by task, if known.
      examples: the examples whose answers are shown.
      tokens: the tokens of the example whose attention weights are shown.
    """

    title: str
    lead: str
    runs: Sequence[RunReport]
    metric_names: Mapping[str, str]
    facts: Mapping[str, str]
    baselines: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    examples: Sequence[Example] = ()
    tokens: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class _Score:
    text: str
    best: bool


@dataclasses.dataclass(frozen=True)
class _MetricsRow:
    task: str
    metric: str
    examples: str
    scores: Sequence[_Score]


@dataclasses.dataclass(frozen=True)
class _MetricsSection:
    """A table and a bar chart of all systems by task.

    Attributes:
      systems: the names of the runs and baselines.
      baselines: names and descriptions of the baselines, as far as they have one.
      rows: one per task.
      chart: the same values.
    """

    systems: Sequence[str]
    baselines: Sequence[tuple[str, str]]
    rows: Sequence[_MetricsRow]
    chart: Markup


@dataclasses.dataclass(frozen=True)
class _Cost:
    """Formatted costs of a run."""

    run: str
    parameters: str
    kflops: str
    cache_bytes: str
    steps_per_second: str
    tokens_per_second: str


@dataclasses.dataclass(frozen=True)
class MovementRow:
    """The formatted movement of the parameters of one path in all layers."""

    path: str
    parameters: str
    frozen: str
    change: str


@dataclasses.dataclass(frozen=True)
class MovementSection:
    """A table of which parameters of a run moved, and how far, since its start."""

    run: str
    since: str
    rows: Sequence[MovementRow]


@dataclasses.dataclass(frozen=True)
class _AttentionMaps:
    """Heat maps of a run's attention weights, and of its learned tables if it has any."""

    run: str
    weights: Markup
    tables: Markup | None


def write_report(path: pathlib.Path, report: Report) -> None:
    """Writes the page atomically: if this fails, an existing file stays as it is."""
    write_atomic(path, render(report))


def render(report: Report) -> str:
    """Returns the page as HTML; all text of the report is escaped."""
    return ENVIRONMENT.get_template("report.html.jinja").render(
        title=report.title,
        facts=report.facts,
        report=report,
        comparison=_summarize_comparison(report),
        metrics=_metrics_section(report) if report.metric_names else None,
        loss_chart=_loss_chart(report.runs),
        costs=[_format_costs(run) for run in report.runs],
        movements=[
            movement_section(run.title, run.movement) for run in report.runs if run.movement
        ],
        examples=list(_examples_with_answers(report)),
        attention=[_attention_maps(run, report.tokens) for run in report.runs if run.attention],
    )


def _summarize_comparison(report: Report) -> str:
    """Returns sentences that compare the runs by their rounded metrics, parameters and speeds."""
    clauses = [*_compare_metrics(report), *_compare_costs(report.runs)]
    sentence = "; ".join(clauses) + ". " if clauses else ""
    return f"{sentence}Each run has one seed, so differences of a few points may be due to chance."


def _compare_metrics(report: Report) -> list[str]:
    """Counts the tasks on which each run is best, and lists those on which a baseline is better."""
    clauses: list[str] = []
    wins = {run.title: 0 for run in report.runs}
    ties = 0
    lost_to_baseline = []
    for task in report.metric_names:
        values = [_round_metric(run.metrics.get(task)) for run in report.runs]
        best = [
            run.title
            for run, value in zip(report.runs, values, strict=True)
            if value == max(values)
        ]
        if len(best) == 1:
            wins[best[0]] += 1
        else:
            ties += 1
        baselines = (_round_metric(b.get(task)) for b in report.baselines.values())
        if any(value > max(values) for value in baselines):
            lost_to_baseline.append(_task_name(task))
    num_tasks = len(report.metric_names)
    if len(report.runs) > 1 and num_tasks:
        (title, count), *others = [*wins.items(), *([("no model", ties)] if ties else [])]
        rest = "".join(f", {name} on {number}" for name, number in others)
        clauses.append(f"{title} is ahead on {count} of {num_tasks} tasks{rest}")
    if lost_to_baseline:
        every = len(lost_to_baseline) == num_tasks
        names = "every task" if every else ", ".join(lost_to_baseline)
        clauses.append(f"{'a' if clauses else 'A'} baseline is better than the models on {names}")
    return clauses


def _compare_costs(runs: Sequence[RunReport]) -> Iterator[str]:
    """Yields the parameters and the speed of the first run relative to each other run."""
    first, *others = runs
    for other in others:
        size = first.parameters / other.parameters
        speed = np.median(first.steps_per_second) / np.median(other.steps_per_second)
        yield (
            f"{first.title} has {size:.2f} times the parameters of {other.title} and trained at "
            f"{speed:.2f} times its speed on this machine"
        )


def _round_metric(value: float | None) -> float:
    """Rounds a metric to the one decimal that is shown; returns minus infinity for None and NaN."""
    return -math.inf if value is None or math.isnan(value) else round(value, 1)


def _metrics_section(report: Report) -> _MetricsSection:
    systems = {run.title: run.metrics for run in report.runs} | dict(report.baselines)
    chart = bar_chart(
        [_task_name(task) for task in report.metric_names],
        {
            name: [metrics.get(task, 0.0) for task in report.metric_names]
            for name, metrics in systems.items()
        },
        y_label="percent",
        gray=len(report.baselines),
    )
    return _MetricsSection(
        systems=list(systems),
        baselines=[(name, BASELINES[name]) for name in report.baselines if name in BASELINES],
        rows=[
            _MetricsRow(
                task=_task_name(task),
                metric=metric,
                examples=f"{report.counts[task]:,}" if report.counts else "",
                scores=_format_scores([metrics.get(task) for metrics in systems.values()]),
            )
            for task, metric in report.metric_names.items()
        ],
        chart=chart,
    )


def _format_scores(values: Sequence[float | None]) -> list[_Score]:
    """Formats the metrics of one task; those that equal the maximum as shown are the best."""
    rounded = [_round_metric(value) for value in values]
    return [_Score(f"{x:.1f}" if x > -math.inf else "–", x == max(rounded)) for x in rounded]


def _loss_chart(runs: Sequence[RunReport]) -> Markup:
    return line_chart(
        {run.title: run.losses for run in runs},
        markers={run.title: run.held_out for run in runs},
        x_label="step",
        y_label="nats per target token",
        size=(9.6, 3.4),
    )


def _format_costs(run: RunReport) -> _Cost:
    return _Cost(
        run=run.title,
        parameters=f"{run.parameters:,}",
        kflops=f"{run.flops / 1e3:,.0f}",
        cache_bytes=f"{run.cache_bytes:,}",
        steps_per_second=_format_quartiles(run.steps_per_second, ".1f"),
        tokens_per_second=_format_quartiles(run.tokens_per_second, ",.0f"),
    )


def _format_quartiles(values: Sequence[float], format_spec: str) -> str:
    """Formats the median and, in brackets, the first and the third quartile."""
    low, middle, high = (format(float(x), format_spec) for x in np.percentile(values, (25, 50, 75)))
    return f"{middle} ({low}–{high})"


def movement_section(title: str, movement: Movement) -> MovementSection:
    """Formats the movement of a run's parameters.

    Args:
      title: the run's name.
      movement: its movement.
    """
    rows = [
        MovementRow(
            path=group.path,
            parameters=f"{group.parameters:,}",
            frozen=_format_frozen(group),
            change=_format_change(group),
        )
        for group in movement.groups
    ]
    return MovementSection(title, movement.since, rows)


def _format_frozen(group: Group) -> str:
    share = group.frozen / group.parameters
    return "–" if not share else "all" if share == 1 else f"{share:.0%}"


def _format_change(group: Group) -> str:
    """Formats the change in percent; rounding errors of initial parameters that are made again are 0."""
    if math.isinf(group.change):
        return f"from 0 to a norm of {group.distance:.3g}"
    return "0" if group.change < ROUNDING else f"{100 * group.change:.3g} %"


def _examples_with_answers(report: Report) -> Iterator[tuple[Example, list[Answer]]]:
    """Yields every example with the runs' answers, first those that only some runs answer right."""
    pairs = [
        (example, [run.answers[i] for run in report.runs])
        for i, example in enumerate(report.examples)
    ]
    yield from sorted(pairs, key=lambda pair: len({answer.right for answer in pair[1]}) == 1)


def _attention_maps(run: RunReport, tokens: Sequence[str]) -> _AttentionMaps:
    weights, tables = (
        [(f"layer {i}", layer) for i, layer in enumerate(layers, start=1)]
        for layers in (run.attention, run.tables)
    )
    return _AttentionMaps(
        run.title, heat_maps(weights, tokens=tokens), heat_maps(tables) if tables else None
    )


def _task_name(task: str) -> str:
    """Returns a task's name without the prefix of the synthetic tasks."""
    return task.removeprefix("synthetic_")
