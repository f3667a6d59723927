"""T5-style encoder-decoder."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from synthesizer_jax.attention import Mask
from synthesizer_jax.initializers import FanIn, Initializer, Normal
from synthesizer_jax.mixers import NewCache
from synthesizer_jax.models.block import Memory
from synthesizer_jax.models.stack import Stack, unstack_layers
from synthesizer_jax.parameters import with_axes
from synthesizer_jax.registry import register, replace


@register
class EncoderDecoder(nn.Module):
    """Two stacks over one vocabulary (Raffel et al. 2020).

    Attributes:
      vocab_size: rows of the embedding (T5: 32,128 for 32,100 pieces).
      d_model: width of the model.
      encoder: the encoder's stack.
      decoder: the decoder's stack; its blocks have a `cross_mixer`.
      tied: the embedding is also the output projection, its logits divided by √d_model (T5 1.0).
      dtype: dtype of the computation, ``"float32"`` or ``"bfloat16"``; parameters are float32.
    """

    vocab_size: int
    d_model: int
    encoder: Stack
    decoder: Stack
    tied: bool = False
    dtype: str = "float32"
    embedding_init: Initializer = Normal(1.0)
    logits_init: Initializer = FanIn()

    def setup(self) -> None:
        """Makes the embedding and, unless tied, the output projection."""
        shape = (self.vocab_size, self.d_model)
        self.embedding = self.param(
            "embedding", with_axes(self.embedding_init, "vocab", "embed"), shape
        )
        if not self.tied:
            init = with_axes(self.logits_init, "embed", "vocab")
            self.logits_kernel = self.param("logits_kernel", init, shape[::-1])

    def __call__(
        self,
        encoder_tokens: jax.Array,
        decoder_tokens: jax.Array,
        *,
        segments: tuple[jax.Array, jax.Array] | None = None,
        positions: tuple[jax.Array, jax.Array] | None = None,
        max_segments: int | None = None,
    ) -> jax.Array:
        """Logits of every next token.

        Args:
          encoder_tokens: ``[batch, k]`` integers, 0 is padding.
          decoder_tokens: ``[batch, q]`` the targets shifted right by one.
          segments: for packed rows the encoder's and the decoder's segment ids, 0 is padding.
          positions: for packed rows the positions inside the segments.
          max_segments: no packed row has more segments; lets terms of absolute positions run on
            unpacked rows.

        Returns:
          ``[batch, q, vocab]`` in the dtype of the computation.
        """
        hidden = self.hidden(
            encoder_tokens,
            decoder_tokens,
            segments=segments,
            positions=positions,
            max_segments=max_segments,
        )
        return self.logits(hidden)

    def hidden(
        self,
        encoder_tokens: jax.Array,
        decoder_tokens: jax.Array,
        *,
        segments: tuple[jax.Array, jax.Array] | None = None,
        positions: tuple[jax.Array, jax.Array] | None = None,
        max_segments: int | None = None,
    ) -> jax.Array:
        """The decoder's output before the projection to the vocabulary, ``[batch, q, d_model]``."""
        source, target = segments if segments is not None else (None, None)
        places = positions if positions is not None else (None, None)
        encoded = self.encode(
            encoder_tokens, segments=source, positions=places[0], max_segments=max_segments
        )
        if segments is None:
            cross = Mask(key_lengths=lengths(encoder_tokens))
        else:
            cross = Mask(query_segments=target, key_segments=source, segments=max_segments)
        mask = Mask(causal=True, query_segments=target, key_segments=target, segments=max_segments)
        return self.decode(decoder_tokens, Memory(encoded, cross), mask=mask, positions=places[1])

    def decode(
        self,
        tokens: jax.Array,
        memory: Memory,
        *,
        mask: Mask | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """The decoder's teacher-forced pass.

        Args:
          tokens: ``[batch, q]`` the targets shifted right by one.
          memory: the encoder's output and the cross-attention's mask.
          mask: the self-attention's mask; None is causal.
          positions: ``[batch, q]`` for packed rows.

        Returns:
          ``[batch, q, d_model]``, for `logits`.
        """
        mask = Mask(causal=True) if mask is None else mask
        x = self.embed(tokens)
        return self.decoder(x, mask=mask, memory=memory, positions=positions)[0]

    def encode(
        self,
        tokens: jax.Array,
        *,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
        max_segments: int | None = None,
    ) -> jax.Array:
        """``[batch, k]`` tokens to ``[batch, k, d_model]``."""
        if segments is None:
            mask = Mask(key_lengths=lengths(tokens))
        else:
            mask = Mask(query_segments=segments, key_segments=segments, segments=max_segments)
        return self.encoder(self.embed(tokens), mask=mask, positions=positions)[0]

    def start(
        self, encoder_tokens: jax.Array, first: jax.Array, *, max_length: int
    ) -> tuple[jax.Array, Any]:
        """Encodes, decodes the first token and makes the caches.

        Args:
          encoder_tokens: ``[batch, k]``.
          first: ``[batch, 1]`` the decoder's first input (T5: 0).
          max_length: number of decoder positions to make room for.

        Returns:
          ``[batch, 1, d_model]`` hidden states for `logits`, and one cache entry per layer.
        """
        encoded = self.encode(encoder_tokens)
        new = (NewCache(max_length), NewCache())
        return self.decoder(
            self.embed(first),
            mask=Mask(causal=True),
            memory=Memory(encoded, Mask(key_lengths=lengths(encoder_tokens))),
            caches=(new,) * self.decoder.num_layers,
            length=max_length,
        )

    def step(
        self,
        tokens: jax.Array,
        encoder_lengths: jax.Array,
        *,
        caches: tuple[Any, ...],
        position: jax.Array,
        max_length: int,
    ) -> tuple[jax.Array, Any]:
        """One decoding step.

        Args:
          tokens: ``[batch, 1]`` the tokens at `position`.
          encoder_lengths: ``[batch]`` number of real encoder tokens.
          caches: from `start` or the step before.
          position: where the tokens stand; a traced scalar.
          max_length: the same as in `start`.

        Returns:
          ``[batch, 1, d_model]`` and the new caches.
        """
        nothing = jnp.zeros((tokens.shape[0], 0, self.d_model), self.dtype)
        return self.decoder(
            self.embed(tokens),
            mask=Mask(causal=True, query_offset=position),
            memory=Memory(nothing, Mask(key_lengths=encoder_lengths)),
            caches=caches,
            position=position,
            length=max_length,
        )

    def embed(self, tokens: jax.Array) -> jax.Array:
        """``[batch, length]`` tokens to ``[batch, length, d_model]`` in the computation's dtype."""
        return jnp.take(self.embedding, tokens, axis=0).astype(self.dtype)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """``[batch, q, d_model]`` to ``[batch, q, vocab]``."""
        kernel, scale = self.output_kernel()
        return (hidden * jnp.asarray(scale, hidden.dtype)) @ kernel.astype(hidden.dtype)

    def output_kernel(self) -> tuple[jax.Array, float]:
        """The projection ``[d_model, vocab]`` and the factor of its input, for chunked losses."""
        if self.tied:
            return self.embedding.T, self.d_model**-0.5
        return self.logits_kernel, 1.0


def lengths(tokens: jax.Array) -> jax.Array:
    """Number of real tokens per row, ``[batch]``; padding (0) is a suffix."""
    return (tokens != 0).sum(axis=-1, dtype=jnp.int32)


def unroll(model: EncoderDecoder) -> EncoderDecoder:
    """The same model with looped layers, as decoding needs it."""
    stacks = {"encoder": model.encoder, "decoder": model.decoder}
    return replace(model, **{name: replace(s, scan=False) for name, s in stacks.items()})


def unroll_variables(model: EncoderDecoder, variables: dict[str, Any]) -> dict[str, Any]:
    """A model's variables in the layout of `unroll(model)`, each layer's slice taken once."""
    stacks = {"encoder": model.encoder, "decoder": model.decoder}
    return {
        collection: {
            name: unstack_layers(stacks[name], tree) if name in stacks else tree
            for name, tree in trees.items()
        }
        for collection, trees in variables.items()
    }
