"""Terms, which are the summands of attention logits, and functions to add and scale terms.

In all models of this package, the attention logits are a sum of terms. A term stores the arrays
from which its logits are computed, such as a table, one number per distance, or the factors of a
product. The routes of `attend` compute attention from these arrays. Most routes never create an
array of all logits.

Shapes use the letters b for the batch size, q for the number of queries, k for the number of keys,
h for the number of heads, e for the width of a head, r for the rank, and w for the width of a
window. The notation ``[b or 1, ...]`` means that all examples share the array if its batch axis has
size 1.
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

The axes of examples, queries, keys and heads have the names ``"b"``, ``"q"``, ``"k"`` and ``"h"``.
The name of any other axis is None.
"""


@dataclasses.dataclass(frozen=True)
class Span:
    """A range of consecutive positions in a sequence.

    Attributes:
      start: the first position, as an int, or as a traced scalar in a decoding loop.
      length: the number of positions.
      limit: a number that is larger than all positions of a decoding loop, or None if no such
        number is known.
    """

    start: int | jax.Array
    length: int
    limit: int | None = None


def logits_dtype(*arrays: jax.Array) -> jnp.dtype:
    """Returns the dtype of logits that are made from these arrays.

    The dtype is float32, or float64 if one of the arrays is float64.
    """
    is_double = any(x.dtype == jnp.float64 for x in arrays)
    return jnp.dtype(jnp.float64 if is_double else jnp.float32)


@dataclasses.dataclass(frozen=True)
class Term(abc.ABC):
    """A summand of the attention logits of all heads.

    A subclass is a frozen dataclass that is registered as a pytree. The annotation of a field
    declares the axes of the array, as in ``logits: Annotated[jax.Array, "h", "q", "k"]``. The
    declared axes determine how a term is partitioned over devices, sliced by heads, unpacked and
    cached. A subclass therefore only has to implement `materialize`. The reference route supports
    all terms. Each of the other routes supports only some classes of terms.

    Attributes:
      is_weights: whether the term contains attention weights instead of logits. Such weights are
        used without a softmax.
      linear: the name of a field in which the logits are linear, or None if there is no such field.
        `scale` multiplies this field.
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
        """The batch size of the logits, which is 1 if all examples have the same logits."""
        return max([1, *(a.x.shape[a.axes.index("b")] for a in self.arrays() if "b" in a.axes)])

    @property
    def lengths(self) -> tuple[int | None, int | None]:
        """The numbers of queries and keys, or None for an axis that the term does not have."""
        q, k = (
            next((a.x.shape[a.axes.index(n)] for a in self.arrays() if n in a.axes), None)
            for n in ("q", "k")
        )
        return q, k

    @property
    def num_keys_reached(self) -> int | None:
        """The number of keys for which the term has logits. None means all keys."""
        return None

    def arrays(self) -> Iterator[TermArray]:
        """Yields each array of the term as a `TermArray`, with its name and axes.

        Fields that are None are skipped.
        """
        for name, axes in _declared_axes(type(self)).items():
            x = getattr(self, name)
            if x is not None:
                yield TermArray(self, name, x, axes)

    def depends_on_tokens(self, name: str) -> bool:
        """Returns whether an array is computed from tokens, and not looked up by position.

        By default, an array is computed from tokens if its batch axis does not have size 1. In a
        call with a single example, the default therefore takes every array for a parameter. A class
        whose arrays may be computed from tokens should override this method. Otherwise, such an
        array is not cached when a single example is decoded, its padding is not cleared, and in
        packed rows its entries are looked up by position.

        Args:
          name: the name of the array's field.
        """
        # The batch axis of parameters has size 1. The comparison uses `!=` and not `>`, because
        # symbolic sizes of `jax.export` cannot be ordered.
        return any(a.name == name and "b" in a.axes and a.x.shape[0] != 1 for a in self.arrays())

    def has_absolute_positions(self, mask: Mask) -> tuple[bool, bool]:
        """Returns whether queries, and whether keys, are looked up by their absolute position.

        In packed rows, the absolute position is the position in the segment, so terms with absolute
        positions need special treatment.

        Args:
          mask: the mask of the call. For some terms, the result depends on whether queries and keys
            are the same tokens.
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
        """Whether the array is computed from tokens, and not looked up by position."""
        return self.term.depends_on_tokens(self.name)

    @property
    def is_cached(self) -> bool:
        """Whether decoding caches the array, because its keys are computed from tokens."""
        return "k" in self.axes and self.from_tokens


