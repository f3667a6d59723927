"""Heads divided among sums of terms."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax

from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.terms.base import Term


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Split(Term):
    """Heads divided among sums of terms, in their order: some Gaussian, some learned.

    Attributes:
      groups: the terms of every group of heads.
    """

    groups: tuple[tuple[Any, ...], ...]

    stands_alone = True

    @property
    def heads(self) -> tuple[int, ...]:
        """The number of heads of every group."""
        return tuple(terms[0].num_heads for terms in self.groups)

    @property
    def num_heads(self) -> int:
        """The number of heads of all groups."""
        return sum(self.heads)

    @property
    def batch(self) -> int:
        """The number of examples; 1 if all examples have the same logits."""
        return max(term.batch for terms in self.groups for term in terms)

    @property
    def lengths(self) -> tuple[int | None, int | None]:
        """The numbers of queries and keys, of the first terms that tell them."""
        lengths = [term.lengths for terms in self.groups for term in terms]
        q = next((q for q, _ in lengths if q is not None), None)
        return q, next((k for _, k in lengths if k is not None), None)

    def slices(self) -> Iterator[tuple[tuple[Term, ...], int, int]]:
        """Yields the terms, the first head and the number of heads of every group."""
        starts = itertools.accumulate(self.heads, initial=0)
        yield from zip(self.groups, starts, self.heads, strict=False)

    def has_absolute_positions(self, mask: Mask) -> tuple[bool, bool]:
        return False, False  # every group is computed by itself

    def materialize(
        self, *, q_length: int, k_length: int, query_offset: int | jax.Array
    ) -> jax.Array:
        """Raises a `ValueError`: the groups may be weights."""
        raise ValueError(
            "Split is not made of logits alone, which is asked for here (talking heads exchange "
            "logits); use GaussianBias, or plain Attention"
        )

    def cached_arrays(self) -> list[jax.Array]:
        return [x for terms in self.groups for term in terms for x in term.cached_arrays()]

    def with_cached_arrays(self, cached: Iterator[jax.Array]) -> Split:
        return Split(
            tuple(tuple(term.with_cached_arrays(cached) for term in terms) for terms in self.groups)
        )
