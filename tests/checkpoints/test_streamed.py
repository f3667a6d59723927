"""Checkpoints whose arrays are read as they are written."""

import threading

import numpy as np
import pytest

from synthesizer_jax.checkpoints import streamed
from synthesizer_jax.checkpoints.manager import restore_variables
from synthesizer_jax.checkpoints.streamed import Unread, save_streamed

SHAPES = ((), (3,), (40, 5), (2, 3, 4), (100,), (1, 7))


def make_arrays():
    rng = np.random.default_rng(0)
    draw = lambda shape: np.asarray(rng.standard_normal(shape), np.float32)
    return {f"p{i}": draw(shape) for i, shape in enumerate(SHAPES)}


@pytest.mark.parametrize("ahead", [1, 500, 2**28])
def test_all_arrays_come_back_however_few_are_read_ahead(tmp_path, monkeypatch, ahead):
    monkeypatch.setattr(streamed, "AHEAD", ahead)
    arrays = make_arrays()
    params = {name: Unread.of(x) for name, x in arrays.items()}
    save_streamed(tmp_path, 3, {"params": params})
    step, variables = restore_variables(tmp_path)
    assert step == 3
    for name, x in arrays.items():
        np.testing.assert_array_equal(variables["params"][name], x)
        assert variables["params"][name].shape == x.shape


def test_no_more_is_read_ahead_than_allowed(monkeypatch):
    monkeypatch.setattr(streamed, "AHEAD", 100)
    begun, lock = [], threading.Lock()

    def unread(i):
        def load():
            with lock:
                begun.append(i)
            return np.full(10, i, np.float32)

        return Unread((10,), load)

    for i, (array, _) in enumerate(streamed._read_ahead([unread(i) for i in range(9)])):
        with lock:
            assert max(begun) < i + 2  # two arrays of 40 bytes each
        np.testing.assert_array_equal(array, i)
    assert sorted(begun) == list(range(9))


def test_an_error_of_a_read_is_raised(tmp_path):
    def fail():
        raise ValueError("p6 cannot be read")

    params = {name: Unread.of(x) for name, x in make_arrays().items()}
    with pytest.raises(ValueError, match="p6 cannot be read"):
        save_streamed(tmp_path, 0, {"params": {**params, "p6": Unread((2,), fail)}})
