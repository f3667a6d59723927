"""Optimizers and learning-rate schedules, as frozen dataclasses for recipes."""

from synthesizer_jax.optimizers.adafactor import Adafactor
from synthesizer_jax.optimizers.adamw import AdamW
from synthesizer_jax.optimizers.base import Optimizer
from synthesizer_jax.optimizers.optax import Optax, optax_optimizer, optax_schedule
from synthesizer_jax.optimizers.rules import OptimizerRule
from synthesizer_jax.optimizers.schedules import (
    Constant,
    Cosine,
    InverseSquareRoot,
    Linear,
    Noam,
    Schedule,
)

__all__ = [
    "Adafactor",
    "AdamW",
    "Constant",
    "Cosine",
    "InverseSquareRoot",
    "Linear",
    "Noam",
    "Optax",
    "Optimizer",
    "OptimizerRule",
    "Schedule",
    "optax_optimizer",
    "optax_schedule",
]
