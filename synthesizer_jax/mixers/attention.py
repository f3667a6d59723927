"""The attention layer, which combines an alignment and values in one call of `attend`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp

from synthesizer_jax.alignments import Alignment, AttentionContext, Bilinear, DotProduct
from synthesizer_jax.alignments.base import dense_layer
from synthesizer_jax.attention import (
    Banded,
    Cache,
    Mask,
    Span,
    Split,
    Terms,
    add,
    attend,
    attention_weights,
    extend,
    init_cache,
    materialize_logits,
)
from synthesizer_jax.attention.beams import extend_for_beams
from synthesizer_jax.attention.cache import Values, advance_length, fill_invalid
from synthesizer_jax.attention.routes import ROUTES, check_terms
from synthesizer_jax.attention.terms import clear_padding
from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import Choices, Length, Number, Positive, Rate
from synthesizer_jax.mixers.base import (
    Mixer,
    MixerCache,
    MixerInput,
    TokenCount,
    dropout_options,
    merge_heads,
    query_ends,
)
from synthesizer_jax.mixers.taps import LOGITS
from synthesizer_jax.primitives.initializers import FanIn, Initializer
from synthesizer_jax.primitives.mesh import partition
from synthesizer_jax.primitives.parameters import with_axes

Implementation: TypeAlias = Annotated[str, Choices(("auto", *ROUTES))]

Window: TypeAlias = Length | tuple[Number, Number]
"""The type of `AttentionBase.window`."""


def window_reach(window: Window) -> tuple[int, int]:
    """Returns the numbers of keys before and after a query that are in its window."""
    return window if isinstance(window, tuple) else (window - 1, window - 1)


class AttentionBase(Mixer):
    """The base class of attention layers, with their fields, projections and caches.

    `Mixer.__call__` checks its arguments and calls `mix`, which computes the layer.

    A subclass defines two methods. `_values` computes values from the tokens to attend to, and
    `_attend` computes the weighted sums of the values.

    Attributes:
      num_heads: number of heads.
      head_dim: width of one head. The product ``num_heads · head_dim`` does not have to be d_model.
      alignment: the alignment, which determines how strongly each token attends to each other
        token.
      dropout_rate: probability of dropping an attention weight. As in T5, all queries of an example
        and head share one random draw for each key. Dropout is active only if a PRNG key for the
        stream ``dropout`` is given.
      window: a query attends only to keys that are less than `window` positions away, on both sides
        if the mask allows it (Beltagy et al. 2020, Longformer). If `window` is a pair of numbers,
        they say how many keys before and after its own position a query attends to.
        `Mixer.init_cache` says which keys a cache holds if there is a window. None means no limit.
      shared_key_value: whether one projection computes both the keys and the values, as with the
        shared ``kv`` of Mesh-TensorFlow.
      project_values: whether values are projected. False means that the tokens themselves are the
        values of every head. Together with the alignment `Bilinear`, False gives general bilinear
        attention (Shazeer et al. 2020, section 3.3).
      use_bias: whether the value and output projections have a bias, as in BERT. The alignment's
        own field `use_bias` adds biases to the queries and keys.
      implementation: the name of the route that computes attention, from `attention.routes.ROUTES`,
        or ``auto``.
      value_init: initializer of the value kernel, which it treats as a matrix
        ``[d_model, heads · head_dim]``.
      out_init: initializer of the output kernel, which it treats as a matrix
        ``[heads · head_dim, d_model]``.
    """

    num_heads: Length
    head_dim: Length
    alignment: Alignment = DotProduct(parent=None)
    dropout_rate: Rate = 0.0
    window: Window | None = None
    shared_key_value: bool = False
    project_values: bool = True
    use_bias: bool = False
    implementation: Implementation = "auto"
    value_init: Initializer = FanIn()
    out_init: Initializer = FanIn()

    has_cross_attention = True

    @property
    def num_value_heads(self) -> int:
        """The number of heads of the values."""
        return self.num_heads

    @nn.compact
    def mix(self, inputs: MixerInput) -> tuple[jax.Array, MixerCache | None]:
        if inputs.cache is not None:
            return self._mix_with_cache(inputs, inputs.cache)

        x = inputs.x
        attended = x if inputs.kv is None else inputs.kv
        mask = self._narrow(inputs.mask)
        values = self._values(attended)  # [b, k, heads, e]

        query_span = Span(0, num_positions(mask, x.shape[1]))
        key_span = Span(0, num_positions(mask, attended.shape[1]))
        context = self.context(query_span, key_span)
        if inputs.kv is not None:
            context = dataclasses.replace(context, packed_positions=mask.packed_positions)
        terms = self._terms(x, attended, values, context)

        y = self._attend(x, terms, values, bias=inputs.bias, mask=mask)  # [b, q, heads, e]
        return self._project_heads(y, x.shape[-1]), None

    def _mix_with_cache(self, inputs: MixerInput, cache: Cache) -> tuple[jax.Array, Cache]:
        """Mixes new tokens with the tokens in the cache, and extends the cache.

        The steps are the same as in `mix`, with one difference. After the terms have been computed,
        the keys and values of the new tokens are written to the cache, and the attention then uses
        all keys and values in the cache.
        """
        x = inputs.x
        self._check_cached_bias(cache, inputs.bias)

        # In cross-attention, the cache already holds the keys and values of the whole memory. `kv`
        # therefore has no tokens, and the keys and values that are computed from `kv` are empty.
        attended = x if inputs.kv is None else inputs.kv
        mask = self._narrow(inputs.mask)

        # The shape of `values` is [b, n, heads, e], where n is the number of new tokens.
        values = self._values(attended)

        # The alignment returns terms for all positions of the cache. But if a term computes its
        # keys from tokens, it contains only the keys of the new tokens, which begin at position
        # `keys_start`.
        query_span = Span(inputs.position, num_positions(mask, x.shape[1]), cache.num_queries)
        key_span = Span(0, num_positions(mask, cache.capacity))
        keys_start = inputs.position if inputs.kv is None else 0
        context = self.context(query_span, key_span, keys_start)
        if inputs.kv is not None:
            context = dataclasses.replace(context, packed_positions=mask.packed_positions)
        terms = self._terms(x, attended, values, context)

        # From here on, the terms, the values and the mask belong to all tokens in the cache.
        bias = inputs.bias
        if cache.beams > 1:
            terms, values, bias, mask, cache = extend_for_beams(
                cache, terms, values, bias=bias, mask=mask, at=inputs.position
            )
            # The n beams of an example become n queries of one row.
            queries = x.reshape(cache.batch, cache.beams, x.shape[-1])
            y = self._attend(queries, terms, values, bias=bias, mask=mask)  # [b, n, heads, e]
            return self._project_heads(y.reshape(len(x), 1, *y.shape[2:]), x.shape[-1]), cache

        terms, values, mask, cache, valid = _extend(
            cache, terms, values, n=x.shape[1], mask=mask, position=inputs.position
        )
        y = self._attend(x, terms, values, bias=bias, mask=mask)  # [b, q, heads, e]

        # If a traced position is invalid, no error can be raised, so the outputs are set to NaN.
        y = fill_invalid(y, valid)
        return self._project_heads(y, x.shape[-1]), cache

    @nn.compact
    def new_cache(
        self, x: jax.Array, kv: jax.Array | None, *, mask: Mask, max_length: int
    ) -> MixerCache:
        attended = x if kv is None else kv
        values = self._values(attended)
        num_queries, num_keys = (0, max_length) if kv is None else (max_length, kv.shape[1])
        context = self.context(Span(0, num_queries), Span(0, num_keys))
        terms = self._terms(x, attended, values, context)
        if kv is None:
            return init_cache(terms, values, max_length=max_length)

        return memory_cache(terms, values, kv, mask=mask, max_length=max_length)

    def shorten(self, cache: MixerCache) -> MixerCache:
        """Returns a cache that can hold only the last ``window - 1`` positions.

        `Mixer.init_cache` calls this method if its argument `whole` is False.

        The cache is returned unchanged if the layer has no window, or if its logits are not
        products of queries and keys that are both computed from tokens.
        """
        room = cache.capacity if self.window is None else window_reach(self.window)[0]
        if room >= cache.capacity or not isinstance(self.alignment, DotProduct | Bilinear):
            return cache
        return cache.as_window(room)

    def _check_cached_bias(self, cache: Cache, bias: Terms) -> None:
        """Raises a `ValueError` if there is a bias, but the cache holds only a window."""
        if cache.window and bias:
            raise ValueError(
                f"{type(self).__name__}: bias covers all positions, but the cache holds only the "
                "positions of a window. Leave bias out, or create the cache with whole=True."
            )

    def _narrow(self, mask: Mask) -> Mask:
        """Returns the mask with the layer's window added."""
        if self.window is None:
            return mask
        if mask.window is not None:
            raise ValueError(
                f"{type(self).__name__}: the layer has window={self.window} and the mask has "
                f"window={mask.window}. Set only one of them."
            )
        return dataclasses.replace(mask, window=window_reach(self.window))

    def context(
        self, query_span: Span, key_span: Span, keys_start: int | jax.Array = 0
    ) -> AttentionContext:
        """Returns the alignment's context, which describes the layer and the positions."""
        return AttentionContext(self.num_heads, self.head_dim, query_span, key_span, keys_start)

    def _bound_alignment(self) -> Alignment:
        """Returns the alignment as a bound submodule.

        The module in the field `alignment` has no parent, so it has no parameters. A copy of it
        becomes a submodule of this layer, with its parameters under the name "align".
        """
        return self.alignment.copy(name="align", parent=self)

    def _terms(
        self,
        x: jax.Array,
        attended: jax.Array,
        values: Values,
        context: AttentionContext,
        align: Alignment | None = None,
    ) -> Terms:
        """Returns the terms that the alignment computes from queries and attended tokens.

        If the caller has already bound the alignment, it passes the bound alignment as `align`.
        """
        keys = jax.tree.leaves(values)[0] if self.shared_key_value else attended
        align = self._bound_alignment() if align is None else align
        terms = align(x, keys, context)
        name = f"{type(self).__name__}: the result of the alignment {type(self.alignment).__name__}"
        check_terms(terms, name)
        return terms

    def _values(self, memory: jax.Array) -> Values:
        """Returns the values that are computed from the tokens to attend to.

        The values are an array ``[batch, k, heads, width]``, or a tuple that begins with such an
        array.
        """
        raise NotImplementedError

    def _attend(
        self, x: jax.Array, terms: Terms, values: Values, *, bias: Terms, mask: Mask
    ) -> jax.Array:
        """Returns the sum of the values, weighted by attention, ``[batch, q, heads, width]``."""
        raise NotImplementedError

    def _project_heads(self, heads: jax.Array, d_model: int) -> jax.Array:
        """Projects the heads ``[batch, q, heads, width]`` to ``[batch, q, d_model]``."""
        return merge_heads(self, heads, d_model, kernel_init=self.out_init, use_bias=self.use_bias)

    def _project_values(self, memory: jax.Array, *, heads_axis: str = "heads") -> jax.Array:
        """Projects ``[batch, k, width]`` tokens to values ``[batch, k, heads, width]``."""
        return self._value_projection(memory.dtype, heads_axis=heads_axis)(memory)

    def _value_projection(
        self, dtype: jnp.dtype, *, heads_axis: str = "heads"
    ) -> Callable[[jax.Array], jax.Array]:
        """Returns the function that maps tokens of a dtype to values; see `_project_values`."""
        if self.project_values:
            return dense_layer(
                (self.num_value_heads, self.head_dim),
                ("embed", heads_axis, "kv"),
                dtype=dtype,
                kernel_init=self.value_init,
                use_bias=self.use_bias,
                name="value",
            )

        def repeat(memory: jax.Array) -> jax.Array:
            """Returns the tokens as the values of every head, ``[b, k, h, width]``."""
            shape = (*memory.shape[:2], self.num_value_heads, memory.shape[-1])
            return jnp.broadcast_to(memory[:, :, None], shape)

        return repeat


