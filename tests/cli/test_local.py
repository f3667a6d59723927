"""Tests that a run gives the same results with several processes as with one process."""

import json
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.cli.commands import RECIPE
from tests.environment import python, without_devices

pytestmark = pytest.mark.hosts

STEPS = 12
"""The steps of a run, which has checkpoints of the steps 5 and 10."""


@pytest.fixture(scope="module")
def place(tmp_path_factory, synthetic_data) -> pathlib.Path:
    """A directory with the synthetic data sets."""
    place = tmp_path_factory.mktemp("local")
    (place / "data").symlink_to(synthetic_data)
    return place


def group(processes, *command):
    return [
        *(sys.executable, "-m", "synthesizer_jax", "local"),
        *("--processes", str(processes), "--devices", str(8 // processes), "--", *command),
    ]


def started(place, command):
    """Runs a command until it ends. All commands share a cache of compiled programs."""
    own = {**without_devices(), "JAX_ENABLE_COMPILATION_CACHE": "true"}
    own |= {"JAX_COMPILATION_CACHE_DIR": str(place / "compiled")}
    return subprocess.run(command, cwd=place, env=own, capture_output=True, text=True, timeout=300)


def run(place, workdir, processes, *settings):
    command = (
        f"train {RECIPE} --workdir {workdir} --data-dir data --quiet --set training.steps={STEPS}"
    )
    result = started(place, group(processes, *command.split(), *settings))
    assert result.returncode == 0, result.stderr
    return result.stderr


def lines(place, workdir, kind="train"):
    text = (place / workdir / "metrics.jsonl").read_text()
    return [r for r in map(json.loads, text.splitlines()) if r["kind"] == kind]


@pytest.fixture(scope="module")
def alone(place):
    """The log of a run that uses one process with eight devices."""
    run(place, "alone", 1)
    return lines(place, "alone")


def test_more_processes_train_the_same(place, alone):
    assert "4 processes with 2 devices each" in run(place, "four", 4)
    found = lines(place, "four")
    assert [r["step"] for r in found] == list(range(1, STEPS + 1))
    assert [r["data_checksum"] for r in found] == [r["data_checksum"] for r in alone]
    assert len({r["data_checksum"] for r in alone}) == STEPS
    for name in ("loss", "gradient_norm"):
        assert [r[name] for r in found] == pytest.approx([r[name] for r in alone], rel=1e-4)
    (measured,), (expected,) = (lines(place, w, "eval") for w in ("four", "alone"))
    assert measured["loss"] == pytest.approx(expected["loss"], rel=1e-4)


@pytest.mark.usefixtures("alone")
def test_more_processes_predict_the_same(place):
    """Several processes make the same predictions as one process.

    The first process writes the predictions of all processes.
    """
    rows = {}
    for processes in (1, 2):
        folder = place / f"predicted_{processes}"
        command = (
            f"predict --workdir alone --split validation --data-dir data --output {folder} "
            "--task synthetic_sst2 --method rank"
        )
        result = started(place, group(processes, *command.split()))
        assert result.returncode == 0, result.stderr
        text = (folder / "synthetic_sst2.jsonl").read_text()
        rows[processes] = [json.loads(line) for line in text.splitlines()]
    assert len(rows[1]) > 0
    for one, two in zip(rows[1], rows[2], strict=True):
        assert (one["idx"], one["prediction"]) == (two["idx"], two["prediction"])
        assert one["score"] == pytest.approx(two["score"], abs=1e-3)


def test_a_run_moves_to_another_mesh(place, alone):
    """A run can continue with a different number of processes or a different mesh.

    With the same topology, the losses are bit-identical. With a different topology, they are equal
    up to rounding.
    """
    for workdir in ("continues", "moves"):
        shutil.copytree(place / "alone", place / workdir)
        shutil.rmtree(place / workdir / "checkpoints" / str(STEPS))
    run(place, "continues", 1)
    run(place, "moves", 2, "--set", "mesh.fsdp=4", "--set", "mesh.tensor=2")
    continues, moves = (lines(place, w) for w in ("continues", "moves"))
    assert len(alone) == len(moves) == STEPS
    assert [r["loss"] for r in continues] == [r["loss"] for r in alone]
    assert [r["data_checksum"] for r in moves] == [r["data_checksum"] for r in alone]
    assert [r["loss"] for r in moves] == pytest.approx([r["loss"] for r in alone], rel=1e-4)


def test_all_processes_stop_early_and_stay_stopped(place):
    """If one evaluation after another brings no improvement, all processes stop early.

    The evaluations use averaged parameters.
    """
    settings = (
        *("--set", "evaluation.every=1", "--set", "evaluation.patience=2"),
        *("--set", "evaluation.min_improvement=1000", "--set", "training.ema=0.9"),
    )
    for _ in range(2):
        run(place, "stopped", 2, *settings)
        assert [r["step"] for r in lines(place, "stopped")] == [1, 2, 3]
        assert [r["step"] for r in lines(place, "stopped", "eval")] == [1, 2, 3]
    events = [json.loads(x) for x in (place / "stopped" / "events.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events].count("stopped") >= 1


def test_an_error_of_one_process_ends_all(tmp_path):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "import os\n"
        "from synthesizer_jax.recipes.quickstart import default as whole\n"
        "from synthesizer_jax.training.experiment import Experiment\n"
        "def default() -> Experiment:\n"
        "    if os.environ['SYNTHESIZER_PROCESS'] == '1':\n"
        "        raise ValueError('this host lacks a file')\n"
        "    return whole()\n"
    )
    command = "train recipe.py --workdir run --data-dir data"
    result = started(tmp_path, group(2, *command.split()))  # by default, JAX would wait
    assert result.returncode == 2, result.stderr
    assert "recipe.py, line 6: ValueError: this host lacks a file" in result.stderr


def test_two_kills_change_nothing(tmp_path):
    options = "--kills 2 --stride 5 --seed 7 --processes 2 1 --json"
    python(RECIPE.with_name("reliability.py"), *options.split(), tmp_path / "found.json")
    result = json.loads((tmp_path / "found.json").read_text())
    assert len(result["kills"]) == 2
    assert {k["lost"] for k in result["kills"] if k["signal"] != "SIGKILL"} == {0}
    assert result["same"]
    assert len(result["losses"]) == result["steps"] == 25
