"""Tests training as a user runs it: with and without a terminal, interrupted and continued."""

import fcntl
import json
import os
import pathlib
import pty
import re
import resource
import shutil
import signal
import termios
from unittest import mock

import pytest

from synthesizer_jax.base.registry import replace
from synthesizer_jax.checkpoints.manager import finished_steps
from synthesizer_jax.data.vocabularies import SentencePiece
from synthesizer_jax.hosts.preemption import Preempted
from synthesizer_jax.runs.lock import InUseError
from synthesizer_jax.runs.metrics import read_metrics
from synthesizer_jax.tasks import synthetic
from synthesizer_jax.training.run import run
from synthesizer_jax.training.run_directory import check_same_run, load_experiment, save_run
from synthesizer_jax.training.trainer import Trainer
from tests.cli.commands import PIPES, RECIPE, call, start


def train(workdir: pathlib.Path, data: pathlib.Path, *settings: str) -> str:
    changes = " ".join(f"--set {setting}" for setting in settings)
    return f"train {RECIPE} --workdir {workdir} --data-dir {data} {changes}"


def test_a_run_stopped_before_its_first_step_leaves_nothing(
    tmp_path, synthetic_data, monkeypatch
) -> None:
    monkeypatch.setattr(Trainer, "compile", mock.Mock(side_effect=Preempted(signal.SIGTERM)))
    with pytest.raises(Preempted):
        call(train(tmp_path / "run", synthetic_data, "training.steps=4"))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["train.lock"]


def test_a_full_disk_is_named(tmp_path, synthetic_data) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
    try:
        with pytest.raises(
            OSError, match=r"File too large\. Files that were finished are kept: '.*/run'"
        ):
            call(train(tmp_path / "run", synthetic_data, "training.steps=2"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def read_terminal(descriptor: int, until: str | None = None) -> str:
    """Returns what a program writes to its terminal.

    Reading stops when the program ends, or after the text `until`.
    """
    shown = b""
    while until is None or until.encode() not in shown:
        try:
            part = os.read(descriptor, 4096)
        except OSError:  # on Linux, the program has closed the terminal
            part = b""
        if not part:
            break
        shown += part
    return shown.decode()


def test_training_is_interrupted_with_and_without_a_terminal(tmp_path, synthetic_data) -> None:
    workdir = tmp_path / "run"
    settings = ("training.steps=100000", "mesh.fsdp=1", "evaluation.every=4")
    endless = train(workdir, synthetic_data, *settings)
    with start(endless, **PIPES) as process:
        said = []
        while not said or "step      8/100000  loss" not in said[-1]:
            said.append(process.stdout.readline())
            assert said[-1], process.stderr.read()
        with pytest.raises(InUseError, match=f"run is in use: process {process.pid} on "):
            call(endless)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate()
    assert process.returncode in (130, -signal.SIGINT)  # negative in an evaluation
    if process.returncode == 130:
        assert errors.endswith(
            "The process was stopped by SIGINT. Everything is saved. Start the same command again "
            "to continue.\n"
        )
    log = "".join(said) + rest
    assert re.search(r"step +0/100000  compiling: [\d,]+ parameters on 1 × cpu\n", log)
    assert re.search(
        r"step +4/100000  loss .*learning rate .*padding \d+%.* steps/s .* left\n", log
    )
    assert re.search(
        r"step +4/100000  saved\n.*evaluated in .* s: score [\d.]+, loss .*accuracy", log
    )
    (*_, newest) = finished_steps(workdir / "checkpoints")
    trained = [r["step"] for r in read_metrics(workdir / "metrics.jsonl") if r["kind"] == "train"]
    assert trained == list(range(1, newest + 1))

    ours, theirs = pty.openpty()

    def belong_to_the_terminal() -> None:
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    terminal = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    with start(endless, **terminal, preexec_fn=belong_to_the_terminal) as process:
        os.close(theirs)
        shown = read_terminal(ours, until=f"{newest + 4 - newest % 4}/100000  evaluated in ")
        os.write(ours, b"\x03")  # Ctrl-C
        rest = read_terminal(ours)
    os.close(ours)
    assert process.returncode in (130, -signal.SIGINT), shown + rest
    assert "/100000" in shown and "steps/s" in shown  # the progress bar
    assert finished_steps(workdir / "checkpoints")[-1] > newest


@pytest.fixture(scope="module")
def finished(tmp_path_factory, synthetic_data) -> pathlib.Path:
    """A run of four steps."""
    workdir = tmp_path_factory.mktemp("runs") / "finished"
    call(train(workdir, synthetic_data, "training.steps=4"))
    return workdir


@pytest.fixture
def copied(finished, tmp_path) -> pathlib.Path:
    """A copy of the finished run that the test may damage."""
    return shutil.copytree(finished, tmp_path / "run")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("data.split=nope", "nope"),
        ("model.vocab_size=20", r"model\.vocab_size is only 20\. Set"),
        ("mesh.tensor=3", "3"),
    ],
)
def test_a_start_that_is_refused_leaves_nothing(tmp_path, synthetic_data, wrong, message) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        call(train(tmp_path / "run", synthetic_data, "training.steps=2", wrong))
    assert list(tmp_path.iterdir()) == []


