"""The protocol of optimizers."""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp
import optax

from synthesizer_jax.optimizers.schedules import Schedule
from synthesizer_jax.typing import PyTree

COUNTS = ("count", "updates")
"""What optimizers' states call the number of their updates."""


class Optimizer(Protocol):
    """The configuration of an optimizer.

    To add an optimizer, decorate a frozen dataclass with `register`. If it has a field `learning_rate`,
    this must be a `Schedule` of the number of updates, whose value is logged; if it has `weight_decay`,
    this is the coefficient of its decoupled weight decay.
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


def count_updates(opt_state: PyTree) -> int | None:
    """Returns the number of updates that a state of an optimizer counts.

    It is what all integers named ``count``, as in optax, or ``updates`` agree on; None: there are none, or
    they differ.
    """
    counts = {
        int(leaf)
        for path, leaf in jax.tree.leaves_with_path(opt_state)
        if path
        and str(path[-1]).strip("'.[]") in COUNTS
        and leaf.ndim == 0
        and jnp.issubdtype(leaf.dtype, jnp.integer)
    }
    return counts.pop() if len(counts) == 1 else None


def with_clipping(
    transformation: optax.GradientTransformation, clip_norm: float | None
) -> optax.GradientTransformation:
    """Clips the gradient's global norm before a transformation; None: no clipping."""
    if clip_norm is None:
        return transformation
    return optax.chain(optax.clip_by_global_norm(clip_norm), transformation)
