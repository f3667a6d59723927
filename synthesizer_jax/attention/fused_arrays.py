"""Defines the inputs of the fused route, and the statistics that its backward pass reads.

The fused route, the kernels of the fused route, and the static route import the types in this
module. The types have a separate module to avoid circular imports: a route imports the module of
its kernels, and both modules need these types.
"""

from __future__ import annotations

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.terms import LowRank, Outer, Relative, Static, clear_padding


class Products(NamedTuple):
    """Terms whose logits are products of factors.

    Attributes:
      low_rank: terms whose logits are ``Q Kᵀ``.
      outer: terms whose logits are ``a[q, k // B] · b[q, k % B]``.
    """

    low_rank: tuple[LowRank, ...] = ()
    outer: tuple[Outer, ...] = ()


class Biases(NamedTuple):
    """Terms that consist only of parameters, so that all examples share their logits.

    Attributes:
      tables: terms with one number for each query and key.
      diagonals: terms with one number for each distance ``key - query`` between the queries and
        keys of this call.
    """

    tables: tuple[Static, ...] = ()
    diagonals: tuple[Relative, ...] = ()

    def sums(self) -> tuple[jax.Array | None, jax.Array | None]:
        """Returns the sum of all tables and the sum of all diagonals.

        The sum of the tables is None if there are no tables. The sum of the diagonals is None if
        there are no diagonals. Both sums are float32, except that a single table keeps its dtype,
        so that kernels read fewer bytes.
        """
        tables = [term.logits for term in self.tables]
        diagonals = [term.logits.astype(jnp.float32) for term in self.diagonals]
        if len(tables) > 1:
            tables = [functools.reduce(operator.add, [x.astype(jnp.float32) for x in tables])]
        table = tables[0] if tables else None
        return table, functools.reduce(operator.add, diagonals) if diagonals else None


class FusedInputs(NamedTuple):
    """The inputs of the fused route.

    Attributes:
      products: the terms that are products of factors.
      biases: the terms that are the same for all examples.
      values: the values, ``[b, k, h, e]``.
      mask: the keys that each query may attend to.
      positions: the positions of queries ``[b, q]`` and keys ``[b, k]`` in packed segments, at
        which biases and the keys of `Outer` terms are looked up. If `positions` is None, biases and
        the keys of `Outer` terms are looked up by the position in the row.
    """

    products: Products
    biases: Biases
    values: jax.Array
    mask: Mask
    positions: tuple[jax.Array, jax.Array] | None = None

    def cleared(self, q_length: int) -> FusedInputs:
        """Returns the inputs with all padding set to zero; see `clear_padding`."""
        real = self.mask.clearing_masks(q_length, self.values.shape[1])
        products, values = clear_padding(self.products, self.values, *real)
        return self._replace(products=products, values=values)

    def cotangents(self, products: Products, biases: Biases, values: jax.Array) -> FusedInputs:
        """Returns the cotangents of all inputs, in the form that the backward pass has to return.

        The cotangents of the mask and of the positions are None, because masks and positions are
        not differentiable.
        """
        mask, positions = jax.tree.map(lambda _: None, (self.mask, self.positions))
        return FusedInputs(products, biases, values, mask, positions)


class SoftmaxStats(NamedTuple):
    """Two numbers for each row of logits, from which the backward pass recomputes the weights.

    Attributes:
      row_max: the maximum of the row, ``[b, q, h, 1]``. If the mask allows no key in a row,
        `row_max` is 0.
      inverse_row_sum: ``1 / Σ exp(logits - row_max)``, ``[b, q, h, 1]``. If the query of a row is
        padding, or if the mask allows no key in the row, `inverse_row_sum` is 0, so that all
        weights of the row are 0.
    """

    row_max: jax.Array
    inverse_row_sum: jax.Array