def test_a_start_without_checkpoints_does_not_block_the_directory(copied, synthetic_data) -> None:
    """A run that has saved no checkpoint may be started again with different settings."""
    shutil.rmtree(copied / "checkpoints")
    (copied / "events.jsonl").unlink()
    call(train(copied, synthetic_data, "training.steps=2", "training.seed=7"))
    assert finished_steps(copied / "checkpoints") == [2]
    saved = json.loads((copied / "experiment.json").read_text())
    assert saved["training"]["seed"] == 7


def test_another_vocabulary_or_a_changed_one_is_noticed(
    finished, copied, synthetic_data, tmp_path
) -> None:
    given = synthetic.vocabulary(synthetic_data)
    mine = replace(load_experiment(finished), vocabulary=given)
    save_run(mine, copied)
    check_same_run(mine, copied)
    other = tmp_path / "other.model"
    other.write_bytes(b"other")
    message = r"holds another run: its vocabulary\.model is not .*other"
    with pytest.raises(ValueError, match=message):
        check_same_run(replace(mine, vocabulary=SentencePiece(str(other))), copied)
    again = replace(mine, training=replace(mine.training, seed=7))
    with pytest.raises(ValueError, match="holds another run"):  # before anything is prepared
        run(again, copied, data_dir=tmp_path, prepare=lambda *_: pytest.fail("data was prepared"))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "distill papers.replacement:alr --teacher {run} --workdir {run}",
            "run holds another run: ",
        ),
        (
            "distill papers.replacement:alr --teacher {run}/.. --workdir new",
            "contains no experiment",
        ),
        (
            f"train {RECIPE} --workdir new --set init_from={{run}} --set training.adapters=LoRA "
            "--set training.adapters.targets=q,v",
            "training.adapters.targets: 'q,v' matches no kernel",
        ),
        (
            "inspect {run}/checkpoints/99",
            "contains no checkpoint of step 99. Choose step 4",
        ),
    ],
)
def test_mistakes_are_reported_before_data_is_prepared(
    copied, monkeypatch, command, message
) -> None:
    def prepare(*_, **__):
        """Fails the test, because no data may be prepared."""
        pytest.fail("data was prepared")

    for module in ("data", "train"):
        monkeypatch.setattr(f"synthesizer_jax.cli.{module}.prepare_missing", prepare)
    with pytest.raises((ValueError, OSError), match=message):
        call(command.format(run=copied))


def test_an_interrupted_evaluation_is_repeated(copied, synthetic_data) -> None:
    log = copied / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if '"eval"' not in line))
    said = call(train(copied, synthetic_data, "training.steps=4"))
    assert "step 4/4  evaluated in " in said and "compiling" not in said
    again = log.read_text().splitlines(keepends=True)
    assert json.loads(again[-1])["score"] == json.loads(lines[-1])["score"]
    assert len(again) == len(lines)
