"""The quickstart's report: one self-contained HTML page."""

from __future__ import annotations

import dataclasses
import html
import os
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from synthesizer_jax.reports.charts import bar_chart, heat_maps, line_chart

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
svg { width: 100%; height: auto; display: block; }
code { font: 13px ui-monospace, SFMono-Regular, Menlo, monospace; background: #f1f3f4;
  padding: 1px 5px; border-radius: 4px; overflow-wrap: anywhere; }
.wrong { color: #b23a48; }
.note { color: #6d757c; font-size: 13.5px; }
footer { color: #6d757c; font-size: 13px; margin-top: 26px; }
"""


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
      steps_per_second: median over the run's intervals, compilation left out.
      tokens_per_second: the same for real tokens.
      metrics: main metric by task, in percent.
      attention: layers' weights ``[heads, q, k]`` on the example, encoder self-attention.
      tables: layers' softmax of the learned table alone, where there is one.
      predictions: answers to the page's examples, in their order.
    """

    title: str
    parameters: int
    cache_bytes: int
    flops: int
    losses: tuple[Sequence[float], Sequence[float]]
    held_out: tuple[Sequence[float], Sequence[float]]
    steps_per_second: float
    tokens_per_second: float
    metrics: Mapping[str, float]
    attention: Sequence[np.ndarray]
    tables: Sequence[np.ndarray]
    predictions: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Example:
    """An example that the page shows: task, input and right answer."""

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
      baselines: main metric by task, by baseline name.
      metric_names: name of the main metric by task.
      counts: number of held-out examples by task.
      examples: the examples whose predictions are shown.
      tokens: pieces of the example whose attention is shown.
      facts: label and value, such as versions and hardware.
    """

    title: str
    lead: str
    runs: Sequence[RunReport]
    baselines: Mapping[str, Mapping[str, float]]
    metric_names: Mapping[str, str]
    counts: Mapping[str, int]
    examples: Sequence[Example]
    tokens: Sequence[str]
    facts: Mapping[str, str]


def write_report(path: pathlib.Path, report: Report) -> None:
    """Writes the page aside and renames it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(render(report), encoding="utf-8")
    os.replace(aside, path)


def render(report: Report) -> str:
    """The page as HTML; every text from outside is escaped."""
    sections = [
        section("Metrics on held-out examples", metrics_part(report)),
        section("Loss", loss_part(report)),
        section("Cost and speed", speed_part(report)),
        section("Answers", answers_part(report)),
        *(
            section(f"Who looks at whom: {run.title}", attention_part(run, report))
            for run in report.runs
        ),
    ]
    facts = " · ".join(f"{escape(k)} {escape(v)}" for k, v in report.facts.items())
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(report.title)}</title><style>{STYLE}</style><main>"
        f'<h1>{escape(report.title)}</h1><p class="lead">{escape(report.lead)}</p>'
        f"{''.join(sections)}<footer>{facts}</footer></main></html>\n"
    )


def metrics_part(report: Report) -> str:
    """The table of all systems by task, and its bars."""
    systems = {run.title: run.metrics for run in report.runs} | dict(report.baselines)
    heads = ["task", "metric", "examples", *systems]
    rows = []
    for task in report.metric_names:
        values = [system.get(task, float("nan")) for system in systems.values()]
        best = max(values[: len(report.runs)])
        cells = [
            cell(task_name(task)),
            cell(report.metric_names[task]),
            cell(f"{report.counts[task]:,}", number=True),
            *(
                cell(f"{v:.1f}", number=True, best=v == best and i < len(report.runs))
                for i, v in enumerate(values)
            ),
        ]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    bars = bar_chart(
        [task_name(t) for t in report.metric_names],
        {name: [m.get(t, 0.0) for t in report.metric_names] for name, m in systems.items()},
        y_label="percent",
    )
    return (
        "<p>One model answers all tasks as text. <b>Majority</b> always gives the most frequent "
        "training answer; <b>bag of words</b> is a linear classifier over the words that occur, "
        "fitted to each task on its own.</p>" + table(heads, rows, numbers_from=2) + bars
    )


def loss_part(report: Report) -> str:
    """Training curves and held-out points."""
    chart = line_chart(
        {run.title: run.losses for run in report.runs},
        markers={run.title: run.held_out for run in report.runs},
        x_label="step",
        y_label="nats per target token",
        size=(9.6, 3.4),
    )
    return "<p>Teacher-forced cross-entropy: lines in training, points held out.</p>" + chart


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
                f"{run.steps_per_second:.2f}",
                f"{run.tokens_per_second:,.0f}",
            )
        )
        + "</tr>"
        for run in report.runs
    ]
    return (
        "<p>FLOPs of a forward pass per token of input and target; the cache is what decoding keeps "
        "per position and example. Speed is the median over the run on this machine, compilation left "
        "out.</p>" + table(heads, rows, numbers_from=1)
    )


def answers_part(report: Report) -> str:
    """Some examples with every run's answer."""
    rows = []
    for i, example in enumerate(report.examples):
        answers = [run.predictions[i] for run in report.runs]
        cells = [f"<td><code>{escape(example.text)}</code></td>", cell(example.answer)]
        for answer in answers:
            kind = "" if answer == example.answer else ' class="wrong"'
            cells.append(f"<td{kind}>{escape(answer)}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return table(["input", "answer", *(run.title for run in report.runs)], rows)


def attention_part(run: RunReport, report: Report) -> str:
    """Heat maps of one run."""
    text = (
        '<p class="note">Encoder self-attention on one held-out example: rows are queries, columns '
        "are keys, dark is much; each map has its own scale.</p>"
    )
    maps = [(f"layer {i + 1}", weights) for i, weights in enumerate(run.attention)]
    parts = [text, heat_maps(maps, tokens=report.tokens)]
    if run.tables:
        tables = [(f"layer {i + 1}", weights) for i, weights in enumerate(run.tables)]
        parts.append(
            '<p class="note">softmax(R), the learned table alone: the same for every input.</p>'
        )
        parts.append(heat_maps(tables))
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
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def cell(text: str, *, number: bool = False, best: bool = False) -> str:
    """A table cell with escaped text."""
    kinds = " ".join(k for k, on in (("n", number), ("best", best)) if on)
    return f'<td class="{kinds}">{escape(text)}</td>' if kinds else f"<td>{escape(text)}</td>"


def task_name(task: str) -> str:
    """A task's name without the benchmark's prefix."""
    return task.removeprefix("embedded_")


def escape(text: object) -> str:
    """Text for HTML."""
    return html.escape(str(text), quote=True)
