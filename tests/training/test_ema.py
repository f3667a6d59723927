"""The exponential moving average of the parameters: its values, and who uses it."""

import jax
import numpy as np
import pytest

from synthesizer_jax.checkpoints.manager import restore_variables
from synthesizer_jax.optimizers import OptimizerRule
from synthesizer_jax.training.state import restart_ema
from tests.training.test_loop import losses, run
from tests.training.tiny import CopyStream

RULES = (OptimizerRule("decoder/.*", frozen=True),)
OPTIONS = {"steps": 6, "ema": 0.6, "rules": RULES, "save_every": 3, "keep_latest": 6}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with an average, and its final state."""
    directory = tmp_path_factory.mktemp("ema")
    return directory, run(directory, **{**OPTIONS, "save_every": 1})


def saved(directory, step, *, averaged):
    _, variables = restore_variables(directory / "checkpoints", step=step, averaged=averaged)
    return jax.device_get(variables["params"])


def test_the_average_equals_numpy(trained):
    directory, state = trained
    average = saved(directory, 1, averaged=True)
    for step in range(2, 7):
        decay = min(0.6, step / (step + 9))  # step − 1 updates came before
        params = saved(directory, step, averaged=False)
        average = jax.tree.map(lambda a, p, d=decay: d * a + (1 - d) * p, average, params)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
            saved(directory, step, averaged=True),
            average,
        )
    jax.tree.map(np.testing.assert_array_equal, saved(directory, 6, averaged=True), state.ema)
    assert state.averaged_variables["params"] is state.ema
    moved = jax.tree.map(lambda a, p: bool(np.any(a != p)), state.ema, state.params)
    assert all(jax.tree.leaves(moved["encoder"])) and not any(jax.tree.leaves(moved["decoder"]))


@pytest.mark.slow
def test_a_run_that_is_continued_has_the_same_average(trained, tmp_path):
    directory, state = trained
    run(tmp_path, **{**OPTIONS, "steps": 3})
    continued = run(tmp_path, **OPTIONS)
    assert losses(tmp_path) == losses(directory)
    for name in ("params", "ema", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, getattr(continued, name), getattr(state, name))


def test_a_damaged_average_is_found(trained):
    """Its checksums are among those that are verified."""
    directory, _ = trained
    contents = (directory / "checkpoints" / "6" / "contents" / "0.json").read_text()
    assert '"ema/encoder/' in contents


@pytest.mark.slow
def test_without_it_a_checkpoint_has_no_entry_for_it(tmp_path):
    state = run(tmp_path, steps=1)
    assert state.ema == {} and restart_ema(state) is state
    assert "ema" not in (tmp_path / "checkpoints" / "1" / "contents" / "0.json").read_text().split(
        "/"
    )
    assert "ema" not in (tmp_path / "checkpoints" / "1" / "state" / "_METADATA").read_text()
    stream = CopyStream()
    run(tmp_path, steps=2, stream=stream)
    assert stream.taken == 2


def test_a_start_from_other_parameters_starts_the_average_from_them(trained):
    _, state = trained
    fresh = restart_ema(state)
    jax.tree.map(np.testing.assert_array_equal, fresh.ema, state.params)
    assert all(
        a is not p for a, p in zip(*map(jax.tree.leaves, (fresh.ema, state.params)), strict=True)
    )
