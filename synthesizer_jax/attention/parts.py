"""What the implementations of the fused route share: their inputs, and what is kept of every row."""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.terms import Relative, Static, Terms, spread, wide


class Inputs(NamedTuple):
    """What the fused route reads.

    Attributes:
      products: `LowRank` and `Outer` terms.
      biases: `Static` terms, and `Relative` ones cut to the block.
      values: ``[b, k, h, e]``.
      mask: which keys a query may see.
      places: positions ``[b, q]`` and ``[b, k]`` inside packed segments; then biases and the keys of
        `Outer` terms are looked up by them. None: the positions in the row.
    """

    products: Terms
    biases: Terms
    values: jax.Array
    mask: Mask
    places: tuple[jax.Array, jax.Array] | None = None

    def cotangents(self, products: Terms, biases: Terms, values: jax.Array) -> Inputs:
        """The inputs' cotangents from those of what may have a gradient."""
        mask, places = jax.tree.map(lambda _: None, (self.mask, self.places))
        return Inputs(products, biases, values, mask, places)


class Rows(NamedTuple):
    """What the backward pass needs to know of every row of logits.

    Attributes:
      top: the maximum, ``[b, q, h, 1]``; 0 for a row without keys.
      inverse: ``1 / Σ exp(logits - top)``, ``[b, q, h, 1]``; 0 for padding queries and rows without
        keys, whose weights vanish by it.
    """

    top: jax.Array
    inverse: jax.Array


def vary_alike(*trees: Any) -> Any:
    """The trees, each of whose arrays varies over all manual mesh axes that any of them varies over.

    Inside `jax.shard_map` loops and conditionals need that; what is shared between devices gets the sum
    of its cotangents by it. Elsewhere nothing changes.
    """
    axes = frozenset().union(*(_varying(x) for x in jax.tree.leaves(trees)))
    if not axes:
        return trees

    def vary(x: Any) -> Any:
        missing = tuple(axes - _varying(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, trees)


def _varying(x: Any) -> frozenset[str]:
    return frozenset(jax.typeof(x).mat.varying)


@functools.partial(jax.checkpoint, prevent_cse=False)
def zero_padding(x: jax.Array, real: jax.Array) -> jax.Array:
    """``[b, n, h, r]`` with zeros in the place of padding; the backward pass keeps only ``[b, n]``."""
    return jnp.where(real[..., None, None], x, 0)


def inner(out: jax.Array, g: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """``Σ_e out · g``, ``[b, q, h, 1]``: what a row's logits lose together in the backward pass."""
    return jnp.sum(g.astype(dtype) * out, axis=-1, keepdims=True)


def shared_bias(biases: Terms, *, q_length: int) -> jax.Array | None:
    """What heads add to the logits of every example, ``[..., q, k]`` float32, if anything.

    Args:
      biases: `Static` and `Relative` terms, of all heads or of one.
      q_length: number of queries.
    """
    parts = [
        spread(t.logits, q_length) if isinstance(t, Relative) else t.logits
        for t in biases
        if isinstance(t, (Relative, Static))
    ]
    return functools.reduce(operator.add, [x.astype(wide(x)) for x in parts]) if parts else None
