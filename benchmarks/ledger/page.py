"""Writes docs/results.md and the README's picture from docs/results.toml and docs/results.json."""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from benchmarks import figures, report
from benchmarks.ledger.tables import RESULTS, Run, Table

INTRODUCTION = """# Results

This page is for readers of the five papers that [coverage.md](coverage.md) lists. It repeats the
papers' comparisons of systems at a small scale and says whether the results agree with the papers.
All models were trained on small tasks, on two CPU cores or on a GPU. The results can therefore show
which system is better, but they cannot reproduce the numbers of a paper.

{total} comparisons were run with at least three seeds and have a published difference. {agrees}
comparisons agree with the paper, {contradicts} contradict it, and {undecided} are undecided.

![How far the papers' systems are from the Transformer, here and in the papers](results.svg)

## How to read the tables

The systems in a table differ only in their attention. [glossary.md](glossary.md#abbreviations)
explains other abbreviations.

| system | attention |
| --- | --- |
| V | the dot product, as in a *vanilla* Transformer |
| R | Random: a learned table of logits, which does not depend on the tokens |
| Fix | Fixed Random: a table of logits like that of Random, which is not trained |
| D | Dense: each token computes its own row of logits |
| FR, FD | Factorized Random and Factorized Dense |
| R+V, D+V, R+D, FR+V | mixtures of two kinds in one softmax |
| HC-SA | hard-coded self-attention: each head looks at a fixed position near the query |
| HC-ALL | hard-coded self-attention and cross-attention |
| SH-X | hard-coded self-attention, and cross-attention with one learned head in the last layer |
| convolutions | each position sees seven tokens |
| V within 3 tokens | the dot product of the same seven tokens, as a control for the convolutions |
| Talking heads | the dot product, with learned projections between the heads |
| Linformer | the dot product, with keys and values projected to a quarter of the positions |

- The first number of a row is the mean over all seeds ± its standard error.
- *Difference from V* is the mean difference ± its standard error. Each run is compared with the run
  of V that has the same seed. If some seeds are missing, brackets give the number of pairs of runs.
  The two runs of a pair may have been made on different devices, a CPU and a GPU.
- *In the paper* is the difference that the paper reports.
- *Verdict* compares the sign of our difference with the sign of the paper's difference. The number
  in brackets is the probability that the true difference has the paper's sign, by Student's
  t-distribution over at least three pairs. The verdict is *agrees* if the probability is above
  0.95, *contradicts* if it is below 0.05, and *undecided* otherwise. If two systems are equally
  good, the verdict is still *agrees* or *contradicts* in one comparison of ten.
- The result of a single seed is not reliable, because training the same model twice on a GPU gives
  different numbers.
- *2 + 2 layers* means that the model has two layers in the encoder and two layers in the decoder.
- *Quoted from memory* means that a value was not looked up in the paper.
"""

ENDING = """## Other recipes

The runs in this section show that the recipes work. They cannot show which system is better. The
values in brackets are the values in the papers.

{others}

## How the measurements were made

The following command makes the runs of a table:

```bash
python -m benchmarks.ledger run TABLE --data-dir DATA --workdir runs/ledger
```

With `speed` instead of `run`, the command measures steps per second. The systems of a table are
timed in turns. With `write`, the command writes this page. `results.toml` defines the tables.
`results.json` contains the metrics, the curve, the machine and the versions of every run.

{machines}
"""

OVERVIEW = ("cotraining", "translation", "language_models", "classification")
"""The names of the tables that the picture shows."""

Results = Mapping[str, Any]
"""The contents of docs/results.json, which are runs by name and seed and speeds by name."""


def values_by_seed(run: Run, results: Results) -> dict[str, float]:
    """Returns a dictionary from seeds to the metrics of the runs with the same system as `run`."""
    entries = results["runs"].get(run.name, {})
    metric = run.table.metric
    return {
        seed: entry["metrics"][metric]
        for seed, entry in entries.items()
        if metric in entry["metrics"]
    }


def differences(values: Mapping[str, float], baseline: Mapping[str, float]) -> list[float]:
    """Returns the difference between a system and the baseline for every seed that both have."""
    return [values[seed] - baseline[seed] for seed in values if seed in baseline]


def standard_error(values: Sequence[float]) -> float | None:
    """Returns the standard error of a mean, or None for fewer than two values."""
    if len(values) < 2:
        return None
    return statistics.stdev(values) / math.sqrt(len(values))


