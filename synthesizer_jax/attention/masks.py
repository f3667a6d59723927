"""Masks: which keys a query may see, kept in parts so that the engine can separate them."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey
from jax.typing import ArrayLike

from synthesizer_jax.base.typing import PyTree


class _Fields(TypedDict, total=False):
    """The fields of `Mask` that may be given to `Mask.padded` and `Mask.packed`."""

    window: int | tuple[int | None, int | None] | None
    prefix_lengths: jax.Array | None
    query_offset: int | jax.Array
    allowed: jax.Array | None


_FAR = 2**30

CROSS_ATTENTION = (
    "give Mask.padded or Mask.packed `queries` too, or Mask(key_lengths=…) if all queries are real"
)
"""How to make a mask of queries that are not the keys."""


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class Mask:
    """Which keys a query may attend to; a field that is left out allows everything.

    A query may attend to a key if every given field allows it. A query without keys, and a query that
    is padding itself, gets zeros. `padded` and `packed` make the usual masks; where queries are the
    keys, the mask knows that, also under `jax.jit`, `jax.checkpoint` and scans. `attend` checks shapes
    and dtypes; numbers other than zero count as True, and a batch axis of 1 is shared by all examples.

    Attributes:
      causal: ``key <= query``.
      window: how many keys before and after its own position a query sees, ``(before, after)``; None
        stands for all. A single number is ``(window - 1, None)``: together with `causal`, the last
        `window` keys.
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
      prefix_lengths: ``[b]``; keys before that count are seen whatever `causal` and `window` say (prefix
        language model).
      query_offset: position of the first query counted from the first key; not 0 in decoding. The
        number 0 is part of the pytree's structure, so that it stays known under `jax.jit` and
        `jax.checkpoint`, as kernels need; other numbers and arrays are traced. A mask that a loop
        carries or that branches return begins with an array.
      allowed: ``[b or 1, h or 1, q or 1, k]`` bool, for what fits nowhere else; slower.
      self_attention: queries and keys are the same tokens, real or padding alike; set by `padded`,
        `packed` and `for_self_attention`.
      cleared_keys: the keys and values of padding are zeros already; set by the cache of a memory.
    """

    causal: bool = dataclasses.field(default=False, metadata={"static": True})
    window: int | tuple[int | None, int | None] | None = dataclasses.field(
        default=None, metadata={"static": True}
    )
    key_lengths: jax.Array | None = None
    key_valid: jax.Array | None = None
    query_lengths: jax.Array | None = None
    query_valid: jax.Array | None = None
    query_segments: jax.Array | None = None
    key_segments: jax.Array | None = None
    segment_length: int | None = dataclasses.field(default=None, metadata={"static": True})
    segments: int | None = dataclasses.field(default=None, metadata={"static": True})
    prefix_lengths: jax.Array | None = None
    query_offset: int | jax.Array = 0
    allowed: jax.Array | None = None
    self_attention: bool = dataclasses.field(default=False, metadata={"static": True})
    cleared_keys: bool = dataclasses.field(default=False, metadata={"static": True})

    def tree_flatten_with_keys(
        self,
    ) -> tuple[list[tuple[GetAttrKey, PyTree]], tuple[bool, tuple[object, ...]]]:
        """Returns the arrays with their names, and what is static: is the offset the number 0, fields."""
        starts_at_zero = isinstance(self.query_offset, int) and self.query_offset == 0
        parts = {name: getattr(self, name) for name in _ARRAYS}
        if starts_at_zero:
            parts["query_offset"] = None
        keyed = [(GetAttrKey(name), part) for name, part in parts.items()]
        return keyed, (starts_at_zero, tuple(getattr(self, name) for name in _STATIC))

    @classmethod
    def tree_unflatten(cls, static: tuple[bool, tuple[object, ...]], parts: Sequence[PyTree]) -> Mask:
        """Inverts `tree_flatten_with_keys`."""
        starts_at_zero, values = static
        fields = dict(zip((*_ARRAYS, *_STATIC), (*parts, *values), strict=True))
        return cls(**{**fields, "query_offset": 0} if starts_at_zero else fields)

    @classmethod
    def padded(
        cls,
        keys: jax.Array,
        queries: jax.Array | None = None,
        *,
        causal: bool = False,
        **fields: Unpack[_Fields],
    ) -> Mask:
        """Returns the mask of padded rows.

        Args:
          keys: ``[b]`` integers, how many keys are real, padding behind them; or ``[b, k]`` bool,
            which keys are real.
          queries: likewise ``[b]`` or ``[b, q]``; None: the queries are the keys (self-attention).
          causal: no key after the query.
          **fields: further fields.
        """
        kind = lambda x: "lengths" if jnp.ndim(x) == 1 else "valid"
        given: dict[str, Any] = {f"key_{kind(keys)}": keys, **fields}
        if queries is not None:
            given[f"query_{kind(queries)}"] = queries
        mask = cls(causal=causal, **given)
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
        **fields: Unpack[_Fields],
    ) -> Mask:
        """Returns the mask of packed rows.

        Args:
          keys: ``[b, k]`` segment numbers, 1, 2, … in the order of the row, 0 for padding.
          queries: ``[b, q]`` likewise; None: the queries are the keys (self-attention).
          causal: no key after the query.
          segments: no row has more segments.
          segment_length: no segment is longer.
          **fields: further fields.
        """
        mask = cls(
            causal=causal,
            key_segments=keys,
            query_segments=queries,
            segments=segments,
            segment_length=segment_length,
            **fields,
        )
        return mask.for_self_attention() if queries is None else mask

    @classmethod
    def of(cls, mask: MaskLike) -> Mask:
        """Returns a mask as it is, or the mask of an array of booleans, or of zeros and ones.

        Args:
          mask: None allows everything. An array is Flax's, and says nothing of padding queries:
            ``[batch or 1, heads or 1, q or 1, k]`` or ``[q, k]``; nonzero where a query may see a key.
            (Models take two axes as ``[batch, keys]``; see `models.token_model.token_mask`.)

        Raises:
          ValueError: for other ranks, and see `as_bool`.
          TypeError: for what is neither.
        """
        if mask is None or isinstance(mask, Mask):
            return cls() if mask is None else mask
        if not isinstance(mask, jax.Array | np.ndarray):
            raise TypeError(
                f"attention: the mask is a {type(mask).__name__}; give a Mask, or an array that is "
                "nonzero where a query may see a key"
            )
        if mask.ndim not in (2, 4):
            raise ValueError(
                f"attention: the mask has shape {mask.shape}; it must be [batch or 1, heads or 1, q, k] or "
                "[q, k]: add an axis of heads to [batch, q, k], and use Mask.padded for padding alone"
            )
        mask = as_bool(mask)
        allowed = mask[None, None] if mask.ndim == 2 else mask
        if allowed.shape[1] == allowed.shape[2] == 1:
            return cls(key_valid=allowed[:, 0, 0], query_valid=jnp.ones((1, 1), bool))
        return cls(allowed=allowed)

    def for_self_attention(self) -> Mask:
        """Returns the mask for queries that are the keys: real where those are, in the same segments.

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
        if self.query_lengths is not None or self.query_valid is not None:
            return self  # the mask already says which queries are real
        return dataclasses.replace(
            self,
            query_lengths=self.key_lengths,
            query_valid=self.key_valid,
            query_segments=segments,
            self_attention=True,
        )

    def map_arrays(self, function: Callable[[str, jax.Array], jax.Array]) -> Mask:
        """Returns the mask with ``function(name, array)`` in the place of every array but the offset."""
        arrays = {name: getattr(self, name) for name in _ARRAYS if name != "query_offset"}
        changed: dict[str, Any] = {name: function(name, x) for name, x in arrays.items() if x is not None}
        return dataclasses.replace(self, **changed)

    def broadcast_to(self, *, batch: int, heads: int, q_length: int, k_length: int) -> Mask:
        """Returns the mask with every array of its full shape, patterns as booleans.

        Raises:
          ValueError: an array has another shape or dtype, or parts are missing or do not go together.
        """
        if (self.query_segments is None) != (self.key_segments is None):
            raise ValueError(
                "attend: Mask has only one of query_segments and key_segments; give both, or use "
                "Mask.packed"
            )
        if self.query_segments is not None and self.prefix_lengths is not None:
            raise ValueError(
                "attend: Mask.prefix_lengths counts from the start of a row, which in packed rows is "
                "the first example only; use Mask.allowed"
            )
        offset = self.query_offset
        if self.query_segments is not None and isinstance(offset, int) and offset != 0:
            raise ValueError(
                f"attend: Mask.query_offset={offset} with segments, where positions begin anew; leave it "
                "out for packed rows"
            )
        if self.self_attention and q_length != k_length:
            raise ValueError(
                f"attend: the mask is that of self-attention, but there are {q_length} queries and "
                f"{k_length} keys; {CROSS_ATTENTION}"
            )
        sizes = {"batch": batch, "heads": heads, "q": q_length, "k": k_length}
        return self.map_arrays(lambda name, x: _broadcast(name, x, sizes))

    def keys(self, k_length: int) -> jax.Array | None:
        """Returns which keys are real, bool ``[b, k]``; None: all of them."""
        return _real(k_length, self.key_lengths, self.key_valid, segments=self.key_segments)

    def queries(self, q_length: int) -> jax.Array | None:
        """Returns which queries are real, bool ``[b, q]``; None: all of them."""
        return _real(q_length, self.query_lengths, self.query_valid, segments=self.query_segments)

    def uncleared(self, q_length: int, k_length: int) -> tuple[jax.Array | None, jax.Array | None]:
        """Returns `queries` and `keys`, each None where no padding is left to be cleared."""
        return self.queries(q_length), None if self.cleared_keys else self.keys(k_length)

    @property
    def counts_in_segments(self) -> bool:
        """Whether the band compares positions inside the segments."""
        return self.query_segments is not None and not self.self_attention

    def segment_lengths(self, q_length: int, k_length: int) -> tuple[int, int]:
        """Returns how many queries and keys a segment has at most."""
        longest = self.segment_length or max(q_length, k_length)
        return min(longest, q_length), min(longest, k_length)

    @property
    def band(self) -> tuple[int | None, int | None]:
        """How many keys before and after its position a query sees, by `causal` and `window`; None: all."""
        window = self.window
        if not isinstance(window, tuple):
            window = (None if window is None else window - 1), None
        before, after = window
        if self.causal:
            after = 0 if after is None else min(after, 0)
        # Farther than any two positions are apart, so that adding it to one is no overflow.
        limit = lambda n: None if n is None else max(-_FAR, min(n, _FAR))
        return limit(before), limit(after)

    @property
    def has_band(self) -> bool:
        """Whether `causal` or `window` hide any key."""
        return self.band != (None, None)

    @property
    def packed_positions(self) -> tuple[jax.Array, jax.Array] | None:
        """The in-sequence positions of queries and keys of packed rows, int32 ``[batch, n]`` each."""
        if self.query_segments is None or self.key_segments is None:
            return None
        return segment_positions(self.query_segments), segment_positions(self.key_segments)

    def band_pairs(self, q_length: int, k_length: int) -> jax.Array | None:
        """Returns what the band allows, bool ``[q, k]``; None: everything.

        In packed cross-attention, where segments do not begin together, it is ``[b, 1, q, k]``.
        """
        query = jnp.arange(q_length)[:, None] + self.query_offset
        key = jnp.arange(k_length)[None, :]
        if self.counts_in_segments and (positions := self.packed_positions) is not None:
            query, key = positions[0][:, None, :, None], positions[1][:, None, None, :]
        return _all(*self.band_rules(query, key))

    def band_rules(self, query: jax.Array, key: jax.Array) -> list[jax.Array]:
        """Returns what the two sides of the band allow of positions, a bool array for each."""
        before, after = self.band
        rules = [] if before is None else [key >= query - before]
        return rules if after is None else [*rules, key <= query + after]

    def prefix(self, k_length: int) -> jax.Array | None:
        """Returns which keys the prefix opens to every query, bool ``[b, k]``; None: there is no prefix."""
        return None if self.prefix_lengths is None else _before(self.prefix_lengths, k_length)

    def take_heads(self, start: int, count: int) -> Mask:
        """Returns the mask of consecutive heads."""
        if self.allowed is None or self.allowed.shape[1] == 1:
            return self
        return dataclasses.replace(self, allowed=self.allowed[:, start : start + count])

    def slice_keys(self, start: int | jax.Array | np.integer, length: int) -> Mask:
        """Returns the mask for `length` keys from position `start` on; positions below 0 are no keys.

        Raises:
          ValueError: for packed rows and patterns of pairs.
        """
        if self.key_segments is not None or self.allowed is not None:
            raise ValueError("Mask.slice_keys: not for packed rows or Mask.allowed")
        position = jnp.arange(length) + start
        real = (position >= 0)[None]
        if self.key_lengths is not None:
            real = real & (position[None] < self.key_lengths[..., None])
        if self.key_valid is not None:
            k_length = self.key_valid.shape[1]
            valid = jnp.asarray(self.key_valid, bool)[:, jnp.clip(position, 0, k_length - 1)]
            real = real & valid & (position < k_length)[None]
        prefix = None if self.prefix_lengths is None else self.prefix_lengths - start
        return dataclasses.replace(
            self,
            key_lengths=None,
            key_valid=real,
            prefix_lengths=prefix,
            query_offset=self.query_offset - start,
        )

    def pairs(self, q_length: int, k_length: int) -> jax.Array | None:
        """Returns which query may attend to which key, bool ``[b or 1, h or 1, q or 1, k or 1]``.

        None: every query to every key. Rows of padding queries are empty.
        """
        keys, queries = self.keys(k_length), self.queries(q_length)
        band, prefix = self.band_pairs(q_length, k_length), self.prefix(k_length)
        if band is not None and prefix is not None:
            band = operator.or_(*_equal_ranks(band, prefix[..., None, None, :]))
        parts = [
            band,
            None if keys is None else keys[..., None, None, :],
            None if queries is None else queries[..., None, :, None],
            None if self.allowed is None else self.allowed.astype(bool),
        ]
        if self.query_segments is not None and self.key_segments is not None:
            same = self.query_segments[..., :, None] == self.key_segments[..., None, :]
            parts.append(same[..., None, :, :])
        pairs = _all(*parts)
        return None if pairs is None else pairs.reshape((1,) * (4 - pairs.ndim) + pairs.shape)


