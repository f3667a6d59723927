"""Terms: what attention logits, or weights, are made of, and their algebra.

Legend: b batch, q/k query and key position, h heads, e per-head width, r rank, w window.
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
    devices, sliced by heads, unpacked and cached. `materialize` alone must be written. The reference
    route computes every term; the other routes tell which terms they take.

    Attributes:
      is_weights: the term is attention weights, with which no softmax is computed.
      linear: the field in which the logits are linear, by which `scale` multiplies them; None: none.
    """

    is_weights: ClassVar[bool] = False
    linear: ClassVar[str | None] = None

    @abc.abstractmethod
    def materialize(self, q_length: int, k_length: int, query_offset: int | jax.Array) -> jax.Array:
        """Returns the logits ``[b or 1, h, q, k]``, float32 or wider.

        Args:
          q_length: number of queries.
          k_length: number of keys.
          query_offset: position of the first query, counted from the first key.
        """

    @property
    def num_heads(self) -> int:
        """The number of heads."""
        return next(a.x.shape[a.axes.index("h")] for a in self.arrays() if "h" in a.axes)

    @property
    def batch(self) -> int:
        """The number of examples; 1 if all examples have the same logits."""
        return max([1, *(a.x.shape[a.axes.index("b")] for a in self.arrays() if "b" in a.axes)])

    @property
    def lengths(self) -> tuple[int | None, int | None]:
        """The numbers of queries and keys; None: the term does not tell."""
        q, k = (
            next((a.x.shape[a.axes.index(n)] for a in self.arrays() if n in a.axes), None)
            for n in ("q", "k")
        )
        return q, k

    @property
    def num_keys_reached(self) -> int | None:
        """The number of keys that have logits; None: all."""
        return None

    def arrays(self) -> Iterator[TermArray]:
        """Yields every field that is an array."""
        for name, axes in _declared_axes(type(self)).items():
            x = getattr(self, name)
            if x is not None:
                yield TermArray(self, name, x, axes)

    def depends_on_tokens(self, name: str) -> bool:
        """Whether an array is made of tokens; otherwise it is looked up by position."""
        # A symbolic size of an exported program is not equal to 1, but cannot be ordered.
        return any(a.name == name and "b" in a.axes and a.x.shape[0] != 1 for a in self.arrays())

    def has_absolute_positions(self, mask: Mask) -> tuple[bool, bool]:
        """Whether queries, and keys, are looked up by their position in a segment of a packed row."""
        by_query, by_key = (
            any(n in a.axes and not a.from_tokens for a in self.arrays()) for n in ("q", "k")
        )
        return by_query, by_key


class TermArray(NamedTuple):
    """An array of a term, the name of its field and its axes."""

    term: Term
    name: str
    x: jax.Array
    axes: Axes

    @property
    def from_tokens(self) -> bool:
        """Whether tokens made it; otherwise it is looked up by position."""
        return self.term.depends_on_tokens(self.name)

    @property
    def is_cached(self) -> bool:
        """Whether decoding caches it: the tokens attended to made it."""
        return "k" in self.axes and self.from_tokens


Terms: TypeAlias = tuple[Term, ...]
"""Terms whose sum is the attention logits."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Call:
    """The checked arguments of `attend`, as the routes take them.

    Attributes:
      terms: terms for q queries and k keys.
      values: ``[b, k, h, e]``.
      mask: which keys a query may see.
      q_length: number of queries.
      soft_cap: what bounds the logits, see `cap_logits`.
      sinks: ``[h]``, the logits of one more key for each head, whose value is zero; None: there is none.
    """

    terms: Terms
    values: jax.Array
    mask: Mask
    q_length: int = dataclasses.field(metadata={"static": True})
    soft_cap: float | None = dataclasses.field(default=None, metadata={"static": True})
    sinks: jax.Array | None = None

    @property
    def k_length(self) -> int:
        """Number of keys."""
        return self.values.shape[1]

    def cleared(self) -> Call:
        """Returns the call with zeros for padding, see `clear_padding`."""
        real = self.mask.uncleared(self.q_length, self.k_length)
        terms, values = clear_padding(self.terms, self.values, *real)
        return dataclasses.replace(self, terms=terms, values=values)


def cap_logits(logits: jax.Array, soft_cap: float | None) -> jax.Array:
    """Returns ``soft_cap · tanh(logits / soft_cap)``, between -soft_cap and soft_cap; None: no change."""
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


@functools.cache
def _declared_axes(cls: type[Term]) -> dict[str, Axes]:
    """Returns the axes of every field that is annotated as an array with axes."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {
        name: typing.get_args(hint)[1:]
        for name, hint in hints.items()
        if typing.get_origin(hint) is Annotated
    }


