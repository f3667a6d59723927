"""The ledger of results: its statistics, and that all of its runs can be made."""

import sys

import pytest
from scipy import stats

from synthesizer_jax.cli.recipes import load_with_code
from synthesizer_jax.distillation.distill import Distillation
from synthesizer_jax.training.experiment import Experiment
from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import ledger_page
from ledger_tables import TABLES, Table

FACTS = {
    "date": "2026-01-01",
    "device": "cpu",
    "python": "3",
    "jax": "0",
    "curve": [],
}


def test_systems_are_compared_seed_by_seed():
    table = Table("T", "", "r:{}", {"V": "v", "R": "r", "D": "d"}, "m", "m", paper={"V": 2, "R": 1})
    scores = {"r:v": [10.0, 20.0, 30.0], "r:r": [9.0, 18.5, 29.5], "r:d": [10.0]}
    runs = {
        name: {str(seed): {"metrics": {"m": x}} | FACTS for seed, x in enumerate(values)}
        for name, values in scores.items()
    }
    runs["r:d"]["7"] = {"metrics": {"m": 11.0}} | FACTS  # a seed that the first system lacks
    results = {"runs": runs, "speed": {}}
    rows = {row["system"]: row for row in ledger_page.rows_of(table, results)}
    assert rows["V"]["score"] == "20.0 ± 5.8" and rows["R"]["difference"] == "-1.0 ± 0.3"
    # One-sided paired t-test, as the paper says that R is lower.
    p = stats.ttest_rel(scores["r:r"], scores["r:v"], alternative="less").pvalue
    assert rows["R"]["order"] == f"agrees ({1 - p:.3f})"
    assert rows["D"]["difference"] == "+0.0 (1)" and "order" not in rows["D"]
    page = ledger_page.verdicts({"t": table}, results)
    assert page.startswith("1 comparisons ") and "1 agree, 0 are contrary, 0 are open." in page
    assert "| T | R |  |  |" in page
    assert ledger_page.sign_probability([1.0, 1.1], 1) is None  # two pairs are too few


@pytest.mark.parametrize("name", [n for n in TABLES if n != "bottleneck"])
def test_the_runs_of_a_table_can_be_made(name):
    for run in TABLES[name].runs([0]):
        recipe, _ = load_with_code(run.recipe, run.settings, kinds=(Experiment, Distillation))
        assert isinstance(recipe, Distillation) == (run.teacher is not None)


def test_coverage_says_works_only_where_something_shows_it():
    timed = {run.name: {} for run in TABLES["translation"].runs([0])}
    page = ledger_page.coverage(TABLES, {"runs": {}, "speed": timed})
    lines = (ROOT / "benchmarks" / "coverage.tsv").read_text().splitlines()
    assert len({line.split("\t")[0] for line in lines}) == len(lines) == 110
    shown = [line.split("\t")[4:] for line in lines]
    for line, place in zip(lines, shown, strict=True):
        number = line.split("\t")[0]
        (row,) = (x for x in page.splitlines() if x.startswith(f"| {number} |"))
        assert ("| works |" in row) <= (not any(place))
