"""Queries times keys: the baseline, and general bilinear attention."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from synthesizer_jax.alignments.base import Alignment, AttentionContext, project
from synthesizer_jax.attention import Terms, low_rank
from synthesizer_jax.attention.terms import logits_dtype
from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import Length, Positive
from synthesizer_jax.primitives.initializers import FanIn, Initializer, Normal
from synthesizer_jax.primitives.norms import RMSNorm


@register
class DotProduct(Alignment):
    """Scaled dot product of projected tokens, ``logits = scale · (x W_q)(y W_k)ᵀ``.

    The width of a head is free: it need not be d_model / heads (Bhojanapalli et al. 2020, the
    low-rank bottleneck).

    Attributes:
      head_dim: width of queries and keys; None means the width of the values.
      scale: factor of the logits; None means 1/√head_dim (Vaswani et al. 2017). T5 uses 1 and puts
        the factor into the query's initializer.
      use_bias: biases in both projections, as in BERT.
      normalize_qk: RMS normalization of every head's queries and keys, with a learned factor for each of
        their features, as in Qwen 3 and Gemma 3 (Dehghani et al. 2023 use LayerNorm).
      rotary_base: base of rotary positions (Su et al. 2021, RoFormer), 10,000 in the paper: features i
        and ``i + head_dim / 2`` are rotated by ``position · base^(-2 i / head_dim)``, as in Llama; None:
        no rotation.
      query_init: initializer of the query kernel ``[d_model, heads · head_dim]``.
      key_init: initializer of the key kernel.
    """

    head_dim: Length | None = None
    scale: float | None = None
    use_bias: bool = False
    normalize_qk: bool = False
    rotary_base: Positive | None = None
    query_init: Initializer = FanIn()
    key_init: Initializer = FanIn()
    linear_in = ("key_norm", "key")

    @nn.compact
    def __call__(self, queries: jax.Array, keys: jax.Array, context: AttentionContext) -> Terms:
        width = self.head_dim or context.head_dim
        if queries.ndim == 3:
            queries = project(
                queries,
                heads=context.num_heads,
                width=width,
                name="query",
                kernel_init=self.query_init,
                use_bias=self.use_bias,
            )
        if keys.ndim == 3:
            shared = context.num_kv_heads is not None
            keys = project(
                keys,
                heads=context.num_kv_heads or context.num_heads,
                width=width,
                name="key",
                axes=("kv_heads" if shared else "heads", "kv"),
                kernel_init=self.key_init,
                use_bias=self.use_bias,
            )
        if self.normalize_qk:
            queries, keys = RMSNorm(name="query_norm")(queries), RMSNorm(name="key_norm")(keys)
        if self.rotary_base is not None:
            at, keys_at = context.packed_positions or (context.query_span.start, context.keys_start)
            queries = rotate(queries, at, base=self.rotary_base)
            keys = rotate(keys, keys_at, base=self.rotary_base)
        scale = width**-0.5 if self.scale is None else self.scale
        if scale != 1.0:
            queries = queries * scale
        return (low_rank(queries, keys, token_keys=True),)


def rotate(x: jax.Array, position: int | jax.Array, *, base: float) -> jax.Array:
    """Rotates pairs of features by their position, so that products depend on distances.

    Args:
      x: ``[batch, n, heads, width]``; feature i and ``i + width / 2`` are a pair.
      position: that of the first of the n tokens, or those of all, ``[batch, n]``.
      base: pair i turns by ``base^(-2 i / width)`` radians per position.

    Raises:
      ValueError: the width is odd.
    """
    length, width = x.shape[1], x.shape[-1]
    if width % 2:
        raise ValueError(f"DotProduct: rotary positions need an even head_dim, not {width}")
    dtype = logits_dtype(x)
    speed = base ** (-jnp.arange(0, width, 2, dtype=dtype) / width)  # [width / 2]
    if jnp.ndim(position) == 0:
        position = (position + jnp.arange(length))[None]
    # [b or 1, n, 1, width / 2]
    angle = jnp.asarray(position, dtype)[..., None, None] * speed[None, None, None]
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)  # [b, n, h, width / 2] each
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


@register
class Bilinear(Alignment):
    """A full matrix between every pair of tokens, ``logits_h = (x W_h) yᵀ`` with W_h of d × d.

    General bilinear multi-head attention (Shazeer et al. 2020, section 3.3) is this alignment in an
    `Attention` with ``project_values=False``: the case of head size d_model, where key and value
    projections can be multiplied into those of the queries and the output.

    Attributes:
      query_init: initializer of the kernel, as ``[d_model, heads · d_model]``; None: standard deviation
        1 / d_model, which makes the logits of unit tokens about one.
    """

    query_init: Initializer | None = None
    linear_in = ("query",)

    @nn.compact
    def __call__(self, queries: jax.Array, keys: jax.Array, context: AttentionContext) -> Terms:
        width = queries.shape[-1]
        queries = project(
            queries,
            heads=context.num_heads,
            width=width,
            name="query",
            kernel_init=self.query_init or Normal(1.0 / width),
        )
        # [b, k, h, d]
        keys = jnp.broadcast_to(keys[:, :, None], (*keys.shape[:2], context.num_heads, width))
        return (low_rank(queries, keys, token_keys=True),)