def map_arrays(function: Callable[[TermArray], Any], terms: PyTree) -> Any:
    """Returns a tree of terms with every array replaced, those in the groups of a `Split` too."""

    def of_term(term: Term) -> Term:
        return dataclasses.replace(term, **{a.name: function(a) for a in term.arrays()})

    is_leaf = lambda x: isinstance(x, Term) and not isinstance(x, Split)
    return jax.tree.map(of_term, terms, is_leaf=is_leaf)


def clear_padding(
    terms: PyTree, values: PyTree, queries: jax.Array | None, keys: jax.Array | None
) -> tuple[Any, Any]:
    """Returns terms and values with zeros for padding in what tokens made: a NaN there has no effect.

    `queries` and `keys` tell which are real, ``[b, q]`` and ``[b, k]``; None: all. They are ``[q]`` and
    ``[k]`` for terms of one example, without that axis.
    """

    def clear(a: TermArray) -> jax.Array:
        real = queries if "q" in a.axes else keys
        if real is None or not a.from_tokens or a.x.shape[: real.ndim] != real.shape:
            return a.x
        return zero_padding(a.x, real)

    return map_arrays(clear, terms), jax.tree.map(lambda x: zero_padding(x, keys), values)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Static(Term):
    """Logits that are the same for every example: Random, Fixed Random.

    Attributes:
      logits: ``[h, q, k]``.
    """

    logits: Annotated[jax.Array, "h", "q", "k"]

    linear = "logits"

    def materialize(self, q_length: int, k_length: int, query_offset: int | jax.Array) -> jax.Array:
        return self.logits.astype(logits_dtype(self.logits))[None]


def static(logits: jax.Array) -> Static:
    """Returns a checked `Static` of logits ``[h, q, k]``; raises `ValueError` for other ranks."""
    _check_rank("static: logits", logits, "[heads, q, k]", rank=3)
    return Static(logits)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Relative(Term):
    """Logits that depend on ``key - query`` only: T5's relative bias, ALiBi, log-Gaussian.

    Attributes:
      logits: ``[h, n]``; column j belongs to ``key - query = j + first``.
      first: the distance of the first column.
    """

    logits: Annotated[jax.Array, "h", None]
    first: int = dataclasses.field(metadata={"static": True})

    linear = "logits"

    def has_absolute_positions(self, mask: Mask) -> tuple[bool, bool]:
        return not mask.self_attention, not mask.self_attention

    def materialize(self, q_length: int, k_length: int, query_offset: int | jax.Array) -> jax.Array:
        cut = cut_diagonals(self, q_length, k_length, query_offset=query_offset)
        return expand_diagonals(cut.logits, q_length)[None]


def relative(logits: jax.Array, *, first: int) -> Relative:
    """Returns a checked `Relative` of logits ``[h, n]``; column 0 is ``key - query = first``."""
    _check_rank("relative: logits", logits, "[heads, distances]", rank=2)
    is_symbolic = is_symbolic_dim(first)  # in `jax.export`
    return Relative(logits, first if is_symbolic else operator.index(first))