@register
class Attention(AttentionBase):
    """Multi-head attention whose logits come from any alignment.

    The layer computes ``y = concat_h(softmax(Σ terms) · x W_v) W_o``. See `AttentionBase` for the
    other fields.

    Attributes:
      num_kv_heads: number of heads of the values, and of the keys that a `DotProduct` computes from
        tokens. Each key head and value head is shared by a group of ``num_heads / num_kv_heads``
        neighboring query heads. Sharing heads is called grouped-query attention (Ainslie et al.
        2023), or multi-query attention if `num_kv_heads` is 1 (Shazeer 2019). None means that every
        query head has its own key head and value head. In a `PerHead`, the alignments do not share
        keys.
      soft_cap: replaces each logit x by ``soft_cap · tanh(x / soft_cap)`` (Gemma 2, 2024). None
        means that logits are not capped. The weights of a `Gaussian` are never capped.
      sinks: whether every head learns the logit of an additional key whose value is zero (gpt-oss,
        2025). The heads of a `Gaussian` have no additional key.
    """

    num_kv_heads: Length | None = None
    soft_cap: Positive | None = None
    sinks: bool = False

    def context(
        self, query_span: Span, key_span: Span, keys_start: int | jax.Array = 0
    ) -> AttentionContext:
        """Returns the alignment's context, which describes the layer and the positions."""
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"Attention: num_kv_heads is {self.num_kv_heads}, but it must divide num_heads, "
                f"which is {self.num_heads}."
            )
        context = super().context(query_span, key_span, keys_start)
        return dataclasses.replace(context, num_kv_heads=self.num_kv_heads)

    @property
    def num_value_heads(self) -> int:
        """The number of heads of the values."""
        return self.num_kv_heads or self.num_heads

    @property
    def bias_heads(self) -> int | None:
        """The number of heads of a position bias, or None if the layer has no logits."""
        return self.num_heads if self.alignment.makes_logits else None

    def _values(self, memory: jax.Array) -> jax.Array:
        """Returns the projected values, ``[batch, k, num_value_heads, width]``."""
        return self._project_values(memory, heads_axis=self._value_axis)

    @property
    def _value_axis(self) -> str:
        """The logical axis of the heads of the values."""
        return "heads" if self.num_kv_heads is None else "kv_heads"

    def _sinks(self) -> jax.Array | None:
        """Returns the parameter ``sinks`` ``[heads]``, or None if the layer has no sinks."""
        if not self.sinks:
            return None
        init = with_axes(nn.initializers.zeros_init(), "heads")
        sinks: jax.Array = self.param("sinks", init, (self.num_heads,))
        return sinks

    def _attend(
        self, x: jax.Array, terms: Terms, values: jax.Array, *, bias: Terms, mask: Mask
    ) -> jax.Array:
        """Returns the attention output of every head, ``[batch, q, heads, width]``."""
        all_terms = add(*terms, *bias)
        options: dict[str, Any] = {"mask": mask, "soft_cap": self.soft_cap, "sinks": self._sinks()}

        if self.is_sowing_weights:
            # `attend` may never store all attention weights, so the weights to sow are computed
            # separately.
            lengths: dict[str, Any] = {"q_length": x.shape[1], "k_length": values.shape[1]}
            weights = attention_weights(all_terms, **lengths, **options)
            self.sow("intermediates", "attention_weights", weights)
            self._sow_logits(terms, mask=mask, **lengths)

        return attend(
            all_terms,
            values,
            q_length=x.shape[1],
            implementation=self.implementation,
            partition=partition(batch=x.shape[0], heads=self.num_heads),
            **options,
            **dropout_options(self, self.dropout_rate),
        )

    def _sow_logits(self, terms: Terms, *, mask: Mask, q_length: int, k_length: int) -> None:
        """Sows the alignment's logits if they can be one array and distillation collects them.

        Distillation compares the logits of the alignment, which do not include the position bias.
        """
        has_logits = not any(isinstance(term, Banded | Split) for term in terms)
        if has_logits and self.is_mutable_collection(LOGITS):
            logits = materialize_logits(terms, mask=mask, q_length=q_length, k_length=k_length)
            self.sow(LOGITS, "attention_logits", logits)


