"""Writes docs/results.md, its pictures and docs/coverage.md from the ledger's numbers."""

from __future__ import annotations

import collections
import json
import math
import pathlib
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import report
from ledger_tables import Table
from matplotlib.figure import Figure
from scipy import stats

HERE = pathlib.Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"
INTRODUCTION = """# Results

The papers' comparisons, run small: these tables say whether the systems come in a paper's *order*, not
what its numbers would be. `benchmarks/ledger.py` makes all runs, and writes this page and
`results.json`.

Scores are means over seeds ± their standard error. *To the first* is the mean difference to the first
system, paired by seed (n: pairs, if fewer than seeds); a pair may have one run on a CPU and one on a GPU.
*P* is the probability, by Student's t over three or more pairs, that its sign is that of the paper's
difference, however small that is: the order agrees above 0.95, is contrary below 0.05, and is open
between. Where two systems are equal, one comparison in ten ends as one or the other. Differences of
single seeds mean little: training one seed twice on a GPU gives two numbers. Steps a second are
measured for all systems of a table in turns. FLOPs are those of a forward pass; *memory* is what the
compiled training step needs, parameters and optimizer state included.
"""

COVERAGE = """# What of the papers is here

{rows} systems, experiments, analyses and settings of the five papers: {summary}. A row works
if the ledger has run it at some scale, or if the command shows it; the last column says where the data
or the settings of the run are not the paper's. Commands are those of `synthesizer-jax`, `pytest` or
`python`; *run as* names a table of `benchmarks/ledger.py`, which writes this page and
[results.md](results.md).
"""
OVERVIEW = ("cotraining", "translation", "language_models", "classification")
"""The tables of README's picture."""
PAPERS = {
    "S": "Synthesizer (Tay et al. 2021)",
    "H": "Hard-coded Gaussian attention (You et al. 2020)",
    "L": "Low-rank bottleneck (Bhojanapalli et al. 2020)",
    "T": "Talking heads (Shazeer et al. 2020)",
    "R": "Attention replaced by feed-forward networks (Bozic et al. 2023)",
    "X": "What all of them need",
}


def values_by_seed(table: Table, system: str, results: Mapping[str, Any]) -> dict[int, float]:
    """Returns the metric of a system's runs by seed."""
    (run,) = (run for run in table.runs([0]) if run.system == system)
    entries = results["runs"].get(run.name, {})
    return {
        int(s): e["metrics"][table.metric]
        for s, e in entries.items()
        if table.metric in e["metrics"]
    }


def differences(values: Mapping[int, float], baseline: Mapping[int, float]) -> list[float]:
    """Returns the differences of the seeds that both have."""
    return [values[seed] - baseline[seed] for seed in values if seed in baseline]


def standard_error(values: Sequence[float]) -> float | None:
    """Returns the standard error of a mean; None of fewer than two values."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def with_error(values: Sequence[float], form: str = ".1f") -> str:
    """Formats a mean and its standard error."""
    error = standard_error(values)
    return f"{statistics.fmean(values):{form}}" + (
        f" ± {error:{form.lstrip('+')}}" if error is not None else ""
    )


def sign_probability(differences: Sequence[float], sign: float) -> float | None:
    """Returns the probability that the true mean difference has a sign; None: too few seeds."""
    error = standard_error(differences)
    if not error or len(differences) < 3:
        return None
    t = statistics.fmean(differences) / error
    return float(stats.t.cdf(math.copysign(1.0, sign) * t, len(differences) - 1))


def judge(probability: float | None) -> str:
    """Says what a probability means for the order of two systems."""
    if probability is None:
        return ""
    verdict = "agrees" if probability > 0.95 else "contrary" if probability < 0.05 else "open"
    return f"{verdict} ({probability:.3f})"


def rows_of(table: Table, results: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a row for every system that has been run or timed."""
    first = next(table.runs([0]))
    baseline = values_by_seed(table, first.system, results)
    reference = results["speed"].get(first.name)
    for run in table.runs([0]):
        row: dict[str, Any] = {"system": run.system}
        if values := values_by_seed(table, run.system, results):
            row |= {"seeds": len(values), "score": with_error(list(values.values()), table.form)}
            row["paper"] = table.paper.get(run.system)
            shared = differences(values, baseline)
            if run != first and shared:
                row["difference"] = with_error(shared, "+" + table.form)
                if len(shared) != len(values):
                    row["difference"] += f" ({len(shared)})"
                if table.comparable and row["paper"] is not None and first.system in table.paper:
                    published = row["paper"] - table.paper[first.system]
                    row["order"] = judge(sign_probability(shared, published)) if published else None
        if speed := results["speed"].get(run.name):
            row |= {key: speed[key] for key in ("parameters", "flops", "memory_mb")}
            row["speed"] = 1 / speed["step_seconds"]
            if table.decodes and reference:
                row["ratio"] = reference["step_seconds"] / speed["step_seconds"]
                row["decoding"] = reference["decode_seconds"] / speed["decode_seconds"]
        if len(row) > 1:
            yield row


