"""Decoder-only language models, causal or with a prefix that sees all of itself."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from synthesizer_jax.attention import Mask
from synthesizer_jax.mixers import NewCache
from synthesizer_jax.models.stack import Stack
from synthesizer_jax.models.token_model import TokenModel, lengths, padding_last, up_to_last
from synthesizer_jax.registry import register


@register
class LanguageModel(TokenModel, kw_only=True):
    """One stack over one row of text; see `TokenModel` for more fields.

    It answers to the same calls as `EncoderDecoder`, so that the same tasks train it and the same
    decoding uses it: inputs and targets follow one another in a row, the targets directly after the
    last real input token.

    Attributes:
      decoder: the stack; its blocks have no `cross_mixer`.
      prefix: inputs see all inputs (prefix language model, Raffel et al. 2020, figure 4); False is
        causal throughout.
    """

    decoder: Stack
    prefix: bool = False

    def __call__(
        self, encoder_tokens: jax.Array, decoder_tokens: jax.Array, **packing: Any
    ) -> jax.Array:
        """Logits of every next token of the targets.

        Args:
          encoder_tokens: ``[batch, k]`` inputs; 0 is padding, on either side; k may be 0.
          decoder_tokens: ``[batch, q]`` the targets shifted right by one.
          **packing: as in `EncoderDecoder`; packed rows are not supported here.

        Returns:
          ``[batch, q, vocab]`` in the dtype of the computation.
        """
        return self.logits(self.hidden(encoder_tokens, decoder_tokens, **packing))

    def hidden(
        self,
        encoder_tokens: jax.Array,
        decoder_tokens: jax.Array,
        *,
        segments: Any = None,
        positions: Any = None,
        max_segments: int | None = None,
        counted: jax.Array | None = None,
    ) -> jax.Array:
        """The targets' states before the projection to the vocabulary, ``[batch, q, d_model]``.

        Arguments are those of `__call__`, and `counted` as in `EncoderDecoder.decode`.
        """
        del positions, max_segments
        if segments is not None:
            raise ValueError(
                "LanguageModel: inputs and targets share a row here; train with data.pack=false"
            )
        inputs = lengths(encoder_tokens)
        row = join(encoder_tokens, decoder_tokens, inputs)
        counted = up_to_last(decoder_tokens) if counted is None else counted
        counted = join(jnp.ones_like(encoder_tokens), counted.astype(row.dtype), inputs) > 0
        x, _ = self.decoder(self.embed(row), mask=self.mask(inputs), counted=counted)
        index = inputs[:, None] + jnp.arange(decoder_tokens.shape[1])
        return jnp.take_along_axis(x, index[..., None], axis=1)

    def mask(self, inputs: jax.Array, **fields: Any) -> Mask:
        """The causal mask, with the inputs as its prefix if the model has one."""
        return Mask(causal=True, prefix_lengths=inputs if self.prefix else None, **fields)

    def remember(self, tokens: jax.Array) -> jax.Array:
        """What `decode` attends to: the inputs themselves."""
        return tokens

    def decode(self, tokens: jax.Array, memory: jax.Array) -> jax.Array:
        """The teacher-forced states of the targets ``[batch · n, q]`` after the inputs `memory`."""
        return self.hidden(jnp.repeat(memory, tokens.shape[0] // memory.shape[0], axis=0), tokens)

    def start(
        self, encoder_tokens: jax.Array, first: jax.Array, *, max_length: int
    ) -> tuple[jax.Array, Any]:
        """Reads the inputs and the first token of the targets, and makes the caches.

        Args:
          encoder_tokens: ``[batch, k]``.
          first: ``[batch, 1]`` the targets' first input (T5: 0).
          max_length: number of positions to make room for, see `room`.

        Returns:
          ``[batch, 1, d_model]`` hidden states for `logits`, and one cache entry per layer.
        """
        inputs = lengths(encoder_tokens)
        x, caches = self.decoder(
            self.embed(join(encoder_tokens, first, inputs)),
            mask=self.mask(inputs, key_lengths=inputs + 1),
            caches=((NewCache(max_length), ()),) * self.decoder.num_layers,
            length=max_length,
        )
        return jnp.take_along_axis(x, inputs[:, None, None], axis=1), caches

    def step(
        self,
        tokens: jax.Array,
        encoder_lengths: jax.Array,
        *,
        caches: tuple[Any, ...],
        position: jax.Array,
        max_length: int,
    ) -> tuple[jax.Array, Any]:
        """One decoding step; every example stands at a position of its own.

        Args:
          tokens: ``[batch · n, 1]`` the targets' tokens at `position`, n rows for each example.
          encoder_lengths: ``[batch]`` number of real input tokens.
          caches: from `start` or the step before.
          position: where the tokens stand in the targets; a traced scalar.
          max_length: the same as in `start`.

        Returns:
          ``[batch · n, 1, d_model]`` and the new caches.
        """
        inputs = jnp.repeat(encoder_lengths, tokens.shape[0] // encoder_lengths.shape[0])
        return self.decoder(
            self.embed(tokens),
            mask=self.mask(inputs),
            caches=caches,
            position=inputs + position,
            length=max_length,
        )

    def room(self, inputs_length: int, targets_length: int) -> int:
        """The positions that decoding needs: inputs and targets share a row."""
        return inputs_length + targets_length


def join(inputs: jax.Array, targets: jax.Array, count: jax.Array) -> jax.Array:
    """Rows of `count` ``[batch]`` inputs followed by the targets, ``[batch, k + q]``, then zeros.

    The inputs' padding may stand anywhere.
    """
    inputs, _ = padding_last(inputs)
    rows = jnp.concatenate([jnp.zeros_like(inputs), targets, jnp.zeros_like(inputs)], axis=1)
    place = jnp.arange(inputs.shape[1] + targets.shape[1])
    shifted = jnp.take_along_axis(rows, place - count[:, None] + inputs.shape[1], axis=1)
    padded = jnp.pad(inputs, ((0, 0), (0, targets.shape[1])))
    return jnp.where(place < count[:, None], padded, shifted)
