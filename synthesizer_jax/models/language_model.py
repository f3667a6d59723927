"""Decoder-only language models, causal or with a prefix that sees all of itself."""

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
    """One stack over one row of text; see `TokenModel` for more fields.

    It has the methods of `EncoderDecoder`, so that the same tasks train it and the same decoding uses it.
    Inputs and targets follow one another in a row, the targets directly after the last real input token.
    Without inputs, ``[batch, 0]``, rows of targets may be packed.

    Attributes:
      decoder: the stack; its blocks have no `cross_mixer`.
      prefix: inputs see all inputs (prefix language model, Raffel et al. 2020, figure 4); False is
        causal throughout.
    """

    decoder: Stack
    prefix: bool = False

    @on_any_mesh
    def hidden(
        self, encoder_tokens: jax.Array, decoder_tokens: jax.Array, *, rows: Rows | None = None
    ) -> jax.Array:
        """Returns the targets' states; see `TextToText`.

        Raises:
          ValueError: packed rows have inputs.
        """
        rows = rows or Rows()
        counted = rows.counted
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
                "LanguageModel: inputs and targets share a row here; train with data.pack=false, or on "
                "targets alone with data.inputs_length=0"
            )
        inputs = num_real_tokens(encoder_tokens, self.ids.padding)
        tokens, _ = move_token_padding_last(encoder_tokens, self.ids.padding)
        row = _concatenate_rows(tokens, decoder_tokens, inputs)
        counted = real_targets_mask(decoder_tokens, self.ids.padding) if counted is None else counted
        counted = _concatenate_rows(jnp.ones_like(encoder_tokens), counted.astype(row.dtype), inputs) > 0
        x = self.decoder(self.embed(row), mask=self._mask(inputs), counted=counted)
        index = inputs[:, None] + jnp.arange(decoder_tokens.shape[1])[None]
        return jnp.take_along_axis(x, index[..., None], axis=1)  # [b, q, d], from the last input on

    def _mask(self, inputs: jax.Array, *, key_lengths: jax.Array | None = None) -> Mask:
        """Returns the causal mask, with the inputs as its prefix if the model has one."""
        prefix = inputs if self.prefix else None
        return Mask(causal=True, prefix_lengths=prefix, key_lengths=key_lengths)

    def encode_inputs(self, tokens: jax.Array) -> jax.Array:
        """Returns what `decode` needs of ``[batch, k]`` input tokens: themselves."""
        return tokens

    @on_any_mesh
    def decode(self, tokens: jax.Array, memory: jax.Array) -> jax.Array:
        """Returns the states of teacher-forced targets after the inputs; see `TextToText`."""
        return self.hidden(jnp.repeat(memory, tokens.shape[0] // memory.shape[0], axis=0), tokens)

    @on_any_mesh
    def init_cache(self, encoder_tokens: jax.Array, *, max_length: int) -> DecodingCache:
        """Reads the inputs and returns the cache from which `extend` decodes; see `TextToText`."""
        inputs = num_real_tokens(encoder_tokens, self.ids.padding)
        tokens, _ = move_token_padding_last(encoder_tokens, self.ids.padding)
        return self._read(tokens, self._mask(inputs, key_lengths=inputs), max_length=max_length)

    def _read(self, tokens: jax.Array, mask: Mask, *, max_length: int) -> DecodingCache:
        """Returns the cache after tokens ``[batch, k]``, with room for `max_length` more."""
        x = self.embed(tokens)
        length = tokens.shape[1] + max_length
        layers = self.decoder.init_cache(x, max_length=length, whole=self.prefix)
        if tokens.shape[1]:
            _, layers = self.decoder.extend(x, layers, mask=mask)
        return DecodingCache(layers, prefix_lengths=mask.prefix_lengths)

    @on_any_mesh
    def begin_targets(self, targets: jax.Array, *, max_length: int) -> tuple[jax.Array, DecodingCache]:
        """Reads the beginning of targets without inputs, such as a text that is to be continued.

        Args:
          targets: ``[batch, k]`` integers, with padding on either side.
          max_length: number of further positions that `extend` may reach.

        Returns:
          The tokens ``[batch]`` that `extend` reads next, the last of every row or the first input of an
          empty one, and the cache before them.
        """
        count = num_real_tokens(targets, self.ids.padding)
        tokens, _ = move_token_padding_last(targets, self.ids.padding)
        # The decoder's first input, then the targets.
        tokens = jnp.pad(tokens, ((0, 0), (1, 0)), constant_values=self.ids.start)
        last = jnp.take_along_axis(tokens, count[:, None], axis=1)[:, 0]  # [b]
        mask = Mask(causal=True, key_lengths=count)
        return last, self._read(tokens[:, :-1], mask, max_length=max_length)

    @on_any_mesh
    def extend(self, tokens: jax.Array, cache: DecodingCache) -> tuple[jax.Array, DecodingCache]:
        """Decodes the next tokens, every example at a position of its own; see `TextToText`."""
        mask = None if cache.prefix_lengths is None else Mask(prefix_lengths=cache.prefix_lengths)
        x, layers = self.decoder.extend(self.embed(tokens), cache.layers, mask=mask)
        return x, dataclasses.replace(cache, layers=layers)


def _concatenate_rows(inputs: jax.Array, targets: jax.Array, count: jax.Array) -> jax.Array:
    """Returns rows of `count` ``[batch]`` inputs followed by the targets, ``[batch, k + q]``, then zeros.

    The inputs' padding is at the end.
    """
    rows = jnp.concatenate([jnp.zeros_like(inputs), targets, jnp.zeros_like(inputs)], axis=1)
    position = jnp.arange(inputs.shape[1] + targets.shape[1])[None]
    # [b, k + q], the targets `count` positions to the right of the row's beginning.
    shifted = jnp.take_along_axis(rows, position - count[:, None] + inputs.shape[1], axis=1)
    padded = jnp.pad(inputs, ((0, 0), (0, targets.shape[1])))
    return jnp.where(position < count[:, None], padded, shifted)
