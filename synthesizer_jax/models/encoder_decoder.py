"""T5-style encoder-decoder."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from synthesizer_jax.ambient import on_any_mesh
from synthesizer_jax.attention import Mask
from synthesizer_jax.mixers.base import NewCache, site
from synthesizer_jax.models.block import Memory
from synthesizer_jax.models.stack import Stack
from synthesizer_jax.models.token_model import TokenModel, lengths, padding_last, up_to_last
from synthesizer_jax.registry import register


@register
class EncoderDecoder(TokenModel, kw_only=True):
    """Two stacks over one vocabulary (Raffel et al. 2020); see `TokenModel` for more fields.

    Attributes:
      encoder: the encoder's stack.
      decoder: the decoder's stack; its blocks have a `cross_mixer`.
      positions: added to the embeddings of both stacks, so that they share its parameters
        (Mesh-TensorFlow), while each stack's own `positions` have their own.
    """

    encoder: Stack
    decoder: Stack
    positions: nn.Module | None = None

    @on_any_mesh
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
          encoder_tokens: ``[batch, k]`` integers; 0 is padding, on either side.
          decoder_tokens: ``[batch, q]`` the targets shifted right by one, padded on the right.
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

    @on_any_mesh
    def hidden(
        self,
        encoder_tokens: jax.Array,
        decoder_tokens: jax.Array,
        *,
        segments: tuple[jax.Array, jax.Array] | None = None,
        positions: tuple[jax.Array, jax.Array] | None = None,
        max_segments: int | None = None,
        counted: jax.Array | None = None,
    ) -> jax.Array:
        """The decoder's output before the projection to the vocabulary, ``[batch, q, d_model]``.

        Arguments are those of `__call__`, and `counted` as in `decode`.
        """
        source, target = segments if segments is not None else (None, None)
        places = positions if positions is not None else (None, None)
        encoded = self.encode(
            encoder_tokens, segments=source, positions=places[0], max_segments=max_segments
        )
        encoded = site(self, "encoded", encoded)
        cross, mask = Mask(key_lengths=lengths(encoder_tokens)), Mask(causal=True)
        if source is not None and target is not None:
            cross = Mask.packed(source, target, segments=max_segments)
            mask = Mask.packed(target, causal=True, segments=max_segments)
        return self.decode(
            decoder_tokens,
            Memory(encoded, cross),
            mask=mask,
            positions=places[1],
            counted=counted,
        )

    @on_any_mesh
    def decode(
        self,
        tokens: jax.Array,
        memory: Memory,
        *,
        mask: Mask | None = None,
        positions: jax.Array | None = None,
        counted: jax.Array | None = None,
    ) -> jax.Array:
        """The decoder's teacher-forced pass.

        Args:
          tokens: ``[batch · n, q]`` the targets shifted right by one, n rows for each row of memory.
          memory: the encoder's output and the cross-attention's mask, ``batch`` rows.
          mask: the self-attention's mask; None is causal.
          positions: ``[batch, q]`` for packed rows.
          counted: ``[batch · n, q]`` bool, the positions with a target, over which modules average
            what they add to a training loss (`LOSSES`); None: up to the last non-zero token.

        Returns:
          ``[batch, q, d_model]``, for `logits`.
        """
        mask = Mask(causal=True) if mask is None else mask
        if counted is None and mask.query_segments is None:
            counted = up_to_last(tokens)
        x = self.embed(tokens)
        return self.decoder(
            x,
            mask=mask,
            memory=memory,
            positions=positions,
            counted=counted,
            shared_positions=self.positions,
        )[0]

    @on_any_mesh
    def remember(self, tokens: jax.Array) -> Memory:
        """What `decode` attends to, from ``[batch, k]`` encoder tokens."""
        return Memory(self.encode(tokens), Mask(key_lengths=lengths(tokens)))

    @on_any_mesh
    def encode(
        self,
        tokens: jax.Array,
        *,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
        max_segments: int | None = None,
    ) -> jax.Array:
        """``[batch, k]`` tokens to ``[batch, k, d_model]``, the real ones first."""
        if segments is None:
            tokens, _ = padding_last(tokens)
            mask = Mask.padded(lengths(tokens))
        else:
            mask = Mask.packed(segments, segments=max_segments)
        return self.encoder(
            self.embed(tokens), mask=mask, positions=positions, shared_positions=self.positions
        )[0]

    @on_any_mesh
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
        new = (NewCache(max_length), NewCache(queries=max_length))
        return self.decoder(
            self.embed(first),
            mask=Mask(causal=True),
            memory=Memory(encoded, Mask(key_lengths=lengths(encoder_tokens))),
            caches=(new,) * self.decoder.num_layers,
            length=max_length,
            shared_positions=self.positions,
        )

    @on_any_mesh
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
          tokens: ``[batch · n, 1]`` the tokens at `position`, n rows for each example.
          encoder_lengths: ``[batch]`` number of real encoder tokens.
          caches: from `start` or the step before; the self-attention's have batch · n rows, the
            cross-attention's batch rows, but batch · n where they change from step to step
            (`Stack.changing_cross_caches`).
          position: where the tokens stand; a traced scalar.
          max_length: the same as in `start`.

        Returns:
          ``[batch · n, 1, d_model]`` and the new caches.
        """
        nothing = jnp.zeros((encoder_lengths.shape[0], 0, self.d_model), self.dtype)
        return self.decoder(
            self.embed(tokens),
            mask=Mask(causal=True, query_offset=position),
            memory=Memory(nothing, Mask(key_lengths=encoder_lengths)),
            caches=caches,
            position=position,
            length=max_length,
            shared_positions=self.positions,
        )

    def room(self, inputs_length: int, targets_length: int) -> int:
        """The positions that decoding needs: the targets'."""
        del inputs_length
        return targets_length