MaskLike: TypeAlias = Mask | jax.Array | np.ndarray | None
"""What layers and models take as a mask.

Layers read an array with two axes as ``[q, k]`` (`Mask.of`), models as ``[batch, keys]``
(`models.token_model.token_mask`).
"""


def is_concrete(x: ArrayLike | None) -> bool:
    """Whether numbers can be read: they are not traced, nor on other processes' devices."""
    if isinstance(x, jax.core.Tracer):
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def as_bool(mask: jax.Array | np.ndarray) -> jax.Array:
    """Returns which numbers of a mask are not zero.

    Raises:
      ValueError: numbers that are not traced are floating and neither 0 nor 1.
    """
    if jnp.issubdtype(mask.dtype, jnp.floating) and is_concrete(mask):
        values = np.asarray(mask)
        others = values[(values != 0) & (values != 1)]
        if others.size:
            raise ValueError(
                f"attention: the mask contains {others[0]}; floating masks are 1 where a query may see a "
                "key, else 0: instead of a mask that is added to the logits give mask == 0"
            )
    return jnp.asarray(mask).astype(bool)


def add_pattern(mask: Mask, pattern: jax.Array, *, batch: int, q_length: int, k_length: int) -> Mask:
    """Returns a mask with a pattern ``[b or 1, h or 1, q or 1, k or 1]`` in the smallest field for it.

    The mask has none of the fields `key_valid`, `query_valid` and `allowed`.
    """
    num_examples, heads, queries, keys = pattern.shape
    if heads == queries == 1:
        valid = jnp.broadcast_to(pattern[:, 0, 0], (batch, k_length))
        return dataclasses.replace(mask, key_valid=valid)
    if heads == keys == 1:
        valid = jnp.broadcast_to(pattern[:, 0, :, 0], (batch, q_length))
        return dataclasses.replace(mask, query_valid=valid)
    allowed = jnp.broadcast_to(pattern, (num_examples, heads, q_length, k_length))
    return dataclasses.replace(mask, allowed=allowed)


