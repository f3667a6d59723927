"""The page docs/results.md, and README's picture, from the ledger's tables and numbers."""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import figures
import report
from ledger_tables import RESULTS, Run, Table
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

INTRODUCTION = """# Results

The papers' comparisons, run small: they say whether systems come in a paper's *order*, not what its
numbers would be. Of {total} comparisons with a paper's value and three seeds or more, {agrees} agree,
{contrary} are contrary, {open} are open.

{follows}

## Systems against the Transformer

{matrix}

V: mean over seeds ± its standard error. Others: mean difference from V, paired by seed (n: pairs, if
fewer than seeds); a pair may have one run on a CPU and one on a GPU. Below: the paper's difference, and
in brackets the probability, by Student's t over three or more pairs, that the sign here is the paper's:
above 0.95 it agrees, below 0.05 it is contrary, between it is open. Where two systems are equal, one
comparison in ten ends as one or the other. Single seeds mean little: training one twice on a GPU gives
two numbers. *V within 3 tokens* is the dot product of the seven tokens that a convolution sees.
"""

ENDING = """## Recipes that run

From these nothing follows about a paper's order. Brackets have the paper's values.

{others}

## How they were made

`python benchmarks/ledger.py run TABLE --data-dir DATA --workdir runs/ledger` makes the runs: {runs}.
`speed` in the place of `run` measures steps a second, of a table's systems in turns: {speeds}.
`write` writes this page. `results.toml` defines the tables, `results.json` has every run with its
metrics, curve, machine and versions.
"""

OVERVIEW = ("cotraining", "translation", "language_models", "classification")
"""The tables of the picture."""

Results = Mapping[str, Any]
"""Entries of runs, by name and seed, and of speeds, by name: docs/results.json."""


def values_by_seed(run: Run, results: Results) -> dict[str, float]:
    """Returns the metric of the runs of a system, with any seed."""
    entries, metric = results["runs"].get(run.name, {}), run.table.metric
    return {s: e["metrics"][metric] for s, e in entries.items() if metric in e["metrics"]}


def differences(values: Mapping[str, float], baseline: Mapping[str, float]) -> list[float]:
    """Returns the differences of the seeds that both have."""
    return [values[seed] - baseline[seed] for seed in values if seed in baseline]


def standard_error(values: Sequence[float]) -> float | None:
    """Returns the standard error of a mean; None of fewer than two values."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def with_error(values: Iterable[float], form: str) -> str:
    """Formats a mean and its standard error."""
    values = list(values)
    mean, error = f"{statistics.fmean(values):{form}}", standard_error(values)
    return mean if error is None else f"{mean}±{error:{form.lstrip('+')}}"


def judge(differences: Sequence[float], published: float) -> str | None:
    """Says how probable it is that the true mean has the paper's sign; None: too few seeds."""
    error = standard_error(differences)
    if not error or len(differences) < 3:
        return None
    t = math.copysign(1.0, published) * statistics.fmean(differences) / error
    probability = float(stats.t.cdf(t, len(differences) - 1))
    verdict = "agrees" if probability > 0.95 else "contrary" if probability < 0.05 else "open"
    return f"{verdict} ({probability:.3f})"


def rows_of(table: Table, results: Results) -> Iterator[dict[str, Any]]:
    """Yields a row for every system that has been run or timed."""
    first, *_ = runs = list(table.runs([0]))
    baseline = values_by_seed(first, results)
    seeds = max(len(values_by_seed(run, results)) for run in runs)
    for run in runs:
        row: dict[str, Any] = {"system": run.system}
        if values := values_by_seed(run, results):
            row["score"] = with_error(values.values(), table.form)
        if run != first and (shared := differences(values, baseline)):
            row["difference"] = with_error(shared, "+" + table.form)
            row["difference"] += f" ({len(shared)})" * (len(shared) != seeds)
            if table.comparable and (published := table.published_difference(run.system)):
                row["paper"] = f"{published:+{table.form}}"
                row["order"] = judge(shared, published)
        if not table.metric and (speed := results["speed"].get(run.name)):
            row |= speed
            row["steps"], row["decodings"] = 1 / speed["step_seconds"], 1 / speed["decode_seconds"]
        if len(row) > 1:
            yield row


def machines(entries: Iterable[Mapping[str, Any]]) -> str:
    """Says on which machines entries were measured, and when."""
    entries = list(entries)
    names = (f"{e['device']}, Python {e['python']}, jax {e['jax']}" for e in entries)
    counts = collections.Counter(names)
    places = "; ".join(f"{count} on {machine}" for machine, count in counts.items())
    dates = [e["date"] for e in entries]
    return f"{places}; {min(dates)} to {max(dates)}"


def description(table: Table, results: Results) -> str:
    """Returns the section of a table without its numbers."""
    entries = [results["runs"].get(run.name, {}) for run in table.runs([0])]
    devices = collections.Counter(e["device"] for seeds in entries for e in seeds.values())
    places = ", ".join(
        f"{count} {device.split(',')[0].split()[-1]}" for device, count in devices.items()
    )
    made = f"Seeds: {max(map(len, entries))}; runs: {places}." if places else ""
    source = f"Paper: {table.source}." if table.source else ""
    return " ".join(filter(None, (table.about, made, source, table.note)))


