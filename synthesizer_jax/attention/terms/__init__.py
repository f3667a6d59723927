"""Terms: what attention logits, or weights, are made of, and their algebra. One file per term."""

from __future__ import annotations

import functools
import operator
from typing import TypeAlias

import jax

from synthesizer_jax.attention.terms.banded import Banded, banded
from synthesizer_jax.attention.terms.base import Span, Term, gather_rows, logits_dtype
from synthesizer_jax.attention.terms.low_rank import LowRank, low_rank
from synthesizer_jax.attention.terms.outer import Outer, outer
from synthesizer_jax.attention.terms.relative import (
    Relative,
    add_relative,
    diagonals,
    expand_diagonals,
    relative,
)
from synthesizer_jax.attention.terms.split import Split
from synthesizer_jax.attention.terms.static import Static, static

Terms: TypeAlias = tuple[Term, ...]

__all__ = [
    "Banded",
    "LowRank",
    "Outer",
    "Relative",
    "Span",
    "Split",
    "Static",
    "Term",
    "Terms",
    "add",
    "banded",
    "diagonals",
    "expand_diagonals",
    "gather_rows",
    "logits_dtype",
    "low_rank",
    "materialize",
    "outer",
    "relative",
    "scale",
    "static",
]


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
        total += (functools.reduce(add_relative, relatives),)
    return total


def scale(terms: Terms, factor: jax.Array) -> Terms:
    """Returns the terms multiplied by a factor per head, see `Term.scale`.

    Args:
      terms: any terms.
      factor: ``[h]`` or a scalar.
    """
    return tuple(term.scale(factor) for term in terms)


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
        term.materialize(q_length=q_length, k_length=k_length, query_offset=query_offset)
        for term in terms
    ]
    return functools.reduce(operator.add, parts)


def _add_to_split(split: Split, others: Terms) -> Split:
    if any(term.stands_alone for term in others):
        raise ValueError("Split adds up with logits only; put everything into one PerHead")
    groups = []
    for terms, start, count in split.slices():
        if not terms[0].is_weights:
            terms = add(*terms, *(term.take_heads(start, count) for term in others))
        groups.append(terms)
    return Split(tuple(groups))
