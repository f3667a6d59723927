"""Masks, which say which keys each query may attend to.

A `Mask` stores padding, bands, segments and patterns in separate fields instead of in one array
``[b, h, q, k]``. The attention routes make use of the separate fields. For example, a route can set
padding values to zero instead of masking the logits, skip the tiles that a causal mask hides, or
unpack segments to separate rows.
"""

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
    """The fields of `Mask` that `Mask.padded` and `Mask.packed` accept as keyword arguments."""

    window: int | tuple[int | None, int | None] | None
    prefix_lengths: jax.Array | None
    query_offset: int | jax.Array
    allowed: jax.Array | None


_FAR = 2**30
"""An upper bound on positions and distances, which can be added to a position in int32."""

CROSS_ATTENTION = (
    "For cross-attention, also pass `queries` to Mask.padded or Mask.packed, or use "
    "Mask(key_lengths=…) if all queries are real."
)
"""The advice at the end of error messages about masks whose queries are not the keys."""


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class Mask:
    """Describes which keys each query may attend to.

    A query may attend to a key if every field allows the pair. A field that is not set allows all
    pairs. The output of attention is zero for a query that is padding, and for a query that may
    attend to no key.

    `padded` and `packed` create the usual masks. Both functions also record whether queries and
    keys are the same tokens. This record is kept under `jax.jit`, `jax.checkpoint` and scans. The
    shapes and dtypes of a mask are checked by `attend`. In boolean fields, numbers other than zero
    count as True. If the batch axis of an array has size 1, all examples share the array.

    Attributes:
      causal: whether a query may attend only to keys up to its own position.
      window: ``(before, after)``, the numbers of keys that a query may attend to before and after
        its own position. None means that the number is not limited. A single number n is short for
        ``(n - 1, None)``. With ``causal=True`` and a window of n, a query may attend to the last n
        keys up to its own position.
      key_lengths: ``[b]``, the number of real keys of each example. All later keys are padding.
        Lengths are the fastest way to describe padding.
      key_valid: ``[b, k]`` bool. True marks a real key. Real keys and padding may be in any order.
      query_lengths: ``[b]``, the number of real queries of each example. All later queries are
        padding. If the field is None, all queries are real.
      query_valid: ``[b, q]`` bool. True marks a real query. Real queries and padding may be in any
        order.
      query_segments: ``[b, q]``, the segment number of each query. A segment is a packed example.
        Segments are numbered 1, 2, … in the order of the row, and padding has the number 0. A query
        may attend only to keys of its own segment. `causal` and `window` count positions inside of
        the segments.
      key_segments: ``[b, k]``, the segment number of each key. Set either both `key_segments` and
        `query_segments`, or neither.
      segment_length: an upper bound on the length of a segment. None means the length of the row.
      segments: an upper bound on the number of segments in a row, or None if no bound is known.
      prefix_lengths: ``[b]``, the length of each example's prefix. All queries may attend to the
        keys of the prefix, even if `causal` or `window` hides these keys (prefix language model).
        The prefix does not override the other fields.
      query_offset: the position of the first query, counted from the first key. In decoding, the
        offset is usually not 0. An offset of 0 is part of the structure of the pytree, so that
        kernels know it under `jax.jit` and `jax.checkpoint`. All other offsets are traced. If a
        mask is the carry of a loop or the result of a conditional, its offset must be an array from
        the beginning.
      allowed: ``[b or 1, h or 1, q or 1, k]`` bool, which is True if the query may attend to the
        key. Use `allowed` for patterns that the other fields cannot express, because it is slower.
      self_attention: whether queries and keys are the same tokens, with the same padding. `padded`,
        `packed` and `for_self_attention` set this field.
      cleared_keys: whether the keys and values of padding have already been set to zero. Decoding
        with cross-attention sets this field.
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
        """Returns the arrays with their names, and the static fields.

        The second result is static under `jax.jit`. It is a pair of a bool, which says whether the
        offset is the number 0, and a tuple of the static fields.
        """
        starts_at_zero = isinstance(self.query_offset, int) and self.query_offset == 0
        parts = {name: getattr(self, name) for name in _ARRAYS}
        if starts_at_zero:
            # The offset 0 is not a leaf, because a leaf would be traced. Kernels would then no
            # longer know that the offset is 0.
            parts["query_offset"] = None
        keyed = [(GetAttrKey(name), part) for name, part in parts.items()]
        return keyed, (starts_at_zero, tuple(getattr(self, name) for name in _STATIC))

    @classmethod
    def tree_unflatten(
        cls, static: tuple[bool, tuple[object, ...]], parts: Sequence[PyTree]
    ) -> Mask:
        """Creates a mask from the results of `tree_flatten_with_keys`."""
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
        """Returns the mask of rows that contain one example each, followed by padding.

        Args:
          keys: ``[b]`` integers or ``[b, k]`` bool. Integers are the numbers of real keys, and all
            later keys are padding. A bool array is True for real keys.
          queries: ``[b]`` integers or ``[b, q]`` bool, which mark the real queries. None means that
            the queries are the same tokens as the keys, as in self-attention.
          causal: whether a query may attend only to keys up to its own position.
          **fields: further fields of `Mask`.
        """

        def kind(x: jax.Array) -> str:
            """Returns "lengths" for an array with one axis, and "valid" for any other array."""
            return "lengths" if jnp.ndim(x) == 1 else "valid"

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
        """Returns the mask of rows that contain several examples.

        Args:
          keys: ``[b, k]``, the segment number of each key. Segments are numbered 1, 2, … in the
            order of the row, and padding has the number 0.
          queries: ``[b, q]``, the segment number of each query. None means that the queries are the
            same tokens as the keys, as in self-attention.
          causal: whether a query may attend only to keys up to its own position.
          segments: an upper bound on the number of segments in a row.
          segment_length: an upper bound on the length of a segment.
          **fields: further fields of `Mask`.
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
        """Converts the argument `mask` of a layer to a `Mask`.

        Args:
          mask: a `Mask`, None or an array. A `Mask` is returned unchanged, and None allows all
            pairs. An array follows Flax's convention: its shape is
            ``[batch or 1, heads or 1, q or 1, k]`` or ``[q, k]``, and it is True or 1 if the query
            may attend to the key. An array does not say which queries are padding. Models interpret
            an array with two axes differently, as ``[batch, keys]``; see
            `models.token_model.token_mask`.

        Raises:
          ValueError: if an array has a different number of axes, or has floating-point numbers
            other than 0 and 1.
          TypeError: if the mask has any other type.
        """
        if mask is None or isinstance(mask, Mask):
            return cls() if mask is None else mask
        if not isinstance(mask, jax.Array | np.ndarray):
            raise TypeError(
                f"attention: the mask is of type {type(mask).__name__}, but it must be a Mask, or "
                "an array that is nonzero where a query may attend to a key."
            )
        if mask.ndim not in (2, 4):
            raise ValueError(
                f"attention: the mask has shape {mask.shape}, but it must be [batch or 1, heads or "
                "1, q, k] or [q, k]. If it is [batch, q, k], add an axis of heads. If it only "
                "hides padding, use Mask.padded."
            )
        mask = as_bool(mask)
        allowed = mask[None, None] if mask.ndim == 2 else mask

        # An array that only masks keys is stored in `key_valid`, because more routes support
        # `key_valid` than `allowed`. All queries are real, so `query_valid` has a single entry,
        # True, which applies to all queries. Without `query_valid`, `for_self_attention` would
        # treat masked keys as padding queries.
        if allowed.shape[1] == allowed.shape[2] == 1:
            return cls(key_valid=allowed[:, 0, 0], query_valid=jnp.ones((1, 1), bool))
        return cls(allowed=allowed)

    def for_self_attention(self) -> Mask:
        """Returns the mask for self-attention, where the queries and the keys are the same tokens.

        The padding and the segments of the keys also apply to the queries.

        Raises:
          ValueError: if the queries have an offset.
        """
        segments = self.query_segments if self.key_segments is None else self.key_segments
        if self.self_attention:
            return dataclasses.replace(self, query_segments=segments)
        if not isinstance(self.query_offset, int) or self.query_offset != 0:
            raise ValueError(
                f"Mask.query_offset is {self.query_offset}, but in self-attention the queries are "
                "the keys and have no offset. Leave it out, or decode with a cache."
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
        """Applies a function to all arrays of the mask except the offset, and returns the new mask.

        Args:
          function: a function that takes the name of a field and its array, and returns the new
            array.
        """
        arrays = {name: getattr(self, name) for name in _ARRAYS if name != "query_offset"}
        changed: dict[str, Any] = {
            name: function(name, x) for name, x in arrays.items() if x is not None
        }
        return dataclasses.replace(self, **changed)

    def broadcast_to(self, *, batch: int, heads: int, q_length: int, k_length: int) -> Mask:
        """Returns the mask with all arrays broadcast to their full shapes, and with bool patterns.

        Args:
          batch: the number of examples.
          heads: the number of heads.
          q_length: the number of queries.
          k_length: the number of keys.

        Raises:
          ValueError: if an array has a wrong shape or dtype, or if the fields are incomplete or
            incompatible.
        """
        if (self.query_segments is None) != (self.key_segments is None):
            raise ValueError(
                "attend: the Mask has only one of query_segments and key_segments. Set both, or "
                "use Mask.packed."
            )
        if self.query_segments is not None and self.prefix_lengths is not None:
            raise ValueError(
                "attend: Mask.prefix_lengths cannot be used with packed rows, because it counts "
                "from the start of a row and not of each example. Use Mask.allowed instead."
            )
        offset = self.query_offset
        if self.query_segments is not None and isinstance(offset, int) and offset != 0:
            raise ValueError(
                f"attend: Mask.query_offset is {offset}, but it must be 0 for packed rows, because "
                "positions start again in every segment. Leave it out."
            )
        if self.self_attention and q_length != k_length:
            raise ValueError(
                f"attend: the mask was made for self-attention, but there are {q_length} queries "
                f"and {k_length} keys. {CROSS_ATTENTION}"
            )
        sizes = {"batch": batch, "heads": heads, "q": q_length, "k": k_length}
        return self.map_arrays(lambda name, x: _broadcast(name, x, sizes))

    def keys(self, k_length: int) -> jax.Array | None:
        """Returns a bool array ``[b, k]`` that marks the real keys, or None if all are real."""
        return _real(k_length, self.key_lengths, self.key_valid, segments=self.key_segments)

    def queries(self, q_length: int) -> jax.Array | None:
        """Returns a bool array ``[b, q]`` that marks the real queries, or None if all are real."""
        return _real(q_length, self.query_lengths, self.query_valid, segments=self.query_segments)

    def clearing_masks(
        self, q_length: int, k_length: int
    ) -> tuple[jax.Array | None, jax.Array | None]:
        """Returns the masks of real queries and real keys that `clear_padding` takes.

        The masks are bool, ``[b, q]`` and ``[b, k]``. A mask is None if there is no padding to set
        to zero. The mask of keys is also None if `cleared_keys` is True, because the padding keys
        have already been set to zero.
        """
        return self.queries(q_length), None if self.cleared_keys else self.keys(k_length)

    @property
    def counts_in_segments(self) -> bool:
        """Whether the band has to compare positions inside of segments.

        In packed self-attention, a distance inside of a segment equals the distance in the row. The
        band can then compare positions in the row.
        """
        return self.query_segments is not None and not self.self_attention

    def segment_lengths(self, q_length: int, k_length: int) -> tuple[int, int]:
        """Returns the largest number of queries and of keys that a segment can have."""
        longest = self.segment_length or max(q_length, k_length)
        return min(longest, q_length), min(longest, k_length)

    @property
    def band(self) -> tuple[int | None, int | None]:
        """The numbers of keys that a query may attend to before and after its own position.

        The band combines `causal` and `window`. A number is None if the band has no limit on that
        side. If the mask is causal, the number of keys after the query is 0 or negative.
        """
        window = self.window
        if not isinstance(window, tuple):
            window = (None if window is None else window - 1), None
        before, after = window
        if self.causal:
            after = 0 if after is None else min(after, 0)

        def limit(n: int | None) -> int | None:
            """Limits a number of keys, so that it can be added to a position without an overflow.

            The limit does not change the mask, because no two positions are farther apart than
            `_FAR`.
            """
            return None if n is None else max(-_FAR, min(n, _FAR))

        return limit(before), limit(after)

    @property
    def has_band(self) -> bool:
        """Whether `causal` or `window` may hide a key."""
        return self.band != (None, None)

    @property
    def packed_positions(self) -> tuple[jax.Array, jax.Array] | None:
        """The positions of queries and keys in their segments, int32 ``[b, q]`` and ``[b, k]``.

        The positions are None if rows are not packed.
        """
        if self.query_segments is None or self.key_segments is None:
            return None
        return segment_positions(self.query_segments), segment_positions(self.key_segments)

    def band_pairs(self, q_length: int, k_length: int) -> jax.Array | None:
        """Returns a bool array ``[q, k]`` that marks the pairs in the band, or None without a band.

        In packed cross-attention, the result has the shape ``[b, 1, q, k]``, because the segments
        of queries and keys start at different positions of the rows.
        """
        query = jnp.arange(q_length)[:, None] + self.query_offset
        key = jnp.arange(k_length)[None, :]
        positions = self.packed_positions if self.counts_in_segments else None
        if positions is not None:
            query = positions[0][:, None, :, None]  # [b, 1, q, 1]
            key = positions[1][:, None, None, :]  # [b, 1, 1, k]
        return _all(*self.band_rules(query, key))

    def band_rules(self, query: jax.Array, key: jax.Array) -> list[jax.Array]:
        """Returns one bool array of allowed pairs for each side on which the band has a limit.

        Args:
          query: positions of queries.
          key: positions of keys, in a shape that can be broadcast with the shape of `query`.
        """
        before, after = self.band
        rules = [] if before is None else [key >= query - before]
        return rules if after is None else [*rules, key <= query + after]

    def prefix(self, k_length: int) -> jax.Array | None:
        """Returns a bool array ``[b, k]`` of the keys in the prefix, or None without a prefix."""
        return None if self.prefix_lengths is None else _before(self.prefix_lengths, k_length)

    def take_heads(self, start: int, count: int) -> Mask:
        """Returns the mask of the heads from `start` to ``start + count - 1``."""
        if self.allowed is None or self.allowed.shape[1] == 1:
            return self
        return dataclasses.replace(self, allowed=self.allowed[:, start : start + count])

    def slice_keys(self, start: int | jax.Array | np.integer, length: int) -> Mask:
        """Returns the mask for the `length` keys that begin at position `start`.

        `start` may be negative. Keys at negative positions are padding.

        Raises:
          ValueError: if rows are packed, or if the mask has a pattern of pairs.
        """
        if self.key_segments is not None or self.allowed is not None:
            raise ValueError("Mask.slice_keys does not support packed rows or Mask.allowed.")
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
        """Returns a bool array that marks the pairs of a query and a key that the mask allows.

        The array has the shape ``[b or 1, h or 1, q or 1, k or 1]``. The rows of padding queries
        are False. The result is None if every query may attend to every key.
        """
        keys = self.keys(k_length)
        queries = self.queries(q_length)
        band = self.band_pairs(q_length, k_length)
        prefix = self.prefix(k_length)
        if band is not None and prefix is not None:
            # The prefix adds pairs to the band. All other parts of the mask only remove pairs.
            band = operator.or_(*_equal_ranks(band, prefix[..., None, None, :]))
        parts = [
            band,
            None if keys is None else keys[..., None, None, :],
            None if queries is None else queries[..., None, :, None],
            None if self.allowed is None else self.allowed.astype(bool),
        ]
        if self.query_segments is not None and self.key_segments is not None:
            same = self.query_segments[..., :, None] == self.key_segments[..., None, :]
            parts.append(same[..., None, :, :])  # [b, 1, q, k]
        pairs = _all(*parts)
        return None if pairs is None else pairs.reshape((1,) * (4 - pairs.ndim) + pairs.shape)


MaskLike: TypeAlias = Mask | jax.Array | np.ndarray | None
"""The types of masks that layers and models take.

Layers interpret an array with two axes as ``[q, k]``; see `Mask.of`. Models interpret an array with
two axes as ``[batch, keys]``; see `models.token_model.token_mask`.
"""


def is_concrete(x: ArrayLike | None) -> bool:
    """Returns whether the values of an array can be read during tracing.

    The values cannot be read if the array is traced, or if parts of the array are on devices of
    other processes.
    """
    if isinstance(x, jax.core.Tracer):
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def as_bool(mask: jax.Array | np.ndarray) -> jax.Array:
    """Converts a mask of numbers to bool, where nonzero numbers become True.

    Raises:
      ValueError: if a floating-point number is neither 0 nor 1. Traced arrays cannot be checked.
    """
    if jnp.issubdtype(mask.dtype, jnp.floating) and is_concrete(mask):
        values = np.asarray(mask)
        others = values[(values != 0) & (values != 1)]
        if others.size:
            raise ValueError(
                f"attention: the mask contains {others[0]}, but a floating-point mask must be 1 "
                "where a query may attend to a key and 0 elsewhere. If the mask is meant to be "
                "added to the logits, pass mask == 0 instead."
            )
    return jnp.asarray(mask).astype(bool)


def add_pattern(
    mask: Mask, pattern: jax.Array, *, batch: int, q_length: int, k_length: int
) -> Mask:
    """Adds a pattern of allowed pairs to a mask, in the smallest field that can hold the pattern.

    A pattern of keys becomes `key_valid`, a pattern of queries becomes `query_valid`, and any other
    pattern becomes `allowed`.

    Args:
      mask: a mask without `key_valid`, `query_valid` and `allowed`.
      pattern: ``[b or 1, h or 1, q or 1, k or 1]`` bool.
      batch: the number of examples.
      q_length: the number of queries.
      k_length: the number of keys.
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
    """Returns the position of each token in its packed segment.

    Positions start at 0 again wherever the segment number changes.

    Args:
      segments: segment numbers, ``[..., n]``.

    Returns:
      Positions, int32 ``[..., n]``.
    """
    index = jax.lax.broadcasted_iota(jnp.int32, segments.shape, segments.ndim - 1)

    # A token is the first of its segment if its segment number differs from the number of the
    # previous token.
    new = jnp.diff(segments, axis=-1, prepend=segments[..., :1]) != 0

    # `start` is the index of the first token of each token's segment, [..., n].
    start = jax.lax.cummax(jnp.where(new, index, 0), axis=segments.ndim - 1)
    return index - start


_AXES = {
    "key_valid": ("batch", "k"),
    "query_valid": ("batch", "q"),
    "key_segments": ("batch", "k"),
    "query_segments": ("batch", "q"),
    "allowed": ("batch", "heads", "q", "k"),
}
"""The axes of the arrays of a mask.

Arrays that are not listed here are lengths, which have only an axis of examples.
"""


def _broadcast(name: str, x: ArrayLike, sizes: dict[str, int]) -> jax.Array:
    """Returns an array of a mask in its full shape; see `Mask.broadcast_to`.

    Args:
      name: the name of the field.
      x: the array of the field.
      sizes: the sizes of the axes "batch", "heads", "q" and "k".

    Raises:
      ValueError: if the array has the wrong shape or dtype.
    """
    x = jnp.asarray(x)
    axes = _AXES.get(name, ("batch",))
    shape = tuple(sizes[axis] for axis in axes)
    # `shared` contains the names of the axes that may have size 1. The single entry of such an axis
    # applies to all positions along the full axis.
    shared = {"batch", "heads", "q"} if name in ("allowed", "query_valid") else {"batch"}
    fits = x.ndim == len(axes) and all(
        n == size or (n == 1 and axis in shared)
        for n, size, axis in zip(x.shape, shape, axes, strict=True)
    )
    if not fits:
        expected = ", ".join(
            f"{size} or 1" if axis in shared and size != 1 else str(size)
            for axis, size in zip(axes, shape, strict=True)
        )
        raise ValueError(
            f"attend: Mask.{name} has shape {x.shape}, but it must be [{', '.join(axes)}], which "
            f"is [{expected}] here."
        )
    if name.endswith(("lengths", "segments")):
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"attend: Mask.{name} has dtype {x.dtype}, but it must be integer.")
        return jnp.broadcast_to(x, shape)

    x = as_bool(x)
    if name == "allowed":
        # If the axis of examples or heads has size 1, it is not broadcast, because the full pattern
        # would be large.
        shape = (*x.shape[:2], *shape[2:])
    return jnp.broadcast_to(x, shape)


def zero_padding(x: jax.Array, real: jax.Array | None) -> jax.Array:
    """Returns an array ``[b, n, ...]`` with zeros for padding.

    Args:
      x: the array.
      real: a bool array ``[b, n]`` that marks the real entries. None returns the array unchanged.
    """
    return x if real is None else _zero_padding(x, real)


@functools.partial(jax.checkpoint, prevent_cse=False)
def _zero_padding(x: jax.Array, real: jax.Array) -> jax.Array:
    """Sets padding to zero.

    With `jax.checkpoint`, only the mask ``[b, n]`` is saved for the backward pass, and not an array
    with all axes of `x`.
    """
    return jnp.where(real.reshape(*real.shape, *(1,) * (x.ndim - real.ndim)), x, 0)


_STATIC = tuple(f.name for f in dataclasses.fields(Mask) if f.metadata.get("static"))
_ARRAYS = tuple(f.name for f in dataclasses.fields(Mask) if f.name not in _STATIC)


def _real(
    length: int, lengths: jax.Array | None, valid: jax.Array | None, *, segments: jax.Array | None
) -> jax.Array | None:
    """Returns a bool array of the real positions, or None if all three arrays are None."""
    return _all(
        None if lengths is None else _before(lengths, length),
        None if valid is None else _for_all(valid.astype(bool), length),
        None if segments is None else segments > 0,
    )


def _for_all(valid: jax.Array, length: int) -> jax.Array:
    """Returns a bool array of the real positions, ``[..., length]``.

    If `valid` has a single entry, the entry applies to all positions.
    """
    if valid.shape[-1] != 1:
        return valid
    return jnp.broadcast_to(valid, (*valid.shape[:-1], length))


def _before(lengths: jax.Array, n: int) -> jax.Array:
    """Returns a bool array that marks the positions that are smaller than each length.

    Args:
      lengths: ``[...]`` integers.
      n: the number of positions.

    Returns:
      A bool array ``[..., n]``.
    """
    lengths = jnp.asarray(lengths, int)
    position = jax.lax.broadcasted_iota(lengths.dtype, (*lengths.shape, n), lengths.ndim)
    return position < lengths[..., None]


def _equal_ranks(*parts: jax.Array) -> list[jax.Array]:
    """Adds leading axes of size 1, so that all arrays have the same number of axes."""
    rank = max((part.ndim for part in parts), default=0)
    return [part.reshape((1,) * (rank - part.ndim) + part.shape) for part in parts]


def _all(*parts: jax.Array | None) -> jax.Array | None:
    """Returns the logical and of bool arrays. A part that is None counts as True."""
    given = _equal_ranks(*(part for part in parts if part is not None))
    return functools.reduce(operator.and_, given) if given else None
