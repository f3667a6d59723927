"""Logits that are an outer product of two vectors of every query."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import jax

from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.terms.base import Term, check_rank, logits_dtype


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
        """The number of keys that have logits, ``A · B``."""
        return self.a.shape[-1] * self.b.shape[-1]

    def depends_on_tokens(self, name: str) -> bool:
        return True

    def has_absolute_positions(self, mask: Mask) -> tuple[bool, bool]:
        return False, True

    def materialize(
        self, *, q_length: int, k_length: int, query_offset: int | jax.Array
    ) -> jax.Array:
        del q_length, query_offset
        a, b = (x.astype(logits_dtype(x)) for x in (self.a, self.b))
        product = (a[..., :, None] * b[..., None, :]).reshape(*a.shape[:3], -1)
        return product[..., :k_length].transpose(0, 2, 1, 3)


def outer(a: jax.Array, b: jax.Array) -> Outer:
    """Returns a checked `Outer` of ``a [b, q, h, A]`` and ``b [b, q, h, B]``."""
    check_rank("outer: a", a, "[batch, q, heads, A]", rank=4)
    check_rank("outer: b", b, "[batch, q, heads, B]", rank=4)
    if a.shape[:3] != b.shape[:3]:
        raise ValueError(
            f"outer: a has [batch, q, heads]={a.shape[:3]} but b {b.shape[:3]}; both must be equal"
        )
    return Outer(a, b)
