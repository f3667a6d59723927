"""Queries times keys, and what the Synthesizer paper puts in their place."""

from __future__ import annotations

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from synthesizer_jax.alignments.base import (
    Alignment,
    AttentionContext,
    check_length,
    project,
    slice_positions,
)
from synthesizer_jax.alignments.rotary import LinearScaling, YaRN, rotate
from synthesizer_jax.attention import Terms, low_rank, outer, static
from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import Length, Positive, Share
from synthesizer_jax.primitives.initializers import FanIn, Initializer, Normal
from synthesizer_jax.primitives.norms import RMSNorm
from synthesizer_jax.primitives.parameters import with_axes


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
      rotary_share: share of every head's features, the first ones, that are rotated, as in GPT-NeoX.
      rotary_scaling: `LinearScaling` or `YaRN`, for texts longer than in training; None: none.
      query_init: initializer of the query kernel ``[d_model, heads · head_dim]``.
      key_init: initializer of the key kernel.
    """

    head_dim: Length | None = None
    scale: float | None = None
    use_bias: bool = False
    normalize_qk: bool = False
    rotary_base: Positive | None = None
    rotary_share: Share = 1.0
    rotary_scaling: LinearScaling | YaRN | None = None
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
            turn = functools.partial(
                rotate, base=self.rotary_base, share=self.rotary_share, scaling=self.rotary_scaling
            )
            queries, keys = turn(queries, at), turn(keys, keys_at)
        elif self.rotary_share < 1 or self.rotary_scaling is not None:
            raise ValueError(
                "DotProduct: rotary_base is None, but rotary_share or rotary_scaling is set; set it too, "
                "such as rotary_base=10_000"
            )
        scale = width**-0.5 if self.scale is None else self.scale
        if scale != 1.0:
            queries = queries * scale
        return (low_rank(queries, keys, token_keys=True),)


@register
class Bilinear(Alignment):
    """A full matrix between every pair of tokens, ``logits_h = (x W_h) yᵀ`` with W_h of d × d.

    In an `Attention` with ``project_values=False`` it is general bilinear multi-head attention (Shazeer
    et al. 2020, section 3.3). That is the case of head size d_model, where key and value projections can
    be multiplied into those of the queries and the output.

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


@register
class Dense(Alignment):
    """Every token computes its own row of logits, ``B_i = W₂ relu(W₁ x_i)``.

    Tay et al. 2021, section 3.1 (Dense Synthesizer), without biases. W₂'s rows act as keys that are
    the same for every example, so the engine treats it as a dot product with static keys.

    Attributes:
      max_length: number of key positions that W₂ addresses.
      hidden_dim: width of the hidden layer per head; None means the width of a head.
      share_heads: one W₂ for all heads, as in the released Mesh-TensorFlow code; the paper's text
        has one per head.
      hidden_init: initializer of W₁ ``[d_model, heads · hidden]``.
      table_init: initializer of W₂ ``[heads, max_length, hidden]``; None: variance 1 / hidden.
    """

    max_length: Length
    hidden_dim: Length | None = None
    share_heads: bool = False
    hidden_init: Initializer = FanIn()
    table_init: Initializer | None = None
    linear_in = ("table",)

    @nn.compact
    def __call__(self, queries: jax.Array, keys: jax.Array, context: AttentionContext) -> Terms:
        check_length(self, self.max_length, context.query_span, context.key_span)
        # [b, q, h, e]
        hidden = _hidden(queries, self.hidden_dim or context.head_dim, self.hidden_init, context)
        width = hidden.shape[-1]
        init = self.table_init or Normal(width**-0.5)
        table = self.param(
            "table",
            with_axes(init, "heads", "key_length", "synth_hidden"),
            (1 if self.share_heads else context.num_heads, self.max_length, width),
        )
        # [h or 1, k, e]
        rows = slice_positions(table, context.key_span, axis=1).astype(hidden.dtype)
        rows = jnp.broadcast_to(rows, (context.num_heads, *rows.shape[1:]))
        return (low_rank(hidden, rows.swapaxes(0, 1)[None], token_keys=False),)  # keys [1, k, h, e]