def with_error(values: Iterable[float], form: str) -> str:
    """Formats the mean of values and its standard error, as in ``34.6±0.2``."""
    values = list(values)
    mean = f"{statistics.fmean(values):{form}}"
    error = standard_error(values)
    if error is None:
        return mean
    return f"{mean}±{error:{form.lstrip('+')}}"


def judge(differences: Sequence[float], published: float) -> str | None:
    """Returns whether the measured differences have the same sign as the published difference.

    Returns:
      A verdict such as ``agrees (0.992)``, or None if there are fewer than three differences. The
      number is the probability that the true difference has the published sign.
    """
    error = standard_error(differences)
    if not error or len(differences) < 3:
        return None
    t = math.copysign(1.0, published) * statistics.fmean(differences) / error
    probability = float(stats.t.cdf(t, len(differences) - 1))
    if probability > 0.95:
        verdict = "agrees"
    elif probability < 0.05:
        verdict = "contradicts"
    else:
        verdict = "undecided"
    return f"{verdict} ({probability:.3f})"


def rows_of(table: Table, results: Results) -> Iterator[dict[str, Any]]:
    """Yields a row for every system of the table that has been trained or timed."""
    runs = list(table.runs([0]))
    first = runs[0]
    baseline = values_by_seed(first, results)
    seeds = max(len(values_by_seed(run, results)) for run in runs)
    for run in runs:
        row: dict[str, Any] = {"system": run.system}
        values = values_by_seed(run, results)
        if values:
            row["score"] = with_error(values.values(), table.form)
        compared = differences(values, baseline)
        if run != first and compared:
            row["difference"] = with_error(compared, "+" + table.form)
            if len(compared) != seeds:
                row["difference"] += f" ({len(compared)})"
            published = table.published_difference(run.system)
            if table.comparable and published:
                row["paper"] = f"{published:+{table.form}}"
                row["verdict"] = judge(compared, published)
        speed = results["speed"].get(run.name)
        if not table.metric and speed:
            row |= speed
            row["steps"] = 1 / speed["step_seconds"]
            row["decodings"] = 1 / speed["decode_seconds"]
        if len(row) > 1:
            yield row


def count_runs(table: Table, results: Results) -> str:
    """Returns a text with a table's number of seeds and its number of runs on each machine."""
    entries = [results["runs"].get(run.name, {}) for run in table.runs([0])]
    devices = [entry["device"] for seeds in entries for entry in seeds.values()]
    if not devices:
        return ""
    # The description of a device has the form "cpu, 2 cores" or "NVIDIA H200, 16 cores".
    kinds = collections.Counter(device.split(",")[0].split()[-1] for device in devices)
    names = {"cpu": "a CPU", "H200": "an H200"}
    places = [f"{count} on {names.get(kind, kind)}" for kind, count in kinds.items()]
    seeds = max(map(len, entries))
    return f"Number of seeds: {seeds}. Number of runs: {' and '.join(places)}."


def section(table: Table, results: Results) -> str:
    """Returns the section of the page that shows a table, its conclusion and its setting."""
    rows = list(rows_of(table, results))
    first = next(iter(table.systems))
    columns = {
        "system": table.rows,
        "score": f"{table.unit}|>",
        "difference": f"difference from {first}|>",
        "paper": "in the paper|>",
        "verdict": "verdict",
        "steps": "steps/s|.2f",
        "decodings": "decodings/s|.2f",
        "memory_mb": "memory, MB|,.0f",
    }
    if not table.paper:
        del columns["difference"]
    shown = {key: form for key, form in columns.items() if any(row.get(key) for row in rows)}
    paragraphs = [
        f"## {table.title}",
        table.follows,
        report.table(rows, shown),
        " ".join(filter(None, ["**Setting.**", table.about, count_runs(table, results)])),
    ]
    if table.source:
        paragraphs.append(f"**Paper.** {table.source}")
    if table.note:
        paragraphs.append(f"**Remarks.** {table.note}")
    return "\n\n".join(paragraphs) + "\n"


def count_verdicts(tables: Iterable[Table], results: Results) -> dict[str, int]:
    """Returns how many comparisons have each verdict, and the total number of comparisons."""
    rows = (row for table in tables for row in rows_of(table, results))
    verdicts = [row["verdict"].split()[0] for row in rows if row.get("verdict")]
    counts = collections.Counter(verdicts)
    return {
        "total": len(verdicts),
        "agrees": counts["agrees"],
        "contradicts": counts["contradicts"],
        "undecided": counts["undecided"],
    }


