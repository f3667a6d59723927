"""Optimizers, schedules and mesh axes that are defined outside of the package."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from synthesizer_jax.optimizers import AdamW, Constant, Schedule
from synthesizer_jax.registry import EXTRA_MESH_AXES, from_json, register, replace, to_json
from synthesizer_jax.sharding import MeshShape, make_mesh, partition_spec, register_mesh_axis
from synthesizer_jax.training.trainer import Trainer
from tests.training.tiny import CopyStream, experiment


@register
@dataclasses.dataclass(frozen=True)
class OutsideSignDescent:
    """An optimizer: every update has the size of the learning rate."""

    learning_rate: Schedule

    def build(self, axes) -> optax.GradientTransformation:
        del axes
        return optax.chain(
            optax.stateless(lambda gradients, _: jax.tree.map(jnp.sign, gradients)),
            optax.scale_by_learning_rate(self.learning_rate.build()),
        )


@register
@dataclasses.dataclass(frozen=True)
class OutsideHalving:
    """A schedule: the learning rate is halved every few steps."""

    value: float = 0.01
    every_steps: int = 10

    def build(self) -> optax.Schedule:
        return lambda step: self.value * 0.5 ** (step // self.every_steps)


register_mesh_axis("expert", "mlp")


@pytest.fixture
def added_axes():
    """Removes the axes that a test adds."""
    before = dict(EXTRA_MESH_AXES)
    yield
    EXTRA_MESH_AXES.clear()
    EXTRA_MESH_AXES.update(before)


def train(recipe, *, steps, num_devices=1):
    """The losses of some steps, and the final state."""
    trainer = Trainer(recipe, jax.devices()[:num_devices])
    state, stream, losses = trainer.init(), CopyStream(), []
    for _ in range(steps):
        state, metrics = trainer.step(state, trainer.shard_batch(next(stream)))
        losses.append(float(metrics["loss"]))
    return losses, state


@pytest.mark.slow
def test_an_optimizer_trains_and_is_saved():
    recipe = experiment(optimizer=OutsideSignDescent(Constant(0.005)))
    assert from_json(json.loads(json.dumps(to_json(recipe)))) == recipe
    losses, _ = train(recipe, steps=30)
    assert losses[-1] < 0.95 * losses[0]


def test_an_optimizer_solves_a_toy_problem():
    optimizer = OutsideSignDescent(OutsideHalving(0.1, every_steps=20)).build({"x": (None,)})
    params = {"x": jnp.array([1.0, -2.0])}
    state = optimizer.init(params)
    for _ in range(100):
        updates, state = optimizer.update(jax.grad(lambda p: (p["x"] ** 2).sum())(params), state)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params["x"], 0, atol=0.02)


@pytest.mark.slow
def test_a_schedule_sets_the_learning_rate_and_is_saved():
    recipe = experiment(optimizer=AdamW(learning_rate=OutsideHalving(0.01, every_steps=2)))
    assert from_json(json.loads(json.dumps(to_json(recipe)))) == recipe
    schedule = Trainer(recipe, jax.devices()[:1]).optimizer.schedule
    rates = [schedule(updates) for updates in range(5)]
    np.testing.assert_allclose(rates, [0.01, 0.01, 0.005, 0.005, 0.0025])
    train(recipe, steps=1)


@pytest.mark.slow
def test_a_mesh_axis_shards_parameters_and_changes_no_result():
    recipe = experiment()
    expected, _ = train(recipe, steps=4)
    recipe = replace(recipe, mesh=MeshShape(data=2, tensor=2, extra=(("expert", 2),)))
    assert from_json(json.loads(json.dumps(to_json(recipe)))) == recipe
    losses, state = train(recipe, steps=4, num_devices=8)
    np.testing.assert_allclose(losses, expected, rtol=2e-4)
    block = state.params["encoder"]["layers_0"]
    assert "expert" in block["mlp"]["wo"]["kernel"].sharding.spec
    assert "tensor" in block["attention"]["out"]["kernel"].sharding.spec


def test_a_mesh_without_the_axis_has_the_usual_rules():
    for shape in (MeshShape(tensor=2), MeshShape(tensor=2, extra=(("expert", 1),))):
        mesh = make_mesh(shape, jax.devices()[:2])
        assert partition_spec(("embed", "mlp"), (4, 4), mesh) == PartitionSpec(None, "tensor")


def test_errors(added_axes):
    with pytest.raises(
        ValueError, match=r"unknown or repeated axis 'exprt', did you mean 'expert'\?"
    ):
        make_mesh(MeshShape(extra=(("exprt", 2),)))
    with pytest.raises(ValueError, match="unknown or repeated axis 'expert'"):
        make_mesh(MeshShape(extra=(("expert", 2), ("expert", 2))))
    with pytest.raises(ValueError, match="the mesh axis 'tensor' exists"):
        register_mesh_axis("tensor", "mlp")
    with pytest.raises(ValueError, match="unknown logical axis 'head', did you mean 'heads'"):
        register_mesh_axis("chip", "head")
    register_mesh_axis("expert", "mlp")  # a module may be imported again
    with pytest.raises(ValueError, match="the mesh axis 'expert' exists"):
        register_mesh_axis("expert", "heads")
