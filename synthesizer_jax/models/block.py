"""One layer of a T5: mixers, a feed-forward layer, norms and residuals."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax

from synthesizer_jax.attention import Mask, Terms
from synthesizer_jax.models.layers import Dropout, rms_norm
from synthesizer_jax.registry import register


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Memory:
    """What a decoder attends to: the encoder's output and who may see it.

    Attributes:
      encoded: ``[batch, k, d_model]``; zero-length after a decoding loop's first step.
      mask: the cross-attention's mask.
    """

    encoded: jax.Array
    mask: Mask


@register
class Block(nn.Module):
    """Pre-norm residual sub-layers: self-attention, cross-attention if any, feed-forward.

    A field holds a sub-layer's configuration; the sub-layer made from it carries T5X's name
    (``self_attention``, ``encoder_decoder_attention``, ``mlp``; ``attention`` in encoders).

    Attributes:
      self_mixer: the token mixer, such as `Attention`.
      feed_forward: the position-wise layer.
      cross_mixer: the mixer over the encoder's output; None in encoders and language models.
      dropout_rate: dropout of each sub-layer's output.
    """

    self_mixer: nn.Module
    feed_forward: nn.Module
    cross_mixer: nn.Module | None = None
    dropout_rate: float = 0.0

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        mask: Mask | None = None,
        bias: Terms = (),
        memory: Memory | None = None,
        cache: tuple[Any, ...] | None = None,
        position: int | jax.Array = 0,
    ):
        """One layer.

        Args:
          x: ``[batch, q, d_model]``.
          mask: the self-attention's mask.
          bias: the stack's position bias, for the self-attention.
          memory: the encoder's side, when there is a `cross_mixer`.
          cache: one cache per mixer, in their order; see `Attention`.
          position: position of the first token of `x` when decoding.

        Returns:
          The pair of ``[batch, q, d_model]`` and the new caches (None without a cache), which is
          also the form of a scan's body.
        """
        own, cross = cache if cache is not None else (None, None)
        decoder = self.cross_mixer is not None
        name = "self_attention" if decoder else "attention"
        h = rms_norm(x, name=f"pre_{name}_layer_norm")
        mixer = self.self_mixer.copy(name=name, parent=self)
        y, own = with_cache(mixer(h, mask=mask, bias=bias, cache=own, position=position), own)
        x = x + Dropout(self.dropout_rate, name="dropout_0")(y)
        if self.cross_mixer is not None:
            if memory is None:
                raise ValueError("Block: a cross_mixer needs the encoder's output as memory")
            h = rms_norm(x, name="pre_cross_attention_layer_norm")
            mixer = self.cross_mixer.copy(name="encoder_decoder_attention", parent=self)
            y = mixer(h, memory.encoded, mask=memory.mask, cache=cross, position=position)
            y, cross = with_cache(y, cross)
            x = x + Dropout(self.dropout_rate, name="dropout_1")(y)
        h = rms_norm(x, name="pre_mlp_layer_norm")
        y = self.feed_forward.copy(name="mlp", parent=self)(h)
        x = x + Dropout(self.dropout_rate, name="dropout_2")(y)
        return x, (None if cache is None else (own, cross))


def with_cache(result: Any, cache: Any) -> tuple[jax.Array, Any]:
    """The pair (output, cache) of a mixer that returns a cache only when it was given one."""
    return (result, None) if cache is None else result
