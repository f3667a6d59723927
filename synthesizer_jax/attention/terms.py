"""Terms: what attention logits, or weights, are made of, and their algebra.

Legend: b batch, q/k query and key position, h heads, e per-head width, r rank, w window.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Span:
    """A run of in-sequence positions.

    Attributes:
      start: the first position; an int, or a traced scalar in a decoding loop.
      length: how many positions.
    """

    start: int | jax.Array
    length: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Static:
    """Logits that are the same for every example: Random, Fixed Random.

    Attributes:
      logits: ``[h, q, k]``.
    """

    logits: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Relative:
    """Logits that depend on ``key - query`` only: T5's relative bias, ALiBi, log-Gaussian.

    Attributes:
      logits: ``[h, n]``; column j belongs to ``key - query = j + first``.
      first: the distance of the first column.
    """

    logits: jax.Array
    first: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRank:
    """A product over a rank, ``logits[b, h, q, k] = Σ_r queries[b, q, h, r] · keys[b, k, h, r]``.

    A dot product of any width; Dense Synthesizer (keys are parameters); Factorized Random
    Synthesizer (both are parameters).

    Attributes:
      queries: ``[b or 1, q, h, r]``.
      keys: ``[b or 1, k, h, r]``.
      token_keys: whether the keys are made from tokens, and so cached while decoding; otherwise
        they are parameters, looked up by position.
      token_queries: likewise for the queries.
    """

    queries: jax.Array
    keys: jax.Array
    token_keys: bool = dataclasses.field(metadata={"static": True})
    token_queries: bool = dataclasses.field(default=True, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outer:
    """An outer product per query, ``logits[b, h, q, p·B + r] = a[b, q, h, p] b[b, q, h, r]``.

    Factorized Dense Synthesizer.

    Attributes:
      a: ``[b, q, h, A]``, one number for every B neighbouring keys.
      b: ``[b, q, h, B]``, repeated A times; ``A · B >= k``.
    """

    a: jax.Array
    b: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Banded:
    """Attention *weights*, not logits, of a window of keys around every query; no softmax.

    Hard-coded Gaussian attention, lightweight and dynamic convolution. It stands alone: weights do
    not add to logits.

    Attributes:
      weights: ``[b or 1, q or 1, h, w]``.
      first: ``key - query`` of the first tap.
      starts: ``[q]`` the key of each query's first tap, in place of `first`: hard-coded
        cross-attention, whose centre moves at another rate than the query.
      normalise: divide by the sum over the keys that are seen; otherwise what lies outside of the
        row or is masked just does not count.
    """

    weights: jax.Array
    first: int = dataclasses.field(metadata={"static": True})
    starts: jax.Array | None = None
    normalise: bool = dataclasses.field(default=False, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Split:
    """Heads divided among sums of terms, in their order: some Gaussian, some learned.

    Attributes:
      groups: the terms of every group of heads.
    """

    groups: tuple[tuple[Any, ...], ...]

    @property
    def heads(self) -> tuple[int, ...]:
        """The number of heads of every group."""
        return tuple(heads_of(terms[0]) for terms in self.groups)


Logits: TypeAlias = Static | Relative | LowRank | Outer
Term: TypeAlias = Logits | Banded | Split
Terms: TypeAlias = tuple[Term, ...]

TERMS = (Static, Relative, LowRank, Outer, Banded, Split)
"""The classes of terms."""


def static(logits: jax.Array) -> Static:
    """A checked `Static` from logits ``[h, q, k]``; raises `ValueError` for other ranks."""
    _check_rank("static: logits", logits, "[heads, q, k]", 3)
    return Static(logits)


def relative(logits: jax.Array, *, first: int) -> Relative:
    """A checked `Relative` from logits ``[h, n]`` whose first column is ``key - query = first``."""
    _check_rank("relative: logits", logits, "[heads, distances]", 2)
    return Relative(logits, operator.index(first))


def low_rank(
    queries: jax.Array, keys: jax.Array, *, token_keys: bool, token_queries: bool = True
) -> LowRank:
    """A checked `LowRank` from queries ``[b or 1, q, h, r]`` and keys ``[b or 1, k, h, r]``.

    Raises:
      ValueError: for other shapes, or parameters with a batch axis longer than one.
    """
    _check_rank("low_rank: queries", queries, "[batch or 1, q, heads, r]", 4)
    _check_rank("low_rank: keys", keys, "[batch or 1, k, heads, r]", 4)
    if queries.shape[2:] != keys.shape[2:]:
        raise ValueError(
            f"low_rank: queries have [heads, r]={queries.shape[2:]} but keys {keys.shape[2:]}; "
            "both must be equal"
        )
    for name, x, tokens in (("queries", queries, token_queries), ("keys", keys, token_keys)):
        if not tokens and x.shape[0] != 1:
            raise ValueError(
                f"low_rank: {name} that are not made from tokens need a batch axis of 1, not "
                f"{x.shape[0]}"
            )
    return LowRank(queries, keys, token_keys, token_queries)


def outer(a: jax.Array, b: jax.Array) -> Outer:
    """A checked `Outer` from ``a [b, q, h, A]`` and ``b [b, q, h, B]``."""
    _check_rank("outer: a", a, "[batch, q, heads, A]", 4)
    _check_rank("outer: b", b, "[batch, q, heads, B]", 4)
    if a.shape[:3] != b.shape[:3]:
        raise ValueError(
            f"outer: a has [batch, q, heads]={a.shape[:3]} but b {b.shape[:3]}; both must be equal"
        )
    return Outer(a, b)


def banded(
    weights: jax.Array,
    *,
    first: int = 0,
    starts: jax.Array | None = None,
    normalise: bool = False,
) -> Banded:
    """A checked `Banded` from weights ``[b or 1, q or 1, h, w]``; see there for the others."""
    _check_rank("banded: weights", weights, "[batch or 1, q or 1, heads, window]", 4)
    if starts is not None:
        _check_rank("banded: starts", starts, "[q]", 1)
    return Banded(weights, operator.index(first), starts, normalise)


def heads_of(term: Term) -> int:
    """The number of heads of a term."""
    match term:
        case Static(logits) | Relative(logits):
            return logits.shape[0]
        case LowRank(x) | Outer(x) | Banded(x):
            return x.shape[2]
        case Split():
            return sum(term.heads)


def add(*terms: Term) -> Terms:
    """The sum of terms: all `Static` become one, all `Relative` one, the others stay apart.

    What is added to a `Split` goes to its groups that are logits; weights have no softmax to go
    into.

    Raises:
      ValueError: for weights (`Banded`) beside other terms, or two `Split`.
    """
    split = next((t for t in terms if isinstance(t, Split)), None)
    if split is not None and len(terms) > 1:
        return (_add_to_split(split, tuple(t for t in terms if t is not split)),)
    if len(terms) > 1 and any(isinstance(t, Banded) for t in terms):
        names = ", ".join(type(t).__name__ for t in terms)
        raise ValueError(
            f"{names} do not add up: Banded terms are weights, not logits. Put the log-Gaussian into "
            "the softmax (GaussianBias), give some heads to each (PerHead), or add up the outputs "
            "of two layers; without other parts, drop the position bias"
        )
    statics = [t.logits for t in terms if isinstance(t, Static)]
    relatives = [t for t in terms if isinstance(t, Relative)]
    rest: Terms = tuple(t for t in terms if not isinstance(t, Static | Relative))
    if statics:
        rest += (Static(functools.reduce(operator.add, statics)),)
    if relatives:
        rest += (functools.reduce(_add_relative, relatives),)
    return rest


def scale(terms: Terms, factor: jax.Array) -> Terms:
    """The terms multiplied by a factor per head.

    The product is formed in float32 and rounded once, so that in bfloat16 the gradient of a
    mixture's weights stays good to a few parts in a thousand.

    Args:
      terms: any terms.
      factor: ``[h]`` or a scalar.
    """

    def times(x: jax.Array, axes: int) -> jax.Array:
        """`x` times the factor, where `axes` axes follow that of the heads."""
        shaped = jnp.reshape(factor, jnp.shape(factor) + (1,) * axes)
        return (x.astype(wide(x)) * shaped).astype(x.dtype)

    def one(term: Term) -> Term:
        match term:
            case Banded() | Split():
                raise ValueError(
                    f"{type(term).__name__} cannot be part of a mixture: it is not made of logits "
                    "alone; use GaussianBias inside the softmax, PerHead around both, or add up the "
                    "outputs of two layers"
                )
            case Static(logits):
                return Static(times(logits, 2))
            case Relative(logits):
                return dataclasses.replace(term, logits=times(logits, 1))
            case LowRank(queries):
                return dataclasses.replace(term, queries=times(queries, 1))
            case Outer(a):
                return dataclasses.replace(term, a=times(a, 1))

    return tuple(one(t) for t in terms)


def materialise(
    terms: Terms, *, q_length: int, k_length: int, query_offset: int | jax.Array = 0
) -> jax.Array:
    """The logits as one array.

    Args:
      terms: at least one term.
      q_length: number of queries.
      k_length: number of keys.
      query_offset: position of the first query, counted from the first key; `Relative` needs it.

    Returns:
      ``[b or 1, h, q, k]``, float32 or wider.
    """

    def one(term: Term) -> jax.Array:
        match term:
            case Banded() | Split():
                raise ValueError(
                    f"{type(term).__name__} is not made of logits alone, which is asked for here "
                    "(talking heads exchange logits); use GaussianBias, or plain Attention"
                )
            case Static(logits):
                return logits.astype(wide(logits))[None]
            case Relative():
                return spread(diagonals(term, q_length, k_length, query_offset), q_length)[None]
            case LowRank(queries, keys):
                dtype = wide(queries, keys)
                return jnp.einsum("bqhr,bkhr->bhqk", queries, keys, preferred_element_type=dtype)
            case Outer(a, b):
                product = a.astype(wide(a))[..., :, None] * b.astype(wide(b))[..., None, :]
                product = product.reshape(*a.shape[:3], -1)[..., :k_length]
                return product.transpose(0, 2, 1, 3)

    return functools.reduce(operator.add, (one(t) for t in terms))


def diagonals(
    term: Relative, q_length: int, k_length: int, query_offset: int | jax.Array = 0
) -> jax.Array:
    """The columns of a `Relative` that a block of logits needs, ``[h, q + k - 1]``, float32.

    Where a traced `query_offset` leads beyond the term, they are NaN.

    Raises:
      ValueError: if the term does not reach from the last query to the first key, or from the
        first query to the last key.
    """
    needed = q_length + k_length - 1
    start = 1 - q_length - query_offset - term.first
    logits = term.logits.astype(wide(term.logits))
    if not isinstance(start, int):
        fits = (start >= 0) & (start + needed <= logits.shape[1])
        if needed > logits.shape[1]:
            return jnp.full((logits.shape[0], needed), jnp.nan, logits.dtype)
        columns = jax.lax.dynamic_slice_in_dim(logits, start, needed, axis=1)
        return jnp.where(fits, columns, jnp.nan)
    if start < 0 or start + needed > logits.shape[1]:
        first = start + term.first
        raise ValueError(
            f"relative: logits cover key - query from {term.first} to "
            f"{term.first + logits.shape[1] - 1}, but the block needs {first} to "
            f"{first + needed - 1}; give a column for each"
        )
    return jax.lax.slice_in_dim(logits, start, start + needed, axis=1)


def spread(columns: jax.Array, q_length: int) -> jax.Array:
    """Spreads diagonals ``[..., q + k - 1]`` to a block ``[..., q, k]``, as a reshape.

    ``block[i, j] = columns[q - 1 + j - i]``; the transpose of this function sums a block along its
    diagonals.
    """
    *lead, n = columns.shape
    rows = jnp.broadcast_to(columns[..., None, :], (*lead, q_length, n))
    flat = rows.reshape(*lead, q_length * n)
    flat = jnp.pad(flat, [(0, 0)] * len(lead) + [(0, q_length)])
    skewed = flat.reshape(*lead, q_length, n + 1)[..., : n + 1 - q_length]
    return skewed[..., ::-1, :]


def wide(*arrays: jax.Array) -> jnp.dtype:
    """The dtype of logits made from these arrays: float32, or theirs if that is wider."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def take_heads(term: Term, start: int, count: int) -> Term:
    """The term of some neighbouring heads."""
    axis = {Static: 0, Relative: 0}.get(type(term), 2)

    def cut(x: jax.Array) -> jax.Array:
        return jax.lax.slice_in_dim(x, start, start + count, axis=axis)

    if isinstance(term, Banded):
        return dataclasses.replace(term, weights=cut(term.weights))
    return jax.tree.map(cut, term)


def _add_to_split(split: Split, others: Terms) -> Split:
    if any(isinstance(t, Split | Banded) for t in others):
        raise ValueError("Split adds up with logits only; put everything into one PerHead")
    groups, start = [], 0
    for terms, count in zip(split.groups, split.heads, strict=True):
        if not isinstance(terms[0], Banded):
            terms = add(*terms, *(take_heads(t, start, count) for t in others))
        groups.append(terms)
        start += count
    return Split(tuple(groups))


def _add_relative(x: Relative, y: Relative) -> Relative:
    """The sum over the distances that both cover."""
    first = max(x.first, y.first)
    end = min(t.first + t.logits.shape[1] for t in (x, y))
    x_logits, y_logits = (t.logits[:, first - t.first : end - t.first] for t in (x, y))
    return Relative(x_logits + y_logits, first)


def _check_rank(name: str, x: jax.Array, shape: str, rank: int) -> None:
    if x.ndim != rank:
        raise ValueError(f"{name} has shape {x.shape}; it must be {shape}")
