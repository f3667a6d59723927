"""Logits that are products over a rank."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp

from synthesizer_jax.attention.terms.base import Term, check_rank, logits_dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRank(Term):
    """A product over a rank, ``logits[b, h, q, k] = Σ_r queries[b, q, h, r] · keys[b, k, h, r]``.

    A dot product of any width; Dense Synthesizer (keys are parameters); Factorized Random
    Synthesizer (both are parameters).

    Attributes:
      queries: ``[b or 1, q, h, r]``.
      keys: ``[b or 1, k, h, r]``.
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

    def materialize(
        self, *, q_length: int, k_length: int, query_offset: int | jax.Array
    ) -> jax.Array:
        del q_length, k_length, query_offset
        dtype = logits_dtype(self.queries, self.keys)
        return jnp.einsum("bqhr,bkhr->bhqk", self.queries, self.keys, preferred_element_type=dtype)


def low_rank(
    queries: jax.Array, keys: jax.Array, *, token_keys: bool, token_queries: bool = True
) -> LowRank:
    """Returns a checked `LowRank` of queries ``[b or 1, q, h, r]`` and keys ``[b or 1, k, h, r]``.

    Raises:
      ValueError: for other shapes, or parameters with a batch axis longer than one.
    """
    check_rank("low_rank: queries", queries, "[batch or 1, q, heads, r]", rank=4)
    check_rank("low_rank: keys", keys, "[batch or 1, k, heads, r]", rank=4)
    if queries.shape[2:] != keys.shape[2:]:
        raise ValueError(
            f"low_rank: queries have [heads, r]={queries.shape[2:]} but keys {keys.shape[2:]}; "
            "both must be equal"
        )
    for name, x, tokens in (("queries", queries, token_queries), ("keys", keys, token_keys)):
        if not tokens and x.shape[0] != 1:
            raise ValueError(
                f"low_rank: {name} that are not made from tokens need a batch axis of 1, not "
                f"{x.shape[0]}"
            )
    return LowRank(queries, keys, token_keys, token_queries)
