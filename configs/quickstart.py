"""Quickstart: two small models on four generated tasks.

Command: `make quickstart` for both, or for one of them:

    synthesizer-jax train quickstart:random_vanilla --workdir runs/rv

Hardware and time: less than a minute per model on two CPU cores, and half a minute for the data. No files
and no network access are needed: the mixture is generated, and its vocabulary is trained on it. The models
are those of `papers.cotraining:synthetic`, which trains them for longer on eight tasks.
"""

from __future__ import annotations

from synthesizer_jax.recipes.papers import cotraining

from synthesizer_jax.optimizers import AdamW, Cosine
from synthesizer_jax.registry import replace
from synthesizer_jax.tasks import synthetic
from synthesizer_jax.training.experiment import Experiment, Training

STEPS = 2000


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
    rate = Cosine(1e-3, total_steps=STEPS, warmup_steps=STEPS // 20, final=2e-5)
    return replace(
        experiment,
        data=replace(experiment.data, mixture=synthetic.QUICKSTART, batch_size=32),
        training=Training(
            steps=STEPS, optimizer=AdamW(rate, b2=0.99), log_every=25, save_every=STEPS
        ),
    )
