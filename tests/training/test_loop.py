"""Tests the training loop: continuing after kills, parameter averages, patience and buckets."""

import contextlib
import itertools
import json
import math
import threading
import types

import jax
import numpy as np
import pytest

from synthesizer_jax.base.registry import replace
from synthesizer_jax.checkpoints.manager import Checkpoints, finished_steps, restore_variables
from synthesizer_jax.checkpoints.placement import read_arrays
from synthesizer_jax.evaluation.config import Evaluation
from synthesizer_jax.models import Size, alignment, t5
from synthesizer_jax.optimizers import AdamW, Constant, OptimizerRule
from synthesizer_jax.runs import metrics
from synthesizer_jax.runs.events import read_events
from synthesizer_jax.training.loop import has_stopped
from synthesizer_jax.training.run_log import NonFiniteLossError
from synthesizer_jax.training.trainer import Trainer
from tests.conftest import ROOT
from tests.environment import python, without_devices
from tests.training.tiny import VOCAB, CopyStream, close, experiment, logged, run, stepped

KILLS = [
    ("term-in-compilation", -1, -15),
    ("kill", 3, -9),
    ("int-in-evaluation", 4, -2),
    ("int", 7, 130),
    ("int-int", 8, -2),
    ("term", 10, 75),
    ("never", -1, 0),
]


def test_a_run_that_is_killed_again_and_again_loses_nothing(tmp_path):
    """A run that is killed repeatedly has bit-identical losses and scores.

    No loss or score is lost or repeated.
    """
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    plays = [(str(killed), at, how) for how, at, _ in KILLS] + [(str(whole), -1, "never")]
    done = python("-m", "tests.training.tiny", json.dumps(plays), cwd=ROOT, env=without_devices())
    assert json.loads(done.stdout) == [code for *_, code in KILLS] + [0], done.stderr
    for name, kind in (("loss", "train"), ("score", "eval")):
        assert logged(killed, name, kind) == logged(whole, name, kind)
    assert list(logged(killed)) == list(range(1, 13))
    saved = [event["step"] for event in read_events(killed) if event["event"] == "saved"]
    assert {8, 11} <= set(saved), "the batch of a signal was trained, and its state saved"


def test_training_learns_and_a_finished_run_does_nothing_more(tmp_path):
    recipe = experiment(steps=60, save_every=60)
    with contextlib.ExitStack() as stack:

        def guard():
            """Forbids implicit transfers between host and devices from now on."""
            return stack.enter_context(jax.transfer_guard("disallow"))

        state = run(tmp_path, recipe, ready=guard)  # the loop only makes explicit transfers
    found = logged(tmp_path)
    assert np.mean([found[s] for s in range(50, 60)]) < found[1] - 0.5
    assert all(0 < share < 1 for share in logged(tmp_path, "product_utilization").values())
    assert set(logged(tmp_path, "mfu").values()) == {None}, "a CPU has no published peak"
    stream = CopyStream()
    again = run(tmp_path, recipe, stream)
    assert stream.taken == 60
    jax.tree.map(np.testing.assert_array_equal, again.params, state.params)
    step, variables = restore_variables(tmp_path / "checkpoints")
    assert step == 60
    jax.tree.map(np.testing.assert_array_equal, variables["params"], state.params)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(tmp_path):
    with pytest.raises(
        NonFiniteLossError, match=r"of step 7 is nan\. The newest checkpoint is of step 4\."
    ):
        run(tmp_path, experiment(), CopyStream(bad_batch=6))
    assert finished_steps(tmp_path / "checkpoints") == [4]
    assert all(math.isfinite(v) for v in logged(tmp_path).values())


RULES = (OptimizerRule("decoder/.*", frozen=True),)


def test_a_moving_average_equals_numpy_and_continues(tmp_path):
    options = {"ema": 0.6, "rules": RULES, "save_every": 1, "keep_latest": 6}
    run(tmp_path, experiment(steps=3, **options))
    state = run(tmp_path, experiment(steps=6, **options))

    def saved(step):
        """Returns the parameters of the checkpoint at a step."""
        return restore_variables(tmp_path / "checkpoints", step=step)[1]["params"]

    average = jax.device_get(saved(1))
    for step in range(2, 7):
        decay = min(0.6, step / (step + 9))  # after step − 1 updates
        checkpoint = tmp_path / "checkpoints" / str(step)
        params = read_arrays(checkpoint, {"params": state.params}, ("params",))["params"]
        average = jax.tree.map(lambda a, p, d=decay: d * a + (1 - d) * p, average, params)
        close(saved(step), average, rtol=1e-5, atol=1e-7)
    assert state.averaged_variables["params"] is state.ema
    moved = jax.tree.map(lambda a, p: bool(np.any(a != p)), state.ema, state.params)
    assert all(jax.tree.leaves(moved["encoder"])) and not any(jax.tree.leaves(moved["decoder"]))
    contents = (tmp_path / "checkpoints" / "6" / "contents" / "contents.json").read_text()
    assert '"ema/encoder/' in contents, "its checksums are among those that are verified"


def test_a_run_starts_under_its_callers_settings_while_the_step_is_compiled(tmp_path, monkeypatch):
    recipe = experiment()
    release = threading.Event()
    compiled = []
    monkeypatch.setattr(Trainer, "compile", lambda *_, lowered: compiled.append(release.wait(60)))
    with jax.threefry_partitionable(False), pytest.raises(ValueError, match="of another model"):
        expected = Trainer(recipe).init().params["embedding"]

        def start(trainer):
            np.testing.assert_array_equal(trainer.init().params["embedding"], expected)
            raise ValueError("a checkpoint of another model")

        run(tmp_path, recipe, initialize=start)
    assert not compiled, "an error does not wait for XLA"
    release.set()


