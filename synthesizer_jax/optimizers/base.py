"""The protocol of optimizers."""

from __future__ import annotations

from typing import Protocol

import jax
import optax

from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.optimizers.schedules import LearningRate, build_schedule

COUNTS = ("count", "updates")
"""The names under which states of optimizers count their updates."""


class Optimizer(Protocol):
    """The configuration of an optimizer.

    To add an optimizer, decorate a frozen dataclass with `register`. If the dataclass has a field
    `learning_rate`, the field must be a number or a `Schedule` of the number of updates. The value
    of the schedule is logged.
    """

    def build(self, axes: PyTree) -> optax.GradientTransformation:
        """Returns the optax transformation.

        Args:
          axes: a pytree like the trained parameters, with a tuple of logical axis names for each
            parameter.
        """
        ...


def schedule_of(optimizer: Optimizer) -> optax.Schedule | None:
    """Returns the learning rate as a function of the number of updates.

    Returns `None` if the optimizer has no schedule.
    """
    learning_rate: LearningRate | None = getattr(optimizer, "learning_rate", None)
    if learning_rate is None:
        return None
    return build_schedule(learning_rate)


def count_updates(opt_state: PyTree) -> jax.Array | None:
    """Returns the number of updates in the state of an optimizer, or None if it has no count.

    The number is the first scalar in the state that is named ``count``, as in optax, or
    ``updates``.
    """
    for path, leaf in jax.tree.leaves_with_path(opt_state):
        # A key of a path is written as ``.count`` or ``['count']``.
        if path and str(path[-1]).strip("'.[]") in COUNTS and leaf.ndim == 0:
            return leaf
    return None


def with_clipping(
    transformation: optax.GradientTransformation, clip_norm: float | None
) -> optax.GradientTransformation:
    """Returns a transformation that first clips the gradient's global norm.

    If `clip_norm` is None, nothing is clipped.
    """
    if clip_norm is None:
        return transformation
    return optax.chain(optax.clip_by_global_norm(clip_norm), transformation)
