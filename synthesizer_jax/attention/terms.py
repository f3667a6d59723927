"""Terms: the summands of attention logits, and functions to add, scale and compute them.

All models of this package attend with logits that are a sum of terms. A term stores what it needs
to compute its logits: a table, a row of distances, or the factors of a product. The routes of
`attend` compute from these, mostly without an array of all logits.

The letters in shapes are: b examples of the batch, q queries, k keys, h heads, e width of a head, r
rank, w width of a window. ``[b or 1, ...]`` means that a batch axis of 1 is shared by all examples.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import operator
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from synthesizer_jax.attention.masks import Mask, zero_padding
from synthesizer_jax.base.typing import PyTree

Axes: TypeAlias = tuple[str | None, ...]
"""The meaning of each axis of a term's array.

The names are ``"b"``, ``"q"``, ``"k"`` and ``"h"``. None stands for any other axis.
"""


@dataclasses.dataclass(frozen=True)
class Span:
    """A run of neighboring positions in a sequence.

    Attributes:
      start: the first position. It is an int, or a traced scalar in a decoding loop.
      length: the number of positions.
      limit: an upper bound on the positions of a decoding loop: all of them are smaller. None if it
        is not known.
    """

    start: int | jax.Array
    length: int
    limit: int | None = None


def logits_dtype(*arrays: jax.Array) -> jnp.dtype:
    """Returns the dtype of logits that are made from these arrays.

    It is float32, or float64 if one of the arrays is float64.
    """
    is_double = any(x.dtype == jnp.float64 for x in arrays)
    return jnp.dtype(jnp.float64 if is_double else jnp.float32)


@dataclasses.dataclass(frozen=True)
class Term(abc.ABC):
    """A summand of the attention logits of all heads.

    A subclass is a frozen dataclass that is registered as a pytree. Its fields declare the axes of
    their arrays, as in ``logits: Annotated[jax.Array, "h", "q", "k"]``. These declarations
    determine how a term is divided over devices, sliced by heads, unpacked and cached, so a
    subclass only has to implement `materialize`. The reference route takes every term. The other
    routes decide for themselves which classes they take.

    Attributes:
      is_weights: whether the term is attention weights. No softmax is computed of weights.
      linear: the name of a field in which the logits are linear. `scale` multiplies this field.
        None if there is no such field.
    """

    is_weights: ClassVar[bool] = False
    linear: ClassVar[str | None] = None

    @abc.abstractmethod
    def materialize(self, q_length: int, k_length: int, query_offset: int | jax.Array) -> jax.Array:
        """Returns the logits ``[b or 1, h, q, k]`` in float32 or wider.

        Args:
          q_length: the number of queries.
          k_length: the number of keys.
          query_offset: the position of the first query, where the first key is at position 0.
        """

    @property
    def num_heads(self) -> int:
        """The number of heads."""
        return next(a.x.shape[a.axes.index("h")] for a in self.arrays() if "h" in a.axes)

    @property
    def batch(self) -> int:
        """The number of examples. It is 1 if all examples have the same logits."""
        return max([1, *(a.x.shape[a.axes.index("b")] for a in self.arrays() if "b" in a.axes)])

    @property
    def lengths(self) -> tuple[int | None, int | None]:
        """The numbers of queries and keys. Each is None if the term has no such axis."""
        q, k = (
            next((a.x.shape[a.axes.index(n)] for a in self.arrays() if n in a.axes), None)
            for n in ("q", "k")
        )
        return q, k

    @property
    def num_keys_reached(self) -> int | None:
        """The number of keys for which the term has logits. None stands for all keys."""
        return None

    def arrays(self) -> Iterator[TermArray]:
        """Yields each array of the term, with its name and axes.

        Fields that are None are left out.
        """
        for name, axes in _declared_axes(type(self)).items():
            x = getattr(self, name)
            if x is not None:
                yield TermArray(self, name, x, axes)

    def depends_on_tokens(self, name: str) -> bool:
        """Returns whether an array is computed from tokens. Otherwise it is looked up by position.

        Args:
          name: the name of the array's field.
        """
        # The batch axis of parameters is 1. `!=` rather than `>` because a symbolic size, in
        # `jax.export`, can be compared with 1 but not ordered.
        return any(a.name == name and "b" in a.axes and a.x.shape[0] != 1 for a in self.arrays())

    def has_absolute_positions(self, mask: Mask) -> tuple[bool, bool]:
        """Returns whether queries, and whether keys, are looked up by absolute position.

        In packed rows this is the position in the segment, so such terms need special treatment
        there.

        Args:
          mask: the mask of the call. Some terms depend on whether queries and keys are the same
            tokens.
        """
        by_query, by_key = (
            any(n in a.axes and not a.from_tokens for a in self.arrays()) for n in ("q", "k")
        )
        return by_query, by_key


class TermArray(NamedTuple):
    """An array of a term, with the term, the name of the array's field and its axes."""

    term: Term
    name: str
    x: jax.Array
    axes: Axes

    @property
    def from_tokens(self) -> bool:
        """Whether the array is computed from tokens. Otherwise it is looked up by position."""
        return self.term.depends_on_tokens(self.name)

    @property
    def is_cached(self) -> bool:
        """Whether decoding caches the array: it has an axis of keys and is computed from tokens."""
        return "k" in self.axes and self.from_tokens