def cut_diagonals(
    term: Relative, q_length: int, k_length: int, *, query_offset: int | jax.Array = 0
) -> Relative:
    """Returns the term with those columns that a block of logits needs, ``[h, q + k - 1]`` float32.

    If a traced `query_offset` leads beyond the term, they are NaN.

    Raises:
      ValueError: the term does not reach from the last query to the first key, or from the first
        query to the last key.
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
            f"relative: logits cover key - query from {term.first} to "
            f"{term.first + logits.shape[1] - 1}, but the block needs {first} to "
            f"{first + needed - 1}; give a column for each"
        )
    columns = jax.lax.slice_in_dim(logits, start, start + needed, axis=1)
    return Relative(columns, 1 - q_length)


def expand_diagonals(columns: jax.Array, q_length: int) -> jax.Array:
    """Expands diagonals ``[..., q + k - 1]`` to a block ``[..., q, k]``, as a reshape.

    ``block[i, j] = columns[q - 1 + j - i]``; the transpose of this function sums a block along its
    diagonals.
    """
    *lead, n = columns.shape
    if is_symbolic_dim(n):  # the reshape would need to know that its size is not negative
        keys = jnp.arange(n + 1 - q_length)
        return columns[..., q_length - 1 + keys[None] - jnp.arange(q_length)[:, None]]
    rows = jnp.broadcast_to(columns[..., None, :], (*lead, q_length, n))
    flat = rows.reshape(*lead, q_length * n)
    flat = jnp.pad(flat, [(0, 0)] * len(lead) + [(0, q_length)])
    skewed = flat.reshape(*lead, q_length, n + 1)[..., : n + 1 - q_length]
    return skewed[..., ::-1, :]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRank(Term):
    """A product over a rank, ``logits[b, h, q, k] = Σ_r queries[b, q, h, r] · keys[b, k, h, r]``.

    A dot product of any width; Dense Synthesizer (keys are parameters); Factorized Random
    Synthesizer (both are parameters).

    Attributes:
      queries: ``[b or 1, q, h, r]``.
      keys: ``[b or 1, k, h, r]``, or fewer heads, each shared by as many neighboring heads of the queries.
      token_keys: whether the keys are made of tokens, and so cached while decoding; otherwise they
        are parameters, looked up by position.
      token_queries: likewise for the queries.
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
    """`jnp.einsum` in a dtype, with a batch axis ``b``, which a product of single examples goes without.

    Under `jax.vmap`, XLA's CPU backend copies factors that have one.
    """
    if x.shape[0] == y.shape[0] == 1:
        return jnp.einsum(subscripts.replace("b", ""), x[0], y[0], preferred_element_type=dtype)[None]
    return jnp.einsum(subscripts, x, y, preferred_element_type=dtype)


