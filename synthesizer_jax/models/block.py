"""One layer of a model: mixers, a feed-forward layer, norms and residuals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

from synthesizer_jax.ambient import constrain
from synthesizer_jax.attention import Mask, Terms
from synthesizer_jax.mixers.base import leave, site
from synthesizer_jax.models.layers import Dropout, RMSNorm
from synthesizer_jax.registry import register


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Memory:
    """What a decoder attends to: the encoder's output and who may see it.

    Where the decoder has n rows for each of these, as in beam search, they stand one after the other.

    Attributes:
      encoded: ``[batch, k, d_model]``; zero-length after a decoding loop's first step.
      mask: the cross-attention's mask.
    """

    encoded: jax.Array
    mask: Mask


@register
class Block(nn.Module):
    """Residual sub-layers: self-attention, cross-attention if any, feed-forward.

    A field holds a sub-layer's configuration; the sub-layer made from it carries T5X's name
    (``self_attention``, ``encoder_decoder_attention``, ``mlp``; ``attention`` in encoders).

    For distillation a block leaves in the collection `SITES` the inputs ``self_input`` and
    ``cross_input``, the mixers' outputs ``self_mixed`` and ``cross_mixed``, ``self_output`` (after the
    residual) and ``output``; given the collection ``forced`` it takes those inputs from there.

    Attributes:
      self_mixer: the token mixer, such as `Attention`.
      feed_forward: the position-wise layer; None leaves it out.
      cross_mixer: the mixer over the encoder's output; None in encoders and language models, and in
        a decoder's layer that does not look at the encoder.
      dropout_rate: dropout of each sub-layer's output.
      norm: the normalisation.
      post_norm: normalise after the residual, ``norm(x + f(x))`` (Vaswani et al. 2017, BERT), not
        before the sub-layer, ``x + f(norm(x))`` (T5).
      self_residual: False: the mixer stands for its norm and residual too (ALRR, and ELR where
        `feed_forward` is None; Bozic et al. 2023).
    """

    self_mixer: nn.Module
    feed_forward: nn.Module | None
    cross_mixer: nn.Module | None = None
    dropout_rate: float = 0.0
    norm: nn.Module = RMSNorm()
    post_norm: bool = False
    self_residual: bool = True

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
          bias: the stack's position bias, for a self-attention that has logits.
          memory: the encoder's side, in decoders.
          cache: one cache per mixer, in their order; see `Attention`.
          position: position of the first token of `x` when decoding.

        Returns:
          The pair of ``[batch, q, d_model]`` and the new caches (None without a cache), which is
          also the form of a scan's body.
        """
        own, cross = cache if cache is not None else (None, None)
        name = "attention" if memory is None else "self_attention"

        def mix(h: jax.Array) -> jax.Array:
            nonlocal own
            mixer = self.self_mixer.copy(name=name, parent=self)
            own_bias = bias if getattr(mixer, "bias_heads", None) else ()
            y = mixer(h, mask=mask, bias=own_bias, cache=own, position=position)
            y, own = with_cache(y, own)
            leave(self, "self_mixed", y)
            return y

        def look(h: jax.Array) -> jax.Array:
            nonlocal cross
            if memory is None:
                raise ValueError("Block: a cross_mixer needs the encoder's output as memory")
            assert self.cross_mixer is not None
            mixer = self.cross_mixer.copy(name="encoder_decoder_attention", parent=self)
            if h.shape[0] != memory.encoded.shape[0]:
                return shared_memory(mixer, h, memory, cross, position)
            y = mixer(h, memory.encoded, mask=memory.mask, cache=cross, position=position)
            y, cross = with_cache(y, cross)
            leave(self, "cross_mixed", y)
            return y

        x = site(self, "self_input", constrain(x))
        x = self.residual(x, name, 0, mix) if self.self_residual else mix(x)
        leave(self, "self_output", x)
        if self.cross_mixer is not None:
            x = self.residual(site(self, "cross_input", x), "cross_attention", 1, look)
        else:
            cross = None if cross is None else ()
        if self.feed_forward is not None:
            x = self.residual(x, "mlp", 2, self.feed_forward.copy(name="mlp", parent=self))
        leave(self, "output", x)
        return x, (None if cache is None else (own, cross))

    def residual(
        self, x: jax.Array, name: str, index: int, layer: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        """A sub-layer with its norm, dropout and residual."""
        place = "post" if self.post_norm else "pre"
        norm = self.norm.copy(name=f"{place}_{name}_layer_norm", parent=self)
        dropout = Dropout(self.dropout_rate, name=f"dropout_{index}", parent=self)
        y = norm(x + dropout(layer(x))) if self.post_norm else x + dropout(layer(norm(x)))
        return constrain(y)


def shared_memory(
    mixer: nn.Module, x: jax.Array, memory: Memory, cache: Any, position: int | jax.Array
) -> jax.Array:
    """A decoding step of a cross mixer for ``[batch · n, 1, d_model]`` over caches of batch rows.

    Nothing is repeated: the products see n queries for the same keys. The cache stays as it is.
    """

    def one(mixer: Any, x: jax.Array) -> jax.Array:
        return mixer(x, memory.encoded, mask=memory.mask, cache=cache, position=position)[0]

    split = x.reshape(memory.encoded.shape[0], -1, *x.shape[1:])
    lifted: Any = nn.vmap(one, {True: None}, split_rngs={}, in_axes=1, out_axes=1)
    return lifted(mixer, split).reshape(x.shape)


def with_cache(result: Any, cache: Any) -> tuple[jax.Array, Any]:
    """The pair (output, cache) of a mixer that returns a cache only when it was given one."""
    return (result, None) if cache is None else result
