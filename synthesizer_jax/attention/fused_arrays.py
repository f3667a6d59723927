"""The inputs of the fused route, and what its forward pass leaves for the backward pass.

The route (`fused`), its kernels for each kind of device and the static route share these types.
They know nothing of who computes with them, so that imports go one way: from a route to its
kernels, and from both to here.
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
      low_rank: terms ``Q Kᵀ``.
      outer: terms whose keys are pairs of numbers.
    """

    low_rank: tuple[LowRank, ...] = ()
    outer: tuple[Outer, ...] = ()


class Biases(NamedTuple):
    """Terms of parameters, which all examples share.

    Attributes:
      tables: terms with one number for each query and key.
      diagonals: terms with one number for each distance, cut to the distances of these logits.
    """

    tables: tuple[Static, ...] = ()
    diagonals: tuple[Relative, ...] = ()

    def sums(self) -> tuple[jax.Array | None, jax.Array | None]:
        """Returns the sum of the tables and the sum of the diagonals; None if there are none.

        The sums are float32, except that a single table keeps its dtype: kernels read fewer bytes.
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
      products: terms made of factors.
      biases: terms that are the same for all examples.
      values: ``[b, k, h, e]``.
      mask: which keys a query may see.
      positions: positions inside packed segments, ``[b, q]`` and ``[b, k]``, at which biases and
        the keys of `Outer` terms are looked up. If it is None, they are looked up at the positions
        in the row.
    """

    products: Products
    biases: Biases
    values: jax.Array
    mask: Mask
    positions: tuple[jax.Array, jax.Array] | None = None

    def cleared(self, q_length: int) -> FusedInputs:
        """Returns the inputs with zeros for padding; see `clear_padding`."""
        real = self.mask.uncleared(q_length, self.values.shape[1])
        products, values = clear_padding(self.products, self.values, *real)
        return self._replace(products=products, values=values)

    def cotangents(self, products: Products, biases: Biases, values: jax.Array) -> FusedInputs:
        """Returns the cotangents of all inputs; masks and positions have none."""
        mask, positions = jax.tree.map(lambda _: None, (self.mask, self.positions))
        return FusedInputs(products, biases, values, mask, positions)


class SoftmaxStats(NamedTuple):
    """Two numbers for every row of logits, from which the backward pass recomputes the weights.

    Attributes:
      row_max: the maximum, ``[b, q, h, 1]``, and 0 for a row without keys.
      inverse_row_sum: ``1 / Σ exp(logits - row_max)``, ``[b, q, h, 1]``. It is 0 for padding
        queries and for rows without keys, so that their weights are 0.
    """

    row_max: jax.Array
    inverse_row_sum: jax.Array
