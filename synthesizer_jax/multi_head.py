"""Flax Linen's `MultiHeadAttention` with an alignment, and what its NNX form shares with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from synthesizer_jax.alignments import Alignment, DotProduct
from synthesizer_jax.ambient import on_any_mesh, partition
from synthesizer_jax.attention import (
    Mask,
    Span,
    Terms,
    attend,
    attention_weights,
)
from synthesizer_jax.flax_attention import as_mask, attention_fn, flat
from synthesizer_jax.multi_head_cache import check_step, new_cache, step, step_array


class MultiHeadAttention(nn.MultiHeadDotProductAttention):
    """Flax's `MultiHeadAttention`, and the same layer with another alignment.

    A drop-in replacement for `flax.linen.MultiHeadAttention`: its arguments, defaults, parameters,
    cache and errors. Without `alignment` the result is Flax's up to rounding, dropout included, and
    checkpoints fit both; the memory is that of `attention_fn`.

    With an alignment the parameters are ``align/...`` (the alignment's own), ``value`` and ``out``;
    ``query`` and ``key`` exist only for `DotProduct`, whose projections are the layer's. What differs
    from Flax then:

    * Dropout is one draw per example, head and key, shared by the queries (as in T5), which every
      route of `attend` has; `broadcast_dropout` has no effect.
    * A query that sees no key gets zeros before the output projection, not the mean of the values.
    * An alignment's own parameters are float32 whatever `param_dtype` is, and `precision` is that of
      the layer's own projections.
    * Decoding needs no keys for alignments that make none from tokens; the collection ``cache`` then
      holds ``cached_value`` and ``cache_index`` only. Mixtures have further keys, ``cached_key_1``, ….

    Attributes:
      num_heads: number of heads.
      dtype: dtype of the computation; None: inferred from the inputs and the parameters.
      param_dtype: dtype of the parameters.
      qkv_features: width of queries, keys and values, all heads together; None: that of `inputs_q`.
      out_features: width of the result; None: that of `inputs_q`.
      broadcast_dropout: one draw ``[q, k]`` for all examples and heads.
      dropout_rate: probability of dropping an attention weight.
      deterministic: no dropout; given here or at the call.
      precision: of the matrix products, see `jax.lax.Precision`.
      kernel_init: initialiser of all kernels.
      out_kernel_init: initialiser of the output's kernel; None: `kernel_init`.
      bias_init: initialiser of all biases.
      out_bias_init: initialiser of the output's bias; None: `bias_init`.
      use_bias: biases in the projections.
      attention_fn: computes the attention where there is no alignment.
      decode: keep keys and values of past tokens in the collection ``cache``, as Flax does.
      normalize_qk: normalise queries and keys (Dehghani et al. 2023); for the dot product only.
      force_fp32_for_softmax: float32 softmax where Flax computes it; otherwise it always is.
      qkv_dot_general: see Flax.
      out_dot_general: see Flax.
      qkv_dot_general_cls: see Flax.
      out_dot_general_cls: see Flax.
      qk_attn_weights_einsum_cls: see Flax; not with an alignment.
      attn_weights_value_einsum_cls: see Flax; not with an alignment.
      alignment: who looks at whom; None: Flax's scaled dot product.
    """

    attention_fn: Callable[..., jax.Array] = attention_fn
    alignment: Alignment | None = None

    @on_any_mesh
    @nn.compact
    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        inputs_kv: jax.Array | None = None,
        mask: jax.Array | Mask | None = None,
        deterministic: bool | None = None,
        dropout_rng: jax.Array | None = None,
        sow_weights: bool = False,
    ) -> jax.Array:
        """Mixes tokens.

        Args:
          inputs_q: ``[batch..., q, features]``; any number of batch dimensions, also none.
          inputs_k: ``[batch..., k, features]``; None: `inputs_q`.
          inputs_v: ``[batch..., k, features]``; None: `inputs_k`.
          inputs_kv: both at once; deprecated in Flax.
          mask: broadcastable to ``[batch..., heads, q, k]``, bool or 0/1; or a `Mask`, which needs no
            array of q × k. While decoding, q is 1 and k the length of the cache.
          deterministic: no dropout; needed here or as a field where `dropout_rate` is not zero.
          dropout_rng: key of the dropout; None: the random stream ``dropout``.
          sow_weights: leave the weights ``[batch..., heads, q, k]`` in ``intermediates`` as
            ``attention_weights``.

        Returns:
          ``[batch..., q, out_features]``.

        Raises:
          ValueError: inputs that do not fit one another or the cache, fields that do not go with the
            alignment, or dropout where nothing says whether it acts.
        """
        decoding = self.decode and self.has_variable("cache", "cache_index")
        own = inputs_k is None and inputs_kv is None
        if isinstance(mask, Mask) and own and not decoding:
            mask = mask.for_self_attention()
        if self.alignment is None:
            if isinstance(mask, Mask) and decoding:
                keys: Any = self.get_variable("cache", "cached_key")
                mask = step_array(mask, self.get_variable("cache", "cache_index"), keys.shape)
            call: Any = super().__call__
            return call(
                inputs_q,
                inputs_k,
                inputs_v,
                inputs_kv=inputs_kv,
                mask=mask,
                deterministic=deterministic,
                dropout_rng=dropout_rng,
                sow_weights=sow_weights,
            )
        check_fields(self)
        if inputs_kv is not None and not (inputs_k is None and inputs_v is None):
            raise ValueError(
                "MultiHeadAttention: give inputs_k and inputs_v, or inputs_kv, not both"
            )
        inputs_k = inputs_kv if inputs_k is None else inputs_k
        inputs = resolved_inputs(inputs_q, inputs_k, inputs_v)
        rate = self.dropout_rate
        if rate > 0.0 and nn.merge_param("deterministic", self.deterministic, deterministic):
            rate = 0.0
        if rate > 0.0 and dropout_rng is None:
            dropout_rng = self.make_rng("dropout")
        heads = self._aligned(inputs, mask, rate, dropout_rng, sow_weights, decoding)
        return self._output(heads, inputs_q.shape[-1])

    def _aligned(
        self,
        inputs: tuple[jax.Array, jax.Array, jax.Array],
        mask: jax.Array | Mask | None,
        rate: float,
        rng: jax.Array | None,
        sow_weights: bool,
        decoding: bool,
    ) -> jax.Array:
        """``[batch..., q, heads, head_dim]`` with the alignment's logits or weights."""
        head_dim = head_width(self.qkv_features or inputs[0].shape[-1], self.num_heads)
        batch, q_length = inputs[0].shape[:-2], inputs[0].shape[-2]
        values = flat(self._projection("value", head_dim)(inputs[2]), batch)
        x, y = (flat(tokens, batch).astype(values.dtype) for tokens in inputs[:2])
        at, length = 0, values.shape[1]
        if decoding:
            at = self.get_variable("cache", "cache_index")
            length = self.get_variable("cache", "cached_value").shape[-3]
            check_step(inputs, self.get_variable("cache", "cached_value").shape)
        terms = self._terms(x, y, head_dim, Span(at, q_length), Span(0, length))
        seen = as_mask(mask, (*batch, self.num_heads, q_length, length))
        if self.decode:
            terms, values, seen = self._cached(terms, values, seen, batch, decoding)
        if sow_weights:
            weights = batched_weights(terms, values, seen, q_length, batch)
            self.sow("intermediates", "attention_weights", weights)
        return mixed_heads(terms, values, seen, q_length, batch, dropout=(rate, rng))

    def _terms(
        self, x: jax.Array, y: jax.Array, head_dim: int, query_span: Span, key_span: Span
    ) -> Terms:
        assert self.alignment is not None
        if isinstance(self.alignment, DotProduct):
            x, y = self._projection("query", head_dim)(x), self._projection("key", head_dim)(y)
            if self.normalize_qk:
                x, y = self._normalized("query_ln", x), self._normalized("key_ln", y)
        return self.alignment.copy(name="align", parent=self)(
            x,
            y,
            num_heads=self.num_heads,
            head_dim=head_dim,
            query_span=query_span,
            key_span=key_span,
        )

    def _cached(
        self, terms: Terms, values: jax.Array, mask: Mask, batch: tuple[int, ...], decoding: bool
    ) -> tuple[Terms, jax.Array, Mask]:
        """The step's terms, values and mask over all positions; makes the cache on the first call."""
        if not decoding:
            for name, x in new_cache(terms, values, values.shape[1], batch).items():
                self.variable("cache", name, lambda x=x: x)
            return terms, values, mask
        kept = dict(self.variables["cache"])
        terms, values, mask, kept = step(kept, terms, values, mask, batch)
        for name, x in kept.items():
            self.put_variable("cache", name, x)
        return terms, values, mask

    def _projection(self, name: str, width: int) -> nn.DenseGeneral:
        return nn.DenseGeneral(
            features=(self.num_heads, width),
            axis=-1,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            use_bias=self.use_bias,
            precision=self.precision,
            dot_general=self.qkv_dot_general,
            dot_general_cls=self.qkv_dot_general_cls,
            name=name,
            parent=self,
        )

    def _normalized(self, name: str, x: jax.Array) -> jax.Array:
        return nn.LayerNorm(
            use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype, name=name, parent=self
        )(x)

    def _output(self, heads: jax.Array, features: int) -> jax.Array:
        return nn.DenseGeneral(
            features=self.out_features or features,
            axis=(-2, -1),
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
            use_bias=self.use_bias,
            precision=self.precision,
            dot_general=self.out_dot_general,
            dot_general_cls=self.out_dot_general_cls,
            name="out",
            parent=self,
        )(heads)


def check_fields(layer: Any) -> None:
    """Raises a `ValueError` for fields of a `MultiHeadAttention` that its alignment excludes."""
    alignment, name = layer.alignment, "MultiHeadAttention: alignment"
    if not isinstance(alignment, Alignment):
        raise ValueError(
            f"{name}={alignment!r} is not an Alignment; give an object such as Random(max_length=512)"
        )
    if isinstance(alignment, DotProduct):
        if alignment.copy(scale=None, name=None, parent=None) != DotProduct(parent=None):
            raise ValueError(
                f"{name}={type(alignment).__name__}: the projections are the layer's; give DotProduct "
                "nothing but scale, and the layer qkv_features, kernel_init and use_bias, or use Attention"
            )
    elif layer.normalize_qk:
        raise ValueError(
            f"{name}={type(alignment).__name__}: normalize_qk normalises the dot product's queries "
            "and keys; leave it out"
        )
    if layer.attention_fn is not attention_fn:
        raise ValueError(f"{name} and attention_fn both say who looks at whom; give one of them")
    for field in ("qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls"):
        if getattr(layer, field, None) is not None:
            raise ValueError(f"{name}: the engine has no {field}; leave alignment or that out")


def head_width(features: int, heads: int) -> int:
    """The width of one head; raises a `ValueError` where the heads do not divide the features."""
    if features % heads:
        raise ValueError(
            f"MultiHeadAttention: qkv_features={features} is not divisible by num_heads={heads}"
        )
    return features // heads


def resolved_inputs(
    inputs_q: jax.Array, inputs_k: jax.Array | None, inputs_v: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The tokens of queries, keys and values, left out ones filled in as Flax does.

    Raises:
      ValueError: values without keys, or shapes that do not agree.
    """
    if inputs_k is None and inputs_v is not None:
        raise ValueError(
            "MultiHeadAttention: inputs_k cannot be None if inputs_v is given; give the values' tokens "
            "as inputs_k and leave inputs_v out"
        )
    inputs_k = inputs_q if inputs_k is None else inputs_k
    inputs_v = inputs_k if inputs_v is None else inputs_v
    inputs = (inputs_q, inputs_k, inputs_v)
    if len({x.shape[:-2] for x in inputs}) > 1 or inputs_k.shape[-2] != inputs_v.shape[-2]:
        raise ValueError(
            f"MultiHeadAttention: inputs_q {inputs_q.shape}, inputs_k {inputs_k.shape} and inputs_v "
            f"{inputs_v.shape} need equal batch dimensions, and keys as many as values"
        )
    return inputs


def mixed_heads(
    terms: Terms,
    values: jax.Array,
    mask: Mask,
    q_length: int,
    batch: tuple[int, ...],
    *,
    dropout: tuple[float, jax.Array | None],
) -> jax.Array:
    """`attend` under the surrounding mesh, ``[batch..., q, heads, width]``; `dropout`: rate and key."""
    rate, key = dropout
    out = attend(
        terms,
        values,
        mask=mask,
        q_length=q_length,
        dropout_rate=rate,
        dropout_key=key,
        partition=partition(batch=values.shape[0], heads=values.shape[2]),
    )
    return out.reshape(*batch, *out.shape[1:])


def batched_weights(
    terms: Terms, values: jax.Array, mask: Mask, q_length: int, batch: tuple[int, ...]
) -> jax.Array:
    """The attention weights ``[batch..., heads, q, k]`` in the values' dtype."""
    weights = attention_weights(terms, mask=mask, q_length=q_length, k_length=values.shape[1])
    weights = jnp.broadcast_to(weights, (values.shape[0], *weights.shape[1:]))
    return weights.reshape(*batch, *weights.shape[1:]).astype(values.dtype)