Terms: TypeAlias = tuple[Term, ...]
"""A tuple of terms. The attention logits are the sum of these terms."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Call:
    """The checked arguments of `attend`, which are the input of every route.

    Attributes:
      terms: the terms of the logits, for q queries and k keys.
      values: ``[b, k, h, e]``.
      mask: the keys that each query may attend to.
      q_length: the number of queries.
      soft_cap: the bound of the logits, or None if there is no bound; see `cap_logits`.
      sinks: ``[h]``, the logit of one additional key for each head, or None. The value vector of
        the additional key is zero.
      returns_log_sums: whether the route also returns the log sums of all rows. Such a call has no
        sinks, because `attend_with_log_sums` adds the sinks to the results of the route.
    """

    terms: Terms
    values: jax.Array
    mask: Mask
    q_length: int = dataclasses.field(metadata={"static": True})
    soft_cap: float | None = dataclasses.field(default=None, metadata={"static": True})
    sinks: jax.Array | None = None
    returns_log_sums: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def k_length(self) -> int:
        """The number of keys."""
        return self.values.shape[1]

    def cleared(self) -> Call:
        """Returns the call with all padding set to zero; see `clear_padding`."""
        real = self.mask.clearing_masks(self.q_length, self.k_length)
        terms, values = clear_padding(self.terms, self.values, *real)
        return dataclasses.replace(self, terms=terms, values=values)


Output: TypeAlias = jax.Array | tuple[jax.Array, jax.Array]
"""The result of a route: the output ``[b, q, h, e]``, or the output and the log sums ``[b, q, h]``.

