"""Learning-rate schedules."""

from __future__ import annotations

import dataclasses
from typing import Protocol, TypeAlias

import jax
import jax.numpy as jnp
import optax

from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import Count, NotNegative, Number


class Schedule(Protocol):
    """The configuration of a learning-rate schedule.

    To add a schedule, decorate a frozen dataclass with `register`.
    """

    def build(self) -> optax.Schedule:
        """Returns the learning rate as a function of the step, which may be traced."""
        ...


LearningRate: TypeAlias = Schedule | NotNegative
"""A schedule, or a number for a constant learning rate."""


def build_schedule(rate: LearningRate) -> optax.Schedule:
    """Returns the learning rate as a function of the step.

    Raises:
      ValueError: if the schedule does not build a function.
    """
    if isinstance(rate, int | float):
        rate = Constant(rate)
    schedule = rate.build()
    if not callable(schedule):
        raise ValueError(
            f"{type(rate).__name__}.build returns {schedule!r}, but it must return a function of "
            "the step."
        )
    return schedule


@register
@dataclasses.dataclass(frozen=True)
class Constant:
    """A constant learning rate after a linear warm-up from 0.

    T5 is fine-tuned with a learning rate of 0.001 and no warm-up.

    Attributes:
      value: the learning rate.
      warmup_steps: number of steps of the warm-up.
    """

    value: NotNegative = 1e-3
    warmup_steps: Number = 0

    def build(self) -> optax.Schedule:
        return lambda step: self.value * _warmup(step, self.warmup_steps)


@register
@dataclasses.dataclass(frozen=True)
class InverseSquareRoot:
    """The learning rate ``factor / √max(step, warmup_steps)`` of T5's pre-training.

    The learning rate is constant during the warm-up and then decays. T5 uses a factor of 1 and
    10,000 warm-up steps (Raffel et al. 2020, section 3.1.2).

    Attributes:
      factor: factor of the learning rate.
      warmup_steps: number of steps with a constant learning rate.
    """

    factor: NotNegative = 1.0
    warmup_steps: Count = 10_000

    def build(self) -> optax.Schedule:
        def learning_rate(step: jax.typing.ArrayLike) -> jax.Array:
            """Returns the learning rate at a step."""
            number = jnp.maximum(jnp.asarray(step, jnp.float32), self.warmup_steps)
            return self.factor / jnp.sqrt(number)

        return learning_rate


@register
@dataclasses.dataclass(frozen=True)
class Noam:
    """The learning rate of the Transformer, which grows linearly and then decays.

    At step s, counted from 1, the learning rate is
    ``factor · d_model^−½ · min(s^−½, s · warmup_steps^−1.5)`` (Vaswani et al. 2017, equation 3).
    After the warm-up, the learning rate is proportional to the inverse square root of the step.
    Tensor2Tensor's base model uses a factor of 2 and 8,000 warm-up steps.

    Attributes:
      d_model: width of the model.
      warmup_steps: number of steps of the warm-up.
      factor: factor of the learning rate.
    """

    d_model: Count
    warmup_steps: Count = 4000
    factor: NotNegative = 1.0

    def build(self) -> optax.Schedule:
        scale = self.factor * self.d_model**-0.5

        def learning_rate(step: jax.typing.ArrayLike) -> jax.Array:
            """Returns the learning rate at a step."""
            number = jnp.asarray(step, jnp.float32) + 1.0
            return scale * jnp.minimum(number**-0.5, number * self.warmup_steps**-1.5)

        return learning_rate


@register
@dataclasses.dataclass(frozen=True)
class Linear:
    """A linear warm-up to `peak`, followed by a linear decay to `final` at `total_steps`.

    BERT is trained with this schedule.

    Attributes:
      peak: the largest learning rate.
      total_steps: the step at which the decay ends.
      warmup_steps: number of steps of the warm-up.
      final: the learning rate from `total_steps` on.
    """

    peak: NotNegative
    total_steps: Count
    warmup_steps: Number = 0
    final: NotNegative = 0.0

    def build(self) -> optax.Schedule:
        def learning_rate(step: jax.typing.ArrayLike) -> jax.Array:
            """Returns the learning rate at a step."""
            decayed = self.peak + (self.final - self.peak) * _decay_fraction(step, self)
            return decayed * _warmup(step, self.warmup_steps)

        return learning_rate


@register
@dataclasses.dataclass(frozen=True)
class Cosine:
    """A linear warm-up to `peak`, followed by a cosine decay to `final` at `total_steps`.

    Attributes:
      peak: the largest learning rate.
      total_steps: the step at which the decay ends.
      warmup_steps: number of steps of the warm-up.
      final: the learning rate from `total_steps` on.
    """

    peak: NotNegative
    total_steps: Count
    warmup_steps: Number = 0
    final: NotNegative = 0.0

    def build(self) -> optax.Schedule:
        def learning_rate(step: jax.typing.ArrayLike) -> jax.Array:
            """Returns the learning rate at a step."""
            angle = jnp.pi * _decay_fraction(step, self)
            cosine = self.final + (self.peak - self.final) * 0.5 * (1.0 + jnp.cos(angle))
            warm = self.peak * _warmup(step, self.warmup_steps)
            return jnp.where(jnp.asarray(step) < self.warmup_steps, warm, cosine)

        return learning_rate


def _warmup(step: jax.typing.ArrayLike, warmup_steps: int) -> jax.Array:
    """Returns the factor of a linear warm-up, which grows from 1 / warmup_steps at step 0 to 1."""
    if warmup_steps == 0:
        return jnp.asarray(1.0)
    return jnp.minimum((jnp.asarray(step, jnp.float32) + 1.0) / warmup_steps, 1.0)


def _decay_fraction(step: jax.typing.ArrayLike, schedule: Cosine | Linear) -> jax.Array:
    """Returns the share of the steps after the warm-up that are done, from 0 to 1."""
    decay_steps = max(schedule.total_steps - schedule.warmup_steps, 1)
    decay_step = jnp.asarray(step, jnp.float32) - schedule.warmup_steps
    return jnp.clip(decay_step / decay_steps, 0.0, 1.0)
