"""Runs the code of docs/extending.md, and trains with its optimizer, schedule and mesh axis."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from synthesizer_jax.base.registry import from_json, replace, to_json
from synthesizer_jax.sharding import MeshShape, make_mesh, partition_spec, register_mesh_axis
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.training.trainer import Trainer
from tests.conftest import run_page
from tests.training.tiny import CopyStream, experiment, stepped


def test_an_optimizer_and_a_mesh_axis_train_and_are_saved(monkeypatch):
    monkeypatch.setattr(task_registry, "TASKS", dict(task_registry.TASKS))
    page = run_page("docs/extending.md")
    assert page["default"]().data.mixture == "my_reviews"
    optimizer = page["SignDescent"](page["Halving"](0.005, every_steps=15))
    recipe = experiment(optimizer=optimizer)
    schedule = Trainer(recipe, jax.devices()[:1]).optimizer.schedule
    rates = [schedule(updates) for updates in (14, 15)]
    np.testing.assert_allclose(rates, [0.005, 0.0025])
    _, expected = stepped(recipe, CopyStream(), steps=25)
    assert expected[-1]["loss"] < 0.95 * expected[0]["loss"]
    recipe = replace(recipe, mesh=MeshShape(data=2, tensor=2, extra=(("expert", 2),)))
    assert from_json(json.loads(json.dumps(to_json(recipe)))) == recipe
    state, found = stepped(recipe, CopyStream(), steps=4, devices=8)
    for one, many in zip(expected, found, strict=False):
        assert many["loss"] == pytest.approx(one["loss"], rel=2e-3)
    block = state.params["encoder"]["layers_0"]
    assert "expert" in block["mlp"]["wo"]["kernel"].sharding.spec
    assert "tensor" in block["attention"]["out"]["kernel"].sharding.spec
    for shape in (MeshShape(tensor=2), MeshShape(tensor=2, extra=(("expert", 1),))):
        mesh = make_mesh(shape, jax.devices()[:2])
        assert partition_spec(("embed", "mlp"), (4, 4), mesh) == PartitionSpec(None, "tensor")
    for wrong, message in (
        ((("exprt", 2),), r"There is no mesh axis 'exprt', did you mean 'expert'\?"),
        ((("expert", 2), ("expert", 2)), "The axis 'expert' is repeated"),
    ):
        with pytest.raises(ValueError, match=message):
            make_mesh(MeshShape(extra=wrong))
    register_mesh_axis("expert", "mlp")  # registering twice must be allowed
    for names, message in (
        (("tensor", "mlp"), "already a mesh axis 'tensor'"),
        (("chip", "head"), "There is no logical axis 'head', did you mean 'heads'"),
        (("expert", "heads"), "already a mesh axis 'expert'"),
    ):
        with pytest.raises(ValueError, match=message):
            register_mesh_axis(*names)
