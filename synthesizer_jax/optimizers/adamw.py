"""The optimizer AdamW, from optax."""

from __future__ import annotations

import dataclasses

import jax
import optax

from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import NotNegative, Positive, PyTree, Rate
from synthesizer_jax.optimizers.adafactor import NEVER_FACTORED
from synthesizer_jax.optimizers.base import with_clipping
from synthesizer_jax.optimizers.schedules import Constant, LearningRate, build_schedule
from synthesizer_jax.primitives.parameters import is_axes


@register
@dataclasses.dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), from optax.

    Attributes:
      learning_rate: the schedule of the learning rate.
      b1: decay rate of the first moment.
      b2: decay rate of the second moment.
      eps: a number that is added to the square root of the second moment.
      weight_decay: weight decay. Scales of norms, relative position biases and weights of mixtures
        are not decayed.
      clip_norm: maximum global norm of the gradient. None means no clipping.
    """

    learning_rate: LearningRate = Constant()
    b1: Rate = 0.9
    b2: Rate = 0.999
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.0
    clip_norm: Positive | None = 1.0

    def build(self, axes: PyTree) -> optax.GradientTransformation:
        is_decayed = jax.tree.map(
            lambda names: not NEVER_FACTORED & set(names), axes, is_leaf=is_axes
        )
        adam = optax.adamw(
            build_schedule(self.learning_rate),
            b1=self.b1,
            b2=self.b2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            mask=is_decayed if self.weight_decay else None,
        )
        return with_clipping(adam, self.clip_norm)
