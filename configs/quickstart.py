"""Train two small models on three generated tasks.

`make quickstart` trains both models. This command trains one of them:

    synthesizer-jax train quickstart:random_vanilla --workdir runs/rv

Hardware and time: training takes less than a minute per model on two CPU cores, and the data takes
half a minute. No files and no network access are needed, because the tasks are generated and the
vocabulary is trained on them. The models learn all three tasks. With the seeds 0 to 2, the models
reach scores of 77 to 87. `papers.cotraining:synthetic` trains the same models for longer on eight
tasks.
"""

from __future__ import annotations

from synthesizer_jax.recipes.papers import cotraining, small_training

from synthesizer_jax.base.registry import replace
from synthesizer_jax.tasks import synthetic
from synthesizer_jax.training.experiment import Experiment


def default() -> Experiment:
    """Trains a Random + Vanilla Synthesizer on three generated tasks."""
    return random_vanilla()


def random_vanilla() -> Experiment:
    """Trains a Synthesizer that mixes a learned table and the dot product in all self-attention."""
    return _experiment("rv")


def dot_product() -> Experiment:
    """Trains the baseline, whose attention is the dot product only."""
    return _experiment("v")


def _experiment(system: str) -> Experiment:
    """Returns the experiment of one system of `papers.SELF_ATTENTIONS`."""
    experiment = cotraining.synthetic(system)
    data = replace(experiment.data, mixture=synthetic.QUICKSTART, batch_size=32)
    return replace(experiment, data=data, training=small_training(1200))
