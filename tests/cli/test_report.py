"""`synthesizer-jax report` compares runs by what they logged."""

import json

import pytest

from synthesizer_jax.runs.metrics import METRICS_FILE
from synthesizer_jax.training.run_directory import save_experiment
from tests.cli import commands
from tests.training.tiny import experiment

TRAINED = {"kind": "train", "loss": 2.0, "steps_per_second": 4.0, "tokens_per_second": 100.0}


def logged(directory, **scores):
    """A run's directory whose newest evaluation has these scores."""
    directory.mkdir()
    save_experiment(experiment(), directory)
    records = [{"step": 1, **TRAINED}, {"step": 2, **TRAINED, "steps_per_second": 8.0}]
    if scores:
        earlier = {"step": 1, "kind": "eval", "loss": 2.5, "glue_rte/accuracy": 1.0}
        newest = {f"glue_{task}": value for task, value in scores.items()}
        records += [earlier, {"step": 2, "kind": "eval", "loss": 1.5, **newest}]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (directory / METRICS_FILE).write_text(text)
    return directory


def call(*arguments):
    return commands.call("report", *arguments)


def test_runs_are_compared_by_their_newest_evaluations(tmp_path):
    first = logged(tmp_path / "a", **{"rte/accuracy": 61.04, "stsb/pearson": 80.0, "stsb/s": 9.0})
    second = logged(
        tmp_path / "b", **{"rte/accuracy": 60.96, "cola/matthews": 12.5, "c4/perplexity": 9}
    )
    output = tmp_path / "sub" / "page.html"
    said = call(first, second, first, "--output", output)
    rows = [line.replace("│", " ").split() for line in said.splitlines() if "glue_" in line]
    assert rows == [
        ["glue_rte", "accuracy", "61.0", "61.0"],
        ["glue_stsb", "pearson", "80.0", "–"],
        ["glue_cola", "matthews", "–", "12.5"],
    ]
    page = output.read_text()
    assert f"{first} is ahead on 1 of 3 tasks, {second} on 1, no run on 1; " in page
    assert "6.0 (5.0–7.0)" in page
    assert "Answers" not in page and "Attention weights" not in page


def test_what_is_no_run_or_has_no_evaluation_is_one_sentence(tmp_path):
    output = tmp_path / "page.html"
    with pytest.raises(FileNotFoundError, match=r"holds no experiment\.json; give the directory"):
        call(tmp_path, "--output", output)
    young = logged(tmp_path / "young")
    with pytest.raises(ValueError, match=r"metrics\.jsonl holds no evaluation; continue the run"):
        call(young, "--output", output)
    assert not output.exists()


def test_numbers_that_were_not_finite_are_left_out(tmp_path):
    run = logged(tmp_path / "a", **{"rte/accuracy": 61.04, "stsb/pearson": None})
    with (run / METRICS_FILE).open("a") as file:
        nothing = dict.fromkeys(TRAINED, None) | {"kind": "train"}
        file.write(json.dumps({"step": 3, **nothing}) + "\n")
        file.write(json.dumps({"step": 3, "kind": "eval", "glue_rte/accuracy": 62.0}) + "\n")
        file.write(json.dumps({"step": 4, "kind": "eval", "glue_rte/accuracy": None}) + "\n")
        file.write(json.dumps({"step": 5, "kind": "eval", "glue_rte/accuracy": 63.0}) + "\n")
    said = call(run, "--output", tmp_path / "page.html")
    assert [line.replace("│", " ").split() for line in said.splitlines() if "glue_" in line] == [
        ["glue_rte", "accuracy", "63.0"]
    ]
    assert "6.0 (5.0–7.0)" in (tmp_path / "page.html").read_text()
