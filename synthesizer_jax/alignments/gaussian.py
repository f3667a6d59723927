"""Hard-coded Gaussian attention."""

from __future__ import annotations

import math
from typing import Annotated

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from synthesizer_jax.alignments.base import Alignment, AttentionContext
from synthesizer_jax.attention import Terms, banded, relative
from synthesizer_jax.attention.relative import arange
from synthesizer_jax.attention.terms import logits_dtype
from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import NotEmpty, NotNegative, Positive
from synthesizer_jax.primitives.initializers import Initializer
from synthesizer_jax.primitives.parameters import with_axes

REACH = 6.0
"""Half width of the window in standard deviations: 2e-11 of the mass lies outside."""


@register
class Gaussian(Alignment):
    """Every head looks at a fixed place near the query, nothing is learned.

    ``weight[i, j] = 1/(σ√2π) · exp(−½ ((j − (ratio · i + offset)) / σ)²)``, the density itself:
    neither a softmax nor a division by the sum (You et al. 2020, equation 2 and released code).
    Masked keys just do not count. The window is cut at 6 σ.

    Attributes:
      offsets: centers relative to the query, given to the heads in turn: ``(-1, 1)`` in the paper's
        encoders and cross-attention, ``(-1, 0)`` in its decoders.
      sigma: standard deviation; 0 is its limit, the one token at the (rounded) center.
      normalize: divide by the sum over the keys that are seen, a softmax of the log-density.
      threshold: densities below it are set to zero; None: none.
      ratio: keys per query for cross-attention, in the paper the ratio of word counts.
    """

    offsets: Annotated[tuple[float, ...], NotEmpty()] = (-1, 1)
    sigma: NotNegative = 1.0
    normalize: bool = False
    threshold: NotNegative | None = None
    ratio: Positive = 1.0
    makes_logits = False

    @nn.compact
    def __call__(self, queries: jax.Array, keys: jax.Array, context: AttentionContext) -> Terms:
        offsets = _cycle_offsets(self, self.offsets, context.num_heads)
        dtype = logits_dtype(queries)
        first, width = self.window(offsets)
        if self.ratio == 1.0:
            distance = np.arange(first, first + width) - offsets[:, None]  # [h, w]
            weights = self.density(distance, dtype)[None, None]  # [1, 1, h, w]
            return (banded(weights, first=first, normalize=self.normalize),)
        start, length = context.query_span.start, context.query_span.length
        position = start + arange(0, length)
        if isinstance(position, jax.Array):
            position = position.astype(dtype)
        center = jnp.asarray(self.ratio * position, dtype)  # [q]
        starts = jnp.floor(center).astype(jnp.int32) + first
        keys_seen = starts[:, None] + jnp.arange(width + 1)[None]  # [q, w]
        distance = (keys_seen.astype(dtype) - center[:, None])[:, None, :]  # [q, 1, w]
        # [q, h, w]
        weights = self.density(distance - jnp.asarray(offsets, dtype)[None, :, None], dtype)
        return (banded(weights[None], starts=starts, normalize=self.normalize),)

    def window(self, offsets: np.ndarray) -> tuple[int, int]:
        """The first tap's distance from the center line and the number of taps, for all heads."""
        half = math.ceil(REACH * self.sigma)
        first = math.floor(offsets.min()) - half
        return first, math.ceil(offsets.max()) + half - first + 1

    def density(self, distance: jax.Array | np.ndarray, dtype: jnp.dtype) -> jax.Array:
        """The density at distances from the center."""
        distance = jnp.asarray(distance, dtype)
        if self.sigma == 0:
            return jnp.where((distance > -0.5) & (distance <= 0.5), 1.0, 0.0).astype(dtype)
        scale = 1.0 / (self.sigma * math.sqrt(2.0 * math.pi))
        value = scale * jnp.exp(-0.5 * (distance / self.sigma) ** 2)
        return value if self.threshold is None else jnp.where(value < self.threshold, 0, value)


@register
class GaussianBias(Alignment):
    """The log-density as logits, ``−½ ((j − i − offset) / σ)²``, to be mixed with others.

    Inside a `Mixture` it is a product of experts: a dot product that prefers a neighborhood. Alone
    it is the softmax-normalized `Gaussian` without its cut.

    Attributes:
      offsets: centers relative to the query, given to the heads in turn.
      sigma: standard deviation.
      trainable: every head learns its center and 1/σ² (parameters ``offset`` and ``precision``,
        ``[heads]``), starting from `offsets` and `sigma`. A precision of zero attends to all keys alike.
    """

    offsets: Annotated[tuple[float, ...], NotEmpty()] = (-1, 1)
    sigma: Positive = 1.0
    trainable: bool = False
    linear_in = ("precision",)

    @nn.compact
    def __call__(self, queries: jax.Array, keys: jax.Array, context: AttentionContext) -> Terms:
        first, last = context.distance_range
        offsets = _cycle_offsets(self, self.offsets, context.num_heads)
        dtype = logits_dtype(queries)
        if not self.trainable:
            # [h, distances]
            z = (arange(first, last + 1)[None] - offsets[:, None]) / self.sigma
            return (relative(jnp.asarray(-0.5 * z**2, dtype), first=first),)
        offset = self._learned("offset", offsets).astype(dtype)
        precision = self._learned("precision", np.full(context.num_heads, self.sigma**-2))
        # [h, distances]
        distance = jnp.asarray(arange(first, last + 1), dtype)[None] - offset[:, None]
        return (relative(-0.5 * precision.astype(dtype)[:, None] * distance**2, first=first),)

    def _learned(self, name: str, start: np.ndarray) -> jax.Array:
        """Returns a parameter of every head that starts from the given values."""
        init: Initializer = lambda key, shape, dtype=jnp.float32: jnp.asarray(start, dtype)
        value: jax.Array = self.param(name, with_axes(init, "heads"), start.shape)
        return value


def _cycle_offsets(module: nn.Module, offsets: tuple[float, ...], num_heads: int) -> np.ndarray:
    """One offset a head: the given ones in turn, as in the released code."""
    if num_heads % len(offsets):
        raise ValueError(
            f"{type(module).__name__}: {len(offsets)} offsets for {num_heads} heads; give as many as "
            "heads, or a divisor of that number"
        )
    return np.resize(np.asarray(offsets, np.float64), num_heads)
