"""What the routes share: their arguments, and the inputs and residuals of blocks."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.terms import (
    LowRank,
    Outer,
    Relative,
    Static,
    Term,
    Terms,
    expand_diagonals,
    logits_dtype,
)
from synthesizer_jax.typing import PyTree

_Term = TypeVar("_Term", bound=Term)

MIN_ROW_SUM = 2.0**-64
"""The smallest denominator that the static route trusts.

Weights lost to underflow are then below 1e-15 of a row's sum for up to 4,096 keys, and the division
of the cotangent cannot overflow.
"""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Call:
    """The checked arguments of `attend`, as the routes take them.

    Attributes:
      terms: terms for q queries and k keys.
      values: ``[b, k, h, e]``.
      mask: which keys a query may see.
      q_length: number of queries.
    """

    terms: Terms
    values: jax.Array
    mask: Mask
    q_length: int = dataclasses.field(metadata={"static": True})

    @property
    def k_length(self) -> int:
        """Number of keys."""
        return self.values.shape[1]


class Products(NamedTuple):
    """Terms whose logits are products of factors.

    Attributes:
      low_rank: `LowRank` terms.
      outer: `Outer` terms.
    """

    low_rank: tuple[LowRank, ...] = ()
    outer: tuple[Outer, ...] = ()


class Biases(NamedTuple):
    """Terms of parameters that every example of a head has in common.

    Attributes:
      tables: `Static` terms.
      diagonals: `Relative` terms, cut to the block of logits.
    """

    tables: tuple[Static, ...] = ()
    diagonals: tuple[Relative, ...] = ()


class FusedInputs(NamedTuple):
    """The inputs of the fused route.

    Attributes:
      products: terms made of factors.
      biases: terms that are the same for all examples.
      values: ``[b, k, h, e]``.
      mask: which keys a query may see.
      positions: ``[b, q]`` and ``[b, k]``, inside packed segments, by which biases and the keys
        of `Outer` terms are looked up. None: the positions in the row.
    """

    products: Products
    biases: Biases
    values: jax.Array
    mask: Mask
    positions: tuple[jax.Array, jax.Array] | None = None

    def cotangents(self, products: Products, biases: Biases, values: jax.Array) -> FusedInputs:
        """Returns the inputs' cotangents from those of what may have a gradient."""
        mask, positions = jax.tree.map(lambda _: None, (self.mask, self.positions))
        return FusedInputs(products, biases, values, mask, positions)


def divide_terms(terms: Terms) -> tuple[Products, Biases] | None:
    """Divides terms into products and biases; None if there is a term of another kind."""
    products = Products(_terms_of_type(LowRank, terms), _terms_of_type(Outer, terms))
    biases = Biases(_terms_of_type(Static, terms), _terms_of_type(Relative, terms))
    num_divided = sum(map(len, (*products, *biases)))
    return (products, biases) if num_divided == len(terms) else None


def _terms_of_type(cls: type[_Term], terms: Terms) -> tuple[_Term, ...]:
    """Returns the terms of a class, without those of its subclasses."""
    return tuple(term for term in terms if isinstance(term, cls) and type(term) is cls)


class SoftmaxStats(NamedTuple):
    """The residuals of every row of logits.

    Attributes:
      row_max: the maximum, ``[b, q, h, 1]``; 0 for a row without keys.
      inverse_row_sum: ``1 / Σ exp(logits - row_max)``, ``[b, q, h, 1]``; 0 for padding queries and
        rows without keys, whose weights vanish by it.
    """

    row_max: jax.Array
    inverse_row_sum: jax.Array


def match_varying_axes(*trees: PyTree) -> PyTree:
    """Returns the trees with all arrays varying over the manual mesh axes over which any of them varies.

    Loops and conditionals need that inside `jax.shard_map`; an array that devices share then gets the sum
    of their cotangents. Elsewhere nothing changes.
    """
    axes = frozenset().union(*(_varying_axes(x) for x in jax.tree.leaves(trees)))
    if not axes:
        return trees

    def vary(x: jax.Array) -> jax.Array:
        missing = tuple(axes - _varying_axes(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, trees)


def _varying_axes(x: ArrayLike) -> frozenset[str]:
    return frozenset(jax.typeof(x).mat.varying)


@functools.partial(jax.checkpoint, prevent_cse=False)
def zero_padding_tokens(x: jax.Array, real: jax.Array) -> jax.Array:
    """Returns ``[b, n, ...]`` with zeros for padding; the backward pass keeps only ``[b, n]``."""
    return jnp.where(real.reshape(*real.shape, *(1,) * (x.ndim - 2)), x, 0)


def softmax_vjp_delta(out: jax.Array, g: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns ``δ = Σ_e out · g``, ``[b, q, h, 1]``, of the softmax's derivative ``dS = P ∘ (dP − δ)``."""
    return jnp.sum(g.astype(dtype) * out.astype(dtype), axis=-1, keepdims=True)


def sum_biases(biases: Biases, *, q_length: int) -> jax.Array | None:
    """Returns the sum of the biases, ``[..., q, k]`` float32 or wider; None if there are none.

    Args:
      biases: of all heads or of one.
      q_length: number of queries.
    """
    parts = [term.logits for term in biases.tables]
    parts += [expand_diagonals(term.logits, q_length) for term in biases.diagonals]
    if not parts:
        return None
    return functools.reduce(operator.add, [x.astype(logits_dtype(x)) for x in parts])
