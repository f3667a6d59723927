"""Different alignments for different heads of one layer."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import flax.linen as nn
import jax

from synthesizer_jax.alignments.base import (
    Alignment,
    AttentionContext,
    check_alignment,
    scale_parts,
)
from synthesizer_jax.attention import Split, Terms
from synthesizer_jax.registry import register
from synthesizer_jax.typing import Length, NotEmpty, PyTree


@register
class PerHead(Alignment):
    """Gives some heads to each part: the first to the first part, and so on.

    Where a `Mixture` adds logits up, this keeps them apart; so it also takes alignments that are
    weights, such as some `Gaussian` and some learned heads (You et al. 2020, released code).

    Attributes:
      parts: the alignments.
      heads: number of heads of every part; None: the same number for all.
    """

    parts: Annotated[tuple[Alignment, ...], NotEmpty()]
    heads: tuple[Length, ...] | None = None

    @nn.compact
    def __call__(self, queries: jax.Array, keys: jax.Array, context: AttentionContext) -> Terms:
        counts = self.counts(context.num_heads)
        groups, start = [], 0
        for i, (part, count) in enumerate(zip(self.parts, counts, strict=True)):
            check_alignment(part, "PerHead: an entry of parts")
            heads = slice(start, start + count)
            groups.append(
                part.copy(name=f"part_{i}", parent=self)(
                    queries if queries.ndim == 3 else queries[:, :, heads],
                    keys if keys.ndim == 3 else keys[:, :, heads],
                    dataclasses.replace(context, num_heads=count),
                )
            )
            start += count
        return (Split(tuple(groups)),)

    def scale_logits(self, params: PyTree, factor: float) -> PyTree:
        """See `Alignment.scale_logits`."""
        return scale_parts(self.parts, params, dict.fromkeys(range(len(self.parts)), factor))

    def counts(self, num_heads: int) -> tuple[int, ...]:
        """The number of heads of every part; raises a `ValueError` when they do not add up."""
        if self.heads is not None:
            if len(self.heads) != len(self.parts) or sum(self.heads) != num_heads:
                raise ValueError(
                    f"PerHead: heads={self.heads} for {len(self.parts)} parts and {num_heads} heads; "
                    "give one number a part, adding up to the layer's num_heads"
                )
            return self.heads
        if not self.parts or num_heads % len(self.parts):
            raise ValueError(
                f"PerHead: {num_heads} heads do not divide among {len(self.parts)} parts; say how "
                "many each gets with heads=(…)"
            )
        return (num_heads // len(self.parts),) * len(self.parts)