def facts(measured: Mapping[str, Mapping[str, Any]], noun: str) -> str:
    """Says on which machines the runs or speeds of systems were measured, and when.

    Args:
      measured: entries by system and seed.
      noun: what they are.
    """
    places: dict[str, dict[str, list[str]]] = {}
    for system, entries in measured.items():
        for seed, e in entries.items():
            machine = f"{e['device']}, Python {e['python']}, jax {e['jax']}"
            places.setdefault(machine, {}).setdefault(system, []).append(seed)
    texts = []
    for machine, systems in places.items():
        count = sum(map(len, systems.values()))
        names = [
            f"*{system}*"
            + ("" if len(seeds) == len(measured[system]) else f" ({', '.join(seeds)})")
            for system, seeds in systems.items()
        ]
        first = next(iter(systems.values()))
        if len(systems) == len(measured) and all(seeds == first for seeds in systems.values()):
            names = [f"seed{'s' * (len(first) > 1)} {', '.join(first)} of all"]
        of = f": {', '.join(names)}" if len(places) > 1 else ""
        texts.append(f"{count} {noun}{'s' * (count > 1)} on {machine}{of}")
    dates = sorted({e["date"] for entries in measured.values() for e in entries.values()})
    return f"{'; '.join(texts)}. {' to '.join(dates[:: max(1, len(dates) - 1)])}"


def section(name: str, table: Table, results: Mapping[str, Any]) -> str:
    """Returns the section of a table; empty unless two of its systems have been run."""
    rows = list(rows_of(table, results))
    if len(rows) < 2:
        return ""
    possible = {
        "system": "system",
        "score": f"{table.unit}|",
        "seeds": "seeds|d",
        "difference": "to the first|",
        "paper": f"paper|{table.form}",
        "order": "order (P)",
        "speed": "steps/s|.2f",
        "ratio": "× the first|.2f",
        "decoding": "decoding × the first|.2f",
        "parameters": "parameters|,d",
        "flops": "FLOPs/token|,d",
        "memory_mb": "memory (MB)|,.0f",
    }
    columns = {k: v for k, v in possible.items() if any(row.get(k) is not None for row in rows)}
    runs, speed = results["runs"], results["speed"]
    made = {r.system: runs[r.name] for r in table.runs([0]) if r.name in runs}
    timed = {r.system: {"": speed[r.name]} for r in table.runs([0]) if r.name in speed}
    parts = [f"## {table.title}", table.about, report.table(rows, columns)]
    if table.source:
        parts.append(f"Paper: {table.source}.")
    if draw_curves(table, results, DOCS / "results" / f"{name}.svg"):
        parts.append(f"![{table.title}: curves of all systems](results/{name}.svg)")
    if made:
        command = f"python benchmarks/ledger.py run {name} --data-dir DATA --workdir runs/ledger"
        parts.append(f"`{command}`: {facts(made, 'run')}.")
    if timed:
        (rounds,) = {entry["rounds"] for entries in timed.values() for entry in entries.values()}
        command = f"python benchmarks/ledger.py speed {name} --data-dir DATA --rounds {rounds}"
        parts.append(f"`{command}`: medians of steps in turns; {facts(timed, 'system')}.")
    return "\n\n".join(parts) + "\n"


def verdicts(tables: Mapping[str, Table], results: Mapping[str, Any]) -> str:
    """Returns a table of which systems come in their paper's order to the first of their table."""
    rows, counts = [], collections.Counter[str]()
    for table in tables.values():
        systems: dict[str, list[str]] = {}
        for row in rows_of(table, results):
            if row.get("order"):
                systems.setdefault(row["order"].split()[0], []).append(row["system"])
        if systems:
            rows.append({"table": table.title} | {k: ", ".join(v) for k, v in systems.items()})
            counts.update({verdict: len(names) for verdict, names in systems.items()})
    columns = {"table": "table", "agrees": "agrees", "contrary": "contrary", "open": "open"}
    return (
        f"{counts.total()} comparisons with the first system of a table have three seeds or more here and "
        f"a value in a paper, known from memory where its table says so: {counts['agrees']} agree, "
        f"{counts['contrary']} are contrary, {counts['open']} are open.\n\n{report.table(rows, columns)}\n"
    )


