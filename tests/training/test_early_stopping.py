"""A run stops when its score no longer improves, and stays stopped."""

import math

import jax
import pytest

from synthesizer_jax.checkpoints.manager import finished_steps
from synthesizer_jax.registry import replace
from synthesizer_jax.runs.events import has_stopped, read_events
from synthesizer_jax.runtime.preemption import StopSignal
from synthesizer_jax.training.early_stopping import evaluations_without_improvement
from synthesizer_jax.training.loop import train
from synthesizer_jax.training.trainer import Trainer
from tests.training.tiny import CopyStream, experiment

SCORES = {2: 50.0, 4: 60.0, 6: 60.5, 8: 60.0, 10: 70.0, 12: 60.0}


def run(directory, *, patience, min_improvement=0.0):
    """Trains to at most 12 steps; returns the final step and how many batches were taken."""
    recipe = experiment(every=2)
    evaluation = replace(recipe.evaluation, patience=patience, min_improvement=min_improvement)
    stream = CopyStream()
    with StopSignal() as stop:
        state = train(
            Trainer(replace(recipe, evaluation=evaluation), jax.devices()[:1]),
            stream,
            directory,
            stop=stop,
            evaluate=lambda state: {"score": SCORES[int(state.step)]},
            visible=False,
        )
    return int(state.step), stream.taken


@pytest.mark.slow
def test_a_run_stops_and_goes_on_with_more_patience(tmp_path, capsys):
    assert run(tmp_path, patience=2, min_improvement=1.0) == (8, 8)
    assert finished_steps(tmp_path / "checkpoints") == [6, 8], "the best is kept"
    names = [event["event"] for event in read_events(tmp_path)]
    assert names[-2:] == ["stopped", "end"] and has_stopped(tmp_path)
    assert run(tmp_path, patience=2, min_improvement=1.0) == (8, 8), "it stays stopped"
    assert run(tmp_path, patience=3, min_improvement=1.0) == (12, 12)
    assert not has_stopped(tmp_path)


def test_evaluations_without_improvement_are_counted():
    count = evaluations_without_improvement
    assert count({}) == 0
    # The best is 50 until 51.2 exceeds it by more than 1; 50.9 is the maximum before, and no best.
    assert count({1: 50.0, 2: 50.9}, min_improvement=1.0) == 1
    assert count({1: 50.0, 2: 50.9, 3: 51.2}, min_improvement=1.0) == 0
    assert count(SCORES) == 1
    assert count(SCORES, min_improvement=1.0) == 1
    assert count({k: v for k, v in SCORES.items() if k < 10}, min_improvement=1.0) == 2
    assert count({1: math.nan, 2: 1.0, 3: math.nan, 4: 1.0}) == 1
    assert count({4: 1.0, 2: 3.0}) == 1, "in the order of the steps"


def test_patience_needs_evaluations():
    recipe = experiment()
    with pytest.raises(ValueError, match=r"evaluation\.every is 0; set evaluation\.every"):
        replace(recipe, evaluation=replace(recipe.evaluation, patience=2))
    with pytest.raises(ValueError, match=r"evaluation\.patience is 0; allowed: 1 to"):
        replace(recipe, evaluation=replace(recipe.evaluation, every=1, patience=0))
    with pytest.raises(ValueError, match=r"evaluation\.min_improvement is -1\.0; allowed: 0 or"):
        replace(recipe, evaluation=replace(recipe.evaluation, min_improvement=-1.0))
    with pytest.raises(ValueError, match=r"training\.ema is 1\.0; allowed: 0 to below 1"):
        experiment(ema=1.0)
