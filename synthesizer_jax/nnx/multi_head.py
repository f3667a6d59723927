"""Flax NNX's `MultiHeadAttention` with an alignment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype

from synthesizer_jax.alignments import Alignment, AttentionContext, DotProduct
from synthesizer_jax.attention import Mask, Span
from synthesizer_jax.linen.functional import attention_fn
from synthesizer_jax.linen.multi_head import attend_with_alignment, check_fields, step_pairs
from synthesizer_jax.nnx.module import LinenModule, draw_dropout_key, joined_signature

Sharding: TypeAlias = jax.sharding.Sharding | jax.sharding.PartitionSpec | None


class MultiHeadAttention(nnx.MultiHeadAttention):
    """Flax NNX's `MultiHeadAttention`, optionally with an alignment instead of the dot product.

    This layer is a drop-in replacement for `flax.nnx.MultiHeadAttention`. For Linen, use
    `synthesizer_jax.MultiHeadAttention`. The notes of `synthesizer_jax.MultiHeadAttention` on
    dropout, fully masked queries and dtypes also apply to this layer. Without `alignment`, the
    parameters, their initial values, the cache and the results are the same as in Flax. With an
    alignment, the attribute ``align`` holds the parameters of the alignment, and the attributes
    ``query`` and ``key`` exist only for `DotProduct`. An alignment does not support grouped-query
    attention (`num_kv_heads`).

    Args:
      *args: arguments of `flax.nnx.MultiHeadAttention`.
      rngs: the random streams. The stream ``params`` initializes the parameters, and the stream
        ``dropout`` is forked for dropout.
      alignment: the Linen module that computes the attention logits or weights. None uses Flax's
        scaled dot product.
      **options: keyword arguments of `flax.nnx.MultiHeadAttention`.
    """

    def __init__(
        self, *args: Any, rngs: nnx.Rngs, alignment: Alignment | None = None, **options: Any
    ):
        super().__init__(*args, rngs=rngs, **{"attention_fn": attention_fn, **options})
        self.alignment = alignment
        if alignment is None:
            return
        check_fields(self)
        is_dot_product = isinstance(alignment, DotProduct)  # uses projected tokens
        shapes = [
            (1, 1, self.num_heads, self.head_dim) if is_dot_product else (1, 1, features)
            for features in (self.in_features, self.in_kv_features)
        ]
        if not is_dot_product:
            del self.query, self.key

        # `DotProduct` gets projected tokens. All other alignments get the tokens themselves, which
        # are not projected.
        x, y = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
        context = AttentionContext(self.num_heads, self.head_dim, Span(0, 1), Span(0, 1))
        self.align = LinenModule(alignment, example=(x, y, context), rngs=rngs)

    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: jax.Array | Mask | None = None,
        decode: bool | None = None,
        is_causal: bool = False,
        **options: Any,
    ) -> jax.Array:
        """Applies multi-head attention.

        Args:
          inputs_q: the inputs of the queries, ``[batch..., q, in_features]``.
          inputs_k: the inputs of the keys, ``[batch..., k, in_kv_features]``. None uses `inputs_q`.
          inputs_v: the inputs of the values, ``[batch..., k, in_kv_features]``. None uses
            `inputs_k`.
          mask: an array or a `Mask` that says which keys a query may attend to. An array is bool or
            0/1 and broadcastable to ``[batch..., heads, q, k]``. A `Mask` does not have to store
            every pair of query and key.
          decode: whether to use the cache. None uses the attribute `decode`.
          is_causal: whether a query may attend only to keys up to its own position. Decoding is
            always causal.
          **options: the arguments `deterministic`, `rngs`, `sow_weights`, `out_sharding` and
            `qkv_sharding` of Flax's layer. Without `alignment`, arguments of newer versions of Flax
            are also supported, such as `input_positions`.

        Returns:
          The output ``[batch..., q, out_features]``.

        Raises:
          ValueError: if the shapes of the inputs do not agree with each other or with the cache, or
            if `decode` or `deterministic` is not set.
        """
        decode = self.decode if decode is None else decode
        if isinstance(mask, Mask) and inputs_k is None and not decode:
            mask = mask.for_self_attention()
        inputs = inputs_q, inputs_k, inputs_v
        if self.alignment is not None:
            return self._call_with_alignment(
                inputs, mask=mask, decode=decode, is_causal=is_causal, **options
            )
        if isinstance(mask, Mask) and decode:
            mask = step_pairs(mask, self._cache_arrays())

        # In decoding, a causal mask has no effect, because the cache contains no later positions.
        is_causal = is_causal and not decode
        apply_flax: Callable[..., jax.Array] = super().__call__
        return apply_flax(*inputs, mask=mask, decode=decode, is_causal=is_causal, **options)

    def _call_with_alignment(
        self,
        inputs: tuple[jax.Array, jax.Array | None, jax.Array | None],
        *,
        mask: jax.Array | Mask | None,
        decode: bool | None,
        is_causal: bool,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
        out_sharding: Sharding = None,
        qkv_sharding: Sharding = None,
    ) -> jax.Array:
        """Applies multi-head attention with an alignment, with the arguments of `__call__`."""
        if decode is None:
            raise ValueError(
                "MultiHeadAttention: decode is not set. Pass it to the call or to the constructor."
            )
        if inputs[0].shape[-1] != self.in_features:
            raise ValueError(
                f"MultiHeadAttention: in_features is {self.in_features}, but inputs_q has "
                f"{inputs[0].shape[-1]} features."
            )
        has_dropout = self.dropout_rate > 0.0
        key = draw_dropout_key(self, deterministic, rngs) if has_dropout else None
        heads, weights, cache = attend_with_alignment(
            self,
            self.align,
            lambda name, x: self._project(name, x, qkv_sharding),
            inputs,
            mask=mask,
            cache=self._cache_arrays() if decode else None,
            dropout=(0.0 if key is None else self.dropout_rate, key),
            is_causal=is_causal,
            return_weights=sow_weights,
        )
        for name, array in cache.items():
            getattr(self, name)[...] = array
        if sow_weights:
            self.sow(nnx.Intermediate, "attention_weights", weights)
        return self.out(heads, out_sharding=out_sharding)

    def init_cache(self, input_shape: Sequence[int], dtype: Dtype = jnp.float32) -> None:
        """Creates an empty cache, which is required before decoding.

        Args:
          input_shape: the shape of the inputs of the whole sequence,
            ``(batch..., max_length, features)``.
          dtype: the dtype of the cached keys and values.
        """
        if self.alignment is None:
            super().init_cache(input_shape, dtype)
            return
        features = self.in_features, self.in_kv_features
        x, y = (jnp.zeros((*input_shape[:-1], width)) for width in features)

        # `jax.eval_shape` computes only the shapes of the cache.
        shapes = jax.eval_shape(
            lambda: attend_with_alignment(self, self.align, self._project, (x, y, y), cache={})[2]
        )
        for name, shape in shapes.items():
            is_index = name == "cache_index"
            array = jnp.zeros(shape.shape, shape.dtype if is_index else dtype)
            setattr(self, name, nnx.Cache(array))

    def _project(self, name: str, x: jax.Array, sharding: Sharding = None) -> jax.Array:
        """Applies the projection with a given name, and its normalization if the layer has one."""
        y = getattr(self, name)(x, out_sharding=sharding)
        norm = getattr(self, f"{name}_ln", None)
        return y if norm is None else norm(y)

    def _cache_arrays(self) -> dict[str, jax.Array]:
        """Returns a dictionary from names to the arrays of the cache.

        Raises:
          ValueError: if there is no cache.
        """
        arrays = {n: x[...] for n, x in vars(self).items() if isinstance(x, nnx.Cache)}
        if not arrays:
            raise ValueError(
                "MultiHeadAttention: the cache is not initialized. Call init_cache first."
            )
        return arrays


MultiHeadAttention.__signature__ = joined_signature(  # type: ignore[attr-defined]
    nnx.MultiHeadAttention, MultiHeadAttention
)