def repeat_heads(x: jax.Array, heads: int) -> jax.Array:
    """Returns ``[b, k, heads, e]`` of an array with fewer heads; as it is if they do not divide `heads`."""
    count = x.shape[2]
    return x if count in (0, heads) or heads % count else jnp.repeat(x, heads // count, axis=2)


def low_rank(
    queries: jax.Array, keys: jax.Array, *, token_keys: bool, token_queries: bool = True
) -> LowRank:
    """Returns a checked `LowRank` of queries ``[b or 1, q, h, r]`` and keys ``[b or 1, k, h, r]``.

    The keys may have fewer heads, whose number divides that of the queries.

    Raises:
      ValueError: for other shapes, or parameters with a batch axis longer than one.
    """
    _check_rank("low_rank: queries", queries, "[batch or 1, q, heads, r]", rank=4)
    _check_rank("low_rank: keys", keys, "[batch or 1, k, heads, r]", rank=4)
    (heads, rank), (key_heads, key_rank) = queries.shape[2:], keys.shape[2:]
    if rank != key_rank or heads % max(key_heads, 1):
        raise ValueError(
            f"low_rank: queries have [heads, r]={queries.shape[2:]} but keys {keys.shape[2:]}; "
            "r must be equal, and the number of the queries' heads a multiple of the keys'"
        )
    for name, x, tokens in (("queries", queries, token_queries), ("keys", keys, token_keys)):
        if not tokens and x.shape[0] != 1:
            raise ValueError(
                f"low_rank: {name} that are not made from tokens need a batch axis of 1, not {x.shape[0]}"
            )
    return LowRank(queries, keys, token_keys, token_queries)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outer(Term):
    """An outer product per query, ``logits[b, h, q, p·B + r] = a[b, q, h, p] b[b, q, h, r]``.

    Factorized Dense Synthesizer.

    Attributes:
      a: ``[b, q, h, A]``, one number for every B neighboring keys.
      b: ``[b, q, h, B]``, repeated A times; ``A · B >= k``.
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
        product = (a[..., :, None] * b[..., None, :]).reshape(*a.shape[:3], -1)
        return product[..., :k_length].transpose(0, 2, 1, 3)


def outer(a: jax.Array, b: jax.Array) -> Outer:
    """Returns a checked `Outer` of ``a [b, q, h, A]`` and ``b [b, q, h, B]``."""
    _check_rank("outer: a", a, "[batch, q, heads, A]", rank=4)
    _check_rank("outer: b", b, "[batch, q, heads, B]", rank=4)
    if a.shape[:3] != b.shape[:3]:
        raise ValueError(
            f"outer: a has [batch, q, heads]={a.shape[:3]} but b {b.shape[:3]}; both must be equal"
        )
    return Outer(a, b)


class _NoLogits(Term):
    """A term that talking heads cannot exchange, nor a mixture multiply."""

    def materialize(self, q_length: int, k_length: int, query_offset: int | jax.Array) -> jax.Array:
        """Raises a `ValueError`."""
        raise ValueError(
            f"{type(self).__name__} is not made of logits alone, which is asked for here (talking heads "
            "exchange logits); use GaussianBias, or plain Attention"
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Banded(_NoLogits):
    """Attention *weights*, not logits, of a window of keys around every query; no softmax.

    Hard-coded Gaussian attention, lightweight and dynamic convolution. It stands alone: weights do
    not add to logits.

    Attributes:
      weights: ``[b or 1, q or 1, h, w]``.
      first: ``key - query`` of the first tap.
      starts: ``[q]`` the key of each query's first tap, in place of `first`: hard-coded
        cross-attention, whose center moves at another rate than the query.
      normalize: divide by the sum over the keys that are seen; otherwise what lies outside of the
        row or is masked just does not count.
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
        # In self-attention a fixed distance is the same in the row.
        moves = self.starts is not None or not mask.self_attention
        return moves, moves


def banded(
    weights: jax.Array, *, first: int = 0, starts: jax.Array | None = None, normalize: bool = False
) -> Banded:
    """Returns a checked `Banded` of weights ``[b or 1, q or 1, h, w]``; see there for the others."""
    _check_rank("banded: weights", weights, "[batch or 1, q or 1, heads, window]", rank=4)
    if starts is not None:
        _check_rank("banded: starts", starts, "[q]", rank=1)
    return Banded(weights, operator.index(first), starts, normalize)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Split(_NoLogits):
    """Heads divided among sums of terms, in their order: some Gaussian, some learned.

    Attributes:
      groups: the terms of every group of heads.
    """

    groups: tuple[tuple[Any, ...], ...]

    @property
    def heads(self) -> tuple[int, ...]:
        """The number of heads of every group."""
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
        """Yields the terms, the first head and the number of heads of every group."""
        starts = itertools.accumulate(self.heads, initial=0)
        yield from zip(self.groups, starts, self.heads, strict=False)


def add(*terms: Term) -> Terms:
    """Returns the sum of terms: all `Static` become one, all `Relative` one.

    What is added to a `Split` goes to its groups that are logits; weights have no softmax to go
    into.

    Raises:
      ValueError: for weights (`Banded`) beside other terms, or two `Split`.
    """
    split = next((term for term in terms if isinstance(term, Split)), None)
    if split is not None and len(terms) > 1:
        return (_add_to_split(split, tuple(term for term in terms if term is not split)),)
    if len(terms) > 1 and any(term.is_weights for term in terms):
        names = ", ".join(type(term).__name__ for term in terms)
        raise ValueError(
            f"{names} do not add up: Banded terms are weights, not logits. Put the log-Gaussian into "
            "the softmax (GaussianBias), give some heads to each (PerHead), or add up the outputs "
            "of two layers; without other parts, drop the position bias"
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
    """Returns the sum over the distances that both terms cover."""
    first = max(x.first, y.first)
    end = min(t.first + t.logits.shape[1] for t in (x, y))
    x_logits, y_logits = (t.logits[:, first - t.first : end - t.first] for t in (x, y))
    return Relative(x_logits + y_logits, first)


def _add_to_split(split: Split, others: Terms) -> Split:
    if any(stands_alone(term) for term in others):
        raise ValueError("Split adds up with logits only; put everything into one PerHead")
    groups = []
    for terms, start, count in split.slices():

        def cut(a: TermArray, start: int = start, end: int = start + count) -> jax.Array:
            if "h" not in a.axes:
                return a.x
            return jax.lax.slice_in_dim(a.x, start, end, axis=a.axes.index("h"))

        groups.append(terms if terms[0].is_weights else add(*terms, *map_arrays(cut, others)))
    return Split(tuple(groups))


def uses_segment_positions(terms: Terms, mask: Mask) -> bool:
    """Whether packed rows look up a term by position in the segment."""
    return mask.query_segments is not None and any(any(term.has_absolute_positions(mask)) for term in terms)


def stands_alone(term: Term) -> bool:
    """Whether a term cannot be added to others."""
    return term.is_weights or isinstance(term, Split)


def scale(terms: Terms, factor: jax.Array) -> Terms:
    """Returns the terms with their logits multiplied by a factor per head.

    The product is formed in float32 and rounded once, so that in bfloat16 the gradient of a mixture's
    weights stays good to a few parts in a thousand.

    Args:
      terms: any terms.
      factor: ``[h]`` or a scalar.

    Raises:
      ValueError: a term is not linear in one of its arrays.
    """
    for term in terms:
        if term.linear is None:
            raise ValueError(
                f"{type(term).__name__} cannot be part of a mixture: it is not made of logits "
                "alone; use GaussianBias inside the softmax, PerHead around both, or add up the "
                "outputs of two layers"
            )

    def times(a: TermArray) -> jax.Array:
        if a.name != a.term.linear:
            return a.x
        shaped = jnp.reshape(factor, tuple(-1 if axis == "h" else 1 for axis in a.axes))
        return (a.x.astype(logits_dtype(a.x)) * shaped).astype(a.x.dtype)

    scaled: Terms = map_arrays(times, terms)
    return scaled


def materialize(
    terms: Terms, *, q_length: int, k_length: int, query_offset: int | jax.Array = 0
) -> jax.Array:
    """Returns the logits as one array.

    Args:
      terms: at least one term.
      q_length: number of queries.
      k_length: number of keys.
      query_offset: position of the first query, counted from the first key; `Relative` needs it.

    Returns:
      ``[b or 1, h, q, k]``, float32 or wider.
    """
    parts = [
        term.materialize(q_length=q_length, k_length=k_length, query_offset=query_offset) for term in terms
    ]
    return functools.reduce(operator.add, parts)


def _check_rank(name: str, x: jax.Array, shape: str, *, rank: int) -> None:
    """Raises a `ValueError` if an array has another rank than its described shape."""
    if x.ndim != rank:
        raise ValueError(f"{name} has shape {x.shape}; it must be {shape}")