Terms: TypeAlias = tuple[Term, ...]
"""Terms whose sum is the attention logits."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of `attend` after its checks, in the form that the routes take.

    Attributes:
      terms: the terms of the logits, for q queries and k keys.
      values: ``[b, k, h, e]``.
      mask: the keys that each query may attend to.
      q_length: the number of queries.
      soft_cap: the bound of the logits; see `cap_logits`. None if there is no bound.
      sinks: ``[h]``, for each head the logit of one more key, whose value is zero. None if there is
        none.
    """

    terms: Terms
    values: jax.Array
    mask: Mask
    q_length: int = dataclasses.field(metadata={"static": True})
    soft_cap: float | None = dataclasses.field(default=None, metadata={"static": True})
    sinks: jax.Array | None = None

    @property
    def k_length(self) -> int:
        """The number of keys."""
        return self.values.shape[1]

    def cleared(self) -> Call:
        """Returns the call with zeros for padding; see `clear_padding`."""
        real = self.mask.uncleared(self.q_length, self.k_length)
        terms, values = clear_padding(self.terms, self.values, *real)
        return dataclasses.replace(self, terms=terms, values=values)


def cap_logits(logits: jax.Array, soft_cap: float | None) -> jax.Array:
    """Returns ``soft_cap · tanh(logits / soft_cap)``, or the logits if `soft_cap` is None.

    The result is between -soft_cap and soft_cap, and close to the logits if they are small.
    """
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


@functools.cache
def _declared_axes(cls: type[Term]) -> dict[str, Axes]:
    """Returns the axes of each field whose annotation declares them."""
    # `Annotated[jax.Array, "h", "q", "k"]` has the arguments (jax.Array, "h", "q", "k").
    hints = typing.get_type_hints(cls, include_extras=True)
    return {
        name: typing.get_args(hint)[1:]
        for name, hint in hints.items()
        if typing.get_origin(hint) is Annotated
    }


def map_arrays(function: Callable[[TermArray], Any], terms: PyTree) -> Any:
    """Returns a pytree of terms in which a function has replaced every array.

    Args:
      function: is called with each `TermArray`, including those in the groups of a `Split`.
      terms: a pytree of terms.
    """

    def map_term(term: Term) -> Term:
        """Returns a term with new arrays."""
        return dataclasses.replace(term, **{a.name: function(a) for a in term.arrays()})

    def is_single_term(x: PyTree) -> bool:
        """Returns whether a node of the pytree is a term that has no groups of terms."""
        return isinstance(x, Term) and not isinstance(x, Split)

    return jax.tree.map(map_term, terms, is_leaf=is_single_term)


