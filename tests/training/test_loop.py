"""A run that is killed continues as if nothing had happened."""

import math
import pathlib
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

from synthesizer_jax.checkpoints.manager import Checkpoints, finished_steps, restore_variables
from synthesizer_jax.checkpoints.retention import Retention
from synthesizer_jax.runs.events import EVENTS_FILE, goodput
from synthesizer_jax.runs.metrics import METRICS_FILE, _truncate_metrics, read_metrics
from synthesizer_jax.runtime.preemption import StopSignal
from synthesizer_jax.runtime.watchdog import Watchdog
from synthesizer_jax.sharding import MeshShape, make_mesh
from synthesizer_jax.training import run_log, trainer
from synthesizer_jax.training.loop import train
from synthesizer_jax.training.run_log import NonFiniteLossError
from synthesizer_jax.training.trainer import Trainer
from tests.environment import without_devices
from tests.training.tiny import CopyStream, experiment

GIB = 2**30
ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(directory, *, stream=None, visible=False, **changes):
    with StopSignal() as stop:
        return train(
            Trainer(experiment(**changes), jax.devices()[:1]),
            stream or CopyStream(),
            directory,
            stop=stop,
            visible=visible,
        )


def process(directory, kill_at, how):
    """Runs `tiny.main` in a process of its own, with one device."""
    return subprocess.run(
        [sys.executable, "-m", "tests.training.tiny", str(directory), str(kill_at), how],
        cwd=ROOT,
        env=without_devices(),
        capture_output=True,
        text=True,
        check=False,
    )


def losses(directory):
    records = read_metrics(directory / METRICS_FILE)
    found = {r["step"]: r["loss"] for r in records if r["kind"] == "train"}
    assert len(found) == sum(r["kind"] == "train" for r in records), "a step was logged twice"
    return found


