"""The quickstart's report: one self-contained HTML page."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from synthesizer_jax.files import write_aside
from synthesizer_jax.reports.charts import bar_chart, heat_maps, line_chart
from synthesizer_jax.reports.text import escape

STYLE = """
:root { color-scheme: light; }
body { margin: 0; background: #f4f5f6; color: #33383d;
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 40px 28px 80px; }
h1 { font-size: 30px; margin: 0 0 4px; letter-spacing: -0.4px; }
h2 { font-size: 19px; margin: 0 0 10px; }
p { margin: 6px 0 14px; max-width: 78ch; }
.lead { color: #5f676e; font-size: 16px; }
section { background: #fff; border: 1px solid #e3e6e9; border-radius: 10px; padding: 22px 26px;
  margin-top: 22px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 6px 12px 6px 0; border-bottom: 1px solid #eceef0;
  vertical-align: top; }
th { font-weight: 600; color: #5f676e; font-size: 13px; }
td.n, th.n { text-align: right; }
td.best { font-weight: 650; color: #1b4f72; }
.scroll { overflow-x: auto; }
svg { width: 100%; min-width: 640px; height: auto; display: block; }
code { font: 13px ui-monospace, SFMono-Regular, Menlo, monospace; background: #f1f3f4;
  padding: 1px 5px; border-radius: 4px; overflow-wrap: break-word; }
td.input { min-width: 17em; max-width: 34em; }
.right { color: #2b6b45; }
.wrong { color: #b23a48; }
.note { color: #6d757c; font-size: 13.5px; }
footer { color: #6d757c; font-size: 13px; margin-top: 26px; overflow-wrap: break-word; }
@media (max-width: 600px) {
  main { padding: 22px 10px 40px; }
  section { padding: 16px 14px; }
  h1 { font-size: 24px; overflow-wrap: break-word; }
}
"""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a run said to an example, and whether that is right by the task's own rule."""

    text: str
    right: bool


@dataclasses.dataclass(frozen=True)
class RunReport:
    """What the page shows of one run.

    Attributes:
      title: its name.
      parameters: number of trainable parameters.
      cache_bytes: decoding cache per position and example.
      flops: forward FLOPs per token.
      losses: ``(steps, nats per token)`` of training.
      held_out: ``(steps, nats per token)`` of the evaluations.
      steps_per_second: of every line of the training log, compilation left out.
      tokens_per_second: the same for real tokens.
      metrics: main metric by task, in percent.
      attention: layers' weights ``[heads, q, k]`` on the example, encoder self-attention.
      tables: layers' softmax of the learned table alone, where there is one.
      answers: to the page's examples, in their order.
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


@dataclasses.dataclass(frozen=True)
class Example:
    """An example that the page shows: task, input and right answer, or ``not`` and a wrong one."""

    task: str
    text: str
    answer: str


@dataclasses.dataclass(frozen=True)
class Report:
    """The whole page.

    Attributes:
      title: heading.
      lead: one or two sentences under it.
      runs: the compared runs.
      metric_names: name of the main metric by task.
      facts: label and value, such as versions and hardware.
      baselines: main metric by task, by baseline name.
      counts: number of held-out examples by task, if known.
      examples: the examples whose answers are shown.
      tokens: pieces of the example whose attention is shown.
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


def write_report(path: pathlib.Path, report: Report) -> None:
    """Writes the page aside and renames it into place; where that fails, nothing is left of it."""
    write_aside(path, render(report))


def render(report: Report) -> str:
    """The page as HTML; every text from outside is escaped."""
    sections = [
        *(
            [section("Metrics on held-out examples", metrics_part(report))]
            if report.metric_names
            else []
        ),
        section("Loss", loss_part(report)),
        section("Cost and speed", speed_part(report)),
        *([section("Answers", answers_part(report))] if report.examples else []),
        *(
            section(f"Who looks at whom: {run.title}", attention_part(run, report))
            for run in report.runs
            if run.attention
        ),
    ]
    facts = " · ".join(f"{escape(k)} {escape(v)}" for k, v in report.facts.items())
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(report.title)}</title><style>{STYLE}</style><main>"
        f'<h1>{escape(report.title)}</h1><p class="lead">{escape(report.lead)}</p>'
        f"<p>{escape(conclusion(report))}</p>"
        f"{''.join(sections)}<footer>{facts}</footer></main></html>\n"
    )


def conclusion(report: Report) -> str:
    """What the numbers say, as they are shown: who is ahead on how many tasks, and at which cost."""
    tasks, parts = list(report.metric_names), []
    ahead, level, beaten = {run.title: 0 for run in report.runs}, 0, []
    for task in tasks:
        values = [shown(run.metrics.get(task)) for run in report.runs]
        best = [run.title for run, v in zip(report.runs, values, strict=True) if v == max(values)]
        if len(best) == 1:
            ahead[best[0]] += 1
        else:
            level += 1
        if any(shown(b.get(task)) > max(values) for b in report.baselines.values()):
            beaten.append(task_name(task))
    if len(report.runs) > 1 and tasks:
        (title, count), *rest = (*ahead.items(), *([("no model", level)] if level else []))
        others_ahead = "".join(f", {name} on {number}" for name, number in rest)
        parts.append(f"{title} is ahead on {count} of {len(tasks)} tasks{others_ahead}")
    if beaten:
        where = "every task" if len(beaten) == len(tasks) else ", ".join(beaten)
        parts.append(f"{'a' if parts else 'A'} baseline is better than the models on {where}")
    first, *others = report.runs
    for other in others:
        size = first.parameters / other.parameters
        speed = np.median(first.steps_per_second) / np.median(other.steps_per_second)
        parts.append(
            f"{first.title} has {size:.2f} times the parameters of {other.title} and made "
            f"{speed:.2f} times its steps a second on this machine"
        )
    said = "; ".join(parts) + ". " if parts else ""
    return f"{said}Every run is one seed: differences of a few points can be chance."


def shown(value: float | None) -> float:
    """A metric as the page shows it, with one decimal; minus infinity where there is none."""
    return -math.inf if value is None or math.isnan(value) else round(value, 1)


def metrics_part(report: Report) -> str:
    """The table of all systems by task, and its bars."""
    systems = {run.title: run.metrics for run in report.runs} | dict(report.baselines)
    heads = ["task", "metric", *(["examples"] if report.counts else []), *systems]
    rows = []
    for task in report.metric_names:
        values = [shown(system.get(task)) for system in systems.values()]
        cells = [
            cell(task_name(task)),
            cell(report.metric_names[task]),
            *([cell(f"{report.counts[task]:,}", number=True)] if report.counts else []),
            *(
                cell(f"{v:.1f}" if v > -math.inf else "–", number=True, best=v == max(values))
                for v in values
            ),
        ]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    bars = bar_chart(
        [task_name(t) for t in report.metric_names],
        {name: [m.get(t, 0.0) for t in report.metric_names] for name, m in systems.items()},
        y_label="percent",
        grey=len(report.baselines),
    )
    known = "".join(f" {BASELINES[name]}" for name in report.baselines if name in BASELINES)
    return (
        f"<p>One model answers all tasks as text.{known} The best of a row is bold.</p>"
        + table(heads, rows, numbers_from=2)
        + scroll(bars)
    )


BASELINES = {
    "Majority": "<b>Majority</b> always gives the most frequent training answer.",
    "Bag of words": "<b>Bag of words</b> is a linear classifier over the words that occur, fitted to each "
    "task on its own.",
}


def loss_part(report: Report) -> str:
    """Training curves and held-out points."""
    chart = line_chart(
        {run.title: run.losses for run in report.runs},
        markers={run.title: run.held_out for run in report.runs},
        x_label="step",
        y_label="nats per target token",
        size=(9.6, 3.4),
    )
    return "<p>Teacher-forced cross-entropy: lines in training, points held out.</p>" + scroll(
        chart
    )


def speed_part(report: Report) -> str:
    """What every run costs."""
    heads = ("", "parameters", "kFLOPs / token", "cache B / position", "steps / s", "tokens / s")
    rows = [
        "<tr>"
        + cell(run.title)
        + "".join(
            cell(text, number=True)
            for text in (
                f"{run.parameters:,}",
                f"{run.flops / 1e3:,.0f}",
                f"{run.cache_bytes:,}",
                median(run.steps_per_second, ".1f"),
                median(run.tokens_per_second, ",.0f"),
            )
        )
        + "</tr>"
        for run in report.runs
    ]
    return (
        "<p>FLOPs of a forward pass per token of input and target; the cache is what decoding keeps "
        "per position and example. Speeds are the median of the training log's lines on this machine, with "
        "the middle half of them in brackets; compilation is left out.</p>"
        + table(heads, rows, numbers_from=1)
    )


def median(values: Sequence[float], form: str) -> str:
    """The median, and the range of the middle half."""
    low, middle, high = (format(float(x), form) for x in np.percentile(values, (25, 50, 75)))
    return f"{middle} ({low}–{high})"


def answers_part(report: Report) -> str:
    """Some examples with every run's answer, those first that not all runs have right or wrong."""
    agreed = lambda i: len({run.answers[i].right for run in report.runs}) == 1
    rows = []
    for i in sorted(range(len(report.examples)), key=agreed):
        example = report.examples[i]
        cells = [
            f'<td class="input"><code>{escape(example.text)}</code></td>',
            cell(example.answer),
        ]
        for run in report.runs:
            answer = run.answers[i]
            kind = "right" if answer.right else "wrong"
            cells.append(f'<td class="{kind}">{escape(answer.text) or "(nothing)"}</td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    heads = ["input", "answer", *(run.title for run in report.runs)]
    return (
        "<p>Green is right and red is wrong, by the task's own rule. Where the answer is <b>not</b> a "
        "name, any other name is right.</p>" + table(heads, rows)
    )


def attention_part(run: RunReport, report: Report) -> str:
    """Heat maps of one run."""
    text = (
        '<p class="note">Encoder self-attention on one held-out example: rows are queries, columns '
        "are keys, dark is much; a layer has one scale, its bar on the right.</p>"
    )
    maps = [(f"layer {i + 1}", weights) for i, weights in enumerate(run.attention)]
    parts = [text, scroll(heat_maps(maps, tokens=report.tokens))]
    if run.tables:
        tables = [(f"layer {i + 1}", weights) for i, weights in enumerate(run.tables)]
        parts.append(
            '<p class="note">softmax(R), the learned table alone: the same for every input.</p>'
        )
        parts.append(scroll(heat_maps(tables)))
    return "".join(parts)


def section(title: str, body: str) -> str:
    """A card of the page."""
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def table(heads: Sequence[str], rows: Sequence[str], *, numbers_from: int = 99) -> str:
    """A table whose rows are HTML already."""
    head = "".join(
        f"<th{' class=n' if i >= numbers_from else ''}>{escape(h)}</th>"
        for i, h in enumerate(heads)
    )
    return scroll(f"<table><tr>{head}</tr>{''.join(rows)}</table>")


def scroll(body: str) -> str:
    """What may be wider than its card, and is then moved inside it."""
    return f'<div class="scroll">{body}</div>'


def cell(text: str, *, number: bool = False, best: bool = False) -> str:
    """A table cell with escaped text."""
    kinds = " ".join(k for k, on in (("n", number), ("best", best)) if on)
    return f'<td class="{kinds}">{escape(text)}</td>' if kinds else f"<td>{escape(text)}</td>"


def task_name(task: str) -> str:
    """A task's name without the benchmark's prefix."""
    return task.removeprefix("embedded_")
