"""Every packaged recipe trains: built as it is, and stepped with small numbers in the place of its own."""

import dataclasses
import functools
import json
from typing import Any

import jax
import numpy as np
import pytest

from synthesizer_jax.cli.recipes import list_recipes, load_recipe, load_with_code
from synthesizer_jax.data.batch import batch_fields
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.distillation.distill import Distillation, DistillationTrainer
from synthesizer_jax.models import unroll_variables
from synthesizer_jax.registry import fields_of, from_json, replace, to_json
from synthesizer_jax.training.experiment import Experiment
from synthesizer_jax.training.trainer import Trainer

NAMES = [row["recipe"] for row in list_recipes() if not row["recipe"].endswith(":default")]
LENGTH = 8
SMALL = {
    "batch_size": 4,
    "d_model": 8,
    "groups": 4,
    "head_dim": 4,
    "hidden_dim": 8,
    "inputs_length": LENGTH,
    "max_length": LENGTH,
    "num_heads": 4,
    "rank": 2,
    "repeats": 1,
    "shards": 1,
    "targets_length": LENGTH,
    "vocab_size": 32,
}


def shrunk(value: Any) -> Any:
    """A recipe, or a part of one, with the numbers of `SMALL`."""
    if isinstance(value, tuple):
        return tuple(map(shrunk, value))
    if not dataclasses.is_dataclass(value):
        return value
    small = {
        name: min(SMALL[name], field) if name in SMALL and isinstance(field, int) else shrunk(field)
        for name, field in fields_of(value).items()
    }
    if isinstance(value, DataConfig):
        small["buckets"] = tuple((LENGTH // 2, 1) for _ in value.buckets)
    return replace(value, **small)


def batch(data: DataConfig) -> dict[str, np.ndarray]:
    values = {"tokens": 3, "ids": 1, "positions": 1, "weights": 1}
    return {
        name: np.full(field.shape, values[name.rpartition("_")[2]], field.dtype)
        for name, field in batch_fields(data).items()
    }


@functools.cache
def loss_of_a_step(recipe: str) -> float:
    """Of a shrunk experiment as JSON; sizes of one model become the same experiment."""
    experiment = from_json(json.loads(recipe))
    trainer = Trainer(experiment, jax.devices()[:1])
    state, metrics = trainer.step(trainer.init(), trainer.shard_batch(batch(experiment.data)))
    assert int(state.step) == 1
    return float(metrics["loss"])


def loss_of_a_distillation(recipe: Distillation) -> float:
    taught = shrunk(load_recipe("translate:vanilla"))
    params = Trainer(taught, jax.devices()[:1]).init().params
    variables = unroll_variables(taught.model, {"params": params})
    trainer = DistillationTrainer(taught, variables, recipe, jax.devices()[:1])
    state = trainer.inherit(trainer.init())
    state, metrics = trainer.step(state, trainer.shard_batch(batch(taught.data)))
    assert int(state.step) == 1
    return float(metrics["loss"])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_packaged_recipe_is_built_and_takes_a_step(name):
    recipe, _ = load_with_code(name, kinds=(Experiment, Distillation))
    assert from_json(to_json(recipe)) == recipe
    if isinstance(recipe, Distillation):
        loss = loss_of_a_distillation(shrunk(recipe))
    else:
        loss = loss_of_a_step(json.dumps(to_json(shrunk(recipe))))
    assert np.isfinite(loss)
