"""How far parameters moved: against NumPy, from a seed and from a checkpoint, and in the report."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from synthesizer_jax.checkpoints.manager import Checkpoints
from synthesizer_jax.models import Size, alignment, t5, unroll_variables
from synthesizer_jax.optimizers import OptimizerRule
from synthesizer_jax.registry import replace
from synthesizer_jax.reports.page import format_change
from synthesizer_jax.training.initial_parameters import initialize_from_checkpoint
from synthesizer_jax.training.movement import (
    MOVEMENT_FILE,
    Group,
    measure_movement,
    read_movement,
    record_movement,
)
from synthesizer_jax.training.run_directory import save_experiment
from synthesizer_jax.training.trainer import Trainer
from tests.training.tiny import CopyStream, experiment

RULES = (
    OptimizerRule("encoder/layers_0/.*", frozen=True),
    OptimizerRule("decoder/.*", frozen=True),
)


def make_trainer(*, scan=True, **changes):
    kind = alignment("rv", head_dim=4, max_length=8)
    model = t5(Size(8, 2, 16, 2, 4), encoder=kind, vocab_size=16, scan=scan)
    return Trainer(replace(experiment(rules=RULES), model=model, **changes), jax.devices()[:1])


def train(trainer, state, steps=2):
    stream = CopyStream()
    for _ in range(steps):
        state, _ = trainer.step(state, trainer.shard_batch(next(stream)))
    return state


def looped(trainer, params):
    return jax.device_get(unroll_variables(trainer.model, {"params": params})["params"])


def expected_groups(before, after):
    """Squared distances and norms over the layers, by path."""
    found = {}
    for (path, old), new in zip(
        jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True
    ):
        names = ["layers_*" if "layers_" in e.key else e.key for e in path]
        distance, norm = ((new - old) ** 2).sum(), (old**2).sum()
        total = found.setdefault("/".join(names), np.zeros(3))
        total += (old.size, distance, norm)
    return found


def check_groups(movement, before, after):
    expected = expected_groups(before, after)
    assert [g.path for g in movement.groups] == sorted(expected)
    for group in movement.groups:
        size, distance, norm = expected[group.path]
        assert group.parameters == size
        np.testing.assert_allclose(group.distance, math.sqrt(distance), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(group.initial_norm, math.sqrt(norm), rtol=1e-5)


@pytest.fixture(scope="module")
def trained():
    """A trainer of scanned layers, its looped parameters at the start, and its final state."""
    trainer = make_trainer()
    state = trainer.init()
    before = looped(trainer, state.params)
    return trainer, before, train(trainer, state)


def test_it_is_the_distance_from_what_the_seed_makes(trained):
    trainer, before, state = trained
    movement = measure_movement(trainer, state)
    assert (movement.step, movement.since) == (2, "initialization")
    check_groups(movement, before, looped(trainer, state.params))
    by_path = {group.path: group for group in movement.groups}
    half = next(g for path, g in by_path.items() if path.startswith("encoder/layers_*/"))
    assert half.frozen == half.parameters // 2 and half.change > 1e-4
    decoder = [group for path, group in by_path.items() if path.startswith("decoder/")]
    assert all(group.frozen == group.parameters for group in decoder)
    assert {format_change(group) for group in decoder} == {"0"}
    assert by_path["embedding"].frozen == 0


def test_from_a_checkpoint_it_is_the_distance_from_that(trained, tmp_path):
    trainer, _, state = trained
    save_experiment(trainer.experiment, tmp_path)
    checkpoints = Checkpoints(tmp_path / "checkpoints", asynchronous=False)
    checkpoints.save(state, None)
    checkpoints.close()
    start = looped(trainer, state.params)
    tuned = make_trainer(scan=False, init_from=str(tmp_path))
    other = initialize_from_checkpoint(
        tuned.init(), experiment=tuned.experiment, report=lambda _: None
    )
    other = train(tuned, other, steps=1)
    movement = measure_movement(tuned, other)
    assert movement.since == str(tmp_path / "checkpoints" / "2")
    check_groups(movement, start, jax.device_get(other.params))
    assert all(g.distance == 0 for g in movement.groups if g.path.startswith("decoder/"))


def test_it_is_written_and_read(trained, tmp_path):
    trainer, _, state = trained
    assert read_movement(tmp_path) is None
    record_movement(trainer, state, tmp_path)
    assert read_movement(tmp_path) == measure_movement(trainer, state)
    assert [p.name for p in tmp_path.iterdir()] == [MOVEMENT_FILE]
    (tmp_path / MOVEMENT_FILE).write_text('{"step": 2')
    with pytest.raises(ValueError, match=r"movement\.json cannot be read: .*; start the run again"):
        read_movement(tmp_path)


def test_a_run_does_not_fail_because_its_start_is_gone(trained, tmp_path, caplog):
    _, _, state = trained
    record_movement(make_trainer(init_from=str(tmp_path / "gone")), state, tmp_path)
    assert "movement.json is not written: " in caplog.text
    assert not any(tmp_path.iterdir())


def test_parameters_that_start_as_zeros_have_no_relative_change():
    groups = (Group("a", 4, 0, 0.5, 0.0), Group("b", 4, 0, 0.0, 0.0), Group("c", 4, 0, 0.5, 2.0))
    assert [format_change(group) for group in groups] == ["from 0 to a norm of 0.5", "0", "25 %"]
    assert json.dumps([dataclasses.asdict(group) for group in groups])
