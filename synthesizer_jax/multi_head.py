"""A subclass of Flax Linen's `MultiHeadAttention` that takes an alignment.

The functions at the end are shared with `synthesizer_jax.nnx.MultiHeadAttention`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from synthesizer_jax.alignments import Alignment, AttentionContext, DotProduct
from synthesizer_jax.ambient import on_any_mesh, partition
from synthesizer_jax.attention import (
    Mask,
    Span,
    Terms,
    attend,
    attention_weights,
)
from synthesizer_jax.flax_attention import AttentionFn, as_mask, attention_fn, merge_batch_axes
from synthesizer_jax.multi_head_cache import (
    check_step_shapes,
    decoding_step_mask,
    empty_cache_arrays,
    extend_cache_arrays,
)


class MultiHeadAttention(nn.MultiHeadDotProductAttention):
    """Flax's `MultiHeadAttention`, optionally with another alignment than the dot product.

    A drop-in replacement for `flax.linen.MultiHeadAttention` with the same arguments, defaults,
    parameters, cache and errors. Without `alignment` the results, dropout included, equal Flax's up to
    rounding, and checkpoints are interchangeable; memory use is that of `attention_fn`.

    With an alignment the parameters are ``align/...`` (those of the alignment), ``value`` and ``out``;
    ``query`` and ``key`` exist only for `DotProduct`, which uses the layer's projections. Differences
    from Flax in that case:

    * The dropout mask is drawn per example, head and key, and shared by the queries (as in T5), because
      every route of `attend` supports this; `broadcast_dropout` has no effect.
    * For a query that attends to no key the output before the projection is zero, not the mean of the
      values.
    * The alignment's parameters are float32 whatever `param_dtype` is; `precision` applies to the layer's
      own projections only.
    * Alignments that compute no keys from tokens cache no keys: the collection ``cache`` then holds
      ``cached_value`` and ``cache_index`` only. Mixtures may cache several keys, ``cached_key_1``, ….

    Attributes:
      num_heads: number of heads.
      dtype: dtype of the computation; None: inferred from the inputs and the parameters.
      param_dtype: dtype of the parameters.
      qkv_features: total size of queries, keys and values over all heads; None: that of `inputs_q`.
      out_features: size of the output; None: that of `inputs_q`.
      broadcast_dropout: whether all examples and heads share one dropout mask ``[q, k]``.
      dropout_rate: probability of dropping an attention weight.
      deterministic: if True, dropout is off; can also be passed to the call.
      precision: precision of the matrix products, see `jax.lax.Precision`.
      kernel_init: initializer of the kernels.
      out_kernel_init: initializer of the output projection's kernel; None: `kernel_init`.
      bias_init: initializer of the biases.
      out_bias_init: initializer of the output projection's bias; None: `bias_init`.
      use_bias: whether the projections have biases.
      attention_fn: the attention function of the layer without an alignment.
      decode: whether to cache keys and values of past tokens in the collection ``cache``, as in Flax.
      normalize_qk: whether to normalize queries and keys (Dehghani et al. 2023); dot product only.
      force_fp32_for_softmax: see Flax; this package computes the softmax in float32 in any case.
      qkv_dot_general: see Flax.
      out_dot_general: see Flax.
      qkv_dot_general_cls: see Flax.
      out_dot_general_cls: see Flax.
      qk_attn_weights_einsum_cls: see Flax; not supported with an alignment.
      attn_weights_value_einsum_cls: see Flax; not supported with an alignment.
      alignment: computes the attention logits or weights; None: Flax's scaled dot product.
    """

    attention_fn: AttentionFn = attention_fn
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
        """Applies multi-head attention.

        Args:
          inputs_q: ``[batch..., q, features]``, with any number of batch dimensions, or none.
          inputs_k: ``[batch..., k, features]``; defaults to `inputs_q`.
          inputs_v: ``[batch..., k, features]``; defaults to `inputs_k`.
          inputs_kv: both of them; deprecated in Flax.
          mask: broadcastable to ``[batch..., heads, q, k]``, bool or 0/1; or a `Mask`, which needs no
            array of q × k. During decoding, q is 1 and k is the length of the cache.
          deterministic: if True, dropout is off; required here or as a field if `dropout_rate` > 0.
          dropout_rng: PRNG key of the dropout; defaults to the random stream ``dropout``.
          sow_weights: whether to sow the weights ``[batch..., heads, q, k]`` as ``attention_weights`` in
            the collection ``intermediates``.

        Returns:
          ``[batch..., q, out_features]``.

        Raises:
          ValueError: the inputs' shapes do not agree with each other or with the cache, a field is not
            supported with the alignment, or `deterministic` is not set.
        """
        decoding = self.decode and self.has_variable("cache", "cache_index")
        self_attention = inputs_k is None and inputs_kv is None
        if isinstance(mask, Mask) and self_attention and not decoding:
            mask = mask.for_self_attention()
        if self.alignment is None:
            if isinstance(mask, Mask) and decoding:
                index, shape = self._cache_index(), self._cached_shape("cached_key")
                mask = decoding_step_mask(mask, index, shape)
            apply_flax: Callable[..., jax.Array] = super().__call__
            return apply_flax(
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
            raise ValueError("MultiHeadAttention: pass either inputs_k and inputs_v, or inputs_kv")
        inputs_k = inputs_kv if inputs_k is None else inputs_k
        inputs = resolve_inputs(inputs_q, inputs_k, inputs_v)
        rate = self.dropout_rate
        if rate > 0.0 and nn.merge_param("deterministic", self.deterministic, deterministic):
            rate = 0.0
        if rate > 0.0 and dropout_rng is None:
            dropout_rng = self.make_rng("dropout")
        heads = self._attend_with_alignment(
            inputs, mask, dropout=(rate, dropout_rng), sow_weights=sow_weights, decoding=decoding
        )
        return self._project_out(heads, inputs_q.shape[-1])

    def _attend_with_alignment(
        self,
        inputs: tuple[jax.Array, jax.Array, jax.Array],
        mask: jax.Array | Mask | None,
        *,
        dropout: tuple[float, jax.Array | None],
        sow_weights: bool,
        decoding: bool,
    ) -> jax.Array:
        """The heads' outputs ``[batch..., q, heads, head_dim]``."""
        head_dim = _head_dim(self.qkv_features or inputs[0].shape[-1], self.num_heads)
        batch, q_length = inputs[0].shape[:-2], inputs[0].shape[-2]
        values = merge_batch_axes(self._projection("value", head_dim)(inputs[2]), batch)
        x, y = (merge_batch_axes(tokens, batch).astype(values.dtype) for tokens in inputs[:2])
        index: int | jax.Array = 0
        length = values.shape[1]
        if decoding:
            index, cached_shape = self._cache_index(), self._cached_shape("cached_value")
            length = cached_shape[-3]
            check_step_shapes(inputs, cached_shape)
        spans = {"query_span": Span(index, q_length), "key_span": Span(0, length)}
        terms = self._terms(x, y, head_dim=head_dim, **spans)
        mask = as_mask(mask, (*batch, self.num_heads, q_length, length))
        if decoding:
            terms, values, mask = self._extend_cache(terms, values, mask, batch=batch)
        elif self.decode:
            arrays = empty_cache_arrays(terms, values, length=values.shape[1], batch=batch)
            for name, array in arrays.items():
                self.variable("cache", name, lambda array=array: array)
        if sow_weights:
            weights = batched_weights(terms, values, mask, q_length=q_length, batch=batch)
            self.sow("intermediates", "attention_weights", weights)
        return attend_heads(terms, values, mask, q_length=q_length, batch=batch, dropout=dropout)

    def _terms(
        self, x: jax.Array, y: jax.Array, *, head_dim: int, query_span: Span, key_span: Span
    ) -> Terms:
        assert self.alignment is not None
        if isinstance(self.alignment, DotProduct):
            x, y = self._projection("query", head_dim)(x), self._projection("key", head_dim)(y)
            if self.normalize_qk:
                x, y = self._normalize("query_ln", x), self._normalize("key_ln", y)
        context = AttentionContext(self.num_heads, head_dim, query_span, key_span)
        return self.alignment.copy(name="align", parent=self)(x, y, context)

    def _cache_index(self) -> jax.Array:
        return cast(jax.Array, self.get_variable("cache", "cache_index"))

    def _cached_shape(self, name: str) -> tuple[int, ...]:
        return self.get_variable("cache", name).shape

    def _extend_cache(
        self, terms: Terms, values: jax.Array, mask: Mask, *, batch: tuple[int, ...]
    ) -> tuple[Terms, jax.Array, Mask]:
        """Writes the step's token to the cache; returns terms, values and mask over all positions."""
        terms, values, mask, cache = extend_cache_arrays(
            dict(self.variables["cache"]), terms, values, mask=mask, batch=batch
        )
        for name, array in cache.items():
            self.put_variable("cache", name, array)
        return terms, values, mask

    def _projection(self, name: str, head_dim: int) -> nn.DenseGeneral:
        return nn.DenseGeneral(
            features=(self.num_heads, head_dim),
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

    def _normalize(self, name: str, x: jax.Array) -> jax.Array:
        return nn.LayerNorm(
            use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype, name=name, parent=self
        )(x)

    def _project_out(self, heads: jax.Array, features: int) -> jax.Array:
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


class _AttentionFields(Protocol):
    """The fields that the Linen and the NNX layer share and that `check_fields` reads."""

    @property
    def alignment(self) -> Alignment | None: ...

    @property
    def attention_fn(self) -> Callable[..., jax.Array]: ...

    @property
    def normalize_qk(self) -> bool: ...


def check_fields(layer: _AttentionFields) -> None:
    """Raises a `ValueError` for fields of a `MultiHeadAttention` that exclude its alignment."""
    alignment, name = layer.alignment, "MultiHeadAttention: alignment"
    if not isinstance(alignment, Alignment):
        raise ValueError(
            f"{name}={alignment!r} is not an Alignment; pass an object such as Random(max_length=512)"
        )
    if isinstance(alignment, DotProduct):
        if alignment.copy(scale=None, name=None, parent=None) != DotProduct(parent=None):
            raise ValueError(
                f"{name}={type(alignment).__name__}: the projections belong to the layer; set only scale "
                "on DotProduct, and qkv_features, kernel_init and use_bias on the layer, or use Attention"
            )
    elif layer.normalize_qk:
        raise ValueError(
            f"{name}={type(alignment).__name__}: normalize_qk is supported for DotProduct only; "
            "remove it"
        )
    if layer.attention_fn is not attention_fn:
        raise ValueError(f"{name} and attention_fn exclude each other; remove one of them")
    for field in ("qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls"):
        if getattr(layer, field, None) is not None:  # fields of Flax's Linen layer only
            raise ValueError(f"{name} does not support {field}; remove one of them")


def _head_dim(features: int, num_heads: int) -> int:
    """The size of each head; raises a `ValueError` if the features are not divisible by the heads."""
    if features % num_heads:
        raise ValueError(
            f"MultiHeadAttention: qkv_features={features} is not divisible by num_heads={num_heads}"
        )
    return features // num_heads


def resolve_inputs(
    inputs_q: jax.Array, inputs_k: jax.Array | None, inputs_v: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the inputs of queries, keys and values, with Flax's defaults for missing ones.

    Raises:
      ValueError: `inputs_v` is given without `inputs_k`, or the shapes do not agree.
    """
    if inputs_k is None and inputs_v is not None:
        raise ValueError(
            "MultiHeadAttention: inputs_k cannot be None if inputs_v is given; to use the same "
            "inputs for both, pass inputs_k only"
        )
    inputs_k = inputs_q if inputs_k is None else inputs_k
    inputs_v = inputs_k if inputs_v is None else inputs_v
    inputs = (inputs_q, inputs_k, inputs_v)
    if len({x.shape[:-2] for x in inputs}) > 1 or inputs_k.shape[-2] != inputs_v.shape[-2]:
        raise ValueError(
            f"MultiHeadAttention: inputs_q {inputs_q.shape}, inputs_k {inputs_k.shape} and inputs_v "
            f"{inputs_v.shape} must have equal batch dimensions, and keys and values equal lengths"
        )
    return inputs


def attend_heads(
    terms: Terms,
    values: jax.Array,
    mask: Mask,
    *,
    q_length: int,
    batch: tuple[int, ...],
    dropout: tuple[float, jax.Array | None],
) -> jax.Array:
    """Calls `attend`, partitioned over the current mesh.

    Args:
      terms: the alignment's terms.
      values: ``[b, k, heads, width]``, b the product of the batch dimensions.
      mask: the mask.
      q_length: number of queries.
      batch: the batch dimensions.
      dropout: rate and PRNG key.

    Returns:
      ``[batch..., q, heads, width]``.
    """
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
    terms: Terms, values: jax.Array, mask: Mask, *, q_length: int, batch: tuple[int, ...]
) -> jax.Array:
    """The attention weights ``[batch..., heads, q, k]`` in the values' dtype."""
    weights = attention_weights(terms, mask=mask, q_length=q_length, k_length=values.shape[1])
    weights = jnp.broadcast_to(weights, (values.shape[0], *weights.shape[1:]))
    return weights.reshape(*batch, *weights.shape[1:]).astype(values.dtype)