def evaluations(directory):
    """Steps and scores, in the log's order."""
    records = read_metrics(directory / METRICS_FILE)
    return [(r["step"], r["score"]) for r in records if r["kind"] == "eval"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("undisturbed")
    assert process(directory, -1, "never").returncode == 0
    return losses(directory), evaluations(directory)


KILLS = [
    ("term-in-compilation", -1, 75),
    ("kill", 3, -9),
    ("int-in-evaluation", 4, 130),
    ("kill", 6, -9),
    ("int", 7, 130),
    ("int-int", 8, 130),
    ("term-in-evaluation", 8, 75),
    ("term", 10, 75),
    ("term-in-evaluation", 12, 75),
]


@pytest.mark.slow
def test_killed_and_started_again_and_again(tmp_path, undisturbed):
    for how, kill_at, code in KILLS:
        killed = process(tmp_path, kill_at, how)
        assert killed.returncode == code, killed.stderr
        if code > 0 and how != "int-int":
            # The batch of the signal was trained, and its state saved.
            assert max(finished_steps(tmp_path / "checkpoints"), default=-1) >= kill_at
    last = process(tmp_path, -1, "never")
    assert last.returncode == 0, last.stderr
    # Bit-identical, none lost, none repeated.
    assert (losses(tmp_path), evaluations(tmp_path)) == undisturbed


def test_training_learns_and_a_finished_run_does_nothing_more(tmp_path):
    state = run(tmp_path, steps=60, save_every=60)
    found = losses(tmp_path)
    assert np.mean([found[s] for s in range(50, 60)]) < found[1] - 0.5
    records = read_metrics(tmp_path / METRICS_FILE)
    trained = [r for r in records if r["kind"] == "train"]
    assert all(0 < r["product_utilization"] < 1 for r in trained)
    assert not any("mfu" in r for r in trained), "a CPU has no published peak"
    stream = CopyStream()
    again = run(tmp_path, steps=60, stream=stream)
    assert stream.taken == 60
    jax.tree.map(np.testing.assert_array_equal, again.params, state.params)
    step, variables = restore_variables(tmp_path / "checkpoints")
    assert step == 60
    jax.tree.map(np.testing.assert_array_equal, variables["params"], state.params)


def test_padding_that_stays_above_half_is_said_once(tmp_path, monkeypatch, capsys):
    class Sparse(CopyStream):
        def __next__(self):
            batch = super().__next__()
            limit = 8 if self.taken == 3 else 3  # of one batch, more
            return {name: value * (np.arange(8) < limit) for name, value in batch.items()}

    monkeypatch.setattr(run_log, "SPARSE_STEPS", 4)
    run(tmp_path, stream=Sparse(), visible=True)
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("more than half of the tokens are padding: data.pack=true") == 1
    assert "step 7/12 more than half" in said


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(tmp_path):
    with pytest.raises(
        NonFiniteLossError, match=r"loss of step 7 is nan; stopped, step 4 is saved: "
    ):
        run(tmp_path, stream=CopyStream(bad_batch=6))
    assert finished_steps(tmp_path / "checkpoints") == [4]
    assert all(math.isfinite(v) for v in losses(tmp_path).values())


def test_the_latest_and_the_best_are_kept_when_the_score_falls(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_latest=2, keep_best=1, asynchronous=False)
    from synthesizer_jax.training.state import TrainState

    for step, score in enumerate((0.1, 0.9, 0.5, math.nan, None, 0.2, 0.95), start=1):
        state = TrainState(np.asarray(step, np.int32), {"x": np.ones(2)}, {}, {})
        checkpoints.save(state, None)
        assert checkpoints.latest == step, "the newest was deleted"
        if score is not None:
            checkpoints.record_score(step, score)
    assert checkpoints.steps == [2, 6, 7]
    checkpoints.prune()
    assert checkpoints.steps == [6, 7]
    checkpoints.close()


@pytest.mark.parametrize("latest", range(5))
def test_so_many_of_the_newest_are_kept_also_while_there_are_fewer(latest):
    policy = Retention(latest, 0, {})
    for count in range(8):
        assert policy.steps_to_keep(range(count)) == set(range(max(count - latest, 0), count))


def test_metrics_are_cut_back_to_the_restored_step(tmp_path):
    path = tmp_path / METRICS_FILE
    lines = [f'{{"step": {s}, "kind": "train", "loss": 1.0}}\n' for s in range(1, 6)]
    path.write_text("".join(lines) + '{"step": 6, "ki')
    _truncate_metrics(path, 3)
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3]
    assert list(tmp_path.iterdir()) == [path]


def damage(checkpoint):
    """Empties the files that hold a checkpoint's arrays."""
    files = [p for p in (checkpoint / "state").rglob("*") if p.is_file() and p.parent.name == "d"]
    assert files
    for path in files:
        path.write_bytes(b"")


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_read_is_set_aside(tmp_path, caplog):
    run(tmp_path / "whole", steps=12)
    run(tmp_path / "damaged", steps=8)
    checkpoints = tmp_path / "damaged" / "checkpoints"
    damage(checkpoints / "8")
    run(tmp_path / "damaged", steps=12)
    assert losses(tmp_path / "damaged") == losses(tmp_path / "whole")
    assert "checkpoint 8 cannot be read and is set aside" in caplog.text
    assert (checkpoints / "8.unreadable" / "state").is_dir()
    assert finished_steps(checkpoints) == [8, 12]


def test_when_no_checkpoint_can_be_read_nothing_is_lost(tmp_path):
    run(tmp_path, steps=8)
    for step in (4, 8):
        damage(tmp_path / "checkpoints" / str(step))
    with pytest.raises(ValueError, match=r"no checkpoint in .* can be read \(tried 8, 4; 8: "):
        run(tmp_path, steps=12)
    assert finished_steps(tmp_path / "checkpoints") == [4, 8]


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [ValueError("seed was 1 and is 2"), PermissionError("denied")],
    ids=lambda e: type(e).__name__,
)
def test_a_checkpoint_stays_where_it_is_when_it_is_not_what_fails(tmp_path, monkeypatch, error):
    run(tmp_path, steps=8)

    def fail(stream, directory):
        raise error

    monkeypatch.setattr(CopyStream, "restore", fail)
    with pytest.raises(type(error), match=str(error)):
        run(tmp_path, steps=12)
    assert finished_steps(tmp_path / "checkpoints") == [4, 8]


