"""Tests checkpoints whose arrays are written one by one while they are read."""

import numpy as np
import pytest

from synthesizer_jax.checkpoints.manager import restore_variables
from synthesizer_jax.checkpoints.streamed import Unread, save_streamed

SHAPES = ((), (3,), (40, 5), (2, 3, 4), (100,), (1, 7))


def make_arrays():
    rng = np.random.default_rng(0)
    return {f"p{i}": np.float32(rng.standard_normal(shape)) for i, shape in enumerate(SHAPES)}


def test_all_arrays_are_restored(tmp_path):
    arrays = make_arrays()
    save_streamed(tmp_path, 3, {"params": {name: Unread.of(x) for name, x in arrays.items()}})
    step, variables = restore_variables(tmp_path)
    assert step == 3
    for name, x in arrays.items():
        np.testing.assert_array_equal(variables["params"][name], x)
        assert variables["params"][name].shape == x.shape


def test_an_error_of_a_read_is_raised(tmp_path):
    def fail(_):
        raise ValueError("p6 cannot be read")

    params = {name: Unread.of(x) for name, x in make_arrays().items()}
    with pytest.raises(ValueError, match="p6 cannot be read"):
        save_streamed(tmp_path, 0, {"params": {**params, "p6": Unread((2,), fail)}})