def clear_padding(
    terms: PyTree, values: PyTree, queries: jax.Array | None, keys: jax.Array | None
) -> tuple[Any, Any]:
    """Returns terms and values with zeros for padding.

    Padding has no weight, but zero times NaN is NaN. After this function, a NaN or an infinity in
    padding has no effect. Only arrays that are computed from tokens change.

    Args:
      terms: a pytree of terms.
      values: a pytree of arrays ``[b, k, ...]``.
      queries: which queries are real, ``[b, q]``. None if all are.
      keys: which keys are real, ``[b, k]``. None if all are. For terms of a single example without
        a batch axis, `queries` is ``[q]`` and `keys` is ``[k]``.
    """

    def clear(a: TermArray) -> jax.Array:
        """Returns an array with zeros for padding, if it has an entry for each token."""
        real = queries if "q" in a.axes else keys
        if real is None or not a.from_tokens or a.x.shape[: real.ndim] != real.shape:
            return a.x
        return zero_padding(a.x, real)

    return map_arrays(clear, terms), jax.tree.map(lambda x: zero_padding(x, keys), values)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Static(Term):
    """Logits that are the same for all examples.

    The Random and Fixed Random Synthesizers use it.

    Attributes:
      logits: ``[h, q, k]``.
    """

    logits: Annotated[jax.Array, "h", "q", "k"]

    linear = "logits"

    def materialize(self, q_length: int, k_length: int, query_offset: int | jax.Array) -> jax.Array:
        return self.logits.astype(logits_dtype(self.logits))[None]


def static(logits: jax.Array) -> Static:
    """Returns a `Static` term after checking its logits.

    Args:
      logits: ``[h, q, k]``.

    Raises:
      ValueError: if the logits do not have three axes.
    """
    _check_rank("static: logits", logits, "[heads, q, k]", rank=3)
    return Static(logits)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Relative(Term):
    """Logits that depend only on the distance ``key - query``.

    Examples are T5's relative position bias, ALiBi, and the logarithm of a Gaussian.

    Attributes:
      logits: ``[h, n]``. Column j belongs to the distance ``key - query = j + first``.
      first: the distance of the first column.
    """

    logits: Annotated[jax.Array, "h", None]
    first: int = dataclasses.field(metadata={"static": True})

    linear = "logits"

    def has_absolute_positions(self, mask: Mask) -> tuple[bool, bool]:
        # In self-attention, a distance in the row equals the distance in the segment.
        return not mask.self_attention, not mask.self_attention

    def materialize(self, q_length: int, k_length: int, query_offset: int | jax.Array) -> jax.Array:
        cut = cut_diagonals(self, q_length, k_length, query_offset=query_offset)
        return expand_diagonals(cut.logits, q_length)[None]


def relative(logits: jax.Array, *, first: int) -> Relative:
    """Returns a `Relative` term after checking its logits.

    Args:
      logits: ``[h, n]``.
      first: the distance ``key - query`` of the first column.

    Raises:
      ValueError: if the logits do not have two axes.
      TypeError: if `first` is not an integer.
    """
    _check_rank("relative: logits", logits, "[heads, distances]", rank=2)
    is_symbolic = is_symbolic_dim(first)  # in `jax.export`
    return Relative(logits, first if is_symbolic else operator.index(first))


def cut_diagonals(
    term: Relative, q_length: int, k_length: int, *, query_offset: int | jax.Array = 0
) -> Relative:
    """Returns the term with only the columns that a tile of logits needs.

    Query i of the tile is at position ``i + query_offset``, so the distances are
    ``1 - q - query_offset`` to ``k - 1 - query_offset``. The result is relative to the tile: its
    first column is ``key - query = 1 - q``, where both are counted from 0 in the tile.

    Args:
      term: the term.
      q_length: the number of queries of the tile.
      k_length: the number of keys of the tile.
      query_offset: the position of the first query. It may be traced.

    Returns:
      A term with logits ``[h, q + k - 1]``, in float32 or wider. All are NaN if a traced
      `query_offset` needs a distance that the term does not cover, because an error cannot be
      raised then.

    Raises:
      ValueError: if the term does not cover all distances between the last query and the first key,
        and between the first query and the last key.
    """
    needed = q_length + k_length - 1
    start = 1 - q_length - query_offset - term.first
    logits = term.logits.astype(logits_dtype(term.logits))
    if not isinstance(start, int):
        fits = (start >= 0) & (start + needed <= logits.shape[1])
        if needed > logits.shape[1]:
            columns = jnp.full((logits.shape[0], needed), jnp.nan, logits.dtype)
        else:
            columns = jax.lax.dynamic_slice_in_dim(logits, start, needed, axis=1)
            columns = jnp.where(fits, columns, jnp.nan)
        return Relative(columns, 1 - q_length)

    if start < 0 or start + needed > logits.shape[1]:
        first = start + term.first
        raise ValueError(
            f"relative: the logits cover the distances key - query from {term.first} to "
            f"{term.first + logits.shape[1] - 1}, but the queries and keys have distances from "
            f"{first} to {first + needed - 1}. Give the logits a column for each distance."
        )
    columns = jax.lax.slice_in_dim(logits, start, start + needed, axis=1)
    return Relative(columns, 1 - q_length)


