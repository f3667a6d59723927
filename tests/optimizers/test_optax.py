"""Optimizers and schedules of optax, by name."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from synthesizer_jax.optimizers import Constant, optax_optimizer, optax_schedule
from synthesizer_jax.optimizers.adafactor import state_axes
from synthesizer_jax.registry import from_json, to_json
from tests.training.tiny import CopyStream, experiment

PARAMS = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3)}
AXES = {"a": ("embed", "mlp"), "b": ("norm",)}


def first_update(transformation):
    state = transformation.init(PARAMS)
    gradients = jax.tree.map(lambda p: 3.0 * p + 1.0, PARAMS)
    return transformation.update(gradients, state, PARAMS)


def test_an_optimizer_equals_optax():
    schedule = optax_schedule("cosine_decay_schedule", init_value=0.1, decay_steps=5)
    optimizer = optax_optimizer("lion", schedule, b1=0.8, weight_decay=0.1, clip_norm=1.0)
    expected_transformation = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.lion(optax.cosine_decay_schedule(0.1, 5), b1=0.8, weight_decay=0.1),
    )
    for actual, expected in zip(
        jax.tree.leaves(first_update(optimizer.build(AXES))),
        jax.tree.leaves(first_update(expected_transformation)),
        strict=True,
    ):
        np.testing.assert_array_equal(actual, expected)


def test_the_state_is_sharded_like_the_parameters():
    state = optax_optimizer("lion").build(AXES).init(PARAMS)
    axes = state_axes(state, AXES, PARAMS)
    assert (
        jax.tree.leaves(axes, is_leaf=lambda x: x == ("embed", "mlp")).count(("embed", "mlp")) == 1
    )


@pytest.mark.slow
def test_a_run_trains_and_is_saved():
    from synthesizer_jax.training.trainer import Trainer

    recipe = experiment(
        optimizer=optax_optimizer("sgd", Constant(0.1), momentum=0.9, nesterov=True)
    )
    assert from_json(json.loads(json.dumps(to_json(recipe)))) == recipe
    trainer = Trainer(recipe, jax.devices()[:1])
    state, metrics = trainer.step(trainer.init(), trainer.shard_batch(next(CopyStream())))
    assert int(state.step) == 1 and np.isfinite(float(metrics["loss"]))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: optax_optimizer("lyon"), r"optax has no 'lyon', did you mean 'lion'\?"),
        (lambda: optax_optimizer("sgd", beta=1.0), "optax.sgd: got an unexpected keyword argument"),
        (lambda: optax_optimizer("chain"), "optax has no 'chain'"),
        (lambda: optax_schedule("adamw"), "optax has no 'adamw'"),
        (lambda: optax_schedule("constant_schedule"), "missing a required argument: 'value'"),
    ],
)
def test_unknown_names_and_arguments_are_errors(build, message):
    with pytest.raises(ValueError, match=message):
        build()