@register
class FactorizedDense(Alignment):
    """Every token computes two short vectors whose outer product is its row of logits.

    ``C_i[p·B + r] = A_i[p] · B_i[r]`` with ``A_i = W_A relu(W₁ x_i)`` and ``B_i = W_B relu(W₁ x_i)``
    (Tay et al. 2021, section 3.3, Factorized Dense Synthesizer). The paper tiles both vectors to
    the full length; here one is repeated element by element and the other as a whole, so that every
    pair (p, r) occurs exactly once.

    Attributes:
      max_length: number of key positions, ``A · B`` with the most balanced factors, 16 · 32 for 512.
      hidden_dim: width of the hidden layer per head; None means the width of a head.
    """

    max_length: Length
    hidden_dim: Length | None = None
    hidden_init: Initializer = FanIn()
    factor_init: Initializer = FanIn()
    linear_in = ("first",)

    @nn.compact
    def __call__(self, queries: jax.Array, keys: jax.Array, context: AttentionContext) -> Terms:
        check_length(self, self.max_length, context.query_span, context.key_span)
        hidden = _hidden(queries, self.hidden_dim or context.head_dim, self.hidden_init, context)
        axes = "heads", "synth_hidden", "key_length"

        def factor(name: str, width: int) -> jax.Array:
            init = with_axes(self.factor_init, *axes)
            kernel = self.param(name, init, (*hidden.shape[-2:], width))
            return jnp.einsum("bqhe,hea->bqha", hidden, kernel.astype(hidden.dtype))

        first, second = balanced_factors(self.max_length)
        return (outer(factor("first", first), factor("second", second)),)


def balanced_factors(length: int) -> tuple[int, int]:
    """The factor pair of `length` nearest to a square, smaller one first: 512 → (16, 32)."""
    first = next(a for a in range(math.isqrt(length), 0, -1) if length % a == 0)
    return first, length // first


def _hidden(
    queries: jax.Array, width: int, kernel_init: Initializer, context: AttentionContext
) -> jax.Array:
    """Computes the hidden layer of every head, ``[batch, q, heads, width]``."""
    if queries.ndim == 3:
        queries = project(
            queries,
            heads=context.num_heads,
            width=width,
            name="hidden",
            axes=("heads", "synth_hidden"),
            kernel_init=kernel_init,
        )
    return jax.nn.relu(queries)


@register
class Random(Alignment):
    """Logits that are parameters, the same for every example, ``S = R[:q, :k]``.

    Tay et al. 2021, section 3.2 (Random Synthesizer). With `trainable=False` it is Fixed Random, whose
    table stays at its initial value: gradients and optimizers belong to the collection ``params``, while
    ``constants`` is passed on, ``layer.apply({"params": params, **rest}, x)``. Shorter inputs use the
    top-left corner of the table.

    Attributes:
      max_length: number of query and key positions of the table.
      trainable: False keeps the table in the collection ``constants``: saved, never optimized.
      table_init: initializer of the table ``[heads, max_length, max_length]``.
    """

    max_length: Length
    trainable: bool = True
    table_init: Initializer = Normal(0.02)
    linear_in = ("table",)

    @nn.compact
    def __call__(self, queries: jax.Array, keys: jax.Array, context: AttentionContext) -> Terms:
        check_length(self, self.max_length, context.query_span, context.key_span)
        init = with_axes(self.table_init, "heads", "query_length", "key_length")
        shape = (context.num_heads, self.max_length, self.max_length)
        if self.trainable:
            table = self.param("table", init, shape)
        else:
            table = self.variable("constants", "table", lambda: init(self.make_rng("params"), shape)).value
        rows = slice_positions(table, context.query_span, axis=1)  # [h, q, max_length]
        return (static(slice_positions(rows, context.key_span, axis=2)),)


@register
class FactorizedRandom(Alignment):
    """A Random table of low rank, ``S = R₁ R₂ᵀ``.

    Tay et al. 2021, section 3.3 (Factorized Random Synthesizer; rank 8 in the paper). The released
    Mesh-TensorFlow code computes something else (every query gets the same row), which is not
    offered here.

    Attributes:
      max_length: number of query and key positions.
      rank: inner width k of the factors.
      factor_init: initializer of R₁ and R₂, each ``[heads, max_length, rank]``.
    """

    max_length: Length
    rank: Length = 8
    factor_init: Initializer = Normal(0.1)
    linear_in = ("query_factor",)

    @nn.compact
    def __call__(self, queries: jax.Array, keys: jax.Array, context: AttentionContext) -> Terms:
        check_length(self, self.max_length, context.query_span, context.key_span)
        shape = (context.num_heads, self.max_length, self.rank)
        rows = self.param(
            "query_factor", with_axes(self.factor_init, "heads", "query_length", "rank"), shape
        )
        columns = self.param(
            "key_factor", with_axes(self.factor_init, "heads", "key_length", "rank"), shape
        )
        # [1, q, h, r]
        rows = slice_positions(rows, context.query_span, axis=1).swapaxes(0, 1)[None]
        # [1, k, h, r]
        columns = slice_positions(columns, context.key_span, axis=1).swapaxes(0, 1)[None]
        return (low_rank(rows, columns, token_keys=False, token_queries=False),)
