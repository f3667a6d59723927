"""Every packaged recipe is built; every structure among them takes a step with small numbers."""

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


def take_step(trainer: Trainer, state: Any) -> None:
    values = {"tokens": 3, "ids": 1, "positions": 1, "weights": 1}
    batch = {
        name: np.full(field.shape, values[name.rpartition("_")[2]], field.dtype)
        for name, field in batch_fields(trainer.experiment.data).items()
    }
    state, metrics = trainer.step(state, trainer.shard_batch(batch))
    assert int(state.step) == 1 and np.isfinite(float(metrics["loss"]))


def distill_once(recipe: Distillation) -> None:
    taught = shrunk(load_recipe("translate:vanilla"))
    params = Trainer(taught, jax.devices()[:1]).init().params
    variables = unroll_variables(taught.model, {"params": params})
    trainer = DistillationTrainer(taught, variables, recipe, jax.devices()[:1])
    take_step(trainer, trainer.inherit(trainer.init()))


STEPPED = {
    "classify:vanilla",
    "cotrain_glue_super_glue:rv_small",
    "finetune:prefix_lm_base",
    "language_model:factorized_random",
    "quickstart:random_vanilla",
    "replace_attention:alr",
    "translate:hc_sa",
    "translate:lightweight_convolution",
}
"""Recipes that differ in more than their alignment, which `tests/layers` tests."""


@functools.cache
def lay_out(recipe: str) -> None:
    """Of a shrunk experiment as JSON; sizes of one model become the same experiment."""
    Trainer(from_json(json.loads(recipe)), jax.devices()[:1])


@pytest.mark.parametrize("name", NAMES)
def test_a_packaged_recipe_is_built_and_takes_a_step(name):
    recipe, _ = load_with_code(name, kinds=(Experiment, Distillation))
    assert from_json(to_json(recipe)) == recipe
    small = shrunk(recipe)
    if isinstance(small, Distillation):
        if name in STEPPED:
            distill_once(small)
    elif name in STEPPED:
        trainer = Trainer(small, jax.devices()[:1])
        take_step(trainer, trainer.init())
    else:
        lay_out(json.dumps(to_json(small)))
