"""Logits that are the same for every example."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import jax

from synthesizer_jax.attention.terms.base import Term, check_rank, logits_dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Static(Term):
    """Logits that are the same for every example: Random, Fixed Random.

    Attributes:
      logits: ``[h, q, k]``.
    """

    logits: Annotated[jax.Array, "h", "q", "k"]

    linear = "logits"

    def materialize(
        self, *, q_length: int, k_length: int, query_offset: int | jax.Array
    ) -> jax.Array:
        del q_length, k_length, query_offset
        return self.logits.astype(logits_dtype(self.logits))[None]


def static(logits: jax.Array) -> Static:
    """Returns a checked `Static` of logits ``[h, q, k]``; raises `ValueError` for other ranks."""
    check_rank("static: logits", logits, "[heads, q, k]", rank=3)
    return Static(logits)
