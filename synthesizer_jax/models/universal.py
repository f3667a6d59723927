"""The Universal Transformer, which applies the same block repeatedly."""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from synthesizer_jax.base.registry import fields_of, register
from synthesizer_jax.base.typing import NotNegative, PyTree, Share
from synthesizer_jax.mixers.taps import LOSSES
from synthesizer_jax.models.block import Block
from synthesizer_jax.models.layers import SinusoidalPositions
from synthesizer_jax.models.stack import Positions, Stack
from synthesizer_jax.primitives.parameters import with_axes


@register
class UniversalStack(Stack):
    """A stack that applies one block repeatedly (Dehghani et al. 2019); see also `Stack`.

    Before every step, sinusoids of the position and of the step are added to the states. If
    `halting_threshold` is given, every position decides when it halts (adaptive computation time,
    Graves 2016).

    Let s_t be the state of a position after step t, and let w_t be its halting probability. In the
    step in which a position halts, the remainder replaces w_t. After a position has halted, w_t is
    zero. As in Tensor2Tensor and Mesh-TensorFlow, the output is ``a_T``, where
    ``a_t = w_t s_t + (1 − w_t) a_{t−1}`` and ``a_0 = 0``. In contrast, Graves averages the states
    as ``Σ_t w_t s_t``.

    Attributes:
      runs: a single `Run`. The number of steps is the `repeats` of the run.
      halting_threshold: a position halts when the sum of its halting probabilities exceeds this
        value. None means that every position runs all steps.
      ponder_cost: factor of the ponder cost in the training loss. The ponder cost is the mean
        number of steps plus the mean remainder.
      signals: whether to add the sinusoids of the position and of the step.
    """

    halting_threshold: Share | None = None
    ponder_cost: NotNegative = 0.01
    signals: bool = True

    def _blocks(self) -> list[Block]:
        """Returns a list that contains the same bound block once for every step."""
        if len(self.runs) != 1:
            raise ValueError(
                "UniversalStack: runs must contain exactly one Run, whose block all steps share."
            )
        block = self._block_type()(**fields_of(self.runs[0].block), name="shared", parent=self)
        return [block] * self.num_layers

    def _scan(self, *arguments: object) -> jax.Array:
        """Raises a `ValueError`, because a scan cannot stack parameters that all steps share."""
        raise ValueError(
            "UniversalStack: all steps share their parameters, so they cannot be scanned. Set "
            "scan=False."
        )

    def _repeat(
        self,
        x: jax.Array,
        layer: Callable[[jax.Array, int], jax.Array],
        positions: Positions,
        counted: jax.Array | None = None,
    ) -> jax.Array:
        """Applies the block `num_layers` times, and averages the states if positions can halt.

        The positions of a batch halt at different steps, so all steps are computed.
        """
        threshold = self.halting_threshold
        sinusoids: PyTree = SinusoidalPositions(parent=None)
        average = jnp.zeros_like(x)  # a_t.
        # Three arrays [b, q] describe each position. The arrays contain the sum of a position's
        # halting probabilities, the remainder with which the position stopped, and the number of
        # its steps.
        halted, remainders, updates = (jnp.zeros(x.shape[:2], jnp.float32) for _ in range(3))
        gate = nn.Dense(
            1,
            dtype=jnp.float32,
            kernel_init=with_axes(nn.initializers.lecun_normal(), "embed", None),
            bias_init=with_axes(nn.initializers.ones_init(), None),
            name="halting",
            parent=self,
        )
        for index in range(self.num_layers):
            if self.signals:
                step = sinusoids.apply({}, jnp.full((1, 1), index), x.shape[-1])
                x = x + (sinusoids.apply({}, positions, x.shape[-1]) + step).astype(x.dtype)
            if threshold is None:
                x = layer(x, index)
                continue

            probability = jax.nn.sigmoid(gate(x)[..., 0])  # [b, q]
            running = halted < 1.0  # [b, q], True for positions that have not halted.
            # A position stops at the step in which the sum of its halting probabilities exceeds the
            # threshold. The weight of this step is the remainder, so that the weights add up to 1.
            stops = running & (halted + probability > threshold)
            runs_on = running & ~stops
            halted = halted + jnp.where(runs_on, probability, 0.0)
            remainders = remainders + jnp.where(stops, 1.0 - halted, 0.0)
            halted = halted + jnp.where(stops, remainders, 0.0)
            updates = updates + running
            weight = jnp.where(runs_on, probability, jnp.where(stops, remainders, 0.0))  # w_t
            weight = weight[..., None].astype(x.dtype)
            x = layer(x, index)  # s_t
            average = x * weight + average * (1 - weight)

        if threshold is None:
            return x
        self._sow_ponder_cost(updates + remainders, counted)
        return average

    def _sow_ponder_cost(self, steps: jax.Array, counted: jax.Array | None) -> None:
        """Sows the ponder cost in `LOSSES` if the collection is mutable.

        The ponder cost is averaged over the positions of each row and then over the rows. The
        ponder cost therefore does not depend on how a batch is divided into parts of equal size.

        Args:
          steps: the number of steps plus the remainder of each position, ``[batch, q]``.
          counted: the positions over which to average, ``[batch, q]``. None means all positions.
        """
        if self.is_initializing() or not self.is_mutable_collection(LOSSES):
            return
        if counted is None:
            mean = steps.mean()
        else:
            rows = jnp.where(counted, steps, 0).sum(axis=-1)
            mean = (rows / jnp.maximum(counted.sum(axis=-1), 1)).mean()
        self.sow(LOSSES, "ponder", self.ponder_cost * mean)
