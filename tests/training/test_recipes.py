"""Builds all packaged recipes, and trains all of their models for one step with small sizes."""

import dataclasses
import functools
import itertools
import json
from typing import Any

import jax
import numpy as np
import pytest
from synthesizer_jax.recipes import papers
from synthesizer_jax.recipes.papers import replacement

from synthesizer_jax.base.registry import fields_of, from_json, replace, to_json
from synthesizer_jax.cli.recipes import list_recipes, load_recipe, load_with_code
from synthesizer_jax.data.batch import batch_fields
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.distillation.distill import Distillation, DistillationTrainer
from synthesizer_jax.models import unroll_variables
from synthesizer_jax.models.zoo import VARIANTS
from synthesizer_jax.training.experiment import Experiment
from synthesizer_jax.training.trainer import Trainer

SYSTEMS = [s for s in papers.SELF_ATTENTIONS if s != "linformer"]
VALUES = {  # the values of recipes' arguments, by name
    "SYSTEM": SYSTEMS,
    "papers.translation:SYSTEM": [*SYSTEMS, "hc_all", "sh_x"],
    "papers.pretraining:SYSTEM": [*SYSTEMS, "hc_all"],
    "papers.cotraining:laptop:SYSTEM": [*SYSTEMS, "hc_all"],
    "papers.translation:large:SYSTEM": ["base", "hc_sa", "hc_all", "sh_x"],
    "papers.translation:small:SYSTEM": ["base", "hc_sa", "hc_all", "sh_x"],
    "papers.classification:SYSTEM": [*VARIANTS, *papers.MIXERS],
    "papers.cotraining:SIZE": ["small", "base"],
    "MODEL": ["mesh_learned_random_base", "universal_transformer_base", "t5_1_1_th_base"],
    "PLACE": [*replacement.PLACES, "everything"],
    "SIZE": [*replacement.WIDTHS],
    "papers.replacement:SCALE": [*replacement.SCALES],
    "SCALE": ["base", "small"],
    "HEAD_DIM": ["16", "128"],
    "NUMBER": ["1", "8"],
    "ENCODER": ["-1,1"],
    "DECODER": ["0"],
    "STACKS": ["encoder", "encoder,decoder"],
    "DOT": ["scaled", "t5"],
    "POSITIONS": ["relative", "sinusoidal"],
    "papers.translation:multi30k:TASK": ["multi30k_en_de"],
    "TASK": ["wmt14_ende_v003", "iwslt2016_en_de"],
}
RECIPES = [row["recipe"] for row in list_recipes() if ":default" not in row["recipe"]]


def calls_of(recipe: str) -> list[str]:
    """Returns the names of a recipe with all combinations of its arguments."""
    module, function, *arguments = recipe.split(":")
    places = (f"{module}:{function}:", f"{module}:", "")
    values = [next(VALUES[p + n] for p in places if p + n in VALUES) for n in arguments]
    return [":".join([module, function, *chosen]) for chosen in itertools.product(*values)]


LENGTH = 8
SMALL = {"d_model": 8, "hidden_dim": 8, "rank": 2, "repeats": 1, "shards": 1, "vocab_size": 32}
SMALL |= dict.fromkeys(("batch_size", "groups", "head_dim", "num_heads"), 4)
SMALL |= dict.fromkeys(("inputs_length", "max_length", "targets_length"), LENGTH)


def shrunk(value: Any) -> Any:
    """Returns a copy of an experiment, or of a part of it, with the sizes of `SMALL`."""
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
    values = {"tokens": 3, "ids": 1, "weights": 1}
    batch = {
        name: np.full(field.shape, values[name.rpartition("_")[2]], field.dtype)
        for name, field in batch_fields(trainer.experiment.data).items()
    }
    state, metrics = trainer.step(state, trainer.shard_batch(batch))
    assert int(state.step) == 1 and np.isfinite(float(metrics["loss"]))


def distill_once(recipe: Distillation) -> None:
    taught = shrunk(load_recipe("papers.translation:multi30k:v"))
    params = Trainer(taught, jax.devices()[:1]).init().params
    variables = unroll_variables(taught.model, {"params": params})
    trainer = DistillationTrainer(taught, variables, recipe, jax.devices()[:1])
    take_step(trainer, trainer.init(trainer.inherited_variables()))


STEPPED = {
    *(f"papers.translation:multi30k:{system}:multi30k_en_de" for system in ("heads", "sh_x")),
    "finetune:prefix_lm_base",
    "papers.classification:ag_news:linformer",
    "papers.cotraining:laptop:rv",
    "papers.language_modeling:masked:16:1",
    "papers.language_modeling:wikitext:fr:scaled:sinusoidal",
    "papers.replacement:alr:everything:s:small",
    "papers.replacement:elr:s:small",
    "papers.translation:without_feed_forward:v:encoder",
    "quickstart:random_vanilla",
}
"""Recipes for each way of training.

`tests/models` has the structures, and `tests/layers` their parts.
"""


@functools.cache
def lay_out(recipe: str) -> None:
    """Computes the shardings of a shrunk experiment, which is given as JSON.

    The result is cached, because all sizes of a model shrink to the same experiment.
    """
    Trainer(from_json(json.loads(recipe)), jax.devices()[:1])


def test_the_structures_that_take_a_step_are_recipes():
    assert {name for recipe in RECIPES for name in calls_of(recipe)} >= STEPPED


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_packaged_recipe_is_built_and_takes_a_step(recipe):
    for number, name in enumerate(calls_of(recipe)):
        built, _ = load_with_code(name, kinds=(Experiment, Distillation))
        assert from_json(to_json(built)) == built
        if isinstance(built, Experiment):
            assert built.model.dtype == "auto", name
        if number and name not in STEPPED:
            continue
        small = shrunk(built)
        if name in STEPPED and isinstance(small, Distillation):
            distill_once(small)
        elif name in STEPPED:
            trainer = Trainer(small, jax.devices()[:1])
            take_step(trainer, trainer.init())
        elif isinstance(small, Experiment):
            lay_out(json.dumps(to_json(small)))