A route returns log sums if `Call.returns_log_sums` is True.
"""


def no_log_sum(dtype: jnp.dtype) -> jax.Array:
    """Returns the log sum of a row without keys, which is the lowest finite number of a dtype.

    The lowest number is used instead of minus infinity, because differences of infinities are NaN.
    """
    return jnp.finfo(dtype).min.astype(dtype)


def cap_logits(logits: jax.Array, soft_cap: float | None) -> jax.Array:
    """Returns ``soft_cap · tanh(logits / soft_cap)``, or the logits if `soft_cap` is None.

    The result is between -soft_cap and soft_cap. Logits close to zero are almost unchanged.
    """
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


@functools.cache
def _declared_axes(cls: type[Term]) -> dict[str, Axes]:
    """Returns the axes of each field of a class whose annotation declares axes."""
    # `Annotated[jax.Array, "h", "q", "k"]` has the arguments (jax.Array, "h", "q", "k").
    hints = typing.get_type_hints(cls, include_extras=True)
    return {
        name: typing.get_args(hint)[1:]
        for name, hint in hints.items()
        if typing.get_origin(hint) is Annotated
    }


def map_arrays(function: Callable[[TermArray], Any], terms: PyTree) -> Any:
    """Applies a function to every array in a pytree of terms, and returns the new terms.

    Args:
      function: a function of a `TermArray`. The function is called for every array, including the
        arrays in the groups of a `Split`.
      terms: a pytree of terms.
    """

    def map_term(term: Term) -> Term:
        """Returns a term with new arrays."""
        return dataclasses.replace(term, **{a.name: function(a) for a in term.arrays()})

    def is_single_term(x: PyTree) -> bool:
        """Returns whether a node of the pytree is a term other than a `Split`."""
        return isinstance(x, Term) and not isinstance(x, Split)

    return jax.tree.map(map_term, terms, is_leaf=is_single_term)


def clear_padding(
    terms: PyTree, values: PyTree, queries: jax.Array | None, keys: jax.Array | None
) -> tuple[Any, Any]:
    """Returns terms and values with zeros for padding.

    The attention weight of padding is zero, but zero times NaN is NaN. Setting padding to zero
    makes sure that a NaN or an infinity in padding has no effect. Only arrays that are computed
    from tokens are changed.

    Args:
      terms: a pytree of terms.
      values: a pytree of arrays ``[b, k, ...]``.
      queries: a bool array ``[b, q]`` that marks the real queries, or None if all queries are real.
      keys: a bool array ``[b, k]`` that marks the real keys, or None if all keys are real. For
        terms of a single example without a batch axis, `queries` is ``[q]`` and `keys` is ``[k]``.
    """

    def clear(a: TermArray) -> jax.Array:
        """Returns an array with zeros for padding, if the array has an entry for each token."""
        real = queries if "q" in a.axes else keys
        if real is None or not a.from_tokens or a.x.shape[: real.ndim] != real.shape:
            return a.x
        return zero_padding(a.x, real)

    return map_arrays(clear, terms), jax.tree.map(lambda x: zero_padding(x, keys), values)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Static(Term):
    """Logits that are the same for all examples.

    The Random and Fixed Random Synthesizers use `Static` terms.

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

    All pairs with the same distance lie on a diagonal of the matrix of logits ``[q, k]``. The code
    of this package therefore calls a vector with one number per distance *diagonals*.

    Attributes:
      logits: ``[h, n]``, the diagonals of each head. Entry j belongs to the distance
        ``key - query = j + first``.
      first: the distance ``key - query`` of the first entry.
    """

    logits: Annotated[jax.Array, "h", None]
    first: int = dataclasses.field(metadata={"static": True})

    linear = "logits"

    def has_absolute_positions(self, mask: Mask) -> tuple[bool, bool]:
        # In self-attention, two tokens have the same distance in the row and in their segment.
        return not mask.self_attention, not mask.self_attention

    def materialize(self, q_length: int, k_length: int, query_offset: int | jax.Array) -> jax.Array:
        cut = cut_diagonals(self, q_length, k_length, query_offset=query_offset)
        return expand_diagonals(cut.logits, q_length)[None]


def relative(logits: jax.Array, *, first: int) -> Relative:
    """Returns a `Relative` term after checking its logits.

    Args:
      logits: ``[h, n]``, one number per distance.
      first: the distance ``key - query`` of the first number.

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
    """Returns the `Relative` term with only the diagonals that a tile of logits needs.

    Query i of the tile is at position ``i + query_offset``, so the distances are
    ``1 - q - query_offset`` to ``k - 1 - query_offset``. In the result, positions are counted from
    0 in the tile, so the first entry belongs to the distance ``key - query = 1 - q``.

    Args:
      term: the term.
      q_length: the number of queries of the tile.
      k_length: the number of keys of the tile.
      query_offset: the position of the first query, which may be traced.

    Returns:
      A term with logits ``[h, q + k - 1]``, in float32 or wider. If `query_offset` is traced and
      needs a distance that the term does not cover, all logits are NaN, because traced numbers
      cannot raise an error.

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
            diagonals = jnp.full((logits.shape[0], needed), jnp.nan, logits.dtype)
        else:
            diagonals = jax.lax.dynamic_slice_in_dim(logits, start, needed, axis=1)
            diagonals = jnp.where(fits, diagonals, jnp.nan)
        return Relative(diagonals, 1 - q_length)

    if start < 0 or start + needed > logits.shape[1]:
        first = start + term.first
        raise ValueError(
            f"relative: the logits cover the distances key - query from {term.first} to "
            f"{term.first + logits.shape[1] - 1}, but the queries and keys have distances from "
            f"{first} to {first + needed - 1}. Give the logits an entry for each distance."
        )
    diagonals = jax.lax.slice_in_dim(logits, start, start + needed, axis=1)
    return Relative(diagonals, 1 - q_length)


def expand_diagonals(diagonals: jax.Array, q_length: int) -> jax.Array:
    """Expands one number per distance, ``[..., q + k - 1]``, to a tile of logits ``[..., q, k]``.

    The formula is ``tile[i, j] = diagonals[q - 1 + j - i]``. The function uses a pad and a reshape
    instead of a gather. The reshape creates rows that have one element more than `diagonals`, so
    that each row starts one entry later than the previous row. The transpose of this function sums
    a tile along its diagonals.
    """
    *lead, n = diagonals.shape
    if is_symbolic_dim(n):  # the reshape needs a size that is known not to be negative
        keys = jnp.arange(n + 1 - q_length)
        return diagonals[..., q_length - 1 + keys[None] - jnp.arange(q_length)[:, None]]
    rows = jnp.broadcast_to(diagonals[..., None, :], (*lead, q_length, n))  # [..., q, n]

    # Repeat the n numbers q times, and reshape them to rows of n + 1 elements, so that row i starts
    # with number i.
    flat = rows.reshape(*lead, q_length * n)
    flat = jnp.pad(flat, [(0, 0)] * len(lead) + [(0, q_length)])
    skewed = flat.reshape(*lead, q_length, n + 1)[..., : n + 1 - q_length]

    # The row of query 0 starts with number q - 1, so the order of the rows is reversed.
    return skewed[..., ::-1, :]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRank(Term):
    """Logits that are a product of queries and keys, which are vectors with r entries.

    The formula is ``logits[b, h, q, k] = Σ_r queries[b, q, h, r] · keys[b, k, h, r]``. The rank of
    the matrix of logits ``[q, k]`` is therefore at most r, which is usually lower than the number
    of queries or keys. The class is named after this property, and has nothing to do with low-rank
    adapters.

    The Transformer's dot product is a `LowRank` term in which r is the width of a head. The Dense
    Synthesizer is a `LowRank` term whose keys are parameters. In the Factorized Random Synthesizer,
    both queries and keys are parameters.

    Attributes:
      queries: ``[b or 1, q, h, r]``.
      keys: ``[b or 1, k, h, r]``. The number of heads of the keys must divide the number of heads
        of the queries. If the keys have fewer heads, neighboring heads of the queries share a head
        of the keys.
      token_keys: whether the keys are computed from tokens. Decoding caches such keys. If
        `token_keys` is False, the keys are parameters, which are looked up by position.
      token_queries: whether the queries are computed from tokens. If `token_queries` is False, the
        queries are parameters.
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

    Under `jax.vmap`, XLA's CPU backend would copy factors that have a batch axis of size 1.

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

    The array is returned unchanged if `count` is 0, if `count` equals `heads`, or if `count` does
    not divide `heads`.
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
      keys: ``[b or 1, k, h, r]``. The number of heads of the keys must divide the number of heads
        of the queries.
      token_keys: whether the keys are computed from tokens. If `token_keys` is False, the keys are
        parameters.
      token_queries: whether the queries are computed from tokens. If `token_queries` is False, the
        queries are parameters.

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
            f"{keys.shape[2:]} in keys. The rank r must be the same in both, and the number of "
            "heads of the keys must divide the number of heads of the queries."
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
    Dense Synthesizer uses `Outer` terms. This Synthesizer predicts A + B numbers for each query,
    instead of one number for each of the A · B keys.

    Attributes:
      a: ``[b, q, h, A]``. Each number applies to B neighboring keys.
      b: ``[b, q, h, B]``. The B numbers are repeated A times along the keys. ``A · B`` must be at
        least the number of keys.
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
    """A term that cannot be converted to logits.

    Terms of this kind cannot be used in `TalkingHeads` or in a mixture.
    """

    def materialize(self, q_length: int, k_length: int, query_offset: int | jax.Array) -> jax.Array:
        """Raises a `ValueError`, because the term has no logits."""
        raise ValueError(
            f"A {type(self).__name__} term cannot be converted to logits, which layers such as "
            "TalkingHeads need. Use GaussianBias as the alignment, or Attention as the layer."
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Banded(_NoLogits):
    """Attention *weights* for a window of keys around every query, without a softmax.

    Hard-coded Gaussian attention, lightweight convolutions and dynamic convolutions use `Banded`
    terms. A `Banded` term cannot be added to other terms, because weights cannot be added to
    logits.

    Attributes:
      weights: ``[b or 1, q or 1, h, w]``. The weights of a window are also called taps. Weights
        with a batch axis of size 1 count as parameters; see `Term.depends_on_tokens`. The term does
        not override this method, because it has no keys to cache, and because the banded route
        clears padding itself. The difference matters only for terms with `starts`, or in
        cross-attention, of packed rows. There, weights with a batch axis of size 1 are looked up by
        the position in the segment, even if the call has a single example.
      first: the distance ``key - query`` of the first tap.
      starts: ``[q]``, the key position of each query's first tap. If `starts` is given, `first` is
        not used. Hard-coded cross-attention needs `starts`, because its window does not move by one
        key per query.
      normalize: whether to divide by the sum of the weights of the keys that the query may attend
        to. Without normalization, keys outside of the row and masked keys are left out, and the
        weights of all other keys are unchanged.
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
        # In self-attention, two tokens have the same distance in the row and in their segment.
        # Windows with `starts`, and windows in cross-attention, need the position in the segment.
        moves = self.starts is not None or not mask.self_attention
        return moves, moves


def banded(
    weights: jax.Array, *, first: int = 0, starts: jax.Array | None = None, normalize: bool = False
) -> Banded:
    """Returns a `Banded` term after checking its arrays.

    Args:
      weights: ``[b or 1, q or 1, h, w]``.
      first: the distance ``key - query`` of the first tap.
      starts: ``[q]``, the key position of each query's first tap. If `starts` is given, `first` is
        not used.
      normalize: whether to divide by the sum of the weights of the keys that a query may attend to.

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
    """A division of the heads into groups, where each group has its own sum of terms.

    For example, some heads may use a Gaussian and the other heads a dot product. The first group
    contains the first heads, the second group contains the next heads, and so on.

    Attributes:
      groups: the terms of each group, as a tuple of tuples.
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
        """Yields the terms, the first head and the number of heads of each group."""
        starts = itertools.accumulate(self.heads, initial=0)
        yield from zip(self.groups, starts, self.heads, strict=False)


def add(*terms: Term) -> Terms:
    """Returns the sum of terms.

    All `Static` terms are merged into a single `Static` term, and all `Relative` terms into a
    single `Relative` term. If one term is a `Split`, the other terms are added to every group of
    the `Split` that has logits. Groups with `Banded` terms are unchanged, because `Banded` terms
    contain weights instead of logits.

    Raises:
      ValueError: if a `Banded` term is added to other terms, or if there are two `Split` terms.
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
    """Returns the sum of two `Relative` terms for the distances that both terms cover."""
    first = max(x.first, y.first)
    end = min(term.first + term.logits.shape[1] for term in (x, y))
    x_logits, y_logits = (term.logits[:, first - term.first : end - term.first] for term in (x, y))
    return Relative(x_logits + y_logits, first)


def _add_to_split(split: Split, others: Terms) -> Split:
    """Adds terms to all groups of a `Split` that have logits."""
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
    """Returns whether rows are packed and any term is looked up by the position in the segment."""
    return mask.query_segments is not None and any(
        any(term.has_absolute_positions(mask)) for term in terms
    )


def stands_alone(term: Term) -> bool:
    """Returns whether a term cannot be added to other terms."""
    return term.is_weights or isinstance(term, Split)


def scale(terms: Terms, factor: jax.Array) -> Terms:
    """Returns the terms with their logits multiplied by a factor per head.

    The product is computed in float32 and rounded once. If the terms are bfloat16, the gradient of
    a mixture's weights then has a relative error of only a few parts in a thousand.

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
        # The factor [h] is reshaped to the axes of the array, such as [h, 1, 1] or [1, 1, h, 1].
        shaped = jnp.reshape(factor, tuple(-1 if axis == "h" else 1 for axis in a.axes))
        return (a.x.astype(logits_dtype(a.x)) * shaped).astype(a.x.dtype)

    scaled: Terms = map_arrays(times, terms)
    return scaled


def materialize(
    terms: Terms, *, q_length: int, k_length: int, query_offset: int | jax.Array = 0
) -> jax.Array:
    """Returns the sum of the terms as one array of logits.

    Args:
      terms: a tuple of at least one term.
      q_length: the number of queries.
      k_length: the number of keys.
      query_offset: the position of the first query, where the first key is at position 0.
        `Relative` terms depend on the offset.

    Returns:
      The logits ``[b or 1, h, q, k]``, in float32 or wider.
    """
    parts = [
        term.materialize(q_length=q_length, k_length=k_length, query_offset=query_offset)
        for term in terms
    ]
    return functools.reduce(operator.add, parts)


def _check_rank(name: str, x: jax.Array, shape: str, *, rank: int) -> None:
    """Raises a `ValueError` if an array does not have `rank` axes. `shape` describes the axes."""
    if x.ndim != rank:
        raise ValueError(f"{name}.shape is {x.shape}, but it must be {shape}.")