@pytest.mark.slow
def test_a_second_damaged_checkpoint_of_a_step_is_set_aside_too(tmp_path):
    for _ in range(2):
        run(tmp_path, steps=8)
        damage(tmp_path / "checkpoints" / "8")
    run(tmp_path, steps=8)
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"4", "8", "8.unreadable", "8.unreadable-2"}


def test_a_checkpoint_of_other_arrays_stays_where_it_is(tmp_path):
    from synthesizer_jax.training.state import TrainState

    checkpoints = Checkpoints(tmp_path, asynchronous=False)
    checkpoints.save(TrainState(np.asarray(1, np.int32), {"x": np.ones(2)}, {}, {}), None)
    other = TrainState(
        jax.ShapeDtypeStruct((), np.int32), {"y": jax.ShapeDtypeStruct((3,), np.float32)}, {}, {}
    )
    with pytest.raises(ValueError, match=r"belongs to another model: params/x is \(2,\) there"):
        checkpoints.restore_newest(other, None)
    assert checkpoints.steps == [1]
    checkpoints.close()


@pytest.mark.parametrize(
    ("free", "devices", "fits"),
    [(19 * GIB, 8, True), (18 * GIB, 8, False), (18 * GIB, 4, True), (None, 8, True)],
)
def test_a_step_that_would_not_fit_into_memory_is_refused(monkeypatch, free, devices, fits):
    monkeypatch.setattr(trainer, "free_memory", lambda: free)
    mesh = make_mesh(MeshShape(), jax.devices()[:devices])
    analysis = types.SimpleNamespace(temp_size_in_bytes=2 * GIB)
    compiled = types.SimpleNamespace(memory_analysis=lambda: analysis)
    if fits:
        trainer.check_memory(compiled, mesh)
        return
    with pytest.raises(
        ValueError, match=r"needs 18\.4 GiB more memory and 18\.0 GiB are free; end"
    ):
        trainer.check_memory(compiled, mesh)


@pytest.mark.slow
def test_memory_is_looked_at_again_before_the_first_step(tmp_path, monkeypatch):
    """Reading data has taken it; the start leaves nothing that blocks the directory."""
    free = iter([GIB, 0])
    monkeypatch.setattr(trainer, "free_memory", lambda: next(free))
    with pytest.raises(ValueError, match="more memory"):
        run(tmp_path, steps=2)
    assert finished_steps(tmp_path / "checkpoints") == []
    monkeypatch.setattr(trainer, "free_memory", lambda: None)
    run(tmp_path, steps=2)


def test_goodput_is_the_steps_share_of_the_time(tmp_path):
    events = tmp_path / EVENTS_FILE
    lines = [(100.0, "start", 0), (110.0, "saving", 5), (130.0, "start", 5), (150.0, "end", 10)]
    events.write_text(
        "".join(f'{{"time": {t}, "event": "{e}", "step": {s}}}\n' for t, e, s in lines[:2])
        + '{"ti'
        + "".join(f'{{"time": {t}, "event": "{e}", "step": {s}}}\n' for t, e, s in lines[2:])
    )
    assert goodput(tmp_path, seconds_per_step=2.0) == 10 * 2 / 50
    assert goodput(tmp_path / "none", 2.0) is None


def test_the_watchdog_tells_where_a_run_hangs(tmp_path):
    path = tmp_path / "stacks"
    with path.open("w") as file:
        watchdog = Watchdog(0.1, file)
        watchdog.reset()
        while "test_the_watchdog_tells" not in path.read_text():
            pass
        watchdog.close()
    assert "most recent call first" in path.read_text()
