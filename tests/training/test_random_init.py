"""Tests that initial parameters do not depend on how initialization is split into programs.

Equal layers share a program.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from synthesizer_jax.models import Size, alignment, t5
from synthesizer_jax.training.random_init import init_arrays


def state(layers: int, *, scan: bool = False):
    """Returns an initializer of a state with random and constant arrays."""
    kind = alignment("rv", head_dim=4, max_length=8)
    model = t5(Size(8, layers, 16, 2, 4), encoder=kind, vocab_size=16, scan=scan)
    tokens = jnp.zeros((1, 8), jnp.int32)

    def init(key):
        params = model.init(key, tokens, tokens)["params"]
        draw = jax.random.normal(key, (2,))
        ones = jax.tree.map(jnp.ones_like, params)
        scaled = [jax.jit(lambda x, c=c: c * x)(draw) for c in np.array([[1.0, 2.0], [3.0, 4.0]])]
        return {"params": params, "ones": ones, "average": params, "scaled": scaled, "count": 0}

    return init


@pytest.mark.parametrize("scan", [False, True])
def test_initial_parameters_are_those_of_one_program_on_a_mesh(scan):
    init = state(2, scan=scan)
    mesh = jax.make_mesh(
        (2,), ("x",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,)
    )
    shapes = jax.eval_shape(init, jax.random.key(3))

    def place(x):
        """Returns a sharding that shards an array's first axis if its size is even."""
        return NamedSharding(mesh, P("x") if x.ndim and x.shape[0] % 2 == 0 else P())

    shardings = jax.tree.map(place, shapes)
    found = init_arrays(init, jax.random.key(3), shardings=shardings)
    assert jax.tree.map(lambda x: x.sharding, found) == shardings
    jax.tree.map(np.testing.assert_array_equal, found, jax.jit(init)(jax.random.key(3)))


def test_layers_that_are_alike_are_compiled_once():
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: (
            compiled.append(name) if name.endswith("backend_compile_duration") else None
        )
    )
    numbers = []
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for layers in (2, 3, 5):  # the first one also compiles the keys
        init = state(layers)
        shardings = jax.tree.map(lambda _: device, jax.eval_shape(init, jax.random.key(0)))
        compiled.clear()
        init_arrays(init, jax.random.key(0), shardings=shardings)
        numbers.append(len(compiled))
    assert 5 < numbers[1] == numbers[2] <= numbers[0], numbers