def expand_diagonals(columns: jax.Array, q_length: int) -> jax.Array:
    """Expands one number per distance, ``[..., q + k - 1]``, to a tile of logits ``[..., q, k]``.

    ``tile[i, j] = columns[q - 1 + j - i]``. It is done with a pad and a reshape, which need no
    gather: in rows that are one longer than the columns, each row starts one column later than the
    row before. The transpose of this function sums a tile along its diagonals.
    """
    *lead, n = columns.shape
    if is_symbolic_dim(n):  # the reshape would need to know that its size is not negative
        keys = jnp.arange(n + 1 - q_length)
        return columns[..., q_length - 1 + keys[None] - jnp.arange(q_length)[:, None]]
    rows = jnp.broadcast_to(columns[..., None, :], (*lead, q_length, n))  # [..., q, n]

    # Repeat the n columns q times, and read them in rows of n + 1: row i then starts at column i.
    flat = rows.reshape(*lead, q_length * n)
    flat = jnp.pad(flat, [(0, 0)] * len(lead) + [(0, q_length)])
    skewed = flat.reshape(*lead, q_length, n + 1)[..., : n + 1 - q_length]

    # Query 0 needs column q - 1 first, so the order of the rows is reversed.
    return skewed[..., ::-1, :]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRank(Term):
    """Logits that are a product of queries and keys over a rank.

    The formula is ``logits[b, h, q, k] = Σ_r queries[b, q, h, r] · keys[b, k, h, r]``. The term
    serves a dot product of any width, the Dense Synthesizer, whose keys are parameters, and the
    Factorized Random Synthesizer, whose queries and keys are parameters.

    Attributes:
      queries: ``[b or 1, q, h, r]``.
      keys: ``[b or 1, k, h, r]``. There may be fewer heads than `queries` has, if their number
        divides that of `queries`. Neighboring heads of the queries then share a head of the keys.
      token_keys: whether the keys are computed from tokens. If so, decoding caches them. Otherwise
        they are parameters, which are looked up by position.
      token_queries: whether the queries are computed from tokens. Otherwise they are parameters.
    """

    queries: Annotated[jax.Array, "b", "q", "h", None]
    keys: Annotated[jax.Array, "b", "k", "h", None]
    token_keys: bool = dataclasses.field(metadata={"static": True})
    token_queries: bool = dataclasses.field(default=True, metadata={"static": True})

    linear = "queries"

    def depends_on_tokens(self, name: str) -> bool:
        return self.token_queries if name == "queries" else self.token_keys

    def materialize(self, q_length: int, k_length: int, query_offset: int | jax.Array) -> jax.Array:
        dtype = logits_dtype(self.queries, self.keys)
        keys = repeat_heads(self.keys, self.num_heads)
        return multiply_examples("bqhr,bkhr->bhqk", self.queries, keys, dtype)


