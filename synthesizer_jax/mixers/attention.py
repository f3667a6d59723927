"""The attention sub-layer: an alignment, values, and the engine between them."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from synthesizer_jax.alignments import Alignment, DotProduct
from synthesizer_jax.alignments.base import check_alignment, project
from synthesizer_jax.ambient import on_any_mesh, partition
from synthesizer_jax.attention import (
    Cache,
    Mask,
    Span,
    Terms,
    add,
    attend,
    attention_weights,
    extend,
    init_cache,
)
from synthesizer_jax.attention.cache import read_tokens
from synthesizer_jax.attention.checks import check_types
from synthesizer_jax.initializers import FanIn, Initializer
from synthesizer_jax.mixers.base import NewCache, dropout_options, merge_heads
from synthesizer_jax.mixers.decoding import (
    query_lengths,
    query_position,
    ragged_step,
    step_mask,
)
from synthesizer_jax.registry import register


@register
class Attention(nn.Module):
    """Multi-head attention whose logits come from any alignment.

    ``y = concat_h(softmax(Σ terms) · x W_v) W_o``.

    Attributes:
      num_heads: number of heads.
      head_dim: width of one head; ``num_heads · head_dim`` need not be d_model.
      alignment: who looks at whom.
      dropout_rate: probability of dropping an attention weight; T5's form, one draw per example,
        head and key, active when the random stream ``dropout`` is given.
      shared_key_value: one projection serves as keys and values (Mesh-TensorFlow's shared ``kv``).
      project_values: False takes the tokens themselves as every head's values; with the alignment
        `Bilinear` this is general bilinear attention (Shazeer et al. 2020, section 3.3).
      use_bias: biases in the value and output projections, as in BERT; an alignment has its own.
      implementation: route of the engine: ``auto``, or a name of `attention.attend.ROUTES`.
      value_init: initialiser of the value kernel ``[d_model, heads, head_dim]``.
      out_init: initialiser of the output kernel ``[heads, head_dim, d_model]``.
    """

    num_heads: int
    head_dim: int
    alignment: Alignment = DotProduct()
    dropout_rate: float = 0.0
    shared_key_value: bool = False
    project_values: bool = True
    use_bias: bool = False
    implementation: str = "auto"
    value_init: Initializer = FanIn()
    out_init: Initializer = FanIn()

    @property
    def bias_heads(self) -> int | None:
        """The number of heads of a position bias; None: there are no logits to add one to."""
        return self.num_heads if self.alignment.makes_logits else None

    @property
    def values_heads(self) -> int:
        """The number of heads of the values."""
        return self.num_heads

    @on_any_mesh
    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        kv: jax.Array | None = None,
        *,
        mask: Mask | jax.Array | None = None,
        bias: Terms = (),
        cache: Cache | NewCache | None = None,
        position: int | jax.Array | None = None,
    ):
        """Mixes tokens.

        Args:
          x: ``[batch, q, d_model]``; its dtype is the dtype of the computation.
          kv: ``[batch, k, d_model]`` tokens to attend to; None means `x` (self-attention).
          mask: which keys may be seen and which queries are real; in self-attention without a
            cache the queries are real where the keys are. Self-attention with a cache is causal
            whatever the mask says, and only its `prefix_lengths` open later tokens; its
            `query_offset` is taken to be `position`.
          bias: terms added to the alignment's, outside a mixture's weights (T5's relative bias).
          cache: keys and values of earlier positions, or `NewCache`. `x` then holds the tokens from
            `position` on; a zero-length `kv` adds nothing (cross-attention after its first step).
            Prompts of different lengths come with the mask's `key_lengths`, padded at the end, or
            its `key_valid`, padded anywhere: positions then count an example's real tokens, and
            every example goes on at its own.
          position: in-sequence position of the first token of `x`, for all or ``[batch]``; None:
            where the cache ends. It may be smaller, to decode from there again.

        Returns:
          ``[batch, q, d_model]``, and with a cache the pair of that and the extended cache.

        Raises:
          ValueError: among others, for tokens past the end of the cache or of the alignment's table.
            Where the position is traced, as in a compiled loop, the outputs are NaN instead.
        """
        check_alignment(self.alignment, f"{type(self).__name__}: alignment")
        mask = Mask.of(mask)
        if cache is not None:
            ragged = ragged_step(self, x, kv, mask=mask, bias=bias, cache=cache, position=position)
            if ragged is not None:
                return ragged
        if not isinstance(bias, tuple) or bias:
            check_types(bias, of="bias is", remedy="give")
        position = query_position(self, mask, cache, position, cross=kv is not None)
        memory = x if kv is None else kv
        values = self.values(memory)
        if cache is None:
            mask = mask.for_self_attention() if kv is None else mask
            room = memory.shape[1]
        elif isinstance(cache, NewCache):
            room = memory.shape[1] if cache.max_length is None else cache.max_length
        else:
            room = cache.values.shape[1]
        terms = self.alignment.copy(name="align", parent=self)(
            x,
            values if self.shared_key_value else kv,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            query_span=Span(position, positions_of(mask, x.shape[1])),
            key_span=Span(0, positions_of(mask, room)),
        )
        check_types(terms)
        extra = self.extra(memory)
        if cache is not None:
            terms, values, mask, cache = self.extended(
                cache, terms, values, mask, extra, position=position, room=room, kv=kv, n=x.shape[1]
            )
            extra = cache.extra
        y = self.mix(x, terms, bias, values, mask, extra)
        y = merge_heads(self, y, x.shape[-1], kernel_init=self.out_init, use_bias=self.use_bias)
        return y if cache is None else (y, cache)

    def extended(
        self,
        cache: Cache | NewCache,
        terms: Terms,
        values: jax.Array,
        mask: Mask,
        extra: tuple[jax.Array, ...],
        *,
        position: int | jax.Array,
        room: int,
        kv: jax.Array | None,
        n: int,
    ) -> tuple[Terms, jax.Array, Mask, Cache]:
        """What n queries at `position` attend to, and the extended cache; see `extend`."""
        if isinstance(cache, NewCache):
            cache = init_cache(
                terms, values, max_length=room, extra=extra, self_attention=kv is None
            )
        if kv is None:
            mask = step_mask(mask, position, n)
            return extend(cache, terms, values, at=position, mask=mask, extra=extra)
        mask = dataclasses.replace(mask, query_offset=position)
        terms, values, mask, cache = extend(cache, terms, values, at=0, mask=mask, extra=extra)
        lengths = query_lengths(mask, position)
        _, length = read_tokens(
            position, n, length=position, lengths=lengths, batch=values.shape[0]
        )
        return terms, values, mask, dataclasses.replace(cache, length=length)

    def values(self, memory: jax.Array) -> jax.Array:
        """``[batch, k, heads, width]`` from the tokens attended to."""
        if not self.project_values:
            shape = (*memory.shape[:2], self.values_heads, memory.shape[-1])
            return jnp.broadcast_to(memory[:, :, None], shape)
        return project(
            memory,
            heads=self.values_heads,
            width=self.head_dim,
            name="value",
            kernel_init=self.value_init,
            use_bias=self.use_bias,
        )

    def extra(self, memory: jax.Array) -> tuple[jax.Array, ...]:
        """What else a subclass makes of the tokens attended to, ``[batch, k, ...]`` each."""
        del memory
        return ()

    def mix(
        self,
        x: jax.Array,
        terms: Terms,
        bias: Terms,
        values: jax.Array,
        mask: Mask,
        extra: tuple[jax.Array, ...],
    ) -> jax.Array:
        """Runs the engine; leaves the weights in ``intermediates`` when they are asked for."""
        del extra
        terms = add(*terms, *bias)
        if self.reporting:
            weights = attention_weights(
                terms, mask=mask, q_length=x.shape[1], k_length=values.shape[1]
            )
            self.sow("intermediates", "attention_weights", weights)
        return attend(
            terms,
            values,
            mask=mask,
            q_length=x.shape[1],
            implementation=self.implementation,
            partition=partition(batch=x.shape[0], heads=values.shape[2]),
            **dropout_options(self),
        )

    @property
    def reporting(self) -> bool:
        """Whether the attention weights are asked for."""
        return self.is_mutable_collection("intermediates") and not self.is_initializing()


def positions_of(mask: Mask, length: int) -> int:
    """How many positions tables must have for a row: in packed rows those of the longest segment."""
    if mask.key_segments is None or mask.segment_length is None:
        return length
    return min(length, mask.segment_length)
