"""Universal Transformer: one block, applied again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from synthesizer_jax.attention import Mask, Terms
from synthesizer_jax.models.block import Memory
from synthesizer_jax.models.layers import SinusoidalPositions
from synthesizer_jax.models.stack import Places, Stack
from synthesizer_jax.parameters import with_axes
from synthesizer_jax.registry import fields_of, register

LOSSES = "losses"
"""The collection in which modules leave what is added to a training loss."""


@register
class UniversalStack(Stack):
    """A stack whose layers share their parameters (Dehghani et al. 2019).

    Before every step the signals of position and step are added. With a `halting_threshold` every
    position halts by itself (adaptive computation time, Graves 2016). As in Tensor2Tensor and
    Mesh-TensorFlow the output is ``a_T`` of ``a_t = w_t s_t + (1 − w_t) a_{t−1}``, ``a_0 = 0``, with s
    the states and w the halting probabilities (the last one the remainder, zero afterwards); Graves'
    own average is ``Σ_t w_t s_t``. The mean number of steps costs `ponder_cost`.

    Attributes:
      runs: one `Run`, its repeats are the steps.
      halting_threshold: a position halts once its probabilities add up to more than this; None runs
        all steps.
      ponder_cost: factor of the mean number of steps and remainders in the training loss.
      signals: add the sinusoids of position and step.
    """

    halting_threshold: float | None = None
    ponder_cost: float = 0.01
    signals: bool = True

    def all_runs(
        self,
        x: jax.Array,
        mask: Mask | None,
        bias: Terms,
        memory: Memory | None,
        *,
        places: Places,
        counted: jax.Array | None,
    ) -> jax.Array:
        """The full pass."""
        block = self.shared_block()
        if counted is None and mask is not None:
            counted = mask.for_self_attention().queries(x.shape[1])
        return self.recur(x, lambda x, _: block(x, mask, bias, memory)[0], places, counted)

    def step(
        self,
        x: jax.Array,
        mask: Mask | None,
        bias: Terms,
        memory: Memory | None,
        caches: tuple[Any, ...],
        position: int | jax.Array,
        *,
        places: Places,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """One decoding step; every step of the recurrence has a cache of its own."""
        block, new = self.shared_block(), []

        def layer(x: jax.Array, index: int) -> jax.Array:
            x, cache = block(x, mask, bias, memory, caches[index], position)
            new.append(cache)
            return x

        return self.recur(x, layer, places, None), tuple(new)

    def shared_block(self) -> Callable[..., Any]:
        """The one block."""
        if len(self.runs) != 1 or self.scan:
            raise ValueError(
                "UniversalStack: give one Run, whose block is shared by all its repeats, and "
                "scan=False: there is nothing to stack"
            )
        block = self.block_type(in_scan=False)
        return block(**fields_of(self.runs[0].block), name="shared", parent=self)

    def recur(
        self,
        x: jax.Array,
        layer: Callable[[jax.Array, int], jax.Array],
        places: Places,
        counted: jax.Array | None,
    ) -> jax.Array:
        """Applies the block `num_layers` times, or until every position has halted."""
        threshold = self.halting_threshold
        average = jnp.zeros_like(x)
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
            x = self.signalled(x, places, index)
            if threshold is None:
                x = layer(x, index)
                continue
            probability = jax.nn.sigmoid(gate(x)[..., 0])
            running = halted < 1.0
            stops = running & (halted + probability > threshold)
            runs_on = running & ~stops
            halted = halted + jnp.where(runs_on, probability, 0.0)
            remainders = remainders + jnp.where(stops, 1.0 - halted, 0.0)
            halted = halted + jnp.where(stops, remainders, 0.0)
            updates = updates + running
            weight = jnp.where(runs_on, probability, jnp.where(stops, remainders, 0.0))
            weight = weight[..., None].astype(x.dtype)
            x = layer(x, index)
            average = x * weight + average * (1 - weight)
        if threshold is None:
            return x
        self.ponder(updates + remainders, counted)
        return average

    def signalled(self, x: jax.Array, places: Places, index: int) -> jax.Array:
        """The state with the sinusoids of its position and step."""
        if not self.signals:
            return x
        sinusoids = SinusoidalPositions(parent=None)
        signal: Any = sinusoids.apply({}, places, x.shape[-1])
        times: Any = sinusoids.apply({}, jnp.full((1, 1), index), x.shape[-1])
        return x + (signal + times).astype(x.dtype)

    def ponder(self, steps: jax.Array, counted: jax.Array | None) -> None:
        """Leaves the ponder cost in `LOSSES` when that is asked for.

        It is a mean over rows of means over their positions, so that it does not depend on how a batch
        is cut into parts of equally many rows.
        """
        if self.is_initializing() or not self.is_mutable_collection(LOSSES):
            return
        if counted is None:
            mean = steps.mean()
        else:
            rows = jnp.where(counted, steps, 0).sum(axis=-1)
            mean = (rows / jnp.maximum(counted.sum(axis=-1), 1)).mean()
        self.sow(LOSSES, "ponder", self.ponder_cost * mean)