SCORES = {2: 50.0, 4: 60.0, 6: 60.5, 8: 60.0, 10: 70.0, 12: 60.0}


def test_a_run_stops_and_continues_with_more_patience(tmp_path, capsys):
    def go(patience):
        stream = CopyStream()
        evaluation = {"patience": patience, "min_improvement": 1.0}
        recipe = experiment(every=2, evaluation=evaluation)

        def measure(state):
            """Returns the score of the evaluation at a step."""
            return {"score": SCORES[int(state.step)]}

        return int(run(tmp_path, recipe, stream, evaluate=measure).step), stream.taken

    assert go(patience=2) == (8, 8)
    assert finished_steps(tmp_path / "checkpoints") == [6, 8], "the best is kept"
    why = "stopped after 2 evaluations without a better score"
    assert capsys.readouterr().err == f"step  8/12  {why}\n", "nothing else is said"
    assert [e["text"] for e in read_events(tmp_path) if e["event"] == "stopped"] == [why]
    assert go(patience=2) == (8, 8), "it stays stopped"
    assert go(patience=3) == (12, 12)


@pytest.mark.parametrize(
    ("scores", "margin", "count"),
    [
        ({}, 0.0, 0),
        # An improvement must be larger than 1. The score 50.9 is therefore not better than 50,
        # although it is the maximum, but 51.2 is better.
        ({1: 50.0, 2: 50.9}, 1.0, 1),
        ({1: 50.0, 2: 50.9, 3: 51.2}, 1.0, 0),
        (SCORES, 0.0, 1),
        ({k: v for k, v in SCORES.items() if k < 10}, 1.0, 2),
        ({1: math.nan, 2: 1.0, 3: math.nan, 4: 1.0}, 0.0, 1),
        ({4: 1.0, 2: 3.0}, 0.0, 1),
        ({2: 3.0, 99: 1.0}, 0.0, 0),
    ],
)
def test_evaluations_without_improvement_are_counted(scores, margin, count):
    for patience in (1, 2, 3):
        evaluation = Evaluation(patience=patience, min_improvement=margin)
        assert has_stopped(evaluation, scores, step=12) == (count >= patience)


STILL = AdamW(learning_rate=Constant(0.0))
MODEL = t5(
    Size(8, 1, 16, 2, 4), encoder=alignment("rv", head_dim=4, max_length=8), vocab_size=VOCAB
)


class Shorter(CopyStream):
    """A stream in which every second batch needs only five positions."""

    def batch(self, rng):
        length = 8 if self.taken % 2 else 5
        batch = {name: x.copy() for name, x in super().batch(np.random.default_rng(0)).items()}
        for x in batch.values():
            x[:, 5:] = 0
        return {name: np.ascontiguousarray(x[:, :length]) for name, x in batch.items()}


def test_a_bucket_is_compiled_once_and_changes_nothing(tmp_path, monkeypatch):
    """Every bucket of lengths is compiled once, and buckets do not change the losses.

    The logged speed does not include the time of compilation.

    A fake clock advances by 1,000 seconds for each compilation, and only then.
    """
    recipe = experiment(MODEL, data={"buckets": ((5, 5),)}, steps=4, rules=RULES)
    frozen = replace(recipe, training=replace(recipe.training, optimizer=STILL))
    _, found = stepped(frozen, Shorter(), steps=4)
    np.testing.assert_allclose([m["loss"] for m in found], found[0]["loss"], rtol=1e-5)
    clock = itertools.count()
    stopped = types.SimpleNamespace(perf_counter=lambda: next(clock), time=lambda: 0)
    monkeypatch.setattr(metrics, "time", stopped)
    trace = Trainer.trace
    shapes = []

    def slow(trainer, lengths=None):
        list(itertools.islice(clock, 1000))
        shapes.append(lengths)
        return trace(trainer, lengths)

    monkeypatch.setattr(Trainer, "trace", slow)
    run(tmp_path, recipe, Shorter())
    assert shapes == [None, (5, 5)]
    speeds = logged(tmp_path, "steps_per_second")
    assert len(speeds) == 4 and min(speeds.values()) > 0.1
    assert set(logged(tmp_path, "product_utilization").values()) == {None}


def test_some_steps_are_profiled(tmp_path, monkeypatch):
    """Some steps are profiled.

    The trace does not include saving a checkpoint before the first profiled step or after the last
    one.
    """
    order = []
    trace = jax.profiler.trace
    save = Checkpoints.save

    @contextlib.contextmanager
    def traced(directory):
        order.append("begin")
        with trace(directory):
            yield
        order.append("end")

    def saved(checkpoints, state, stream):
        order.append(int(state.step))
        save(checkpoints, state, stream)

    monkeypatch.setattr(jax.profiler, "trace", traced)
    monkeypatch.setattr(Checkpoints, "save", saved)
    run(tmp_path, experiment(steps=4, save_every=1, profile=(1, 3)))
    assert order == [1, "begin", 2, "end", 3, 4]
    traces = list((tmp_path / "profile").rglob("*.xplane.pb"))
    assert len(traces) == 1
    for profile in ((3, 3), (1, 5)):
        with pytest.raises(ValueError, match=r"the second is at most training\.steps \(4\)"):
            experiment(steps=4, profile=profile)


def test_programs_name_what_their_operations_belong_to():
    trainer = Trainer(experiment(), jax.devices()[:1])
    names = trainer.compile().as_text()
    for scope in ("encoder/", "self_attention/", "align/", "mlp/", "jvp(loss)/", "/optimizer/"):
        assert scope in names
