"""The interface of a term: what attention logits, or weights, are made of.

Legend: b batch, q/k query and key position, h heads, e per-head width, r rank, w window.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Self, TypeAlias

import jax
import jax.numpy as jnp

from synthesizer_jax.attention.masks import Mask

Axes: TypeAlias = tuple[str | None, ...]
"""What the axes of a term's array are: ``"b"``, ``"q"``, ``"k"``, ``"h"``, or None for others."""


@dataclasses.dataclass(frozen=True)
class Span:
    """A run of in-sequence positions.

    Attributes:
      start: the first position; an int, or a traced scalar in a decoding loop.
      length: number of positions.
      limit: all positions of a decoding loop are below; None: unknown.
    """

    start: int | jax.Array
    length: int
    limit: int | None = None


def logits_dtype(*arrays: jax.Array) -> jnp.dtype:
    """Returns the dtype of logits made from these arrays: float32, or theirs if that is wider."""
    is_double = any(x.dtype == jnp.float64 for x in arrays)
    return jnp.dtype(jnp.float64 if is_double else jnp.float32)


@dataclasses.dataclass(frozen=True)
class Term(abc.ABC):
    """A summand of the attention logits of all heads, stored without an array of every logit.

    A subclass is a frozen dataclass, registered as a pytree, whose fields declare their axes, as in
    ``logits: Annotated[jax.Array, "h", "q", "k"]``. From these follows how a term is divided over
    devices, sliced by heads, unpacked and cached; if that is not true of a term, it overrides the
    method. `materialize` alone must be written. The reference route computes every term; the other
    routes tell which terms they take.

    Attributes:
      is_weights: the term is attention weights, with which no softmax is computed.
      stands_alone: the term cannot be added to others by `terms.add`.
      linear: the field in which the logits are linear, by which `scale` multiplies them; None: none.
    """

    is_weights: ClassVar[bool] = False
    stands_alone: ClassVar[bool] = False
    linear: ClassVar[str | None] = None

    @abc.abstractmethod
    def materialize(
        self, *, q_length: int, k_length: int, query_offset: int | jax.Array
    ) -> jax.Array:
        """Returns the logits ``[b or 1, h, q, k]``, float32 or wider.

        Args:
          q_length: number of queries.
          k_length: number of keys.
          query_offset: position of the first query, counted from the first key.
        """

    @property
    def num_heads(self) -> int:
        """The number of heads."""
        return next(x.shape[axes.index("h")] for _, x, axes in self.arrays() if "h" in axes)

    @property
    def batch(self) -> int:
        """The number of examples; 1 if all examples have the same logits."""
        return max([1, *(x.shape[axes.index("b")] for _, x, axes in self.arrays() if "b" in axes)])

    @property
    def lengths(self) -> tuple[int | None, int | None]:
        """The numbers of queries and keys; None: the term does not tell."""
        q, k = (
            next((x.shape[axes.index(a)] for _, x, axes in self.arrays() if a in axes), None)
            for a in ("q", "k")
        )
        return q, k

    @property
    def num_keys_reached(self) -> int | None:
        """The number of keys that have logits; None: all."""
        return None

    def arrays(self) -> Iterator[tuple[str, jax.Array, Axes]]:
        """Yields name, array and axes of every field that is an array."""
        for name, axes in _declared_axes(type(self)).items():
            x = getattr(self, name)
            if x is not None:
                yield name, x, axes

    def map_arrays(self, function: Callable[[str, jax.Array, Axes], Any]) -> Self:
        """Returns the term with every array replaced by ``function(name, array, axes)``."""
        changed = {name: function(name, x, axes) for name, x, axes in self.arrays()}
        return dataclasses.replace(self, **changed)

    def depends_on_tokens(self, name: str) -> bool:
        """Whether an array is made of tokens; otherwise it is looked up by position."""
        return any(n == name and "b" in axes and x.shape[0] > 1 for n, x, axes in self.arrays())

    @property
    def is_made_of_parameters(self) -> bool:
        """Whether no array is made of tokens, so that all examples have the same logits."""
        return not any(self.depends_on_tokens(name) for name, _, _ in self.arrays())

    def has_absolute_positions(self, mask: Mask) -> tuple[bool, bool]:
        """Whether queries, and keys, are looked up by their position in a segment of a packed row."""
        del mask
        by_query, by_key = (
            any(a in axes and not self.depends_on_tokens(name) for name, _, axes in self.arrays())
            for a in ("q", "k")
        )
        return by_query, by_key

    def scale(self, factor: jax.Array) -> Term:
        """Returns the term with its logits multiplied by a factor ``[h]`` or a scalar.

        The product is formed in float32 and rounded once, so that in bfloat16 the gradient of a
        mixture's weights stays good to a few parts in a thousand.

        Raises:
          ValueError: the term is not linear in one of its arrays.
        """
        if self.linear is None:
            raise ValueError(
                f"{type(self).__name__} cannot be part of a mixture: it is not made of logits "
                "alone; use GaussianBias inside the softmax, PerHead around both, or add up the "
                "outputs of two layers"
            )

        def times(name: str, x: jax.Array, axes: Axes) -> jax.Array:
            if name != self.linear:
                return x
            shaped = jnp.reshape(factor, tuple(-1 if a == "h" else 1 for a in axes))
            return (x.astype(logits_dtype(x)) * shaped).astype(x.dtype)

        return self.map_arrays(times)

    def take_heads(self, start: int, count: int) -> Term:
        """Returns the term of some neighboring heads."""

        def cut(name: str, x: jax.Array, axes: Axes) -> jax.Array:
            del name
            if "h" not in axes:
                return x
            return jax.lax.slice_in_dim(x, start, start + count, axis=axes.index("h"))

        return self.map_arrays(cut)

    def zero_padding(self, clear: Callable[[jax.Array, str], jax.Array]) -> Term:
        """Returns the term with zeros where tokens that are padding made an array.

        Args:
          clear: maps ``[b, n, ...]`` of all queries (``"q"``) or keys (``"k"``) to the cleared array.
        """

        def clear_tokens(name: str, x: jax.Array, axes: Axes) -> jax.Array:
            if not self.depends_on_tokens(name):
                return x
            return clear(x, "q" if "q" in axes else "k")

        return self.map_arrays(clear_tokens)

    def unpack(self, queries: jax.Array, keys: jax.Array) -> Term:
        """Returns the term for rows of one segment each.

        Args:
          queries: where the segments' queries are, ``[b, segments, q]``.
          keys: likewise, ``[b, segments, k]``.
        """

        def take(name: str, x: jax.Array, axes: Axes) -> jax.Array:
            for axis, rows in (("q", queries), ("k", keys)):
                if axis not in axes:
                    continue
                if self.depends_on_tokens(name):
                    x = gather_rows(jnp.broadcast_to(x, (rows.shape[0], *x.shape[1:])), rows)
                else:
                    x = jax.lax.slice_in_dim(x, 0, rows.shape[-1], axis=axes.index(axis))
            return x

        return self.map_arrays(take)

    def cached_arrays(self) -> list[jax.Array]:
        """Returns the arrays ``[b, k, ...]`` that tokens attended to make, which decoding caches."""
        return [x for name, x, _ in self.arrays() if self._is_cached(name)]

    def with_cached_arrays(self, cached: Iterator[jax.Array]) -> Term:
        """Returns the term with the next arrays in the place of its `cached_arrays`."""
        return self.map_arrays(lambda name, x, _: next(cached) if self._is_cached(name) else x)

    def _is_cached(self, name: str) -> bool:
        is_keys = any(n == name and "k" in axes for n, _, axes in self.arrays())
        return is_keys and self.depends_on_tokens(name)


@functools.cache
def _declared_axes(cls: type[Term]) -> dict[str, Axes]:
    """Returns the axes of every field that is annotated as an array with axes."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {
        name: typing.get_args(hint)[1:]
        for name, hint in hints.items()
        if typing.get_origin(hint) is Annotated
    }


def gather_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns the rows ``[b, count, length]`` of ``[b, n, ...]``, as ``[b · count, length, ...]``."""
    picked = jax.vmap(lambda x, i: x[i])(x, rows)
    return picked.reshape(-1, *picked.shape[2:])


def check_rank(name: str, x: jax.Array, shape: str, *, rank: int) -> None:
    """Raises a `ValueError` if an array has another rank than its described shape."""
    if x.ndim != rank:
        raise ValueError(f"{name} has shape {x.shape}; it must be {shape}")
