"""Flax NNX's `MultiHeadAttention` with an alignment."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes, initializers
from flax.traverse_util import flatten_dict, unflatten_dict

from synthesizer_jax.alignments import Alignment, DotProduct
from synthesizer_jax.attention import Mask, Span, Terms
from synthesizer_jax.flax_attention import as_mask, attention_fn, flat
from synthesizer_jax.multi_head import MultiHeadAttention as LinenMultiHeadAttention
from synthesizer_jax.multi_head import batched_weights, check_fields, mixed_heads, resolved_inputs
from synthesizer_jax.multi_head_cache import check_step, new_cache, step, step_array
from synthesizer_jax.nnx.initialise import as_variables, axes_of, naming_axes
from synthesizer_jax.registry import fields_of

ZEROS = initializers.zeros_init()
NO_METADATA: Mapping[str, Any] = MappingProxyType({})


class BoundAlignment(nnx.Module):
    """An alignment with its parameters, at the paths that Linen gives them.

    Args:
      alignment: the Linen module.
      rngs: random streams; ``params`` makes the parameters.
      x: the queries' tokens of any call, of which only the shape counts.
      y: the keys' tokens.
      **heads: ``num_heads`` and ``head_dim``.
    """

    def __init__(
        self, alignment: Alignment, rngs: nnx.Rngs, x: jax.Array, y: jax.Array, **heads: int
    ):
        self._alignment = alignment
        options: dict[str, Any] = {**heads, "query_span": Span(0, 1), "key_span": Span(0, 1)}
        initialise: Any = functools.partial(alignment.init, **options)
        key = rngs.params()
        with naming_axes():
            axes = axes_of(jax.eval_shape(initialise, key, x, y))
        made = linen.unbox(initialise(key, x, y))
        self._paths = tuple(flatten_dict(made))
        for name, node in as_variables(made, axes, type(alignment).__name__).items():
            setattr(self, name, nnx.data(node))

    def __call__(self, x: jax.Array, y: jax.Array, **options: Any) -> Terms:
        """The terms, see `Alignment`."""
        found = {
            path: functools.reduce(operator.getitem, path[2:], vars(self)[path[1]])[...]
            for path in self._paths
        }
        terms: Any = self._alignment.apply(unflatten_dict(found), x, y, **options)
        return terms


class MultiHeadAttention(nnx.MultiHeadAttention):
    """Flax NNX's `MultiHeadAttention`, and the same layer with another alignment.

    A drop-in replacement for `flax.nnx.MultiHeadAttention`, as `synthesizer_jax.MultiHeadAttention` is
    for Linen's; what is said there of dropout, empty rows and dtypes holds here. Without `alignment`
    the parameters, initial values, cache and results are Flax's. With one, the attribute ``align``
    holds the alignment's parameters, and ``query`` and ``key`` exist for `DotProduct` only; grouped
    queries (`num_kv_heads`) are for the layer without an alignment.

    Args:
      alignment: who looks at whom; None: Flax's scaled dot product. All others: see
        `flax.nnx.MultiHeadAttention`.
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
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        broadcast_dropout: bool = True,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        precision: Any = None,
        kernel_init: Callable[..., Any] = nnx.nn.linear.default_kernel_init,
        out_kernel_init: Callable[..., Any] | None = None,
        bias_init: Callable[..., Any] = ZEROS,
        out_bias_init: Callable[..., Any] | None = None,
        use_bias: bool = True,
        attention_fn: Callable[..., jax.Array] = attention_fn,
        decode: bool | None = None,
        normalize_qk: bool = False,
        qkv_promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        out_promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        ln_promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        qkv_dot_general: Callable[..., Any] | None = None,
        out_dot_general: Callable[..., Any] | None = None,
        qkv_dot_general_cls: Any = None,
        out_dot_general_cls: Any = None,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
        kernel_metadata: Mapping[str, Any] = NO_METADATA,
        out_kernel_metadata: Mapping[str, Any] = NO_METADATA,
        bias_metadata: Mapping[str, Any] = NO_METADATA,
        out_bias_metadata: Mapping[str, Any] = NO_METADATA,
        query_ln_scale_metadata: Mapping[str, Any] = NO_METADATA,
        key_ln_scale_metadata: Mapping[str, Any] = NO_METADATA,
        alignment: Alignment | None = None,
    ):
        arguments = dict(locals())
        for name in ("self", "alignment", "__class__"):
            arguments.pop(name, None)
        super().__init__(**arguments)
        self.alignment = alignment
        if alignment is None:
            return
        check_fields(self)
        if self.num_kv_heads != num_heads:
            raise ValueError(
                f"MultiHeadAttention: num_kv_heads={num_kv_heads} groups the heads of the dot product; "
                "leave it or alignment out"
            )
        if not isinstance(alignment, DotProduct):
            del self.query, self.key
        shape = (1, 1, num_heads, self.head_dim)
        widths = (self.in_features, self.in_kv_features)
        x, y = (
            jnp.zeros(shape if isinstance(alignment, DotProduct) else (1, 1, n)) for n in widths
        )
        self.align = BoundAlignment(alignment, rngs, x, y, **self._heads)

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
        out_sharding: Any = None,
        qkv_sharding: Any = None,
        input_positions: jax.Array | None = None,
    ) -> jax.Array:
        """Mixes tokens.

        Args:
          inputs_q: ``[batch..., q, features]``; any number of batch dimensions, also none.
          inputs_k: ``[batch..., k, features]``; None: `inputs_q`.
          inputs_v: ``[batch..., k, features]``; None: `inputs_k`.
          mask: broadcastable to ``[batch..., heads, q, k]``, bool or 0/1; or a `Mask`, which needs no
            array of q × k. While decoding, q is 1 and k the length of the cache.
          deterministic: no dropout; takes precedence over the attribute, which `train` and `eval` set.
          rngs: random streams; take precedence over those of the constructor.
          sow_weights: leave the weights ``[batch..., heads, q, k]`` as an `nnx.Intermediate`
            ``attention_weights``.
          decode: use the cache; takes precedence over the attribute.
          is_causal: a query sees only keys up to its own position; while decoding that is so anyway.
          out_sharding: sharding of the output projection's result.
          qkv_sharding: sharding of the projections' results.
          input_positions: ``[batch..., q]``, handed to an `attention_fn` that takes them, such as Flax's
            with rotary positions; needs a Flax newer than 0.12.8, and no `alignment`.

        Returns:
          ``[batch..., q, out_features]``.

        Raises:
          ValueError: inputs that do not fit one another or the cache, or `input_positions` with an
            alignment.
        """
        decode = self.decode if decode is None else decode
        if isinstance(mask, Mask) and inputs_k is None and not decode:
            mask = mask.for_self_attention()
        options: dict[str, Any] = {"out_sharding": out_sharding, "qkv_sharding": qkv_sharding}
        if self.alignment is None:
            if isinstance(mask, Mask) and decode:
                kept = self._kept()
                mask = step_array(mask, kept["cache_index"], kept["cached_key"].shape)
            if input_positions is not None:  # no argument of Flax 0.12.8
                options["input_positions"] = input_positions
            call: Any = super().__call__
            return call(
                inputs_q,
                inputs_k,
                inputs_v,
                mask=mask,
                deterministic=deterministic,
                rngs=rngs,
                sow_weights=sow_weights,
                decode=decode,
                is_causal=is_causal and not decode,
                **options,
            )
        if input_positions is not None:
            raise ValueError(
                "MultiHeadAttention: input_positions are for an attention_fn that takes them; leave them "
                "or alignment out"
            )
        if decode is None:
            raise ValueError("MultiHeadAttention: decode is not set; give it here or when building")
        inputs = resolved_inputs(inputs_q, inputs_k, inputs_v)
        rate, rng = self._dropout(deterministic, rngs)
        heads = self._aligned(inputs, mask, rate, rng, sow_weights, decode, is_causal, qkv_sharding)
        return self.out(heads, out_sharding=out_sharding)

    def init_cache(self, input_shape: Sequence[int], dtype: Any = jnp.float32) -> None:
        """Makes an empty cache; needed before decoding.

        Args:
          input_shape: ``(batch..., max_length, features)``.
          dtype: of the keys and values kept.
        """
        if self.alignment is None:
            super().init_cache(input_shape, dtype)
            return
        *batch, length, _ = input_shape
        shape = (*batch, 1, self.num_heads, self.head_dim)
        values = flat(jnp.zeros(shape, dtype), tuple(batch))
        x, y = (
            jnp.zeros((values.shape[0], 1, width), dtype)
            for width in (self.in_features, self.in_kv_features)
        )
        terms = self._terms(x, y, Span(0, 1), Span(0, length))
        for name, kept in new_cache(terms, values, length, tuple(batch)).items():
            setattr(self, name, nnx.Cache(kept if name == "cache_index" else kept.astype(dtype)))

    def _dropout(
        self, deterministic: bool | None, rngs: nnx.Rngs | nnx.RngStream | None
    ) -> tuple[float, jax.Array | None]:
        """The rate and key of this call's dropout."""
        deterministic = self.deterministic if deterministic is None else deterministic
        if self.dropout_rate == 0.0 or deterministic:
            return 0.0, None
        if deterministic is None:
            raise ValueError(
                "MultiHeadAttention: deterministic is not set; give it here or when building, or call "
                "train() or eval()"
            )
        rngs = self.rngs if rngs is None else rngs
        if rngs is None:
            raise ValueError(
                "MultiHeadAttention: the layer was made with keep_rngs=False; give rngs to the call, or "
                "deterministic=True"
            )
        return self.dropout_rate, (rngs.dropout if isinstance(rngs, nnx.Rngs) else rngs)()

    def _aligned(
        self,
        inputs: tuple[jax.Array, jax.Array, jax.Array],
        mask: jax.Array | Mask | None,
        rate: float,
        rng: jax.Array | None,
        sow_weights: bool,
        decode: bool,
        is_causal: bool,
        sharding: Any,
    ) -> jax.Array:
        """``[batch..., q, heads, head_dim]`` with the alignment's logits or weights."""
        if inputs[0].shape[-1] != self.in_features:
            raise ValueError(
                f"MultiHeadAttention: in_features={self.in_features}, but inputs_q has "
                f"{inputs[0].shape[-1]}"
            )
        batch, q_length = inputs[0].shape[:-2], inputs[0].shape[-2]
        values = flat(self.value(inputs[2], out_sharding=sharding), batch)
        x, y = (flat(tokens, batch).astype(values.dtype) for tokens in inputs[:2])
        kept = self._kept() if decode else {}
        at, length = kept.get("cache_index", 0), values.shape[1]
        if decode:
            check_step(inputs, kept["cached_value"].shape)
            length = kept["cached_value"].shape[-3]
        terms = self._terms(x, y, Span(at, q_length), Span(0, length))
        seen = as_mask(mask, (*batch, self.num_heads, q_length, length))
        if decode:
            terms, values, seen, kept = step(kept, terms, values, seen, batch)
            for name, new in kept.items():
                getattr(self, name)[...] = new
        seen = dataclasses.replace(seen, causal=seen.causal or is_causal)
        if sow_weights:
            weights = batched_weights(terms, values, seen, q_length, batch)
            self.sow(nnx.Intermediate, "attention_weights", weights)
        return mixed_heads(terms, values, seen, q_length, batch, dropout=(rate, rng))

    def _kept(self) -> dict[str, jax.Array]:
        """The cache's arrays by name."""
        kept = {n: x[...] for n, x in vars(self).items() if isinstance(x, nnx.Cache)}
        if not kept:
            raise ValueError("MultiHeadAttention: there is no cache yet; call init_cache first")
        return kept

    def _terms(self, x: jax.Array, y: jax.Array, query_span: Span, key_span: Span) -> Terms:
        if isinstance(self.alignment, DotProduct):
            x, y = self.query(x), self.key(y)
            if self.query_ln is not None and self.key_ln is not None:
                x, y = self.query_ln(x), self.key_ln(y)
        return self.align(x, y, **self._heads, query_span=query_span, key_span=key_span)

    @property
    def _heads(self) -> dict[str, int]:
        return {"num_heads": self.num_heads, "head_dim": self.head_dim}


def from_linen(
    layer: LinenMultiHeadAttention, in_features: int, *, rngs: nnx.Rngs, **options: Any
) -> MultiHeadAttention:
    """The NNX layer with a Linen layer's fields.

    Args:
      layer: the Linen layer.
      in_features: width of the queries' tokens.
      rngs: random streams.
      **options: other arguments of `MultiHeadAttention`; they take precedence over the fields.

    Raises:
      ValueError: a field is set that Flax's NNX layer does not have.
    """
    arguments = inspect.signature(MultiHeadAttention.__init__).parameters
    fields = fields_of(layer)
    for name in sorted(fields.keys() - arguments.keys()):
        if fields[name]:
            raise ValueError(
                f"to_nnx: MultiHeadAttention has no {name} in NNX; leave {name}={fields[name]!r} out"
            )
    shared = {name: value for name, value in fields.items() if name in arguments}
    return MultiHeadAttention(in_features=in_features, rngs=rngs, **{**shared, **options})