def memory_cache(
    terms: Terms, values: Values, memory: jax.Array, *, mask: Mask, max_length: int
) -> Cache:
    """Returns a cache that holds all keys and values of a memory.

    Decoding steps add queries, but no keys or values.

    Args:
      terms: the terms for all tokens of the memory as keys.
      values: the values of all tokens of the memory.
      memory: the tokens of the memory, ``[b, k, width]``.
      mask: the mask that says which tokens of the memory are real.
      max_length: an upper bound on the number of queries.
    """
    batch, num_keys, _ = memory.shape
    cache = init_cache(terms, values, max_length=num_keys, memory=memory)
    keys = Mask(key_lengths=mask.key_lengths, key_valid=mask.key_valid).broadcast_to(
        batch=batch, heads=1, q_length=1, k_length=num_keys
    )
    real = keys.keys(num_keys)  # [b or 1, k], or None if all keys are real
    terms, values = clear_padding(terms, values, None, real)
    *_, cache = extend(cache, terms, values, at=0, mask=Mask())
    return dataclasses.replace(
        cache,
        num_queries=max_length,
        cleared=real is not None,
        # In cross-attention, `length` counts queries, and there are no queries yet.
        length=TokenCount().length,
    )


def extend_memory(
    cache: Cache, terms: Terms, values: Values, mask: Mask
) -> tuple[Terms, Values, Mask, Cache]:
    """Calls `attention.extend` for new queries that attend to the memory in a cache.

    The keys of `terms` and the values are empty, because the cache already holds the whole memory.
    """
    if cache.cleared and mask.allowed is None and mask.keys(cache.capacity) is None:
        raise ValueError(
            "extend: the cache was created with a mask of its keys. Pass the same mask to this "
            "step."
        )
    mask = dataclasses.replace(mask, cleared_keys=cache.cleared)
    return extend(cache, terms, values, at=0, mask=mask)


def num_positions(mask: Mask, length: int) -> int:
    """Returns the number of positions that the alignment's tables must cover.

    In packed rows, positions start again in every segment, so the result is the length of the
    longest segment.
    """
    if mask.key_segments is None or mask.segment_length is None:
        return length
    return min(length, mask.segment_length)


def _extend(
    cache: Cache, terms: Terms, values: Values, *, n: int, mask: Mask, position: int | jax.Array
) -> tuple[Terms, Values, Mask, Cache, jax.Array | None]:
    """Calls `attention.extend` for self-attention or cross-attention with n queries.

    In cross-attention, the last result says whether the positions of the queries are valid. If all
    positions are known to be valid, the last result is None.
    """
    if cache.empty_memory is None:
        return *extend(cache, terms, values, at=position, mask=mask), None

    # The cache already holds all keys of the memory, so a decoding step only counts its queries.
    terms, values, mask, cache = extend_memory(cache, terms, values, mask)
    valid, length = advance_length(
        position,
        n,
        length=position,
        lengths=query_ends(mask, position),
        batch=cache.batch,
        capacity=cache.num_queries,
    )
    return terms, values, mask, dataclasses.replace(cache, length=length), valid
