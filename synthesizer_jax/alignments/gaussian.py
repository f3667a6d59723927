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
from synthesizer_jax.attention.relative_table import arange
from synthesizer_jax.attention.terms import logits_dtype
from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import NotEmpty, NotNegative, Positive
from synthesizer_jax.primitives.parameters import with_axes

REACH = 6.0
"""Half of the width of a Gaussian's window of keys, in standard deviations.

A share of 2e-9 of the density lies outside the window.
"""


@register
class Gaussian(Alignment):
    """An alignment in which every head attends to keys at a fixed offset from the query.

    The weight of key j for query i is ``1/(σ√2π) · exp(−½ ((j − (ratio · i + offset)) / σ)²)`` (You
    et al. 2020, equation 2 and released code). The alignment has no parameters. The attention
    weight is the Gaussian density itself. By default, the weights are not normalized by a softmax
    or by their sum. Masked keys get weight zero, and the weights of the other keys do not change.
    The window of keys ends 6 σ from the center.

    Attributes:
      offsets: positions of the centers relative to the query. The heads cycle through the offsets.
        You et al. 2020 use ``(-1, 1)`` in encoders and in cross-attention, and ``(-1, 0)`` in the
        self-attention of decoders.
      sigma: standard deviation in tokens. If `sigma` is 0, a head attends only to the token at the
        rounded center.
      normalize: whether to divide the weights by their sum over the visible keys. The result is the
        softmax of the log-density.
      threshold: weights below `threshold` are set to zero. None means that all weights are kept.
      ratio: number of keys per query, for cross-attention. You et al. 2020 divide the number of
        source words by the number of target words.
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
            # The window moves by one key per query, so all queries have the same weights within the
            # window.
            distance = np.arange(first, first + width) - offsets[:, None]  # [h, w]
            weights = self.density(distance, dtype)[None, None]  # [1, 1, h, w]
            return (banded(weights, first=first, normalize=self.normalize),)

        position = context.query_span.start + arange(0, context.query_span.length)  # [q]
        if isinstance(position, jax.Array):
            position = position.astype(dtype)
        # The center of a window can lie between two keys. Every query therefore has separate
        # weights, and a separate first key of the window.
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
          The distance of the window's first key from the query's position, and the number of keys
          in the window.
        """
        half = math.ceil(REACH * self.sigma)
        first = math.floor(offsets.min()) - half
        return first, math.ceil(offsets.max()) + half - first + 1

    def density(self, distance: jax.Array | np.ndarray, dtype: jnp.dtype) -> jax.Array:
        """Returns the Gaussian density at the given distances from the center."""
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
    """An alignment whose logits are a Gaussian log-density, ``−½ ((j − i − offset) / σ)²``.

    Inside a `Mixture`, this alignment makes a product of experts, in which the weights of the other
    parts are multiplied by a Gaussian. For example, a dot product can prefer nearby tokens. Outside
    a mixture, a `GaussianBias` computes the same weights as a `Gaussian` with ``normalize=True``,
    except that its window has no limit.

    Attributes:
      offsets: positions of the centers relative to the query. The heads cycle through the offsets.
      sigma: standard deviation in tokens.
      trainable: whether every head learns its center and 1/σ². The learned parameters are
        ``offset`` and ``precision``, each ``[heads]``, which are initialized from `offsets` and
        `sigma`. A head with a precision of zero attends to all keys equally.
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
            # z is the distance from the center in standard deviations, [h, distances].
            z = (arange(first, last + 1)[None] - offsets[:, None]) / self.sigma
            return (relative(jnp.asarray(-0.5 * z**2, dtype), first=first),)

        offset = self._learned("offset", offsets).astype(dtype)
        precision = self._learned("precision", np.full(context.num_heads, self.sigma**-2))
        # `distance` is measured from the center in tokens, [h, distances].
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
    """Returns the offset of every head, ``[heads]``.

    The given offsets are repeated to get an offset for every head, as in the released code.

    Raises:
      ValueError: if the number of offsets does not divide the number of heads.
    """
    if num_heads % len(offsets):
        raise ValueError(
            f"{type(module).__name__} has {len(offsets)} offsets, but their number must divide the "
            f"number of heads, which is {num_heads}."
        )
    return np.resize(np.asarray(offsets, np.float64), num_heads)
