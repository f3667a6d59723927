"""Hard-coded Gaussian attention, whose weights depend only on positions."""

from __future__ import annotations

import math
from typing import Annotated

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.typing import Dtype, Shape

from synthesizer_jax.alignments.base import Alignment, AttentionContext
from synthesizer_jax.attention import Terms, banded, relative
from synthesizer_jax.attention.relative import arange
from synthesizer_jax.attention.terms import logits_dtype
from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import NotEmpty, NotNegative, Positive
from synthesizer_jax.primitives.parameters import with_axes

REACH = 6.0
"""Half the width of the window, in standard deviations.

A share of 2e-11 of the density lies outside.
"""


@register
class Gaussian(Alignment):
    """Every head attends to a fixed place near the query, and nothing is learned.

    ``weight[i, j] = 1/(σ√2π) · exp(−½ ((j − (ratio · i + offset)) / σ)²)`` (You et al. 2020,
    equation 2 and released code). The weight is the density itself, without a softmax and without a
    division by the sum. Masked keys get weight zero, and the other weights do not change. The
    window of keys ends 6 σ from the center.

    Attributes:
      offsets: centers relative to the query, which the heads use in turn. The paper uses
        ``(-1, 1)`` in encoders and in cross-attention, and ``(-1, 0)`` in decoders.
      sigma: standard deviation in tokens. With 0, a head attends only to the token at the rounded
        center.
      normalize: whether to divide the weights by their sum over the visible keys. This is the
        softmax of the log-density.
      threshold: weights below this density are set to zero. None means that no weight is.
      ratio: number of keys per query, for cross-attention. The paper uses the ratio of word counts.
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
            # The window moves by one key per query, so all queries have the same weights.
            distance = np.arange(first, first + width) - offsets[:, None]  # [h, w]
            weights = self.density(distance, dtype)[None, None]  # [1, 1, h, w]
            return (banded(weights, first=first, normalize=self.normalize),)

        position = context.query_span.start + arange(0, context.query_span.length)  # [q]
        if isinstance(position, jax.Array):
            position = position.astype(dtype)
        # The center of a window can lie between two keys, so every query has weights of its own,
        # and its window starts at a key of its own.
        center = jnp.asarray(self.ratio * position, dtype)  # [q]
        starts = jnp.floor(center).astype(jnp.int32) + first
        keys_seen = starts[:, None] + jnp.arange(width + 1)[None]  # [q, w]
        distance = (keys_seen.astype(dtype) - center[:, None])[:, None, :]  # [q, 1, w]
        head_offsets = jnp.asarray(offsets, dtype)[None, :, None]  # [1, h, 1]
        weights = self.density(distance - head_offsets, dtype)  # [q, h, w]
        return (banded(weights[None], starts=starts, normalize=self.normalize),)

    def window(self, offsets: np.ndarray) -> tuple[int, int]:
        """Returns the window of keys that covers all heads.

        Args:
          offsets: the center of every head relative to the query, ``[heads]``.

        Returns:
          The distance of the window's first key from the query's place, and the number of keys.
        """
        half = math.ceil(REACH * self.sigma)
        first = math.floor(offsets.min()) - half
        return first, math.ceil(offsets.max()) + half - first + 1

    def density(self, distance: jax.Array | np.ndarray, dtype: jnp.dtype) -> jax.Array:
        """Returns the density at distances from the center, in the shape of `distance`."""
        distance = jnp.asarray(distance, dtype)
        if self.sigma == 0:
            return jnp.where((distance > -0.5) & (distance <= 0.5), 1.0, 0.0).astype(dtype)
        scale = 1.0 / (self.sigma * math.sqrt(2.0 * math.pi))
        value = scale * jnp.exp(-0.5 * (distance / self.sigma) ** 2)
        if self.threshold is None:
            return value
        return jnp.where(value < self.threshold, 0, value)


@register
class GaussianBias(Alignment):
    """The log-density of a Gaussian as logits, ``−½ ((j − i − offset) / σ)²``, to use in mixtures.

    Inside a `Mixture` it makes a product of experts, such as a dot product that prefers nearby
    tokens. By itself it gives a `Gaussian` with ``normalize=True``, except that its window has no
    limit.

    Attributes:
      offsets: centers relative to the query, which the heads use in turn.
      sigma: standard deviation in tokens.
      trainable: whether every head learns its center and 1/σ². These are the parameters ``offset``
        and ``precision``, each ``[heads]``, which start from `offsets` and `sigma`. A precision of
        zero attends to all keys equally.
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
            # The distance from the center in standard deviations, [h, distances].
            z = (arange(first, last + 1)[None] - offsets[:, None]) / self.sigma
            return (relative(jnp.asarray(-0.5 * z**2, dtype), first=first),)

        offset = self._learned("offset", offsets).astype(dtype)
        precision = self._learned("precision", np.full(context.num_heads, self.sigma**-2))
        # The distance from the center in tokens, [h, distances].
        distance = jnp.asarray(arange(first, last + 1), dtype)[None] - offset[:, None]
        return (relative(-0.5 * precision.astype(dtype)[:, None] * distance**2, first=first),)

    def _learned(self, name: str, start: np.ndarray) -> jax.Array:
        """Returns a parameter ``[heads]`` whose initial values are `start`."""

        def init(key: jax.Array, shape: Shape, dtype: Dtype = jnp.float32) -> jax.Array:
            """Returns the initial values, without drawing random numbers."""
            del key, shape
            return jnp.asarray(start, dtype)

        value: jax.Array = self.param(name, with_axes(init, "heads"), start.shape)
        return value


def _cycle_offsets(module: nn.Module, offsets: tuple[float, ...], num_heads: int) -> np.ndarray:
    """Returns one offset for every head, ``[heads]``.

    The given offsets are repeated, as in the released code.

    Raises:
      ValueError: the number of offsets does not divide the number of heads.
    """
    if num_heads % len(offsets):
        raise ValueError(
            f"{type(module).__name__} has {len(offsets)} offsets, but their number must divide the "
            f"number of heads, which is {num_heads}."
        )
    return np.resize(np.asarray(offsets, np.float64), num_heads)
