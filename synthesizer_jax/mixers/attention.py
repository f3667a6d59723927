"""The attention sub-layer: an alignment, values, and the engine between them."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax

from synthesizer_jax.alignments import Alignment, DotProduct
from synthesizer_jax.alignments.base import project
from synthesizer_jax.attention import (
    Cache,
    Mask,
    Partition,
    Span,
    Terms,
    add,
    attend,
    attention_weights,
    extend,
    init_cache,
)
from synthesizer_jax.attention.products import dense_product
from synthesizer_jax.initializers import FanIn, Initializer
from synthesizer_jax.parameters import with_axes
from synthesizer_jax.registry import register


@dataclasses.dataclass(frozen=True)
class NewCache:
    """Asks a layer to start a cache with room for `max_length` positions (None: as many as given)."""

    max_length: int | None = None


@register
class Attention(nn.Module):
    """Multi-head attention whose logits come from any alignment.

    ``y = concat_h(softmax(Σ terms) · x W_v) W_o``, without biases.

    Attributes:
      num_heads: number of heads.
      head_dim: width of one head; ``num_heads · head_dim`` need not be d_model.
      alignment: who looks at whom.
      dropout_rate: probability of dropping an attention weight; T5's form, one draw per example,
        head and key, active when the random stream ``dropout`` is given.
      shared_key_value: one projection serves as keys and values (Mesh-TensorFlow's shared ``kv``).
      implementation: route of the engine: ``auto``, ``static``, ``fused`` or ``reference``.
      partition: how the batch and the heads are spread over a mesh, set by `sharding`.
      value_init: initialiser of the value kernel ``[d_model, heads, head_dim]``.
      out_init: initialiser of the output kernel ``[heads, head_dim, d_model]``.
    """

    num_heads: int
    head_dim: int
    alignment: Alignment = DotProduct()
    dropout_rate: float = 0.0
    shared_key_value: bool = False
    implementation: str = "auto"
    partition: Partition | None = None
    value_init: Initializer = FanIn()
    out_init: Initializer = FanIn()

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        kv: jax.Array | None = None,
        *,
        mask: Mask | None = None,
        bias: Terms = (),
        cache: Cache | NewCache | None = None,
        position: int | jax.Array = 0,
    ):
        """Mixes tokens.

        Args:
          x: ``[batch, q, d_model]``; its dtype is the dtype of the computation.
          kv: ``[batch, k, d_model]`` tokens to attend to; None means `x` (self-attention).
          mask: which keys may be seen and which queries are real; in self-attention without a
            cache the queries are real where the keys are.
          bias: terms added to the alignment's, outside a mixture's weights (T5's relative bias).
          cache: keys and values of earlier positions, or `NewCache`. `x` then holds the tokens from
            `position` on; a zero-length `kv` adds nothing (cross-attention after its first step).
          position: in-sequence position of the first token of `x`.

        Returns:
          ``[batch, q, d_model]``, and with a cache the pair of that and the extended cache.
        """
        mask = Mask() if mask is None else mask
        memory = x if kv is None else kv
        values = project(
            memory,
            heads=self.num_heads,
            width=self.head_dim,
            name="value",
            kernel_init=self.value_init,
        )
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
            query_span=Span(position, x.shape[1]),
            key_span=Span(0, room),
        )
        if cache is not None:
            if isinstance(cache, NewCache):
                cache = init_cache(terms, values, max_length=room)
            at = position if kv is None else 0
            terms, values, cache = extend(cache, terms, values, at=at)
        y = self.mix(add(*terms, *bias), values, mask, x.shape[1])
        y = nn.DenseGeneral(
            features=x.shape[-1],
            axis=(-2, -1),
            use_bias=False,
            dtype=x.dtype,
            kernel_init=with_axes(self.out_init, "heads", "kv", "embed"),
            dot_general=dense_product,
            name="out",
        )(y)
        return y if cache is None else (y, cache)

    def mix(self, terms: Terms, values: jax.Array, mask: Mask, q_length: int) -> jax.Array:
        """Runs the engine; leaves the weights in ``intermediates`` when they are asked for."""
        if self.is_mutable_collection("intermediates") and not self.is_initializing():
            weights = attention_weights(
                terms, mask=mask, q_length=q_length, k_length=values.shape[1]
            )
            self.sow("intermediates", "attention_weights", weights)
        dropping = self.dropout_rate > 0.0 and self.has_rng("dropout")
        return attend(
            terms,
            values,
            mask=mask,
            q_length=q_length,
            dropout_rate=self.dropout_rate if dropping else 0.0,
            dropout_key=self.make_rng("dropout") if dropping else None,
            implementation=self.implementation,
            partition=self.partition,
        )
