"""Quickstart: two small models on the synthetic co-training mixture.

Command: `make quickstart` for both, or for one of them:

    synthesizer-jax train quickstart:random_vanilla --workdir runs/rv

Hardware and time: about two minutes per model on two CPU cores. No files and no network access are needed:
the mixture is generated, and its vocabulary is trained on it. After 6,000 steps both models exceed the
majority class by far on all eight tasks, for all seeds tried (0 to 3); for some seeds, STS-B and MNLI are
still improving.
"""

from __future__ import annotations

from synthesizer_jax.recipes.papers import cotraining

from synthesizer_jax.training.experiment import Experiment


def default() -> Experiment:
    """Random + Vanilla."""
    return random_vanilla()


def random_vanilla() -> Experiment:
    """A mixture of a learned table and the dot product in every self-attention layer."""
    return cotraining.synthetic("rv")


def dot_product() -> Experiment:
    """The baseline: the dot product alone."""
    return cotraining.synthetic("v")
