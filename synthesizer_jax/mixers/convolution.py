"""Lightweight and dynamic convolutions, which replace self-attention."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax

from synthesizer_jax.alignments.base import dense_layer
from synthesizer_jax.attention import Cache, Mask, Terms, attend, banded, extend, init_cache
from synthesizer_jax.attention.terms import logits_dtype
from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import Length, Rate
from synthesizer_jax.mixers.base import Mixer, MixerInput, dropout_options, merge_heads
from synthesizer_jax.primitives.initializers import FanIn, Initializer, Normal
from synthesizer_jax.primitives.mesh import partition
from synthesizer_jax.primitives.parameters import with_axes


class ConvolutionBase(Mixer):
    """A depthwise convolution between two projections, with a kernel that is a softmax over taps.

    The layer computes ``y = W_o · conv(W_1 x ∘ σ(W_2 x))`` with
    ``conv(u)_i = Σ_t softmax(w)_t u_{i + t}`` (Wu et al. 2019). If the mask is causal, the taps
    cover the last `width` positions. If the mask is not causal, the taps lie on both sides of the
    position. Padding tokens count as zero, and the weights of the remaining taps are not normalized
    again. A subclass defines `_tap_logits`.

    Attributes:
      width: number of taps.
      groups: number of groups of channels. The channels in a group share a kernel. None means that
        every channel has its own kernel, as in the released Mesh-TensorFlow code. Wu et al. 2019
        use 16 groups.
      glu: whether the input is gated. False means that the input is a projection without a gate.
      pointwise: whether the layer has another dense layer with a bias before the output projection,
        as in the released Mesh-TensorFlow code.
      dropout_rate: probability of dropping a tap. Every example, position and group has its own
        random draw.
      tap_init: initializer of the kernel's logits ``[groups, width]``.
      kernel_init: initializer of the dense layers' kernels.
    """

    width: Length = 9
    groups: Length | None = None
    glu: bool = True
    pointwise: bool = False
    dropout_rate: Rate = 0.0
    tap_init: Initializer = Normal(0.1)
    kernel_init: Initializer = FanIn()

    @nn.compact
    def mix(self, inputs: MixerInput) -> tuple[jax.Array, Cache | None]:
        x, mask, cache = inputs.x, inputs.mask, inputs.cache
        terms, values = self._terms_and_values(x, mask)
        if cache is not None:
            terms, values, mask, cache = extend(cache, terms, values, at=inputs.position, mask=mask)
        y = attend(
            terms,
            values,
            mask=mask,
            q_length=x.shape[1],
            **dropout_options(self, self.dropout_rate),
            partition=partition(batch=x.shape[0], heads=values.shape[2]),
        )
        y = y.reshape(x.shape)  # [b, q, groups, channels] → [b, q, d]
        if self.pointwise:
            y = self._dense(y, "pointwise", use_bias=True)
        y = merge_heads(self, y[:, :, None], x.shape[-1], kernel_init=self.kernel_init)
        return y, cache

    @nn.compact
    def new_cache(
        self, x: jax.Array, kv: jax.Array | None, *, mask: Mask, max_length: int
    ) -> Cache:
        return init_cache(*self._terms_and_values(x, mask), max_length=max_length)

    def _terms_and_values(self, x: jax.Array, mask: Mask) -> tuple[Terms, jax.Array]:
        """Returns the convolution as a term, and the values ``[batch, length, groups, channels]``.

        The term represents the kernel as attention weights for a window of keys.
        """
        d_model = x.shape[-1]
        groups = d_model if self.groups is None else self.groups
        if d_model % groups:
            raise ValueError(
                f"{type(self).__name__}: groups is {groups}, but it must divide d_model, which is "
                f"{d_model}."
            )
        u = self._dense(x, "input")
        if self.glu:
            u = u * jax.nn.sigmoid(self._dense(x, "gate"))
        logits = self._tap_logits(u, groups)
        weights = jax.nn.softmax(logits.astype(logits_dtype(logits)), axis=-1)
        # `first` is the distance from the query's position to the first tap. A causal window ends
        # at the query's position. Other windows lie on both sides of the query's position.
        first = 1 - self.width if mask.causal else -(self.width // 2)
        values = u.reshape(*u.shape[:2], groups, d_model // groups)  # [b, n, groups, channels]
        return (banded(weights, first=first),), values

    def _tap_logits(self, u: jax.Array, groups: int) -> jax.Array:
        """Returns the logits of the kernel, ``[batch or 1, length or 1, groups, width]``.

        Args:
          u: the gated inputs, ``[batch, length, d_model]``.
          groups: number of groups.
        """
        raise NotImplementedError

    def _dense(self, x: jax.Array, name: str, *, use_bias: bool = False) -> jax.Array:
        """Applies a dense layer ``[d_model, d_model]``."""
        dense = functools.partial(dense_layer, dtype=x.dtype, kernel_init=self.kernel_init)
        axes = "embed", "mlp"
        return dense(x.shape[-1], axes, use_bias=use_bias, name=name, parent=self)(x)


@register
class LightweightConvolution(ConvolutionBase):
    """A depthwise convolution with the same kernel at every position (Wu et al. 2019, section 3).

    See `ConvolutionBase` for the fields.
    """

    def _tap_logits(self, u: jax.Array, groups: int) -> jax.Array:
        """Returns the learned logits, ``[1, 1, groups, width]``."""
        init = with_axes(self.tap_init, "heads", "taps")
        return self.param("taps", init, (groups, self.width))[None, None]


@register
class DynamicConvolution(ConvolutionBase):
    """A depthwise convolution whose kernel is computed from the token at each position.

    The logits of the kernel at position i are ``w_i = W u_i`` (Wu et al. 2019, section 4). See
    `ConvolutionBase` for the other fields.

    Attributes:
      groups: number of groups. None means that every channel has its own kernel, so that the
        projection W has d_model · width outputs.
    """

    def _tap_logits(self, u: jax.Array, groups: int) -> jax.Array:
        """Returns logits computed from every token, ``[batch, length, groups, width]``."""
        dense = functools.partial(dense_layer, dtype=u.dtype, kernel_init=self.kernel_init)
        axes = "embed", "heads", "taps"
        return dense((groups, self.width), axes, name="taps", parent=self)(u)
