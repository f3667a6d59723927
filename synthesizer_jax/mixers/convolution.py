"""Lightweight and dynamic convolution."""

from __future__ import annotations

import flax.linen as nn
import jax

from synthesizer_jax.ambient import on_any_mesh, partition
from synthesizer_jax.attention import (
    Cache,
    Mask,
    Terms,
    attend,
    banded,
    extend,
    init_cache,
)
from synthesizer_jax.attention.products import dense_product
from synthesizer_jax.attention.terms import wide
from synthesizer_jax.initializers import FanIn, Initializer, Normal
from synthesizer_jax.mixers.base import (
    NewCache,
    dropout_options,
    merge_heads,
    self_attention_only,
)
from synthesizer_jax.mixers.decoding import query_position, ragged_step, step_mask
from synthesizer_jax.parameters import with_axes
from synthesizer_jax.registry import register


@register
class LightweightConvolution(nn.Module):
    """A depthwise convolution whose kernel is a softmax over its taps, between two projections.

    ``y = W_o · conv(W_1 x ∘ σ(W_2 x))``, ``conv(u)_i = Σ_t softmax(w)_t u_{i + t}`` (Wu et al. 2019).
    Under a causal mask the taps are the last `width` positions, otherwise they lie around the
    position. Padding counts as zero; nothing is renormalised.

    Attributes:
      width: number of taps.
      groups: channels that share a kernel form a group; None: every channel has its own kernel, as
        in the released Mesh-TensorFlow code (Wu et al.: 16 groups).
      glu: the gate on the way in; False is one plain projection.
      pointwise: another dense layer with bias before the output projection, as in the released
        Mesh-TensorFlow code.
      dropout_rate: probability of dropping a tap, one draw per example, position and group.
      tap_init: initialiser of the kernel's logits ``[groups, width]``.
    """

    width: int = 9
    groups: int | None = None
    glu: bool = True
    pointwise: bool = False
    dropout_rate: float = 0.0
    tap_init: Initializer = Normal(0.1)
    kernel_init: Initializer = FanIn()

    @on_any_mesh
    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        kv: jax.Array | None = None,
        *,
        mask: Mask | jax.Array | None = None,
        bias: Terms = (),
        cache: Cache | NewCache | None = None,
        position: int | jax.Array | None = None,
    ):
        """Mixes tokens; arguments and results as in `Attention`, without cross-attention and bias.

        A cache has no end, and cannot be decoded again from an earlier position.
        """
        self_attention_only(self, kv, bias)
        mask = Mask.of(mask)
        if cache is not None:
            ragged = ragged_step(self, x, None, mask=mask, bias=(), cache=cache, position=position)
            if ragged is not None:
                return ragged
        position = query_position(self, mask, cache, position, cross=False)
        if cache is not None:
            mask = step_mask(mask, position, x.shape[1])
        d_model = x.shape[-1]
        groups = d_model if self.groups is None else self.groups
        if d_model % groups or self.width < 1:
            raise ValueError(
                f"{type(self).__name__}: groups={groups} and width={self.width}; groups must divide "
                f"d_model={d_model} and width be positive"
            )
        u = self.gated(x)
        first = 1 - self.width if mask.causal else -(self.width // 2)
        logits = self.tap_logits(u, groups)
        weights = jax.nn.softmax(logits.astype(wide(logits)), axis=-1)
        terms: Terms = (banded(weights, first=first),)
        values = u.reshape(*u.shape[:2], groups, d_model // groups)
        if cache is None:
            mask = mask.for_self_attention()
        else:
            if isinstance(cache, NewCache):
                cache = init_cache(terms, values, max_length=cache.max_length or x.shape[1])
            terms, values, mask, cache = extend(cache, terms, values, at=position, mask=mask)
        y = attend(
            terms,
            values,
            mask=mask,
            q_length=x.shape[1],
            **dropout_options(self),
            partition=partition(batch=x.shape[0], heads=values.shape[2]),
        )
        y = y.reshape(x.shape)
        y = self.dense(y, "pointwise", use_bias=True) if self.pointwise else y
        y = merge_heads(self, y[:, :, None], d_model, kernel_init=self.kernel_init)
        return y if cache is None else (y, cache)

    def gated(self, x: jax.Array) -> jax.Array:
        """The gated linear unit on the way in, ``[batch, length, d_model]``."""
        u = self.dense(x, "input")
        return u * jax.nn.sigmoid(self.dense(x, "gate")) if self.glu else u

    def tap_logits(self, u: jax.Array, groups: int) -> jax.Array:
        """The kernel's logits, ``[batch or 1, length or 1, groups, width]``."""
        del u
        init = with_axes(self.tap_init, "heads", "taps")
        return self.param("taps", init, (groups, self.width))[None, None]

    def dense(self, x: jax.Array, name: str, *, use_bias: bool = False) -> jax.Array:
        """A projection of tokens to d_model."""
        return nn.Dense(
            x.shape[-1],
            use_bias=use_bias,
            dtype=x.dtype,
            kernel_init=with_axes(self.kernel_init, "embed", "mlp"),
            bias_init=with_axes(nn.initializers.zeros_init(), "mlp"),
            dot_general=dense_product,
            name=name,
            parent=self,
        )(x)


@register
class DynamicConvolution(LightweightConvolution):
    """As `LightweightConvolution`, but every position's token computes its own kernel.

    ``w_i = W u_i`` (Wu et al. 2019, section 4).

    Attributes:
      groups: None is every channel, whose kernels then are d_model · width wide.
    """

    def tap_logits(self, u: jax.Array, groups: int) -> jax.Array:
        """The kernel's logits, ``[batch, length, groups, width]``."""
        kernel = nn.DenseGeneral(
            (groups, self.width),
            use_bias=False,
            dtype=u.dtype,
            kernel_init=with_axes(self.kernel_init, "embed", "heads", "taps"),
            dot_general=dense_product,
            name="taps",
            parent=self,
        )
        return kernel(u)
