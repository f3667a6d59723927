"""Random and Fixed Random Synthesizer."""

from __future__ import annotations

import flax.linen as nn
import jax

from synthesizer_jax.alignments.base import Alignment, check_length, take
from synthesizer_jax.attention import Span, Terms, static
from synthesizer_jax.initializers import Initializer, Normal
from synthesizer_jax.parameters import with_axes
from synthesizer_jax.registry import register


@register
class Random(Alignment):
    """Logits that are parameters, the same for every example, ``S = R[:q, :k]``.

    Tay et al. 2021, section 3.2 (Random Synthesizer); with `trainable=False` Fixed Random, whose
    table stays at its initial value. Shorter inputs use the top-left corner of the table.

    Attributes:
      max_length: number of query and key positions of the table.
      trainable: False keeps the table in the collection ``constants``: saved, never optimised.
      table_init: initialiser of the table ``[heads, max_length, max_length]``.
    """

    max_length: int
    trainable: bool = True
    table_init: Initializer = Normal(0.02)

    @nn.compact
    def __call__(
        self,
        queries: jax.Array,
        keys: jax.Array | None = None,
        *,
        num_heads: int,
        head_dim: int,
        query_span: Span,
        key_span: Span,
    ) -> Terms:
        check_length(self, self.max_length, query_span, key_span)
        init = with_axes(self.table_init, "heads", "query_length", "key_length")
        shape = (num_heads, self.max_length, self.max_length)
        if self.trainable:
            table = self.param("table", init, shape)
        else:
            table = self.variable(
                "constants", "table", lambda: init(self.make_rng("params"), shape)
            ).value
        return (static(take(take(table, query_span, axis=1), key_span, axis=2)),)