def segment_positions(segments: jax.Array) -> jax.Array:
    """Returns the positions inside packed segments, int32 ``[..., n]`` from segment numbers ``[..., n]``.

    Each run of equal numbers counts from 0.
    """
    index = jax.lax.broadcasted_iota(jnp.int32, segments.shape, segments.ndim - 1)
    new = jnp.diff(segments, axis=-1, prepend=segments[..., :1]) != 0
    start = jax.lax.cummax(jnp.where(new, index, 0), axis=segments.ndim - 1)
    return index - start


_AXES = {
    "key_valid": ("batch", "k"),
    "query_valid": ("batch", "q"),
    "key_segments": ("batch", "k"),
    "query_segments": ("batch", "q"),
    "allowed": ("batch", "heads", "q", "k"),
}
"""The axes of a mask's arrays; lengths have one, of examples."""


def _broadcast(name: str, x: ArrayLike, sizes: dict[str, int]) -> jax.Array:
    """Returns an array of a mask of its full shape, see `Mask.broadcast_to`."""
    x, axes = jnp.asarray(x), _AXES.get(name, ("batch",))
    shape = tuple(sizes[axis] for axis in axes)
    shared = {"batch", "heads", "q"} if name in ("allowed", "query_valid") else {"batch"}
    fits = x.ndim == len(axes) and all(
        n == size or (n == 1 and axis in shared) for n, size, axis in zip(x.shape, shape, axes, strict=True)
    )
    if not fits:
        expected = ", ".join(
            f"{axis}{' or 1' if axis in shared else ''}={size}"
            for axis, size in zip(axes, shape, strict=True)
        )
        raise ValueError(f"attend: Mask.{name} has shape {x.shape}; it must be [{expected}]")
    if name.endswith(("lengths", "segments")):
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"attend: Mask.{name} has dtype {x.dtype}; it must be integers")
        return jnp.broadcast_to(x, shape)
    x = as_bool(x)
    return jnp.broadcast_to(x, (*x.shape[:2], *shape[2:]) if name == "allowed" else shape)