def matrix(tables: Iterable[Table], results: Results) -> str:
    """Returns the table of all systems that papers compare with the Transformer."""
    systems: dict[str, dict[str, str]] = {}
    columns = {"system": ""}
    for table in tables:
        columns[table.title] = f"{table.title}, {table.unit}"
        for row in rows_of(table, results):
            cell = row.get("difference", row["score"])
            if paper := row.get("paper"):
                cell += f"<br>paper {paper}" + (f": {row['order']}" if row["order"] else "")
            systems.setdefault(row["system"], {"system": row["system"]})[table.title] = cell
    return report.table(list(systems.values()), columns)


def section(table: Table, results: Results) -> str:
    """Returns the section of a table that is not part of the matrix."""
    columns = {"system": "system", "score": f"{table.unit}|"}
    if not table.metric:
        columns = {"system": "system", "steps": "steps/s|.2f", "decodings": "decodings/s|.2f"}
        columns |= {"memory_mb": "memory, MB|,.0f"}
    numbers = report.table(list(rows_of(table, results)), columns)
    return f"## {table.title}\n\n{description(table, results)}\n\n{numbers}\n"


def count_verdicts(tables: Iterable[Table], results: Results) -> dict[str, int]:
    """Returns how many comparisons agree with a paper, are contrary to it, and are open."""
    rows = (row for table in tables for row in rows_of(table, results))
    orders = [row["order"] for row in rows if row.get("order")]
    counts = collections.Counter(order.split()[0] for order in orders)
    return {"total": len(orders)} | {v: counts[v] for v in ("agrees", "contrary", "open")}


def other_row(table: Table, results: Results) -> dict[str, Any]:
    """Returns the row of a table from which nothing follows about a paper's order."""
    runs = list(table.runs([0]))
    entries = [e for run in runs for e in results["runs"].get(run.name, {}).values()]
    values = []
    for row in rows_of(table, results):
        text = f"*{row['system']}* {row['score']}"
        if table.comparable and (paper := table.paper.get(row["system"])):
            order = f", {row['order'].split()[0]}" if row.get("order") else ""
            text += f" ({paper:{table.form}}{order})"
        values.append(text)
    return {
        "recipe": f"`{runs[0].recipe}`",
        "steps": max((e["step"] for e in entries if "step" in e), default=None),
        "data": table.about,
        "value": f"{table.unit}: {', '.join(values)}",
    }


def draw_overview(tables: Mapping[str, Table], results: Results) -> None:
    """Draws how far systems are from the first of their tables, here and in the papers."""

    def draw(narrow: bool) -> Figure:
        figure = Figure(figsize=(4.4, 10.5) if narrow else (9.5, 3.4), layout="constrained")
        if narrow:  # a panel below the other, as high as its systems need
            heights = [len(compared_runs(tables[name])) + 2 for name in OVERVIEW]
            panels = figure.subplots(len(OVERVIEW), 1, height_ratios=heights)
        else:
            panels = figure.subplots(1, len(OVERVIEW))
        for axes, name in zip(panels, OVERVIEW, strict=True):
            draw_differences(axes, tables[name], results)
        panels[0].plot([], [], "o", color=figures.OURS, label="here: mean ± standard error")
        panels[0].plot([], [], "D", color=figures.OTHER, fillstyle="none", label="paper")
        figure.legend(
            loc=f"outside {'upper' if narrow else 'lower'} center", ncols=2, frameon=False
        )
        return figure

    figures.save(draw, RESULTS / "results.svg")


def compared_runs(table: Table) -> list[Run]:
    """Returns the runs of the systems that a paper compares with the first system of a table."""
    _, *others = table.runs([0])
    return [run for run in others if table.published_difference(run.system)]


def draw_differences(axes: Axes, table: Table, results: Results) -> None:
    """Draws how far the systems of a table are from its first one."""
    first, *_ = table.runs([0])
    baseline = values_by_seed(first, results)
    drawn = compared_runs(table)[::-1]  # the first one is at the top
    for y, run in enumerate(drawn):
        own = differences(values_by_seed(run, results), baseline)
        axes.errorbar(
            statistics.fmean(own), y, xerr=standard_error(own), fmt="o", color=figures.OURS
        )
        published = table.published_difference(run.system)
        axes.plot(published, y, "D", color=figures.OTHER, fillstyle="none")
    axes.axvline(0, color=figures.LINE, linewidth=0.8)
    axes.set(xlabel=f"{table.unit}, difference to {first.system}", title=table.title)
    axes.set_yticks(range(len(drawn)), [run.system for run in drawn])
    axes.tick_params(axis="y", length=0)


def page(tables: Mapping[str, Table], results: Results) -> str:
    """Returns the page of results."""
    main = [table for table in tables.values() if table.follows]
    compared = [table for table in main if table.paper]
    others = [other_row(table, results) for table in tables.values() if not table.follows]
    columns = {"recipe": "recipe", "steps": "steps|,d", "data": "data", "value": "value"}
    introduction = INTRODUCTION.format(
        **count_verdicts(tables.values(), results),
        follows="\n".join(f"- **{table.title}.** {table.follows}" for table in main),
        matrix=matrix(compared, results),
    )
    texts = [f"**{table.title}.** {description(table, results)}\n" for table in compared]
    sections = [section(table, results) for table in main if not table.paper]
    ending = ENDING.format(
        others=report.table(others, columns),
        runs=machines(e for seeds in results["runs"].values() for e in seeds.values()),
        speeds=machines(results["speed"].values()),
    )
    return "\n".join([introduction, *texts, *sections, ending])
