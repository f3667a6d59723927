"""Random and Fixed Random Synthesizer."""

from __future__ import annotations

import flax.linen as nn
import jax

from synthesizer_jax.alignments.base import (
    Alignment,
    AttentionContext,
    check_length,
    slice_positions,
)
from synthesizer_jax.attention import Terms, static
from synthesizer_jax.initializers import Initializer, Normal
from synthesizer_jax.parameters import with_axes
from synthesizer_jax.registry import register
from synthesizer_jax.typing import Length


@register
class Random(Alignment):
    """Logits that are parameters, the same for every example, ``S = R[:q, :k]``.

    Tay et al. 2021, section 3.2 (Random Synthesizer); with `trainable=False` Fixed Random, whose
    table stays at its initial value: gradients and optimizers belong to the collection ``params``,
    while ``constants`` is passed on, ``layer.apply({"params": params, **rest}, x)``. Shorter inputs
    use the top-left corner of the table.

    Attributes:
      max_length: number of query and key positions of the table.
      trainable: False keeps the table in the collection ``constants``: saved, never optimized.
      table_init: initializer of the table ``[heads, max_length, max_length]``.
    """

    max_length: Length
    trainable: bool = True
    table_init: Initializer = Normal(0.02)
    linear_in = ("table",)

    @nn.compact
    def __call__(self, queries: jax.Array, keys: jax.Array, context: AttentionContext) -> Terms:
        check_length(self, self.max_length, context.query_span, context.key_span)
        init = with_axes(self.table_init, "heads", "query_length", "key_length")
        shape = (context.num_heads, self.max_length, self.max_length)
        if self.trainable:
            table = self.param("table", init, shape)
        else:
            table = self.variable(
                "constants", "table", lambda: init(self.make_rng("params"), shape)
            ).value
        rows = slice_positions(table, context.query_span, axis=1)
        return (static(slice_positions(rows, context.key_span, axis=2)),)
