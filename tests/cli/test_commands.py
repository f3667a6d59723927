"""The command line end to end: train, continue, evaluate, follow, generate."""

import json
import re
import threading

import numpy as np
import pytest

from synthesizer_jax.checkpoints.manager import finished_steps
from synthesizer_jax.cli import evaluate as evaluating
from synthesizer_jax.cli.evaluate import print_results
from synthesizer_jax.evaluation.scoring import TaskResult
from tests.cli.commands import call

pytestmark = pytest.mark.slow

SMALL = (
    *("--set", "training.save_every=2", "--set", "training.log_every=1"),
    *("--set", "evaluation.max_examples=8", "--set", "evaluation.batch_size=64"),
    *("--set", "data.batch_size=8", "--quiet"),
)
TASKS = [f"synthetic_{t}" for t in ("cola", "sst2", "stsb", "mnli", "boolq", "copa", "wic", "wsc")]


def train(place, *, steps):
    return call(
        *("train", "quickstart:random_vanilla", "--workdir", place / "run"),
        *("--data-dir", place / "data", "--set", f"training.steps={steps}", *SMALL),
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run of two steps, continued to four."""
    place = tmp_path_factory.mktemp("commands")
    train(place, steps=2)
    train(place, steps=4)
    return place


def test_a_longer_run_continues(place):
    lines = (place / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [r["step"] for r in map(json.loads, lines) if r["kind"] == "train"]
    assert steps == [1, 2, 3, 4]
    assert finished_steps(place / "run" / "checkpoints") == [2, 4]


def test_another_model_in_the_same_directory_is_refused(place):
    with pytest.raises(ValueError, match=r"holds another run: data\.batch_size was 8 and is 48"):
        call(
            *("train", "quickstart:random_vanilla", "--workdir", place / "run"),
            *("--data-dir", place / "data", *SMALL[:-3], "--quiet"),
        )


def test_a_checkpoint_of_another_model_is_refused(place):
    with pytest.raises(ValueError, match=r"another model: .* less than init_share=1; 6 arrays"):
        call(
            *("train", "quickstart:dot_product", "--workdir", place / "other"),
            *("--data-dir", place / "data", "--set", f"init_from={place / 'run'}", *SMALL),
        )


def test_a_batch_that_does_not_divide_is_refused(place):
    with pytest.raises(ValueError, match=r"batch_size=9\b.*8"):
        call(
            *("train", "quickstart", "--workdir", place / "uneven"),
            *("--data-dir", place / "data", *SMALL, "--set", "data.batch_size=9"),
        )


def test_eval_shows_every_task_and_step(place):
    shown = call(
        *("eval", "--workdir", place / "run", "--data-dir", place / "data"),
        *("--all", "--method", "rank", "--max-examples", "10"),
    )
    for task in TASKS:
        assert shown.count(task) == 3  # two steps, and the best of them
    assert "step 2" in shown and "step 4" in shown
    assert "average" not in shown  # no task of GLUE or SuperGLUE was evaluated
    assert {p.name for p in (place / "run" / "evaluation").iterdir()} == {"2", "4"}


def test_averages_of_the_benchmarks_that_were_evaluated(capsys):
    metrics = {"matthews_corrcoef": 50.0}
    cola = TaskResult("glue_cola_v002", "validation", 5, 5, metrics, ("",) * 5, np.zeros(5))
    print_results(3, [cola], {})
    shown = capsys.readouterr().out
    assert "GLUE average: incomplete, not computed" in shown and "SuperGLUE" not in shown
    print_results(3, [cola], {"GLUE": 61.25})
    assert "GLUE average: 61.25" in capsys.readouterr().out


def test_eval_beam_on_one_task(place):
    shown = call(
        *("eval", "--workdir", place / "run", "--data-dir", place / "data"),
        *("--step", "2", "--method", "beam", "--task", "synthetic_cola", "--max-examples", "4"),
    )
    assert "synthetic_cola" in shown and "synthetic_sst2" not in shown


def test_eval_follows_a_job_until_its_last_step(place, monkeypatch):
    """Checkpoints that are not there yet are waited for."""
    hidden = threading.Event()
    real = finished_steps

    def some(directory):
        return real(directory) if hidden.is_set() else real(directory)[:1]

    monkeypatch.setattr("synthesizer_jax.checkpoints.manager.finished_steps", some)
    monkeypatch.setattr(evaluating.time, "sleep", lambda _: hidden.set())
    shown = call(
        *("eval", "--workdir", place / "run", "--data-dir", place / "data"),
        *("--follow", "--method", "rank", "--task", "synthetic_wic", "--max-examples", "4"),
    )
    assert hidden.is_set()
    assert shown.index("step 2") < shown.index("step 4")


def test_generate_reads_arguments_and_files(place, tmp_path):
    inputs = ["cola sentence: The dog sleeps.", "wsc: Anna thanked Mary because *she* had helped."]
    shown = call("generate", "--workdir", place / "run", *inputs)
    assert len(shown.splitlines()) == 2
    (tmp_path / "in.txt").write_text("\n".join(inputs) + "\n")
    call(
        *("generate", "--workdir", place / "run", "--input", tmp_path / "in.txt"),
        *("--output", tmp_path / "out.txt", "--batch-size", "1"),
    )
    assert (tmp_path / "out.txt").read_text() == shown
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.txt", "out.txt"]


def test_a_run_is_a_recipe_that_starts_from_its_parameters(place, tmp_path):
    shown = call(
        *("train", place / "run", "--workdir", tmp_path / "again", "--data-dir", place / "data"),
        *("--set", "training.steps=1"),
    )
    assert re.search(r"restored +[\d,]+ parameters in \d+ arrays", shown)
    assert re.search(r"initialized +0 parameters in 0 arrays", shown)
    experiment = json.loads((tmp_path / "again" / "experiment.json").read_text())
    assert experiment["init_from"] == str(place / "run")
    with pytest.raises(FileNotFoundError, match=r"holds no experiment\.json"):
        call("train", place / "data", "--workdir", tmp_path / "other")