def zero_padding(x: jax.Array, real: jax.Array | None) -> jax.Array:
    """Returns ``[b, n, ...]`` with zeros for padding; the backward pass keeps only ``[b, n]``."""
    return x if real is None else _zero_padding(x, real)


@functools.partial(jax.checkpoint, prevent_cse=False)
def _zero_padding(x: jax.Array, real: jax.Array) -> jax.Array:
    return jnp.where(real.reshape(*real.shape, *(1,) * (x.ndim - real.ndim)), x, 0)


_STATIC = tuple(f.name for f in dataclasses.fields(Mask) if f.metadata.get("static"))
_ARRAYS = tuple(f.name for f in dataclasses.fields(Mask) if f.name not in _STATIC)


def _real(
    length: int, lengths: jax.Array | None, valid: jax.Array | None, *, segments: jax.Array | None
) -> jax.Array | None:
    return _all(
        None if lengths is None else _before(lengths, length),
        None if valid is None else _for_all(valid.astype(bool), length),
        None if segments is None else segments > 0,
    )


def _for_all(valid: jax.Array, length: int) -> jax.Array:
    """Returns which positions are real, ``[..., length]``; a single entry stands for all of them."""
    if valid.shape[-1] != 1:
        return valid
    return jnp.broadcast_to(valid, (*valid.shape[:-1], length))


def _before(lengths: jax.Array, n: int) -> jax.Array:
    """Returns which of n positions lie before lengths ``[...]``, bool ``[..., n]``."""
    lengths = jnp.asarray(lengths, int)
    position = jax.lax.broadcasted_iota(lengths.dtype, (*lengths.shape, n), lengths.ndim)
    return position < lengths[..., None]


def _equal_ranks(*parts: jax.Array) -> list[jax.Array]:
    rank = max((part.ndim for part in parts), default=0)
    return [part.reshape((1,) * (rank - part.ndim) + part.shape) for part in parts]


def _all(*parts: jax.Array | None) -> jax.Array | None:
    given = _equal_ranks(*(part for part in parts if part is not None))
    return functools.reduce(operator.and_, given) if given else None
