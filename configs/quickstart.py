"""Train two small models on three generated tasks.

`make quickstart` trains both models. This command trains one of them:

    synthesizer-jax train quickstart:random_vanilla --workdir runs/rv

Hardware and time: on two CPU cores, generating the data takes half a minute, and training takes
less than a minute for each model. No files and no network access are needed, because the tasks are
generated and the vocabulary is trained on them. The models learn all three tasks. Their scores are
between 77 and 87 with the seeds 0 to 2. The recipe `papers.cotraining:synthetic` trains the same
models longer and on eight tasks.
"""

from __future__ import annotations

# The folder of this file, `configs/`, is installed as the package `synthesizer_jax.recipes`. The
# quickstart shares its models and its training with the recipes of the papers.
from synthesizer_jax.recipes.papers import cotraining, small_training

from synthesizer_jax.base.registry import replace
from synthesizer_jax.tasks import synthetic
from synthesizer_jax.training.experiment import Experiment


def default() -> Experiment:
    """Trains a Random + Vanilla Synthesizer on three generated tasks."""
    return random_vanilla()


def random_vanilla() -> Experiment:
    """Trains a Synthesizer whose self-attention layers mix a learned table and the dot product."""
    return _experiment("rv")


def dot_product() -> Experiment:
    """Trains the baseline, which uses only dot-product attention."""
    return _experiment("v")


def _experiment(system: str) -> Experiment:
    """Returns the experiment for a system of `papers.SELF_ATTENTIONS`."""
    experiment = cotraining.synthetic(system)
    data = replace(experiment.data, mixture=synthetic.QUICKSTART, batch_size=32)
    return replace(experiment, data=data, training=small_training(1200))
