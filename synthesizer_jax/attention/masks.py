"""Masks: which keys a query may see, kept in parts so that the engine can separate them."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class Mask:
    """Which keys a query may see; everything that is left out allows everything.

    A query sees a key if every given part agrees. A query without keys, and a query that is
    padding itself, gets zeros. `padded` and `packed` make the usual masks; where queries are the keys
    they say so, which survives `jax.jit`, `jax.checkpoint` and scans. `attend` checks shapes and
    dtypes; numbers that are not zero count as True, and a batch axis of 1 is that of all examples.

    Attributes:
      causal: ``key <= query``.
      window: ``key > query - window``: together with `causal`, the last `window` keys.
      ahead: ``key <= query + ahead``: how many later keys a query sees; `causal` is ``ahead=0``.
      key_lengths: ``[b]``; the keys before that count are real (suffix padding, the fast case).
      key_valid: ``[b, k]`` bool; any pattern of real keys.
      query_lengths: ``[b]``, as `key_lengths`. Left out: every query is real.
      query_valid: ``[b, q]`` bool, as `key_valid`.
      query_segments: ``[b, q]`` number of the packed example, 1, 2, … in the order of the row; 0 is
        padding. A query sees only keys of its own segment; `causal` and `window` count positions
        inside the segments.
      key_segments: ``[b, k]``; given if and only if `query_segments` is.
      segment_length: no segment is longer (None: as long as the row).
      segments: no row has more segments (None: unknown).
      prefix_lengths: ``[b]``; keys before that count are seen whatever `causal`, `window` and `ahead`
        say (prefix language model).
      query_offset: position of the first query counted from the first key; not 0 in decoding. The
        number 0 is part of the pytree's structure, so that it stays known under `jax.jit` and
        `jax.checkpoint`, as kernels need; other numbers and arrays are traced. A mask that a loop
        carries or that branches return begins with an array.
      allowed: ``[b or 1, h or 1, q or 1, k]`` bool, for what fits nowhere else; slower.
      self_attention: queries and keys are the same tokens, real or padding alike; set by `padded`,
        `packed` and `for_self_attention`.
    """

    causal: bool = dataclasses.field(default=False, metadata={"static": True})
    window: int | None = dataclasses.field(default=None, metadata={"static": True})
    ahead: int | None = dataclasses.field(default=None, metadata={"static": True})
    key_lengths: jax.Array | None = None
    key_valid: jax.Array | None = None
    query_lengths: jax.Array | None = None
    query_valid: jax.Array | None = None
    query_segments: jax.Array | None = None
    key_segments: jax.Array | None = None
    segment_length: int | None = dataclasses.field(default=None, metadata={"static": True})
    segments: int | None = dataclasses.field(default=None, metadata={"static": True})
    prefix_lengths: jax.Array | None = None
    query_offset: Any = 0
    allowed: jax.Array | None = None
    self_attention: bool = dataclasses.field(default=False, metadata={"static": True})

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[bool, tuple[Any, ...]]]:
        """Arrays with their names; whether the offset is the number 0, and what is static."""
        begins = isinstance(self.query_offset, int) and self.query_offset == 0
        parts = {name: getattr(self, name) for name in _ARRAYS}
        if begins:
            parts["query_offset"] = None
        keyed = [(jax.tree_util.GetAttrKey(name), part) for name, part in parts.items()]
        return keyed, (begins, tuple(getattr(self, name) for name in _STATIC))

    @classmethod
    def tree_unflatten(cls, static: tuple[bool, tuple[Any, ...]], parts: Sequence[Any]) -> Mask:
        """The mask of `tree_flatten_with_keys`."""
        begins, values = static
        fields = dict(zip((*_ARRAYS, *_STATIC), (*parts, *values), strict=True))
        return cls(**{**fields, "query_offset": 0} if begins else fields)

    @classmethod
    def padded(
        cls, keys: jax.Array, queries: jax.Array | None = None, *, causal: bool = False, **more: Any
    ) -> Mask:
        """The mask of padded rows.

        Args:
          keys: ``[b]`` integers, how many keys are real, padding behind them; or ``[b, k]`` bool,
            which keys are real.
          queries: likewise ``[b]`` or ``[b, q]``; None: the queries are the keys (self-attention).
          causal: no key after the query.
          **more: further fields.
        """
        parts: dict[str, Any] = {}
        for side, real in (("key", keys), ("query", queries)):
            if real is not None:
                parts[f"{side}_lengths" if jnp.ndim(real) == 1 else f"{side}_valid"] = real
        mask = cls(causal=causal, **parts, **more)
        return mask.for_self_attention() if queries is None else mask

    @classmethod
    def packed(
        cls,
        keys: jax.Array,
        queries: jax.Array | None = None,
        *,
        causal: bool = False,
        segments: int | None = None,
        segment_length: int | None = None,
        **more: Any,
    ) -> Mask:
        """The mask of packed rows.

        Args:
          keys: ``[b, k]`` segment numbers, 1, 2, … in the order of the row, 0 for padding.
          queries: ``[b, q]`` likewise; None: the queries are the keys (self-attention).
          causal: no key after the query.
          segments: no row has more segments.
          segment_length: no segment is longer.
          **more: further fields.
        """
        mask = cls(
            causal=causal,
            key_segments=keys,
            query_segments=queries,
            segments=segments,
            segment_length=segment_length,
            **more,
        )
        return mask.for_self_attention() if queries is None else mask

    @classmethod
    def of(cls, mask: Mask | jax.Array | None) -> Mask:
        """A mask, or the mask of an array ``[…, q or 1, k]`` of booleans, or of zeros and ones.

        Args:
          mask: None allows everything. An array is Flax's, and says nothing of padding queries:
            ``[batch or 1, heads or 1, q or 1, k]`` or ``[q, k]``; nonzero where a query may see a key.

        Raises:
          ValueError: for other ranks.
          TypeError: for what is neither.
        """
        if mask is None or isinstance(mask, Mask):
            return cls() if mask is None else mask
        if not hasattr(mask, "ndim"):
            raise TypeError(
                f"attention: the mask is a {type(mask).__name__}; give a Mask, or an array that is "
                "nonzero where a query may see a key"
            )
        if mask.ndim not in (2, 4):
            raise ValueError(
                f"attention: the mask has shape {mask.shape}; it must be [batch or 1, heads or 1, q, k] or "
                "[q, k]: add an axis of heads to [batch, q, k], and use Mask.padded for padding alone"
            )
        mask = mask.astype(bool)
        allowed = mask[None, None] if mask.ndim == 2 else mask
        if allowed.shape[1] == allowed.shape[2] == 1:
            return cls(key_valid=allowed[:, 0, 0], query_valid=jnp.ones((1, 1), bool))
        return cls(allowed=allowed)

    def for_self_attention(self) -> Mask:
        """The mask for queries that are the keys: real where those are, in the same segments, no offset.

        Raises:
          ValueError: the queries have an offset.
        """
        segments = self.query_segments if self.key_segments is None else self.key_segments
        if self.self_attention:
            return dataclasses.replace(self, query_segments=segments)
        if not isinstance(self.query_offset, int) or self.query_offset != 0:
            raise ValueError(
                f"Mask.query_offset={self.query_offset} in self-attention, where every query is its own "
                "key; leave it out, or decode with a cache"
            )
        twins = (
            (self.query_lengths, self.key_lengths),
            (self.query_valid, self.key_valid),
        )
        if any(query is not None and query is not key for query, key in twins):
            return self
        return dataclasses.replace(
            self,
            query_lengths=self.key_lengths,
            query_valid=self.key_valid,
            query_segments=segments,
            query_offset=0,
            self_attention=True,
        )

    def keys(self, k_length: int) -> jax.Array | None:
        """Which keys are real, bool ``[b, k]``; None: all of them."""
        return _real(k_length, self.key_lengths, self.key_valid, self.key_segments)

    def queries(self, q_length: int) -> jax.Array | None:
        """Which queries are real, bool ``[b, q]``; None: all of them."""
        return _real(q_length, self.query_lengths, self.query_valid, self.query_segments)

    @property
    def counts_in_segments(self) -> bool:
        """Whether positions that matter here begin anew in every segment, for queries and for keys."""
        return self.query_segments is not None and not self.self_attention

    def band(self, q_length: int, k_length: int) -> jax.Array | None:
        """What `causal`, `window` and `ahead` allow, bool ``[q, k]``; None: everything.

        In packed cross-attention, where segments do not begin together, it is ``[b, 1, q, k]``.
        """
        query = jnp.arange(q_length)[:, None] + self.query_offset
        key = jnp.arange(k_length)[None, :]
        if self.counts_in_segments:
            assert self.query_segments is not None and self.key_segments is not None
            query = positions(self.query_segments)[:, None, :, None]
            key = positions(self.key_segments)[:, None, None, :]
        return _all(*self.band_rules(query, key))

    @property
    def has_band(self) -> bool:
        """Whether `causal`, `window` or `ahead` hide any key."""
        return self.causal or self.window is not None or self.ahead is not None

    def band_rules(self, query: jax.Array, key: jax.Array) -> list[jax.Array]:
        """What `causal`, `window` and `ahead` say of positions, each a bool array; all must agree."""
        rules = []
        if self.causal:
            rules.append(key <= query)
        if self.window is not None:
            rules.append(key > query - self.window)
        if self.ahead is not None:
            rules.append(key <= query + self.ahead)
        return rules

    def prefix(self, k_length: int) -> jax.Array | None:
        """Which keys the prefix opens to every query, bool ``[b, k]``; None: there is no prefix."""
        if self.prefix_lengths is None:
            return None
        return jnp.arange(k_length) < self.prefix_lengths[..., None]

    def block(self, example: jax.Array | int, head: jax.Array | int) -> Mask:
        """The mask of one example and one head, its batch axis 1 long."""

        def at(x: jax.Array, index: jax.Array | int, axis: int) -> jax.Array:
            start = 0 if x.shape[axis] == 1 else index
            return jax.lax.dynamic_slice_in_dim(x, start, 1, axis)

        rest = dataclasses.replace(self, allowed=None, query_offset=None)
        rest = jax.tree.map(lambda x: at(x, example, 0), rest)
        allowed = None if self.allowed is None else at(at(self.allowed, example, 0), head, 1)
        return dataclasses.replace(rest, allowed=allowed, query_offset=self.query_offset)

    def head_group(self, start: int, count: int) -> Mask:
        """The mask of some neighbouring heads."""
        if self.allowed is None or self.allowed.shape[1] == 1:
            return self
        return dataclasses.replace(self, allowed=self.allowed[:, start : start + count])

    def from_key(self, start: int | jax.Array, length: int) -> Mask:
        """The mask for `length` keys from position `start` on; positions below 0 are no keys.

        Raises:
          ValueError: for packed rows and patterns of pairs.
        """
        if self.key_segments is not None or self.allowed is not None:
            raise ValueError("Mask.from_key: not for packed rows or Mask.allowed")
        place = jnp.arange(length) + start
        real = (place >= 0)[None]
        if self.key_lengths is not None:
            real = real & (place < self.key_lengths[..., None])
        if self.key_valid is not None:
            inside = jnp.clip(place, 0, self.key_valid.shape[1] - 1)
            real = real & self.key_valid.astype(bool)[:, inside] & (place < self.key_valid.shape[1])
        prefix = None if self.prefix_lengths is None else self.prefix_lengths - start
        return dataclasses.replace(
            self,
            key_lengths=None,
            key_valid=real,
            prefix_lengths=prefix,
            query_offset=self.query_offset - start,
        )

    def pairs(self, q_length: int, k_length: int) -> jax.Array | None:
        """Everything together, bool ``[b or 1, h or 1, q or 1, k or 1]``; None: everything is allowed.

        Rows of padding queries are empty.
        """
        keys, queries = self.keys(k_length), self.queries(q_length)
        band, prefix = self.band(q_length, k_length), self.prefix(k_length)
        if band is not None and prefix is not None:
            band = band | prefix[..., None, None, :]
        parts = [
            band,
            None if keys is None else keys[..., None, None, :],
            None if queries is None else queries[..., None, :, None],
            None if self.allowed is None else self.allowed.astype(bool),
        ]
        if self.query_segments is not None and self.key_segments is not None:
            same = self.query_segments[..., :, None] == self.key_segments[..., None, :]
            parts.append(same[..., None, :, :])
        found = _all(*parts)
        return None if found is None else found.reshape((1,) * (4 - found.ndim) + found.shape)


def parts_of(
    pattern: jax.Array, *, batch: int, q_length: int, k_length: int
) -> dict[str, jax.Array]:
    """The fields of `Mask` that say what a pattern says, with the fewest numbers.

    Args:
      pattern: bool ``[b or 1, h or 1, q or 1, k or 1]``.
      batch: b.
      q_length: q.
      k_length: k.
    """
    own, heads, queries, keys = pattern.shape
    if heads == queries == 1:
        return {"key_valid": jnp.broadcast_to(pattern[:, 0, 0], (batch, k_length))}
    if heads == keys == 1:
        return {"query_valid": jnp.broadcast_to(pattern[:, 0, :, 0], (batch, q_length))}
    return {"allowed": jnp.broadcast_to(pattern, (own, heads, q_length, k_length))}


def positions(segments: jax.Array) -> jax.Array:
    """Positions inside packed segments, int32 ``[..., n]`` from segment numbers ``[..., n]``.

    Each run of equal numbers counts from 0.
    """
    index = jnp.arange(segments.shape[-1], dtype=jnp.int32)
    new = jnp.diff(segments, axis=-1, prepend=segments[..., :1]) != 0
    start = jax.lax.cummax(jnp.where(new, index, 0), axis=segments.ndim - 1)
    return index - start


_STATIC = tuple(f.name for f in dataclasses.fields(Mask) if f.metadata.get("static"))
_ARRAYS = tuple(f.name for f in dataclasses.fields(Mask) if f.name not in _STATIC)


def _real(
    length: int,
    lengths: jax.Array | None,
    valid: jax.Array | None,
    segments: jax.Array | None,
) -> jax.Array | None:
    return _all(
        None if lengths is None else jnp.arange(length) < lengths[..., None],
        None if valid is None else valid.astype(bool),
        None if segments is None else segments > 0,
    )


def _all(*parts: jax.Array | None) -> jax.Array | None:
    given = [part for part in parts if part is not None]
    return functools.reduce(operator.and_, given) if given else None
