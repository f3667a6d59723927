"""Merged attention: a decoder's self-attention and cross-attention in one softmax."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from synthesizer_jax.alignments import AttentionContext, DotProduct
from synthesizer_jax.attention import (
    Cache,
    LowRank,
    Mask,
    Span,
    Terms,
    add,
    attend_with_log_sums,
    attention_weights,
    extend,
    init_cache,
    low_rank,
    merge_attention,
)
from synthesizer_jax.attention.beams import extend_for_beams
from synthesizer_jax.base.registry import register
from synthesizer_jax.mixers.attention import (
    Attention,
    extend_memory,
    memory_cache,
    num_positions,
)
from synthesizer_jax.mixers.base import (
    MixerCache,
    MixerInput,
    TokenCount,
    dropout_options,
    rows_per_memory,
)
from synthesizer_jax.primitives.mesh import partition


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MergedCache:
    """The cache of `MergedAttention`.

    Attributes:
      own: the keys and values of the decoder's tokens.
      memory: the keys and values of the memory, which do not change. Several rows of tokens may
        share a row of the memory, for example in beam search.
    """

    own: Cache
    memory: Cache

    @property
    def length(self) -> int | jax.Array | np.int32:
        """The position of the next token, a scalar or ``[batch]``."""
        return self.own.length

    @property
    def empty_memory(self) -> jax.Array | None:
        """An array without tokens, with the width and dtype of the memory."""
        return self.memory.empty_memory


class _KeySet(NamedTuple):
    """One of the two sets of keys in the shared softmax, as arguments of `attend_with_log_sums`.

    Attributes:
      terms: the terms of the logits of these keys.
      values: the values of the keys, ``[batch, k, heads, e]``.
      mask: the mask that says which of the keys each query may attend to.
    """

    terms: Terms
    values: jax.Array
    mask: Mask


@register
class MergedAttention(Attention):
    """Attention to the decoder's tokens and to the encoder's outputs, in one softmax (T5Gemma 2).

    The layer replaces self-attention and cross-attention in a decoder block. It computes
    ``y = concat_h(softmax([S; C]) · [x; m] W_v) W_o``. Here ``S`` are the logits of the decoder's
    tokens x, ``C`` are the logits of the encoder's outputs m, and ``[ ; ]`` concatenates along the
    axis of keys. Both kinds of tokens share the projections of values and outputs.

    If `cross_alignment` is None, the alignment must be a `DotProduct`, and both kinds of tokens
    also share its projections of queries and keys, as in T5Gemma 2 (released code, 2025). The same
    queries are multiplied with both kinds of keys. With rotary positions, the queries and the
    decoder's keys are rotated, but the keys of the encoder's outputs are not.

    Any other alignment whose logits are part of a softmax can be used together with a
    `cross_alignment`. For example, a table of a `Random` can be learned next to the logits of a dot
    product with the encoder's outputs.

    No array contains the keys of both kinds of tokens. Each kind has its own call of
    `attend_with_log_sums`, with its own route, and `merge_attention` merges the results.

    The layer is called with the encoder's outputs as `kv`, and with a mask for them:
    ``layer(x, kv, mask=Mask(causal=True), memory_mask=Mask(key_lengths=lengths))``. `bias`,
    `window` and `mask` apply only to the decoder's tokens. See `Attention` for the other fields.

    Attributes:
      alignment: the alignment of the decoder's tokens.
      cross_alignment: a dot product with the encoder's outputs, which has its own projections of
        queries and keys. With rotary positions, only the queries are rotated. None means that both
        kinds of tokens share the projections of `alignment`.
      sinks: whether every head learns the logit of one more key in the shared softmax.
    """

    cross_alignment: DotProduct | None = None

    has_cross_attention = False
    reads_memory = True

    @nn.compact
    def mix(self, inputs: MixerInput) -> tuple[jax.Array, MergedCache | None]:
        x, memory, cache = inputs.x, inputs.kv, inputs.cache
        assert memory is not None
        if cache is not None:
            self._check_cached_bias(cache.own, inputs.bias)
        mask = self._narrow(inputs.mask)
        memory_mask = _with_queries_of(inputs.memory_mask, mask)
        contexts = self._contexts(inputs, mask, memory_mask)

        value = self._value_projection(x.dtype, heads_axis=self._value_axis)
        values, memory_values = value(x), value(memory)  # [b, k, heads, e]
        terms, memory_terms = self._both_terms((x, memory), (values, memory_values), contexts)
        own_keys = _KeySet(terms, values, mask)
        memory_keys = _KeySet(memory_terms, memory_values, memory_mask)

        bias = inputs.bias
        num_rows, num_queries, _ = x.shape
        if cache is not None:
            # From here on, both sets contain all keys in the cache.
            own_keys, memory_keys, bias, cache = _extend_both(
                cache, own_keys, memory_keys, bias, at=inputs.position
            )
            if cache.own.beams > 1:
                # The n beams of an example are n queries of one row.
                num_rows, num_queries = cache.own.batch, cache.own.beams

        options: dict[str, Any] = {
            "soft_cap": self.soft_cap,
            "implementation": self.implementation,
        }
        own_with_bias = own_keys._replace(terms=add(*own_keys.terms, *bias))
        out, own_sums = attend_with_log_sums(
            **own_with_bias._asdict(),
            q_length=num_queries,
            partition=partition(batch=num_rows, heads=self.num_heads),
            **options,
            **dropout_options(self, self.dropout_rate),
        )
        # The shapes are [batch, q, heads, e] and [batch, q, heads], with one row for each beam.
        own_part = out.reshape(*x.shape[:2], *out.shape[2:]), own_sums.reshape(*x.shape[:2], -1)
        rows = rows_per_memory(x.shape[0], memory.shape[0])
        memory_part = _attend_to_memory(
            memory_keys,
            rows=rows,
            q_length=x.shape[1],
            partition=partition(batch=memory.shape[0], heads=self.num_heads),
            **options,
            **dropout_options(self, self.dropout_rate),
        )
        y, log_sums = merge_attention((own_part, memory_part), sinks=self._sinks())

        if self.is_sowing_weights:
            own_share = (own_part[1] - log_sums).reshape(num_rows, num_queries, -1)
            self._sow_weights("attention_weights", own_with_bias, own_share)
            self._sow_logits(
                own_keys.terms,
                mask=own_keys.mask,
                q_length=num_queries,
                k_length=own_keys.values.shape[1],
            )
            # As in cross-attention, rows that share a memory do not sow their weights of it.
            if rows == 1:
                self._sow_weights("memory_weights", memory_keys, memory_part[1] - log_sums)
        return self._project_heads(y, x.shape[-1]), cache

    @nn.compact
    def new_cache(
        self, x: jax.Array, kv: jax.Array | None, *, mask: Mask, max_length: int
    ) -> MergedCache:
        assert kv is not None
        context = self.context(Span(0, 0), Span(0, max_length))
        memory_context = self.context(Span(0, max_length), Span(0, kv.shape[1]))
        value = self._value_projection(x.dtype, heads_axis=self._value_axis)
        values, memory_values = value(x), value(kv)
        terms, memory_terms = self._both_terms(
            (x, kv), (values, memory_values), (context, memory_context)
        )
        return MergedCache(
            own=init_cache(terms, values, max_length=max_length),
            memory=memory_cache(memory_terms, memory_values, kv, mask=mask, max_length=max_length),
        )

    def shorten(self, cache: MixerCache) -> MixerCache:
        """Returns a cache whose own tokens are only those that the window can still reach.

        See `Attention.shorten`.
        """
        return dataclasses.replace(cache, own=super().shorten(cache.own))

    def with_length(
        self, cache: MixerCache, length: int | jax.Array | np.int32 | None
    ) -> MixerCache:
        """Returns the cache with another length; see `Mixer.with_length`."""
        # The cache of the memory does not count the queries, so its length stays 0.
        memory_length = None if length is None else TokenCount().length
        return MergedCache(
            super().with_length(cache.own, length), super().with_length(cache.memory, memory_length)
        )

    def _contexts(
        self, inputs: MixerInput, mask: Mask, memory_mask: Mask
    ) -> tuple[AttentionContext, AttentionContext]:
        """Returns the contexts of the alignments of the decoder's tokens and of the memory.

        Args:
          inputs: the inputs of `mix`.
          mask: the mask of the decoder's tokens, with the layer's window.
          memory_mask: the mask of the memory, for the same queries.
        """
        x, memory, cache = inputs.x, inputs.kv, inputs.cache
        assert memory is not None

        # The new queries begin at `start`. `num_keys` counts all keys, including cached keys.
        start = 0 if cache is None else inputs.position
        num_keys = x.shape[1] if cache is None else cache.own.capacity
        num_memory = memory.shape[1] if cache is None else cache.memory.capacity
        queries = Span(start, num_positions(mask, x.shape[1]))
        context = self.context(queries, Span(0, num_positions(mask, num_keys)), start)

        # The keys of the encoder's outputs are not rotated, so rotated queries depend on absolute
        # positions. In packed rows, these are the positions in the segments.
        context = dataclasses.replace(context, packed_positions=mask.packed_positions)
        memory_context = dataclasses.replace(
            context,
            key_span=Span(0, num_positions(memory_mask, num_memory)),
            keys_start=0,
            packed_positions=memory_mask.packed_positions,
        )
        return context, memory_context

    def _both_terms(
        self,
        tokens: tuple[jax.Array, jax.Array],
        values: tuple[jax.Array, jax.Array],
        contexts: tuple[AttentionContext, AttentionContext],
    ) -> tuple[Terms, Terms]:
        """Returns the terms of the decoder's tokens, and the terms of the memory.

        Args:
          tokens: the decoder's tokens ``[b, q, d_model]``, and the memory ``[b, k, width]``.
          values: the values of the decoder's tokens and of the memory.
          contexts: the contexts of the alignments of the decoder's tokens and of the memory.
        """
        self._check_alignments()
        x, memory = tokens
        align = self._bound_alignment()
        terms = self._terms(x, x, values[0], contexts[0], align)
        keys = values[1] if self.shared_key_value else memory
        query_terms = terms
        if self.cross_alignment is not None:
            align = self.cross_alignment.copy(name="cross_align", parent=self)
            # These terms are computed only for their queries, so there are no keys.
            query_terms = align(x, memory[:, :0], _without_keys(contexts[0]))

        (term,) = query_terms
        assert isinstance(term, LowRank) and isinstance(align, DotProduct)
        memory_keys = align.keys_without_positions(keys, contexts[1])
        return terms, (low_rank(term.queries, memory_keys, token_keys=True),)

    def _check_alignments(self) -> None:
        """Raises a `ValueError` if the alignments cannot share a softmax."""
        kind = type(self.alignment).__name__
        if not self.alignment.makes_logits:
            raise ValueError(
                f"MergedAttention: alignment is {kind}, whose weights are not made by a softmax. "
                "They cannot share a softmax with the memory. Use an alignment of logits, such as "
                "GaussianBias."
            )
        if self.cross_alignment is None and not isinstance(self.alignment, DotProduct):
            raise ValueError(
                f"MergedAttention: alignment is {kind}, which has no projections of queries and "
                "keys that the memory could share. Set cross_alignment, for example to "
                "DotProduct()."
            )

    def _sow_weights(self, name: str, keys: _KeySet, log_share: jax.Array) -> None:
        """Sows the weights of one set of keys in the shared softmax, ``[batch, heads, q, k]``.

        Args:
          name: the name of the sown array.
          keys: the keys whose weights are sown.
          log_share: the logarithm of the share of these keys in the softmax, ``[batch, q, heads]``.
        """
        weights = attention_weights(
            keys.terms,
            mask=keys.mask,
            q_length=log_share.shape[1],
            k_length=keys.values.shape[1],
            soft_cap=self.soft_cap,
        )
        share = jnp.exp(log_share).swapaxes(1, 2)[..., None]  # [b, h, q, 1]
        self.sow("intermediates", name, weights * share)


def _extend_both(
    cache: MergedCache, own_keys: _KeySet, memory_keys: _KeySet, bias: Terms, *, at: int | jax.Array
) -> tuple[_KeySet, _KeySet, Terms, MergedCache]:
    """Writes the keys and values of new tokens to a cache, and returns all keys and values.

    Args:
      cache: the cache.
      own_keys: the keys of the decoder's new tokens.
      memory_keys: the keys of the memory. Its arrays have no tokens, because the cache already
        holds the memory.
      bias: terms that are added to the logits of the decoder's tokens.
      at: the position of the first new token.

    Returns:
      All keys of the decoder's tokens, all keys of the memory, the bias, and the extended cache. If
      beams share the rows of the cache, the keys of the decoder's tokens and the bias are for rows
      in which the beams of an example are the queries; see `attention.beams`.
    """
    if cache.own.beams > 1:
        terms, values, bias, mask, extended = extend_for_beams(
            cache.own, own_keys.terms, own_keys.values, bias=bias, mask=own_keys.mask, at=at
        )
    else:
        terms, values, mask, extended = extend(
            cache.own, own_keys.terms, own_keys.values, at=at, mask=own_keys.mask
        )
    *all_memory, _ = extend_memory(cache.memory, *memory_keys)
    cache = MergedCache(extended, cache.memory)
    return _KeySet(terms, values, mask), _KeySet(*all_memory), bias, cache


def _without_keys(context: AttentionContext) -> AttentionContext:
    """Returns the context for the same queries and no keys."""
    positions = context.packed_positions
    if positions is not None:
        positions = (positions[0], positions[1][:, :0])
    return dataclasses.replace(context, packed_positions=positions)


def _with_queries_of(memory_mask: Mask, mask: Mask) -> Mask:
    """Returns the mask of the memory, in which padding queries of self-attention are padding too.

    Args:
      memory_mask: the mask of the memory.
      mask: the mask of self-attention, for the same queries.
    """
    lengths, valid = mask.query_lengths, mask.query_valid
    if lengths is not None and memory_mask.query_lengths is not None:
        lengths = jnp.minimum(lengths, memory_mask.query_lengths)
    if mask.query_segments is not None and memory_mask.query_segments is None:
        real = mask.query_segments > 0
        valid = real if valid is None else valid.astype(bool) & real
    if valid is not None and memory_mask.query_valid is not None:
        valid = valid.astype(bool) & memory_mask.query_valid.astype(bool)
    return dataclasses.replace(
        memory_mask,
        query_lengths=memory_mask.query_lengths if lengths is None else lengths,
        query_valid=memory_mask.query_valid if valid is None else valid,
    )


def _attend_to_memory(
    memory: _KeySet,
    *,
    rows: int,
    dropout_key: jax.Array | None,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Calls `attend_with_log_sums` with `rows` rows of queries for each row of the memory.

    The memory is not repeated for its rows of queries. Under `jax.vmap`, each matrix product
    multiplies all queries of a row of the memory with the same keys.

    Args:
      memory: the keys of the memory. The queries of its terms, and the arrays of queries of its
        mask, have ``batch · rows`` rows. All other arrays have at most ``batch`` rows.
      rows: the number of rows of queries for each row of the memory.
      dropout_key: as in `attend`.
      **options: more arguments of `attend`.

    Returns:
      The outputs ``[batch · rows, q, heads, e]`` and the log sums ``[batch · rows, q, heads]``.
    """
    terms, values, mask = memory
    if rows == 1:
        return attend_with_log_sums(terms, values, mask=mask, dropout_key=dropout_key, **options)

    batch = values.shape[0]
    (term,) = terms
    assert isinstance(term, LowRank)

    def split(x: jax.Array) -> jax.Array:
        """Returns an array ``[batch · rows, ...]`` as ``[batch, rows, ...]``."""
        return x.reshape(batch, rows, *x.shape[1:])

    # Arrays of the mask that differ between the rows of queries are split like the queries.
    of_queries = {"query_lengths": mask.query_lengths, "query_valid": mask.query_valid}
    per_row = {
        name: x for name, x in of_queries.items() if x is not None and x.shape[0] == batch * rows
    }
    keys = None if dropout_key is None else jax.random.split(dropout_key, rows)

    def attend_row(
        queries: jax.Array, of_row: dict[str, Any], key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the results for one row of queries for each row of the memory."""
        return attend_with_log_sums(
            (dataclasses.replace(term, queries=queries),),
            values,
            mask=dataclasses.replace(mask, **of_row),
            dropout_key=key,
            **options,
        )

    mapped = jax.vmap(attend_row, in_axes=(1, 1, 0), out_axes=1)
    results = mapped(split(term.queries), jax.tree.map(split, per_row), keys)
    out, log_sums = jax.tree.map(lambda x: x.reshape(batch * rows, *x.shape[2:]), results)
    return out, log_sums