def multiply_examples(subscripts: str, x: jax.Array, y: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Computes an einsum in a dtype, leaving out the batch axis if both factors have one example.

    Under `jax.vmap`, XLA's CPU backend copies factors that have a batch axis of 1.

    Args:
      subscripts: the subscripts of the einsum, in which ``b`` is the first axis of all arrays.
      x: the first factor, ``[b, ...]``.
      y: the second factor, ``[b, ...]``.
      dtype: the dtype of the result.
    """
    if x.shape[0] == y.shape[0] == 1:
        subscripts = subscripts.replace("b", "")
        product = jnp.einsum(subscripts, x[0], y[0], preferred_element_type=dtype)
        return product[None]
    return jnp.einsum(subscripts, x, y, preferred_element_type=dtype)


def repeat_heads(x: jax.Array, heads: int) -> jax.Array:
    """Returns an array ``[b, k, count, e]`` with its heads repeated to ``[b, k, heads, e]``.

    Returns the array as it is if it has no heads, has enough heads, or if `count` does not divide
    `heads`.
    """
    count = x.shape[2]
    if count in (0, heads) or heads % count:
        return x
    return jnp.repeat(x, heads // count, axis=2)


def low_rank(
    queries: jax.Array, keys: jax.Array, *, token_keys: bool, token_queries: bool = True
) -> LowRank:
    """Returns a `LowRank` term after checking its factors.

    Args:
      queries: ``[b or 1, q, h, r]``.
      keys: ``[b or 1, k, h, r]``. The number of heads may be smaller, if it divides that of the
        queries.
      token_keys: whether the keys are computed from tokens. Otherwise they are parameters.
      token_queries: whether the queries are computed from tokens. Otherwise they are parameters.

    Raises:
      ValueError: if shapes do not agree, or if parameters have a batch axis longer than 1.
    """
    _check_rank("low_rank: queries", queries, "[batch or 1, q, heads, r]", rank=4)
    _check_rank("low_rank: keys", keys, "[batch or 1, k, heads, r]", rank=4)
    heads, rank = queries.shape[2:]
    key_heads, key_rank = keys.shape[2:]
    if rank != key_rank or heads % max(key_heads, 1):
        raise ValueError(
            f"low_rank: the last two axes [heads, r] are {queries.shape[2:]} in queries and "
            f"{keys.shape[2:]} in keys. r must be the same in both, and the number of heads of the "
            "keys must divide the number of heads of the queries."
        )
    for name, x, tokens in (("queries", queries, token_queries), ("keys", keys, token_keys)):
        if not tokens and x.shape[0] != 1:
            raise ValueError(
                f"low_rank: token_{name} is False, which means that {name} are parameters, but "
                f"their batch axis has the size {x.shape[0]}. It must be 1."
            )
    return LowRank(queries, keys, token_keys, token_queries)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outer(Term):
    """Logits that are an outer product of two short vectors for each query.

    The formula is ``logits[b, h, q, p·B + r] = a[b, q, h, p] · b[b, q, h, r]``. The Factorized
    Dense Synthesizer uses it. It predicts A + B numbers for each query, and not one number for each
    of the A · B keys.

    Attributes:
      a: ``[b, q, h, A]``. Each number is used for B neighboring keys.
      b: ``[b, q, h, B]``. The numbers are repeated A times. ``A · B`` must be at least the number
        of keys.
    """

    a: Annotated[jax.Array, "b", "q", "h", None]
    b: Annotated[jax.Array, "b", "q", "h", None]

    linear = "a"

    @property
    def num_keys_reached(self) -> int:
        return self.a.shape[-1] * self.b.shape[-1]

    def depends_on_tokens(self, name: str) -> bool:
        return True

    def has_absolute_positions(self, mask: Mask) -> tuple[bool, bool]:
        return False, True

    def materialize(self, q_length: int, k_length: int, query_offset: int | jax.Array) -> jax.Array:
        a, b = (x.astype(logits_dtype(x)) for x in (self.a, self.b))
        product = (a[..., :, None] * b[..., None, :]).reshape(*a.shape[:3], -1)  # [b, q, h, A·B]
        return product[..., :k_length].transpose(0, 2, 1, 3)


def outer(a: jax.Array, b: jax.Array) -> Outer:
    """Returns an `Outer` term after checking its factors.

    Args:
      a: ``[b, q, h, A]``.
      b: ``[b, q, h, B]``.

    Raises:
      ValueError: if an array does not have four axes, or if the first three axes are not equal.
    """
    _check_rank("outer: a", a, "[batch, q, heads, A]", rank=4)
    _check_rank("outer: b", b, "[batch, q, heads, B]", rank=4)
    if a.shape[:3] != b.shape[:3]:
        raise ValueError(
            f"outer: the first three axes [batch, q, heads] are {a.shape[:3]} in a and "
            f"{b.shape[:3]} in b, but they must be the same."
        )
    return Outer(a, b)


class _NoLogits(Term):
    """A term that does not consist of logits only.

    Talking heads cannot exchange its heads, and a mixture cannot multiply it.
    """

    def materialize(self, q_length: int, k_length: int, query_offset: int | jax.Array) -> jax.Array:
        """Raises a `ValueError`, because there are no logits."""
        raise ValueError(
            f"A {type(self).__name__} term cannot be converted to logits, which layers such as "
            "TalkingHeads need. Use GaussianBias as the alignment, or Attention as the layer."
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Banded(_NoLogits):
    """Attention *weights* for a window of keys around every query, of which no softmax is computed.

    Hard-coded Gaussian attention, lightweight convolutions and dynamic convolutions use it. It
    cannot be added to other terms, because weights do not add up with logits.

    Attributes:
      weights: ``[b or 1, q or 1, h, w]``. The weights of a window are also called taps.
      first: the distance ``key - query`` of the first tap.
      starts: ``[q]``, the key of each query's first tap. If given, it replaces `first`. Hard-coded
        cross-attention needs it, because the center of its window moves at another rate than the
        query.
      normalize: whether to divide by the sum of the weights of those keys that the query sees. If
        it is False, keys outside of the row and masked keys are left out, and the other weights
        stay as they are.
    """

    weights: Annotated[jax.Array, "b", "q", "h", None]
    first: int = dataclasses.field(metadata={"static": True})
    starts: Annotated[jax.Array | None, "q"] = None
    normalize: bool = dataclasses.field(default=False, metadata={"static": True})

    is_weights = True

    @property
    def lengths(self) -> tuple[int | None, int | None]:
        return (self.weights.shape[1] if self.weights.shape[1] != 1 else None), None

    def has_absolute_positions(self, mask: Mask) -> tuple[bool, bool]:
        # In self-attention, a distance in the row equals the distance in the segment. A window that
        # is given by its start, or that moves over other tokens, needs positions in the segment.
        moves = self.starts is not None or not mask.self_attention
        return moves, moves


def banded(
    weights: jax.Array, *, first: int = 0, starts: jax.Array | None = None, normalize: bool = False
) -> Banded:
    """Returns a `Banded` term after checking its arrays.

    Args:
      weights: ``[b or 1, q or 1, h, w]``.
      first: the distance ``key - query`` of the first tap.
      starts: ``[q]``, the key of each query's first tap, in place of `first`.
      normalize: whether to divide by the sum of the weights of the keys that a query sees.

    Raises:
      ValueError: if an array does not have the right number of axes.
    """
    _check_rank("banded: weights", weights, "[batch or 1, q or 1, heads, window]", rank=4)
    if starts is not None:
        _check_rank("banded: starts", starts, "[q]", rank=1)
    return Banded(weights, operator.index(first), starts, normalize)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Split(_NoLogits):
    """Heads that are divided into groups, each with its own sum of terms.

    For example, some heads may use a Gaussian and others a dot product. The groups follow each
    other in the order of the heads.

    Attributes:
      groups: the terms of each group.
    """

    groups: tuple[tuple[Any, ...], ...]

    @property
    def heads(self) -> tuple[int, ...]:
        """The number of heads of each group."""
        return tuple(terms[0].num_heads for terms in self.groups)

    @property
    def num_heads(self) -> int:
        return sum(self.heads)

    @property
    def batch(self) -> int:
        return max(term.batch for terms in self.groups for term in terms)

    @property
    def lengths(self) -> tuple[int | None, int | None]:
        lengths = [term.lengths for terms in self.groups for term in terms]
        q = next((q for q, _ in lengths if q is not None), None)
        return q, next((k for _, k in lengths if k is not None), None)

    def slices(self) -> Iterator[tuple[Terms, int, int]]:
        """Yields for each group its terms, its first head and its number of heads."""
        starts = itertools.accumulate(self.heads, initial=0)
        yield from zip(self.groups, starts, self.heads, strict=False)


def add(*terms: Term) -> Terms:
    """Returns the sum of terms.

    All `Static` terms become one, and all `Relative` terms become one. Terms that are added to a
    `Split` are added to each of its groups that has logits. Groups of weights stay as they are,
    because weights are not the input of a softmax.

    Raises:
      ValueError: if a `Banded` term is added to others, or if there are two `Split` terms.
    """
    split = next((term for term in terms if isinstance(term, Split)), None)
    if split is not None and len(terms) > 1:
        return (_add_to_split(split, tuple(term for term in terms if term is not split)),)
    if len(terms) > 1 and any(term.is_weights for term in terms):
        names = ", ".join(type(term).__name__ for term in terms)
        raise ValueError(
            f"The terms {names} cannot be added up, because Banded terms are weights and not "
            "logits. Use GaussianBias, which belongs inside the softmax, or give some heads to "
            "each part with PerHead, or add up the outputs of two layers. If the other term is a "
            "position bias, leave it out."
        )
    statics = [term for term in terms if isinstance(term, Static)]
    relatives = [term for term in terms if isinstance(term, Relative)]
    total: Terms = tuple(term for term in terms if type(term) not in (Static, Relative))
    if statics:
        total += (Static(functools.reduce(operator.add, [term.logits for term in statics])),)
    if relatives:
        total += (functools.reduce(_add_relative, relatives),)
    return total


def _add_relative(x: Relative, y: Relative) -> Relative:
    """Returns the sum of two `Relative` terms, over the distances that both cover."""
    first = max(x.first, y.first)
    end = min(term.first + term.logits.shape[1] for term in (x, y))
    x_logits, y_logits = (term.logits[:, first - term.first : end - term.first] for term in (x, y))
    return Relative(x_logits + y_logits, first)


def _add_to_split(split: Split, others: Terms) -> Split:
    """Adds terms to those groups of a `Split` that have logits."""
    if any(stands_alone(term) for term in others):
        raise ValueError(
            "Only logits can be added to a Split term. Put all parts into a single PerHead."
        )
    groups = []
    for terms, start, count in split.slices():

        def cut(a: TermArray, start: int = start, end: int = start + count) -> jax.Array:
            """Returns the part of an array that belongs to the heads of the group."""
            if "h" not in a.axes:
                return a.x
            return jax.lax.slice_in_dim(a.x, start, end, axis=a.axes.index("h"))

        groups.append(terms if terms[0].is_weights else add(*terms, *map_arrays(cut, others)))
    return Split(tuple(groups))


def uses_segment_positions(terms: Terms, mask: Mask) -> bool:
    """Returns whether packed rows look up any of the terms by the position in the segment."""
    return mask.query_segments is not None and any(
        any(term.has_absolute_positions(mask)) for term in terms
    )


def stands_alone(term: Term) -> bool:
    """Returns whether a term cannot be added to others."""
    return term.is_weights or isinstance(term, Split)


def scale(terms: Terms, factor: jax.Array) -> Terms:
    """Returns the terms with their logits multiplied by a factor per head.

    The product is computed in float32 and rounded once. In bfloat16, the gradient of the weights of
    a mixture then has a relative error of only a few parts in a thousand.

    Args:
      terms: terms that are linear in one of their arrays.
      factor: ``[h]`` or a scalar.

    Raises:
      ValueError: if a term is not linear in one of its arrays.
    """
    for term in terms:
        if term.linear is None:
            raise ValueError(
                f"A {type(term).__name__} term cannot be part of a mixture, because no array "
                "scales its logits. Use GaussianBias inside the softmax, or give some heads to "
                "each part with PerHead, or add up the outputs of two layers."
            )

    def times(a: TermArray) -> jax.Array:
        """Returns an array multiplied by the factor, if the logits are linear in it."""
        if a.name != a.term.linear:
            return a.x
        # [h] becomes [h, 1, 1] or [1, 1, h, 1], by the axes of the array.
        shaped = jnp.reshape(factor, tuple(-1 if axis == "h" else 1 for axis in a.axes))
        return (a.x.astype(logits_dtype(a.x)) * shaped).astype(a.x.dtype)

    scaled: Terms = map_arrays(times, terms)
    return scaled


def materialize(
    terms: Terms, *, q_length: int, k_length: int, query_offset: int | jax.Array = 0
) -> jax.Array:
    """Returns the sum of the terms as one array of logits.

    Args:
      terms: at least one term.
      q_length: the number of queries.
      k_length: the number of keys.
      query_offset: the position of the first query, where the first key is at position 0.
        `Relative` terms depend on it.

    Returns:
      The logits ``[b or 1, h, q, k]``, in float32 or wider.
    """
    parts = [
        term.materialize(q_length=q_length, k_length=k_length, query_offset=query_offset)
        for term in terms
    ]
    return functools.reduce(operator.add, parts)


def _check_rank(name: str, x: jax.Array, shape: str, *, rank: int) -> None:
    """Raises a `ValueError` if an array does not have `rank` axes; `shape` describes them."""
    if x.ndim != rank:
        raise ValueError(f"{name}.shape is {x.shape}, but it must be {shape}.")
