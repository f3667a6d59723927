"""Flax Linen's `MultiHeadAttention` with an alignment, and functions that NNX also uses."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp

from synthesizer_jax.alignments import Alignment, AttentionContext, DotProduct
from synthesizer_jax.attention import (
    Cache,
    Mask,
    Span,
    Terms,
    attend,
    attention_weights,
    extend,
    init_cache,
)
from synthesizer_jax.linen.functional import AttentionFn, as_mask, attention_fn, merge_batch_axes
from synthesizer_jax.mixers.base import decoding_mask
from synthesizer_jax.primitives.mesh import on_any_mesh, partition


class AlignedLayer(Protocol):
    """The fields that the `MultiHeadAttention` of Linen and of NNX have in common."""

    @property
    def alignment(self) -> Alignment | None:
        """The module that computes the attention logits, or None for Flax's dot product."""

    @property
    def num_heads(self) -> int:
        """The number of heads."""

    @property
    def normalize_qk(self) -> bool:
        """Whether queries and keys are normalized before the dot product."""


class MultiHeadAttention(nn.MultiHeadDotProductAttention):
    """Flax's `MultiHeadAttention`, optionally with an alignment instead of the dot product.

    This layer is a drop-in replacement for `flax.linen.MultiHeadAttention`, with the same
    arguments, defaults, parameters, cache and errors. Without `alignment`, the results are equal to
    the results of Flax up to rounding, and checkpoints can be exchanged. With at most 128 queries,
    the results are also equal under dropout. The layer uses as little memory as `attention_fn`.

    With an alignment, the layer has the parameters ``align/...`` of the alignment, ``value`` and
    ``out``. The parameters ``query`` and ``key`` exist only for the alignment `DotProduct`, which
    uses the projections of the layer. With an alignment, the layer differs from Flax's layer as
    follows:

    * As in T5, the dropout mask is drawn per example, head and key, and all queries share the mask.
      All implementations of `attend` support this kind of dropout. The field `broadcast_dropout`
      has no effect.
    * If a query may attend to no key, the input of the output projection is zero, and not the mean
      of the values.
    * The parameters of the alignment are always float32, and do not depend on `param_dtype`.
      `precision` applies only to the projections of the layer.
    * If an alignment computes no keys from tokens, no keys are cached. The collection ``cache``
      then contains only ``cached_value`` and ``cache_index``. A mixture may cache several keys
      under the names ``cached_key``, ``cached_key_1``, and so on.

    Attributes:
      alignment: the module that computes the attention logits or weights. None uses Flax's scaled
        dot product. All other attributes are documented in `flax.linen.MultiHeadAttention`.
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
          inputs_q: ``[batch..., q, features]``, with any number of batch axes, including zero.
          inputs_k: ``[batch..., k, features]``. None uses `inputs_q`.
          inputs_v: ``[batch..., k, features]``. None uses `inputs_k`.
          inputs_kv: the inputs for both keys and values. Flax has deprecated this argument. This
            argument cannot be used together with an alignment.
          mask: an array or a `Mask` that says which keys a query may attend to. An array is bool or
            0/1 and broadcastable to ``[batch..., heads, q, k]``. A `Mask` does not have to store
            every pair of query and key. During decoding, q is 1 and k is the length of the cache.
          deterministic: whether dropout is off. If `dropout_rate` is above 0, `deterministic` must
            be set either in the call or as a field.
          dropout_rng: the PRNG key of the dropout. None uses the random stream ``dropout``.
          sow_weights: whether to sow the weights; see Flax.

        Returns:
          The output ``[batch..., q, out_features]``.

        Raises:
          ValueError: if the shapes of the inputs do not agree with each other or with the cache, if
            a field is not supported with the alignment, or if `deterministic` is not set.
        """
        decoding = self.decode and self.has_variable("cache", "cache_index")
        cache = dict(self.variables["cache"]) if decoding else {}
        if isinstance(mask, Mask) and inputs_k is None and inputs_kv is None and not decoding:
            mask = mask.for_self_attention()

        if self.alignment is None:
            if isinstance(mask, Mask) and decoding:
                # Flax combines the mask with the mask of the cache, so the mask must be an array.
                mask = step_pairs(mask, cache)

            # Without an alignment, Flax's layer computes the output, and calls `attention_fn`.
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
        if inputs_kv is not None:
            raise ValueError(
                "MultiHeadAttention: inputs_kv cannot be used with an alignment. Pass inputs_k."
            )
        features = self.qkv_features or inputs_q.shape[-1]
        if features % self.num_heads:
            raise ValueError(
                f"MultiHeadAttention: qkv_features is {features}, but it must be divisible by "
                f"num_heads, which is {self.num_heads}."
            )
        # The field `alignment` is a configuration. Its copy is a submodule of this layer, so the
        # parameters of the alignment are stored under "align".
        align = self.alignment.copy(name="align", parent=self)
        heads, weights, cache = attend_with_alignment(
            self,
            align,
            functools.partial(self._project, features // self.num_heads),
            (inputs_q, inputs_k, inputs_v),
            mask=mask,
            cache=cache if self.decode else None,
            dropout=self._dropout(deterministic, dropout_rng),
            return_weights=sow_weights,
        )
        for name, array in cache.items():
            self.variable("cache", name, lambda array=array: array).value = array
        if sow_weights:
            self.sow("intermediates", "attention_weights", weights)

        # [batch..., q, heads, head_dim] → [batch..., q, out_features]
        out = self._dense(
            features=self.out_features or inputs_q.shape[-1],
            axis=(-2, -1),
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
            dot_general=self.out_dot_general,
            dot_general_cls=self.out_dot_general_cls,
            name="out",
        )
        return out(heads)

    def _dense(self, **fields: Any) -> nn.DenseGeneral:
        """Returns a `DenseGeneral` with the dtypes, `use_bias` and `precision` of the layer."""
        return nn.DenseGeneral(
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            use_bias=self.use_bias,
            precision=self.precision,
            **fields,
        )

    def _project(self, head_dim: int, name: str, x: jax.Array) -> jax.Array:
        """Applies the projection with a given name to x.

        The result is ``[batch..., length, heads, head_dim]``.

        Projected queries and keys are normalized if `normalize_qk` is True.
        """
        dense = self._dense(
            features=(self.num_heads, head_dim),
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            dot_general=self.qkv_dot_general,
            dot_general_cls=self.qkv_dot_general_cls,
            name=name,
        )
        y = dense(x)
        if not self.normalize_qk or name == "value":
            return y
        norm = nn.LayerNorm(
            use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype, name=f"{name}_ln"
        )
        return norm(y)

    def _dropout(
        self, deterministic: bool | None, key: jax.Array | None
    ) -> tuple[float, jax.Array | None]:
        """Returns the dropout rate and the PRNG key of a call."""
        rate = self.dropout_rate
        if rate > 0.0 and nn.merge_param("deterministic", self.deterministic, deterministic):
            rate = 0.0
        if rate > 0.0 and key is None:
            key = self.make_rng("dropout")
        return rate, key


def check_fields(layer: AlignedLayer) -> None:
    """Raises a `ValueError` if the alignment of a layer is incompatible with its other fields."""
    alignment = layer.alignment
    if not isinstance(alignment, Alignment):
        raise ValueError(
            f"MultiHeadAttention: alignment is {alignment!r}, but it must be an Alignment object, "
            "such as Random(max_length=512)."
        )
    name = f"MultiHeadAttention: alignment={type(alignment).__name__}"
    is_dot_product = isinstance(alignment, DotProduct)
    if is_dot_product:
        # The layer uses its own projections. The fields of `DotProduct` that describe projections
        # would have no effect, so these fields must have their default values.
        own = ("scale", "rotary_base", "rotary_share", "rotary_scaling", "name", "parent")
        plain = DotProduct(parent=None)
        without_own = alignment.copy(**{field: getattr(plain, field) for field in own})
        if without_own != plain:
            raise ValueError(
                f"{name} uses the projections of the layer. Set only scale, rotary_base, "
                "rotary_share and rotary_scaling of DotProduct, and set qkv_features, kernel_init, "
                "use_bias and normalize_qk of the layer. Or use Attention."
            )
    for field, default in (
        ("attention_fn", attention_fn),
        ("normalize_qk", layer.normalize_qk if is_dot_product else False),
        ("num_kv_heads", layer.num_heads),  # a field of Flax's NNX layer
        ("qk_attn_weights_einsum_cls", None),  # a field of Flax's Linen layer
        ("attn_weights_value_einsum_cls", None),
    ):
        if getattr(layer, field, default) != default:
            raise ValueError(
                f"{name} and {field} cannot be used together. Remove one of them, or use "
                "Attention, which has num_kv_heads and soft_cap."
            )


def attend_with_alignment(
    layer: AlignedLayer,
    align: Callable[[jax.Array, jax.Array, AttentionContext], Terms],
    project: Callable[[str, jax.Array], jax.Array],
    inputs: tuple[jax.Array, jax.Array | None, jax.Array | None],
    *,
    mask: jax.Array | Mask | None = None,
    cache: dict[str, jax.Array] | None = None,
    dropout: tuple[float, jax.Array | None] = (0.0, None),
    is_causal: bool = False,
    return_weights: bool = False,
) -> tuple[jax.Array, jax.Array | None, dict[str, jax.Array]]:
    """Computes `MultiHeadAttention` with an alignment, up to the output projection.

    The Linen and the NNX layer share this function. The function creates no parameters, because all
    parameters belong to `align` and `project`.

    Args:
      layer: the layer, after `check_fields`.
      align: the alignment of the layer, bound to its parameters.
      project: a function ``(name, x) -> [batch..., length, heads, head_dim]`` that applies an input
        projection. The name is ``value``, or for `DotProduct` also ``query`` or ``key``.
      inputs: the arguments ``inputs_q``, ``inputs_k`` and ``inputs_v`` of the layer.
      mask: the argument ``mask`` of the layer.
      cache: a dictionary from Flax's names to arrays ``[batch..., length, heads, width]``. If there
        is a cache, the inputs must contain only the next token. If the dictionary is empty, a cache
        with the shapes of the inputs is created. None uses no cache.
      dropout: the dropout rate and the PRNG key.
      is_causal: whether a query may attend only to keys up to its own position.
      return_weights: whether to return the weights.

    Returns:
      A tuple of the outputs of the heads ``[batch..., q, heads, head_dim]``, the weights
      ``[batch..., heads, q, k]``, and the cache after this step. The weights are None if
      `return_weights` is False. The cache is empty if no cache is used.

    Raises:
      ValueError: if the shapes of the inputs do not agree with each other or with the cache, or if
        the cache is full.
    """
    inputs_q, inputs_k, inputs_v = _complete_inputs(*inputs)
    batch = inputs_q.shape[:-2]
    q_length = inputs_q.shape[-2]
    values = project("value", inputs_v)
    length = values.shape[-3]
    index: int | jax.Array = 0
    if cache:
        _check_step(cache, inputs_q, inputs_k, inputs_v)
        index = cache["cache_index"]
        length = cache["cached_value"].shape[-3]

    # An alignment computes in the dtype of the projections. Only `DotProduct` needs projected
    # inputs.
    x = inputs_q.astype(values.dtype)
    y = inputs_k.astype(values.dtype)
    if isinstance(layer.alignment, DotProduct):
        x = project("query", x)
        y = project("key", y)

    # `attend` supports only one batch axis, so the arrays are reshaped to [b, length, ...].
    x, y, values = (merge_batch_axes(array, batch) for array in (x, y, values))
    mask = as_mask(mask, (*batch, layer.num_heads, q_length, length))
    mask = dataclasses.replace(mask, causal=mask.causal or is_causal)
    context = AttentionContext(
        num_heads=layer.num_heads,
        head_dim=values.shape[-1],
        query_span=Span(index, q_length),
        key_span=Span(0, length),
        keys_start=index,
        packed_positions=None if cache else mask.packed_positions,
    )
    terms = align(x, y, context)

    if cache:
        terms, values, mask, cache = _extend_cache(cache, terms, values, mask, batch)
    elif cache is not None:
        # As in Flax, the cache is created when the layer is initialized. The length of the inputs
        # is then the maximum length of the cache.
        past = init_cache(terms, values, max_length=length, positions_first=True)
        cache = {**_cache_arrays(past, batch), "cache_index": jnp.array(0, jnp.int32)}

    weights = None
    if return_weights:
        weights = attention_weights(terms, mask=mask, q_length=q_length, k_length=values.shape[1])
        weights = jnp.broadcast_to(weights, (values.shape[0], *weights.shape[1:]))  # [b, h, q, k]
        weights = weights.reshape(*batch, *weights.shape[1:]).astype(values.dtype)
    out = attend(
        terms,
        values,
        mask=mask,
        q_length=q_length,
        dropout_rate=dropout[0],
        dropout_key=dropout[1],
        partition=partition(batch=values.shape[0], heads=values.shape[2]),
    )
    return out.reshape(*batch, *out.shape[1:]), weights, cache or {}


def _complete_inputs(
    inputs_q: jax.Array, inputs_k: jax.Array | None, inputs_v: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the inputs of queries, keys and values, after checking their shapes.

    If `inputs_k` is None, it is replaced by `inputs_q`. If `inputs_v` is None, it is replaced by
    `inputs_k`.
    """
    if inputs_k is None and inputs_v is not None:
        raise ValueError(
            "MultiHeadAttention: inputs_k cannot be None if inputs_v is given. To use the same "
            "inputs for both, pass only inputs_k."
        )
    inputs_k = inputs_q if inputs_k is None else inputs_k
    inputs_v = inputs_k if inputs_v is None else inputs_v
    batches = {x.shape[:-2] for x in (inputs_q, inputs_k, inputs_v)}
    if len(batches) > 1 or inputs_k.shape[-2] != inputs_v.shape[-2]:
        raise ValueError(
            f"MultiHeadAttention: the shapes are inputs_q {inputs_q.shape}, inputs_k "
            f"{inputs_k.shape} and inputs_v {inputs_v.shape}. All three must have equal batch "
            "dimensions, and inputs_k and inputs_v must have equal lengths."
        )
    return inputs_q, inputs_k, inputs_v


def _check_step(cache: dict[str, jax.Array], *inputs: jax.Array) -> None:
    """Raises a `ValueError` unless the inputs contain one token for every row of the cache."""
    expected = (*cache["cached_value"].shape[:-3], 1)
    for x in inputs:
        if x.shape[:-1] != expected:
            raise ValueError(
                "MultiHeadAttention: autoregressive cache shape error. The inputs must have "
                f"shape {(*expected, x.shape[-1])}, but they have shape {x.shape}."
            )


def _extend_cache(
    cache: dict[str, jax.Array],
    terms: Terms,
    values: jax.Array,
    mask: Mask,
    batch: tuple[int, ...],
) -> tuple[Terms, jax.Array, Mask, dict[str, jax.Array]]:
    """Writes one token to Flax's cache, and returns the terms and values of all positions.

    Args:
      cache: a dictionary from Flax's names to the arrays of the cache.
      terms: the terms of the step.
      values: the values of the token, ``[b, 1, heads, head_dim]``.
      mask: the mask with which the layer was called.
      batch: the sizes of the batch axes.

    Returns:
      The terms and values of all positions of the cache, the mask of the step, and the cache.
    """
    index = cache["cache_index"]
    names = [name for name in map(_key_name, range(len(cache))) if name in cache]
    past = Cache(
        keys=tuple(merge_batch_axes(cache[name], batch) for name in names),
        values=merge_batch_axes(cache["cached_value"], batch),
        length=index,
        positions_first=True,
    )
    mask = _step_mask(mask, index)
    terms, values, mask, past = extend(past, terms, values, at=index, mask=mask)
    return terms, values, mask, {**_cache_arrays(past, batch), "cache_index": index + 1}


def step_pairs(mask: Mask, cache: dict[str, jax.Array]) -> jax.Array | None:
    """Converts a `Mask` to an array for a decoding step of Flax's layer.

    Args:
      mask: the mask.
      cache: the arrays of Flax's cache.

    Returns:
      A bool array ``[batch... or 1..., heads or 1, 1, k]``, where k is the length of the cache. The
      result is None if the mask allows all pairs.
    """
    *batch, length, heads, _ = cache["cached_key"].shape
    mask = _step_mask(as_mask(mask, (*batch, heads, 1, length)), cache["cache_index"])
    pairs = mask.pairs(1, length)
    ndim = len(batch) + 3
    return None if pairs is None else pairs.reshape((1,) * (ndim - 4) + pairs.shape[-ndim:])


def _step_mask(mask: Mask, index: int | jax.Array) -> Mask:
    """Returns the mask of a decoding step, in which the query is never padding."""
    mask = decoding_mask(mask, index, 1)
    return dataclasses.replace(mask, query_lengths=None, query_valid=None, self_attention=False)


def _key_name(i: int) -> str:
    """Returns the name of the i-th array of keys in the cache, which for i = 0 is Flax's name."""
    return f"cached_key_{i}" if i else "cached_key"


def _cache_arrays(cache: Cache, batch: tuple[int, ...]) -> dict[str, jax.Array]:
    """Returns a dictionary from Flax's names to the arrays of a cache, with all batch axes."""
    arrays = {_key_name(i): x for i, x in enumerate(cache.keys)} | {"cached_value": cache.values}
    return {name: x.reshape(*batch, *x.shape[1:]) for name, x in arrays.items()}