def other_row(table: Table, results: Results) -> dict[str, Any]:
    """Returns the row that represents a table without a conclusion in the page's last table."""
    runs = list(table.runs([0]))
    entries = [e for run in runs for e in results["runs"].get(run.name, {}).values()]
    values = []
    for row in rows_of(table, results):
        text = f"*{row['system']}* {row['score']}"
        paper = table.paper.get(row["system"])
        if table.comparable and paper:
            text += f" ({paper:{table.form}}"
            if row.get("verdict"):
                text += f", {row['verdict'].split()[0]}"
            text += ")"
        values.append(text)
    return {
        "recipe": f"`{runs[0].recipe}`",
        "steps": max((e["step"] for e in entries if "step" in e), default=None),
        "data": table.about,
        "value": f"{table.unit}: {', '.join(values)}",
    }


def machines(results: Results) -> str:
    """Returns a table of the machines and the dates of the measurements."""
    runs = [entry for seeds in results["runs"].values() for entry in seeds.values()]
    speeds = list(results["speed"].values())
    rows = []
    for kind, entries in (("runs", runs), ("speed measurements", speeds)):
        groups = collections.defaultdict(list)
        for entry in entries:
            groups[entry["device"], entry["python"], entry["jax"]].append(entry["date"])
        for (device, python, jax), dates in groups.items():
            rows.append(
                {
                    "measured": f"{len(dates)} {kind}",
                    "machine": device,
                    "python": python,
                    "jax": jax,
                    "dates": " to ".join(sorted({min(dates), max(dates)})),
                }
            )
    columns = {
        "measured": "measured",
        "machine": "machine",
        "python": "Python",
        "jax": "jax",
        "dates": "dates",
    }
    return report.table(rows, columns)


def draw_overview(tables: Mapping[str, Table], results: Results) -> None:
    """Draws the measured and published differences between systems and the first system.

    The figure has a panel for each table of `OVERVIEW`.
    """

    def draw(narrow: bool) -> Figure:
        """Returns the figure for narrow screens or for wide screens."""
        if narrow:
            # Stack the panels vertically. The height of a panel depends on its number of systems.
            figure = Figure(figsize=(4.4, 10.5), layout="constrained")
            heights = [len(compared_runs(tables[name])) + 2 for name in OVERVIEW]
            panels = figure.subplots(len(OVERVIEW), 1, height_ratios=heights)
            place = "outside upper center"
        else:
            figure = Figure(figsize=(9.5, 3.4), layout="constrained")
            panels = figure.subplots(1, len(OVERVIEW))
            place = "outside lower center"
        for axes, name in zip(panels, OVERVIEW, strict=True):
            draw_differences(axes, tables[name], results)

        # Draw two empty series, because the legend needs an entry for each kind of marker.
        panels[0].plot([], [], "o", color=figures.OURS, label="here: mean ± standard error")
        panels[0].plot([], [], "D", color=figures.OTHER, fillstyle="none", label="paper")
        figure.legend(loc=place, ncols=2, frameon=False)
        return figure

    figures.save(draw, RESULTS / "results.svg")


def compared_runs(table: Table) -> list[Run]:
    """Returns the runs of all systems that a paper compares with the first system of the table."""
    _, *others = table.runs([0])
    return [run for run in others if table.published_difference(run.system)]


def draw_differences(axes: Axes, table: Table, results: Results) -> None:
    """Draws how the systems of one table differ from its first system."""
    first, *_ = table.runs([0])
    baseline = values_by_seed(first, results)
    drawn = compared_runs(table)[::-1]  # puts the first system at the top
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
    """Returns the text of docs/results.md."""
    main = [table for table in tables.values() if table.follows]
    others = [other_row(table, results) for table in tables.values() if not table.follows]
    columns = {"recipe": "recipe", "steps": "steps|,d", "data": "data", "value": "value"}
    introduction = INTRODUCTION.format(**count_verdicts(tables.values(), results))
    sections = [section(table, results) for table in main]
    ending = ENDING.format(others=report.table(others, columns), machines=machines(results))
    return "\n".join([introduction, *sections, ending])
