"""Optimizers and learning-rate schedules, as frozen dataclasses for recipes."""

from synthesizer_jax.optimizers.adafactor import Adafactor as Adafactor
from synthesizer_jax.optimizers.adamw import AdamW as AdamW
from synthesizer_jax.optimizers.base import Optimizer as Optimizer
from synthesizer_jax.optimizers.optax import Optax as Optax
from synthesizer_jax.optimizers.optax import optax_optimizer as optax_optimizer
from synthesizer_jax.optimizers.optax import optax_schedule as optax_schedule
from synthesizer_jax.optimizers.rules import OptimizerRule as OptimizerRule
from synthesizer_jax.optimizers.schedules import Constant as Constant
from synthesizer_jax.optimizers.schedules import Cosine as Cosine
from synthesizer_jax.optimizers.schedules import InverseSquareRoot as InverseSquareRoot
from synthesizer_jax.optimizers.schedules import Linear as Linear
from synthesizer_jax.optimizers.schedules import Noam as Noam
from synthesizer_jax.optimizers.schedules import Schedule as Schedule
