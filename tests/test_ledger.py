"""Tests the statistics and the page of the ledger, and that all its runs can be made."""

import re

import pytest
from matplotlib.figure import Figure
from scipy import stats

from benchmarks import figures
from benchmarks.ledger import page
from benchmarks.ledger.runs import load
from benchmarks.ledger.tables import TABLES, Table
from synthesizer_jax.cli.recipes import load_with_code
from synthesizer_jax.distillation.distill import Distillation
from synthesizer_jax.training.experiment import Experiment
from tests.conftest import ROOT

KINDS = (Experiment, Distillation)


def test_systems_are_compared_seed_by_seed():
    systems, paper = {"V": "v", "R": "r", "D": "d"}, {"V": 2, "R": 1, "D": [5, 4]}
    table = Table("T", "", "r:{}", systems, metric="m", paper=paper)
    scores = {"r:v": [10.0, 20.0, 30.0], "r:r": [9.0, 18.5, 29.5], "r:d": [10.0]}
    runs = {
        name: {str(seed): {"metrics": {"m": x}} for seed, x in enumerate(values)}
        for name, values in scores.items()
    }
    runs["r:d"]["7"] = {"metrics": {"m": 11.0}}  # the first system was not run with this seed
    results = {"runs": runs, "speed": {}}
    rows = {row["system"]: row for row in page.rows_of(table, results)}
    assert rows["V"] == {"system": "V", "score": "20.0±5.8"}
    # Compare with a one-sided paired t-test, because R is lower in the paper.
    p = stats.ttest_rel(scores["r:r"], scores["r:v"], alternative="less").pvalue
    assert rows["R"]["difference"] == "-1.0±0.3" and rows["R"]["paper"] == "-1.0"
    assert rows["R"]["verdict"] == f"agrees ({1 - p:.3f})"
    assert rows["D"]["difference"] == "+0.0 (1)" and rows["D"]["paper"] == "+1.0"
    assert rows["D"]["verdict"] is None
    counts = page.count_verdicts([table], results)
    assert counts == {"total": 1, "agrees": 1, "contradicts": 0, "undecided": 0}
    assert page.judge([1.0, 1.1], 1) is None  # two pairs are not enough


def test_the_page_is_what_the_ledger_writes():
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert text == page.page(TABLES, load()), "run: python -m benchmarks.ledger write"


@pytest.mark.parametrize("name", [n for n in TABLES if n != "bottleneck"])
def test_the_runs_of_a_table_can_be_made(name):
    table = TABLES[name]
    for run in table.runs([0]):
        recipe, _ = load_with_code(run.recipe, table.all_settings(), kinds=KINDS)
        assert isinstance(recipe, Distillation) == (run.teacher is not None)


def test_recipes_of_the_page_of_coverage_exist():
    text = (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8")
    names = re.findall(r"`(papers\.[^`]+)`", text)
    assert len(names) > 20
    for name in names:
        load_with_code(name, (), kinds=KINDS)


def test_figures_follow_the_color_scheme_and_have_a_narrow_form(tmp_path):
    def draw(narrow):
        figure = Figure(figsize=(2, 4) if narrow else (4, 2))
        figure.subplots().barh(["here", "there"], [1, 2], color=[figures.OURS, figures.OTHER])
        return figure

    figures.save(draw, tmp_path / "bars.svg")
    wide, narrow = ((tmp_path / name).read_text() for name in ("bars.svg", "bars-narrow.svg"))
    assert 'width="288pt" height="144pt"' in wide and 'width="144pt" height="288pt"' in narrow
    for svg in (wide, narrow):
        assert "@media (prefers-color-scheme: dark)" in svg and ">there</text>" in svg
        used = set(re.findall(r"var\(--(\w+)", svg))
        assert {"ours", "other", "line", "text"} <= used <= set(figures.COLORS)
        assert "#0000c" not in svg  # all placeholders are variables now
        assert "#ffffff" not in svg  # the background is transparent


def test_the_front_page_shows_figures_for_both_widths():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("attention", "results"):
        assert (
            f'srcset="docs/{name}{figures.NARROW}.svg"' in readme
            and f'src="docs/{name}.svg"' in readme
        )
        for suffix in ("", figures.NARROW):
            svg = (ROOT / "docs" / f"{name}{suffix}.svg").read_text(encoding="utf-8")
            assert "prefers-color-scheme: dark" in svg
