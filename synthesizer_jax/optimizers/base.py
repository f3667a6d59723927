"""The protocol of optimizers."""

from __future__ import annotations

from typing import Protocol

import optax

from synthesizer_jax.typing import PyTree


class Optimizer(Protocol):
    """The configuration of an optimizer.

    To add an optimizer, decorate a frozen dataclass with `register`. If it has a field `learning_rate`,
    this must be a `Schedule`, whose value is logged.
    """

    def build(self, axes: PyTree) -> optax.GradientTransformation:
        """Returns the optax transformation.

        Args:
          axes: like the parameters, with a tuple of logical axis names for each.
        """
        ...


def with_clipping(
    transformation: optax.GradientTransformation, clip_norm: float | None
) -> optax.GradientTransformation:
    """Clips the gradient's global norm before a transformation; None: no clipping."""
    if clip_norm is None:
        return transformation
    return optax.chain(optax.clip_by_global_norm(clip_norm), transformation)
