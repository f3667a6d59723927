"""Linformer attention, whose keys and values are projected along the sequence axis."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from synthesizer_jax.alignments.base import check_length, project
from synthesizer_jax.attention import Mask, Span, attend, attention_weights, low_rank
from synthesizer_jax.attention.masks import zero_padding
from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import Length, Rate
from synthesizer_jax.mixers.base import Mixer, MixerInput, dropout_options, merge_heads
from synthesizer_jax.primitives.initializers import FanIn, Initializer, Normal
from synthesizer_jax.primitives.mesh import partition
from synthesizer_jax.primitives.parameters import with_axes


@register
class Linformer(Mixer):
    """Attention to k learned mixtures of positions instead of to all positions.

    The layer computes ``softmax(Q (E K)ᵀ / √d_k) (F V)`` (Wang et al. 2020, equation 7). E and F
    have the shape ``[k, max_length]``. The cost is linear in the sequence length. The layer is only
    for encoders, because a projection along the sequence axis includes later positions. The keys
    and values of padding are set to zero before the projection.

    Attributes:
      num_heads: number of heads.
      head_dim: width of one head.
      max_length: number of positions that E and F project.
      projected_length: the number k of projected positions, as in the paper.
      shared: whether E and F are the same matrix, which the paper calls "key-value sharing". In any
        case, all heads share E and F.
      dropout_rate: probability of dropping an attention weight.
      query_init: initializer of the query kernel.
      kernel_init: initializer of the key, value and output kernels.
      length_init: initializer of E and F. None means a normal distribution with standard deviation
        1/√projected_length, as in the paper's Johnson-Lindenstrauss projection.
    """

    num_heads: Length
    head_dim: Length
    max_length: Length
    projected_length: Length = 256
    shared: bool = True
    dropout_rate: Rate = 0.0
    query_init: Initializer = FanIn()
    kernel_init: Initializer = FanIn()
    length_init: Initializer | None = None

    # A projection along the sequence axis includes later tokens.
    supports_causal = False
    supports_packing = False

    @nn.compact
    def mix(self, inputs: MixerInput) -> tuple[jax.Array, None]:
        x, mask = inputs.x, inputs.mask
        length = x.shape[1]
        check_length(self, self.max_length, Span(0, length))

        def projected(name: str, kernel_init: Initializer) -> jax.Array:
            """Returns queries, keys or values of the tokens, ``[b, n, h, e]``."""
            return project(
                x,
                heads=self.num_heads,
                width=self.head_dim,
                name=name,
                kernel_init=kernel_init,
            )

        query = projected("query", self.query_init)
        key = projected("key", self.kernel_init)
        value = projected("value", self.kernel_init)
        key, value = (zero_padding(y, mask.keys(length)) for y in (key, value))

        # The matrices E and F have the shape [p, max_length], where p is called k in the paper.
        init = with_axes(
            self.length_init or Normal(self.projected_length**-0.5), "rank", "key_length"
        )
        shape = (self.projected_length, self.max_length)
        key_matrix = self.param("key_length_projection", init, shape)
        value_matrix = key_matrix
        if not self.shared:
            value_matrix = self.param("value_length_projection", init, shape)

        def mix_positions(matrix: jax.Array, y: jax.Array) -> jax.Array:
            """Returns p mixtures of the n positions, ``[b, p, h, e]``."""
            return jnp.einsum("pn,bnhe->bphe", matrix[:, :length].astype(y.dtype), y)

        keys = mix_positions(key_matrix, key)
        values = mix_positions(value_matrix, value)
        terms = (low_rank(query * self.head_dim**-0.5, keys, token_keys=True),)
        # The projected keys do not belong to single positions, so the mask only says which queries
        # are real.
        rows = Mask(query_valid=mask.queries(length))
        if self.is_sowing_weights:
            self.sow("intermediates", "attention_weights", attention_weights(terms, mask=rows))
        y = attend(
            terms,
            values,
            mask=rows,
            **dropout_options(self, self.dropout_rate),
            partition=partition(batch=x.shape[0], heads=values.shape[2]),
        )
        return merge_heads(self, y, x.shape[-1], kernel_init=self.kernel_init), None
