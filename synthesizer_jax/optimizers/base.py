"""The protocol of optimizers."""

from __future__ import annotations

from typing import Protocol

import optax

from synthesizer_jax.optimizers.schedules import Schedule
from synthesizer_jax.typing import PyTree


class Optimizer(Protocol):
    """The configuration of an optimizer.

    To add an optimizer, decorate a frozen dataclass with `register`. If it has a field `learning_rate`,
    this must be a `Schedule`, whose value is logged; if it has `weight_decay`, this is the coefficient of
    its decoupled weight decay.
    """

    def build(self, axes: PyTree) -> optax.GradientTransformation:
        """Returns the optax transformation.

        Args:
          axes: like the parameters that are trained, with a tuple of logical axis names for each.
        """
        ...


def schedule_of(optimizer: Optimizer) -> optax.Schedule | None:
    """Returns the learning rate by the number of updates; None: the optimizer has no schedule."""
    schedule: Schedule | None = getattr(optimizer, "learning_rate", None)
    return None if schedule is None else schedule.build()


def own_weight_decay(optimizer: Optimizer) -> float:
    """Returns the coefficient of the optimizer's decoupled weight decay; 0: it has none."""
    return getattr(optimizer, "weight_decay", None) or 0.0


def with_clipping(
    transformation: optax.GradientTransformation, clip_norm: float | None
) -> optax.GradientTransformation:
    """Clips the gradient's global norm before a transformation; None: no clipping."""
    if clip_norm is None:
        return transformation
    return optax.chain(optax.clip_by_global_norm(clip_norm), transformation)
