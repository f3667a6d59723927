"""Quickstart: two small models on three generated tasks.

Command: `make quickstart` for both, or for one of them:

    synthesizer-jax train quickstart:random_vanilla --workdir runs/rv

Hardware and time: less than a minute per model on two CPU cores, and half a minute for the data. No files
and no network access are needed: the mixture is generated, and its vocabulary is trained on it. All three
tasks are learned, for all seeds tried (0 to 2): scores of 77 to 87. `papers.cotraining:synthetic` trains
the same models for longer on eight tasks.
"""

from __future__ import annotations

from synthesizer_jax.recipes.papers import cotraining, small_training

from synthesizer_jax.base.registry import replace
from synthesizer_jax.tasks import synthetic
from synthesizer_jax.training.experiment import Experiment


def default() -> Experiment:
    """Random + Vanilla."""
    return random_vanilla()


def random_vanilla() -> Experiment:
    """A mixture of a learned table and the dot product in every self-attention layer."""
    return _experiment("rv")


def dot_product() -> Experiment:
    """The baseline: the dot product alone."""
    return _experiment("v")


def _experiment(system: str) -> Experiment:
    experiment = cotraining.synthetic(system)
    data = replace(experiment.data, mixture=synthetic.QUICKSTART, batch_size=32)
    return replace(experiment, data=data, training=small_training(1200))