def draw_overview(tables: Mapping[str, Table], results: Mapping[str, Any]) -> None:
    """Draws how far systems are from the first of their tables, here and in the papers."""
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    panels = figure.subplots(1, len(OVERVIEW))
    for axes, name in zip(panels, OVERVIEW, strict=True):
        table = tables[name]
        first, *others = table.runs([0])
        baseline = values_by_seed(table, first.system, results)
        drawn = []
        for run in reversed(others):
            own = differences(values_by_seed(table, run.system, results), baseline)
            if not own or (published := table.paper.get(run.system)) is None:
                continue
            y = len(drawn)
            axes.errorbar(statistics.fmean(own), y, xerr=standard_error(own), fmt="o", color="C0")
            axes.plot(published - table.paper[first.system], y, "D", color="C1", fillstyle="none")
            drawn.append(run.system)
        axes.axvline(0, color="gray", linewidth=0.8)
        axes.set(xlabel=f"{table.unit}, difference to {first.system}", title=table.title)
        axes.set_yticks(range(len(drawn)), drawn)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].plot([], [], "o", color="C0", label="here, mean ± standard error over seeds")
    panels[0].plot([], [], "D", color="C1", fillstyle="none", label="paper")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    save_svg(figure, DOCS / "results.svg")


def save_svg(figure: Figure, path: pathlib.Path) -> None:
    """Writes a figure; the same numbers make the same picture, and its text stays text."""
    path.parent.mkdir(exist_ok=True)
    with mpl.rc_context({"svg.hashsalt": "ledger", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})
    text = path.read_text(encoding="utf-8")
    report.write_file(path, re.sub(r"[ \t]+$", "", text, flags=re.M))


def draw_curves(table: Table, results: Mapping[str, Any], path: pathlib.Path) -> bool:
    """Draws the curves of a table's systems, with the range of the seeds; False: there are none."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes, colors = figure.subplots(), mpl.colormaps["tab20"].colors
    drawn = 0
    for color, run in zip(colors * 2, table.runs([0]), strict=False):
        curves = [dict(map(tuple, e["curve"])) for e in results["runs"].get(run.name, {}).values()]
        steps = sorted(set.intersection(*map(set, curves))) if curves else []
        if len(steps) < 2:
            continue
        drawn += 1
        columns = [[curve[step] for curve in curves] for step in steps]
        axes.plot(steps, [statistics.fmean(c) for c in columns], color=color, label=run.system)
        axes.fill_between(
            steps, list(map(min, columns)), list(map(max, columns)), color=color, alpha=0.15
        )
    if drawn:
        axes.set(xlabel="step", ylabel=table.unit)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
        save_svg(figure, path)
    return drawn > 0


def coverage(tables: Mapping[str, Table], results: Mapping[str, Any]) -> str:
    """Returns the page that says what of the papers works, and what shows it."""
    lines = (HERE / "coverage.tsv").read_text(encoding="utf-8").splitlines()
    rows: dict[str, list[dict[str, Any]]] = {paper: [] for paper in PAPERS.values()}
    for line in lines:
        number, what, command, note, name = (line.split("\t") + [""] * 4)[:5]
        name, _, system = name.partition("/")
        runs = [r for r in tables[name].runs([0]) if system in ("", r.system)] if name else []
        assert bool(runs) == bool(name), line
        seeds = max((len(results["runs"].get(run.name, {})) for run in runs), default=0)
        timed = any(run.name in results["speed"] for run in runs if not run.metric)
        shown = ", ".join(filter(None, (name, seeds and f"{seeds} seed{'s' * (seeds > 1)}")))
        needs_run = name or command.startswith("recipes papers.")
        works = command and (seeds or timed or not needs_run)
        verdict = "works" if works else "not run" if command else "missing"
        if not works:  # nor is it run otherwise
            shown, note = "", "; ".join(x for x in note.split("; ") if not x.startswith("run "))
        rows[PAPERS[number[0]]].append(
            {
                "row": number,
                "what": what,
                "verdict": verdict,
                "command": f"`{command}`" if command else "",
                "shown": "; ".join(filter(None, (shown, note))),
            }
        )
    columns = {
        "row": "",
        "what": "what",
        "verdict": "verdict",
        "command": "command",
        "shown": "run as; what differs",
    }
    every = [row for found in rows.values() for row in found]
    counts = collections.Counter(row["verdict"] for row in every)
    summary = ", ".join(f"*{verdict}* {count}" for verdict, count in counts.most_common())
    sections = (f"## {paper}\n\n{report.table(found, columns)}\n" for paper, found in rows.items())
    return "\n".join([COVERAGE.format(summary=summary, rows=len(every)), *sections])


def write(tables: Mapping[str, Table], results: Mapping[str, Any]) -> None:
    """Writes the pages and pictures."""
    notes = json.loads((HERE / "ledger_notes.json").read_text(encoding="utf-8"))
    sections, speed = [], dict(results["speed"])
    for name, table in tables.items():
        if text := section(name, table, results | {"speed": speed}):
            sections.append(text + (f"\n{notes[name]}\n" if name in notes else ""))
        for run in table.runs([0]):
            speed.pop(run.name, None)  # one table of each measurement
    draw_overview(tables, results)
    report.write_file(
        DOCS / "results.md", "\n".join([INTRODUCTION, verdicts(tables, results), *sections])
    )
    report.write_file(DOCS / "coverage.md", coverage(tables, results))
