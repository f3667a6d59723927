"""Decoder-only language models, either causal or with a bidirectional prefix."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from synthesizer_jax.attention import Mask
from synthesizer_jax.base.registry import register
from synthesizer_jax.models.stack import Stack
from synthesizer_jax.models.token_model import (
    DecodingCache,
    Rows,
    TextToText,
    move_token_padding_last,
    num_real_tokens,
    real_targets_mask,
)
from synthesizer_jax.primitives.mesh import on_any_mesh


@register
class LanguageModel(TextToText, kw_only=True):
    """A model with a single stack that reads the inputs and the targets in one row.

    See `TokenModel` for more fields.

    A `LanguageModel` has the same methods as an `EncoderDecoder`, so it can be trained on the same
    tasks and decoded by the same functions. Each row holds the inputs and then the targets, which
    start directly after the last real input token. If the inputs are empty, ``[batch, 0]``, the
    rows of targets may be packed.

    Attributes:
      decoder: the stack, whose blocks have no `cross_mixer`.
      prefix: whether all inputs see each other, as in the prefix language model of Raffel et al.
        2020, figure 4. False means that the inputs are causal too.
    """

    decoder: Stack
    prefix: bool = False

    @on_any_mesh
    def hidden(
        self, encoder_tokens: jax.Array, decoder_tokens: jax.Array, *, rows: Rows | None = None
    ) -> jax.Array:
        """Returns the states of the targets; see `TextToText`.

        Raises:
          ValueError: if the rows are packed, but have inputs.
        """
        rows = rows or Rows()
        counted = rows.counted

        # If there are no inputs, the rows of targets may be packed.
        if not encoder_tokens.shape[1]:
            mask = Mask(causal=True)
            if rows.segments is not None:
                mask = Mask.packed(rows.segments[1], causal=True, segments=rows.max_segments)
            elif counted is None:
                counted = real_targets_mask(decoder_tokens, self.ids.padding)
            x = self.embed(decoder_tokens)
            return self.decoder(x, mask=mask, counted=counted)

        if rows.segments is not None:
            raise ValueError(
                "LanguageModel: rows with inputs cannot be packed, because each row holds the "
                "inputs and the targets of one example. Train with data.pack=false, or train on "
                "targets only with data.inputs_length=0."
            )

        # If there are inputs, each row holds the inputs and then the targets, [b, k + q].
        inputs = num_real_tokens(encoder_tokens, self.ids.padding)
        tokens, _ = move_token_padding_last(encoder_tokens, self.ids.padding)
        row = _concatenate_rows(tokens, decoder_tokens, inputs)

        # Inputs are counted like targets, because modules average their additions to the loss over
        # both.
        if counted is None:
            counted = real_targets_mask(decoder_tokens, self.ids.padding)
        counted = (
            _concatenate_rows(jnp.ones_like(encoder_tokens), counted.astype(row.dtype), inputs) > 0
        )
        x = self.decoder(self.embed(row), mask=self._mask(inputs), counted=counted)

        # The states of the targets, [b, q, d], begin after the states of the inputs.
        index = inputs[:, None] + jnp.arange(decoder_tokens.shape[1])[None]
        return jnp.take_along_axis(x, index[..., None], axis=1)

    def _mask(self, inputs: jax.Array, *, key_lengths: jax.Array | None = None) -> Mask:
        """Returns the causal mask, in which the inputs are a prefix if `prefix` is True."""
        prefix = inputs if self.prefix else None
        return Mask(causal=True, prefix_lengths=prefix, key_lengths=key_lengths)

    def encode_inputs(self, tokens: jax.Array) -> jax.Array:
        """Returns the input tokens ``[batch, k]`` unchanged, because `decode` reads tokens."""
        return tokens

    @on_any_mesh
    def decode(self, tokens: jax.Array, memory: jax.Array) -> jax.Array:
        """Returns the states of the targets, with teacher forcing; see `TextToText`."""
        inputs = jnp.repeat(memory, tokens.shape[0] // memory.shape[0], axis=0)
        return self.hidden(inputs, tokens)

    @on_any_mesh
    def init_cache(self, encoder_tokens: jax.Array, *, max_length: int) -> DecodingCache:
        """Reads the inputs and returns the cache from which `extend` decodes; see `TextToText`."""
        inputs = num_real_tokens(encoder_tokens, self.ids.padding)
        tokens, _ = move_token_padding_last(encoder_tokens, self.ids.padding)
        return self._read(tokens, self._mask(inputs, key_lengths=inputs), max_length=max_length)

    def _read(self, tokens: jax.Array, mask: Mask, *, max_length: int) -> DecodingCache:
        """Returns the cache after tokens ``[batch, k]``, with room for `max_length` more tokens."""
        x = self.embed(tokens)
        length = tokens.shape[1] + max_length
        # A prefix must stay visible to all later tokens, so the cache must keep more than a window.
        layers = self.decoder.init_cache(x, max_length=length, whole=self.prefix)
        if tokens.shape[1]:
            _, layers = self.decoder.extend(x, layers, mask=mask)
        return DecodingCache(layers, prefix_lengths=mask.prefix_lengths)

    @on_any_mesh
    def begin_targets(
        self, targets: jax.Array, *, max_length: int
    ) -> tuple[jax.Array, DecodingCache]:
        """Reads the beginning of targets that have no inputs, such as a text to continue.

        Args:
          targets: ``[batch, k]`` integers, with padding on either side.
          max_length: number of further positions that `extend` may reach.

        Returns:
          The tokens ``[batch]`` that `extend` reads next, and the cache before these tokens. The
          next token is the last token of a row, or the decoder's first input if the row is empty.
        """
        count = num_real_tokens(targets, self.ids.padding)
        tokens, _ = move_token_padding_last(targets, self.ids.padding)
        # As in training, the model reads the start token followed by the targets.
        tokens = jnp.pad(tokens, ((0, 0), (1, 0)), constant_values=self.ids.start)
        last = jnp.take_along_axis(tokens, count[:, None], axis=1)[:, 0]  # [b]
        mask = Mask(causal=True, key_lengths=count)
        return last, self._read(tokens[:, :-1], mask, max_length=max_length)

    @on_any_mesh
    def extend(self, tokens: jax.Array, cache: DecodingCache) -> tuple[jax.Array, DecodingCache]:
        """Decodes the next tokens, with a separate position for every example; see `TextToText`."""
        mask = None if cache.prefix_lengths is None else Mask(prefix_lengths=cache.prefix_lengths)
        x, layers = self.decoder.extend(self.embed(tokens), cache.layers, mask=mask)
        return x, dataclasses.replace(cache, layers=layers)


def _concatenate_rows(inputs: jax.Array, targets: jax.Array, count: jax.Array) -> jax.Array:
    """Joins the inputs and targets of each example in one row, ``[batch, k + q]``.

    Each row holds the real inputs, then the targets, then zeros.

    Args:
      inputs: ``[batch, k]``, with padding at the end.
      targets: ``[batch, q]``.
      count: ``[batch]`` number of real inputs.
    """
    # The targets are padded by k positions on both sides, so that they can be shifted by up to k
    # positions.
    rows = jnp.concatenate([jnp.zeros_like(inputs), targets, jnp.zeros_like(inputs)], axis=1)
    position = jnp.arange(inputs.shape[1] + targets.shape[1])[None]
    # `shifted` holds the targets, shifted to the right by `count` positions, [b, k + q].
    shifted = jnp.take_along_axis(rows, position - count[:, None] + inputs.shape[1], axis=1)
    padded = jnp.pad(inputs, ((0, 0), (0, targets.shape[1])))
    return jnp.where(position < count[:, None], padded, shifted)
