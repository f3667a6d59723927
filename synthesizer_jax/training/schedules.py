"""Learning rates over steps, as frozen configurations."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax.numpy as jnp
import optax

from synthesizer_jax.registry import register


class Schedule(Protocol):
    """A learning rate over steps; one of your own is a frozen dataclass with `register`."""

    def build(self) -> optax.Schedule:
        """A function of the (possibly traced) step."""
        ...


@register
@dataclasses.dataclass(frozen=True)
class Constant:
    """``value``, after a linear warm-up from 0. T5's fine-tuning: 0.001 without warm-up."""

    value: float = 1e-3
    warmup_steps: int = 0

    def build(self) -> optax.Schedule:
        """A function of the (possibly traced) step."""
        return lambda step: self.value * _warmup(step, self.warmup_steps)


@register
@dataclasses.dataclass(frozen=True)
class InverseSquareRoot:
    """``factor / √max(step, warmup_steps)``: T5's pre-training with 1 and 10,000.

    Raffel et al. 2020, section 3.1.2; constant during the warm-up, then decaying.
    """

    factor: float = 1.0
    warmup_steps: int = 10_000

    def build(self) -> optax.Schedule:
        """A function of the (possibly traced) step."""
        return lambda step: (
            self.factor / jnp.sqrt(jnp.maximum(jnp.asarray(step, jnp.float32), self.warmup_steps))
        )


@register
@dataclasses.dataclass(frozen=True)
class Cosine:
    """Linear warm-up to `peak`, then half a cosine down to `final` at `total_steps`."""

    peak: float
    total_steps: int
    warmup_steps: int = 0
    final: float = 0.0

    def build(self) -> optax.Schedule:
        """A function of the (possibly traced) step."""

        def rate(step: optax.ScalarOrSchedule) -> jnp.ndarray:
            span = max(self.total_steps - self.warmup_steps, 1)
            done = jnp.clip((jnp.asarray(step, jnp.float32) - self.warmup_steps) / span, 0.0, 1.0)
            cosine = self.final + (self.peak - self.final) * 0.5 * (1.0 + jnp.cos(jnp.pi * done))
            return jnp.where(
                jnp.asarray(step) < self.warmup_steps,
                self.peak * _warmup(step, self.warmup_steps),
                cosine,
            )

        return rate


def _warmup(step: optax.ScalarOrSchedule, steps: int) -> jnp.ndarray:
    """Rises from 1 / steps at step 0 to 1."""
    if steps == 0:
        return jnp.asarray(1.0)
    return jnp.minimum((jnp.asarray(step, jnp.float32) + 1.0) / steps, 1.0)
