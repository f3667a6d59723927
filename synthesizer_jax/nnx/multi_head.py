"""A subclass of Flax NNX's `MultiHeadAttention` that takes an alignment."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias, cast

import flax.linen as linen
import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes, initializers
from flax.traverse_util import flatten_dict, unflatten_dict
from flax.typing import DotGeneralT, Dtype, Initializer, PrecisionLike, PromoteDtypeFn

from synthesizer_jax.alignments import Alignment, AttentionContext, DotProduct
from synthesizer_jax.attention import Mask, Span, Terms
from synthesizer_jax.flax_attention import AttentionFn, as_mask, attention_fn, merge_batch_axes
from synthesizer_jax.multi_head import MultiHeadAttention as LinenMultiHeadAttention
from synthesizer_jax.multi_head import attend_heads, batched_weights, check_fields, resolve_inputs
from synthesizer_jax.multi_head_cache import (
    check_step_shapes,
    decoding_step_mask,
    empty_cache_arrays,
    extend_cache_arrays,
)
from synthesizer_jax.nnx.variables import axes_by_path, box_with_axes, to_nnx_variables
from synthesizer_jax.registry import fields_of

ZEROS = initializers.zeros_init()
Metadata: TypeAlias = Mapping[str, Any]

NO_METADATA: Metadata = MappingProxyType({})

Sharding: TypeAlias = jax.sharding.Sharding | jax.sharding.PartitionSpec | None


class BoundAlignment(nnx.Module):
    """An alignment and its parameters, which have the same paths as in Linen.

    Args:
      alignment: the Linen module.
      x: tokens of the queries; only the shape matters.
      y: tokens of the keys; only the shape matters.
      num_heads: number of heads.
      head_dim: size of each head.
      rngs: random streams; ``params`` is used for the parameters.
    """

    def __init__(
        self,
        alignment: Alignment,
        x: jax.Array,
        y: jax.Array,
        *,
        num_heads: int,
        head_dim: int,
        rngs: nnx.Rngs,
    ):
        self._alignment = alignment
        context = AttentionContext(num_heads, head_dim, query_span=Span(0, 1), key_span=Span(0, 1))
        init = functools.partial(alignment.init, context=context)
        key = rngs.params()
        with box_with_axes():
            axes = axes_by_path(jax.eval_shape(init, key, x, y))
        variables = linen.unbox(init(key, x, y))
        self._paths = tuple(flatten_dict(variables))
        for name, node in to_nnx_variables(variables, axes, type(alignment).__name__).items():
            setattr(self, name, nnx.data(node))

    def __call__(self, x: jax.Array, y: jax.Array, context: AttentionContext) -> Terms:
        """Computes the terms, see `Alignment`."""
        variables = {
            path: functools.reduce(operator.getitem, path[2:], vars(self)[path[1]])[...]
            for path in self._paths
        }
        return cast(Terms, self._alignment.apply(unflatten_dict(variables), x, y, context))


class MultiHeadAttention(nnx.MultiHeadAttention):
    """Flax NNX's `MultiHeadAttention`, optionally with another alignment than the dot product.

    A drop-in replacement for `flax.nnx.MultiHeadAttention`, as `synthesizer_jax.MultiHeadAttention` is
    for Linen's; its notes on dropout, fully masked queries and dtypes apply here too. Without
    `alignment`, parameters, initial values, cache and results are those of Flax. With an alignment, the
    attribute ``align`` holds the alignment's parameters, ``query`` and ``key`` exist only for
    `DotProduct`, and grouped queries (`num_kv_heads`) are not supported.

    Args:
      alignment: computes the attention logits or weights; None selects Flax's scaled dot product. For
        all other arguments see `flax.nnx.MultiHeadAttention`.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        broadcast_dropout: bool = True,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        precision: PrecisionLike = None,
        kernel_init: Initializer = nnx.nn.linear.default_kernel_init,
        out_kernel_init: Initializer | None = None,
        bias_init: Initializer = ZEROS,
        out_bias_init: Initializer | None = None,
        use_bias: bool = True,
        attention_fn: AttentionFn = attention_fn,
        decode: bool | None = None,
        normalize_qk: bool = False,
        qkv_promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        out_promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        ln_promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        qkv_dot_general: DotGeneralT | None = None,
        out_dot_general: DotGeneralT | None = None,
        qkv_dot_general_cls: Callable[[], DotGeneralT] | None = None,
        out_dot_general_cls: Callable[[], DotGeneralT] | None = None,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
        kernel_metadata: Metadata = NO_METADATA,
        out_kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
        out_bias_metadata: Metadata = NO_METADATA,
        query_ln_scale_metadata: Metadata = NO_METADATA,
        key_ln_scale_metadata: Metadata = NO_METADATA,
        alignment: Alignment | None = None,
    ):
        arguments = dict(locals())
        for name in ("self", "alignment", "__class__"):
            arguments.pop(name, None)
        super().__init__(**arguments)
        self.alignment = alignment
        if alignment is not None:
            self._bind_alignment(alignment, rngs)

    def _bind_alignment(self, alignment: Alignment, rngs: nnx.Rngs) -> None:
        """Checks the fields and initializes the alignment's parameters."""
        check_fields(self)
        if self.num_kv_heads != self.num_heads:
            raise ValueError(
                f"MultiHeadAttention: num_kv_heads={self.num_kv_heads} is for the scaled dot product; "
                "remove it, or remove alignment"
            )
        if isinstance(alignment, DotProduct):
            x = y = jnp.zeros((1, 1, self.num_heads, self.head_dim))
        else:
            del self.query, self.key
            x, y = (jnp.zeros((1, 1, n)) for n in (self.in_features, self.in_kv_features))
        self.align = BoundAlignment(
            alignment, x, y, num_heads=self.num_heads, head_dim=self.head_dim, rngs=rngs
        )

    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: jax.Array | Mask | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
        out_sharding: Sharding = None,
        qkv_sharding: Sharding = None,
        input_positions: jax.Array | None = None,
    ) -> jax.Array:
        """Applies multi-head attention.

        Args:
          inputs_q: ``[batch..., q, features]``, with any number of batch dimensions, or none.
          inputs_k: ``[batch..., k, features]``; defaults to `inputs_q`.
          inputs_v: ``[batch..., k, features]``; defaults to `inputs_k`.
          mask: broadcastable to ``[batch..., heads, q, k]``, bool or 0/1; or a `Mask`, which needs no
            array of q × k. During decoding, q is 1 and k is the length of the cache.
          deterministic: if True, dropout is off; overrides the attribute, which `train` and `eval` set.
          rngs: random streams; override those of the constructor.
          sow_weights: whether to sow the weights ``[batch..., heads, q, k]`` as an `nnx.Intermediate`
            named ``attention_weights``.
          decode: whether to use the cache; overrides the attribute.
          is_causal: whether queries attend only to keys up to their own position; always the case during
            decoding.
          out_sharding: sharding of the output projection's result.
          qkv_sharding: sharding of the query, key and value projections' results.
          input_positions: ``[batch..., q]``, passed to an `attention_fn` that takes them, such as Flax's
            with rotary positions; requires a Flax newer than 0.12.8 and no `alignment`.

        Returns:
          ``[batch..., q, out_features]``.

        Raises:
          ValueError: the inputs' shapes do not agree with each other or with the cache, or
            `input_positions` are given with an alignment.
        """
        decode = self.decode if decode is None else decode
        if isinstance(mask, Mask) and inputs_k is None and not decode:
            mask = mask.for_self_attention()
        if self.alignment is None:
            if isinstance(mask, Mask) and decode:
                cache = self._cache_arrays()
                mask = decoding_step_mask(mask, cache["cache_index"], cache["cached_key"].shape)
            # Flax 0.12.8 does not have this argument.
            positions = {} if input_positions is None else {"input_positions": input_positions}
            apply_flax: Callable[..., jax.Array] = super().__call__
            return apply_flax(
                inputs_q,
                inputs_k,
                inputs_v,
                mask=mask,
                deterministic=deterministic,
                rngs=rngs,
                sow_weights=sow_weights,
                decode=decode,
                is_causal=is_causal and not decode,
                out_sharding=out_sharding,
                qkv_sharding=qkv_sharding,
                **positions,
            )
        if input_positions is not None:
            raise ValueError(
                "MultiHeadAttention: input_positions require an attention_fn that takes them; remove "
                "them, or remove alignment"
            )
        if decode is None:
            raise ValueError(
                "MultiHeadAttention: decode is not set; pass it to the call or to the constructor"
            )
        inputs = resolve_inputs(inputs_q, inputs_k, inputs_v)
        heads = self._attend_with_alignment(
            inputs,
            mask,
            dropout=self._dropout(deterministic, rngs),
            sow_weights=sow_weights,
            decode=decode,
            is_causal=is_causal,
            qkv_sharding=qkv_sharding,
        )
        return self.out(heads, out_sharding=out_sharding)

    def init_cache(self, input_shape: Sequence[int], dtype: Dtype = jnp.float32) -> None:
        """Creates an empty cache, which decoding requires.

        Args:
          input_shape: ``(batch..., max_length, features)``.
          dtype: dtype of the cached keys and values.
        """
        if self.alignment is None:
            super().init_cache(input_shape, dtype)
            return
        *batch, length, _ = input_shape
        shape = (*batch, 1, self.num_heads, self.head_dim)
        values = merge_batch_axes(jnp.zeros(shape, dtype), tuple(batch))
        x, y = (
            jnp.zeros((values.shape[0], 1, width), dtype)
            for width in (self.in_features, self.in_kv_features)
        )
        terms = self._terms(x, y, query_span=Span(0, 1), key_span=Span(0, length))
        arrays = empty_cache_arrays(terms, values, length=length, batch=tuple(batch))
        for name, x in arrays.items():
            setattr(self, name, nnx.Cache(x if name == "cache_index" else x.astype(dtype)))

    def _dropout(
        self, deterministic: bool | None, rngs: nnx.Rngs | nnx.RngStream | None
    ) -> tuple[float, jax.Array | None]:
        """The dropout rate and PRNG key of a call."""
        deterministic = self.deterministic if deterministic is None else deterministic
        if self.dropout_rate == 0.0 or deterministic:
            return 0.0, None
        if deterministic is None:
            raise ValueError(
                "MultiHeadAttention: deterministic is not set; pass it to the call or to the "
                "constructor, or call train() or eval()"
            )
        rngs = self.rngs if rngs is None else rngs
        if rngs is None:
            raise ValueError(
                "MultiHeadAttention: the layer was built with keep_rngs=False; pass rngs or "
                "deterministic=True to the call"
            )
        return self.dropout_rate, (rngs.dropout if isinstance(rngs, nnx.Rngs) else rngs)()

    def _attend_with_alignment(
        self,
        inputs: tuple[jax.Array, jax.Array, jax.Array],
        mask: jax.Array | Mask | None,
        *,
        dropout: tuple[float, jax.Array | None],
        sow_weights: bool,
        decode: bool,
        is_causal: bool,
        qkv_sharding: Sharding,
    ) -> jax.Array:
        """The heads' outputs ``[batch..., q, heads, head_dim]``."""
        if inputs[0].shape[-1] != self.in_features:
            raise ValueError(
                f"MultiHeadAttention: in_features={self.in_features}, but inputs_q has "
                f"{inputs[0].shape[-1]}"
            )
        batch, q_length = inputs[0].shape[:-2], inputs[0].shape[-2]
        values = merge_batch_axes(self.value(inputs[2], out_sharding=qkv_sharding), batch)
        x, y = (merge_batch_axes(tokens, batch).astype(values.dtype) for tokens in inputs[:2])
        cache = self._cache_arrays() if decode else {}
        index, length = cache.get("cache_index", 0), values.shape[1]
        if decode:
            check_step_shapes(inputs, cache["cached_value"].shape)
            length = cache["cached_value"].shape[-3]
        terms = self._terms(x, y, query_span=Span(index, q_length), key_span=Span(0, length))
        mask = as_mask(mask, (*batch, self.num_heads, q_length, length))
        if decode:
            terms, values, mask, cache = extend_cache_arrays(
                cache, terms, values, mask=mask, batch=batch
            )
            for name, array in cache.items():
                getattr(self, name)[...] = array
        mask = dataclasses.replace(mask, causal=mask.causal or is_causal)
        if sow_weights:
            weights = batched_weights(terms, values, mask, q_length=q_length, batch=batch)
            self.sow(nnx.Intermediate, "attention_weights", weights)
        return attend_heads(terms, values, mask, q_length=q_length, batch=batch, dropout=dropout)

    def _cache_arrays(self) -> dict[str, jax.Array]:
        """The cache's arrays by name."""
        arrays = {n: x[...] for n, x in vars(self).items() if isinstance(x, nnx.Cache)}
        if not arrays:
            raise ValueError(
                "MultiHeadAttention: the cache is not initialized; call init_cache first"
            )
        return arrays

    def _terms(self, x: jax.Array, y: jax.Array, *, query_span: Span, key_span: Span) -> Terms:
        if isinstance(self.alignment, DotProduct):
            x, y = self.query(x), self.key(y)
            if self.query_ln is not None and self.key_ln is not None:
                x, y = self.query_ln(x), self.key_ln(y)
        context = AttentionContext(self.num_heads, self.head_dim, query_span, key_span)
        return self.align(x, y, context)


def from_linen(
    layer: LinenMultiHeadAttention, in_features: int, *, rngs: nnx.Rngs, **options: Any
) -> MultiHeadAttention:
    """Builds the NNX layer with the fields of a Linen layer.

    Args:
      layer: the Linen layer.
      in_features: number of features of the queries' inputs.
      rngs: random streams.
      **options: other arguments of `MultiHeadAttention`; they override the fields.

    Raises:
      ValueError: a field is set that does not exist in Flax's NNX layer.
    """
    arguments = inspect.signature(MultiHeadAttention.__init__).parameters
    fields = fields_of(layer)
    for name in sorted(fields.keys() - arguments.keys()):
        if fields[name]:
            raise ValueError(
                f"to_nnx: MultiHeadAttention has no {name} in NNX; remove {name}={fields[name]!r}"
            )
    shared = {name: value for name, value in fields.items() if name in arguments}
    return MultiHeadAttention(in_features=in_features, rngs=rngs, **{**shared, **options})
