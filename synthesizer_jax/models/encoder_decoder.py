"""Encoder-decoder models in the style of T5."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from synthesizer_jax.attention import Mask
from synthesizer_jax.attention.masks import MaskLike
from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import Length
from synthesizer_jax.mixers.taps import tap
from synthesizer_jax.models.block import Memory
from synthesizer_jax.models.layers import PositionEmbedding
from synthesizer_jax.models.stack import Stack
from synthesizer_jax.models.token_model import (
    DecodingCache,
    Rows,
    TextToText,
    move_token_padding_last,
    num_real_tokens,
    real_targets_mask,
    token_mask,
)
from synthesizer_jax.primitives.mesh import on_any_mesh
from synthesizer_jax.primitives.parameters import with_axes


@register
class EncoderDecoder(TextToText, kw_only=True):
    """A model with two stacks that share a vocabulary (Raffel et al. 2020).

    See `TokenModel` for more fields.

    Attributes:
      encoder: the encoder's stack.
      decoder: the decoder's stack, whose blocks have a `cross_mixer`.
      positions: a module that adds position vectors to the embeddings of both stacks. The stacks
        share the parameters of the module, as in Mesh-TensorFlow. In contrast, the field
        `positions` of a `Stack` is used only by that stack.
      encoder_d_model: width of the encoder if the encoder has its own embedding (T5Gemma). None
        means that both stacks share an embedding of width `d_model`.
      encoder_embedding_scale: factor of the vectors from the encoder's embedding, if the encoder
        has its own embedding.
    """

    encoder: Stack
    decoder: Stack
    positions: PositionEmbedding | None = None
    encoder_d_model: Length | None = None
    encoder_embedding_scale: float = 1.0

    def setup(self) -> None:
        """Creates the embeddings, and the output projection if it is not tied."""
        super().setup()
        if self.encoder_d_model is not None:
            init = with_axes(self.embedding_init, "vocab", "embed")
            shape = (self.vocab_size, self.encoder_d_model)
            self.encoder_embedding = self.param("encoder_embedding", init, shape)

    def width(self, stack: str) -> int:
        """Returns the width of a stack, ``encoder`` or ``decoder``."""
        return self.d_model if stack == "decoder" else self.encoder_d_model or self.d_model

    @on_any_mesh
    def __call__(
        self,
        encoder_tokens: jax.Array,
        decoder_tokens: jax.Array,
        *,
        rows: Rows | None = None,
        mask: MaskLike = None,
    ) -> jax.Array:
        """Returns the logits of every next token of the targets; see `TextToText`.

        `Mask.key_lengths`, `Mask.key_valid` or an array ``[batch, keys]`` determines the tokens to
        which the decoder attends. If the mask only restricts pairs of queries and keys, the decoder
        attends to all tokens.

        Args:
          encoder_tokens: ``[batch, k]`` integers. If there is no mask, the tokens may have padding
            on either side.
          decoder_tokens: ``[batch, q]`` the targets shifted right by one, padded on the right.
          rows: the segment numbers of packed rows. None means that no row is packed.
          mask: the mask of the encoder, for the tokens in the order of `encoder_tokens`. ``Mask()``
            means that all tokens are real. An array ``[batch, keys]`` is a tokenizer's attention
            mask, which is nonzero for real tokens. An array that masks pairs of queries and keys
            must have four axes, ``[batch or 1, heads or 1, q, keys]``. None means that the padding
            is masked.

        Returns:
          ``[batch, q, vocab]`` float32.

        Raises:
          ValueError: if the rows are packed and a mask is given, although the segments already say
            which tokens are visible. The error is also raised if a mask array has a shape that is
            not listed above.
        """
        return self.logits(self.hidden(encoder_tokens, decoder_tokens, rows=rows, mask=mask))

    @on_any_mesh
    def hidden(
        self,
        encoder_tokens: jax.Array,
        decoder_tokens: jax.Array,
        *,
        rows: Rows | None = None,
        mask: MaskLike = None,
    ) -> jax.Array:
        """Returns the decoder's outputs before the projection to the vocabulary; see `__call__`."""
        rows = rows or Rows()
        mask = self._token_mask(encoder_tokens, mask)
        if rows.segments is None:
            decoder_mask = Mask(causal=True)
            cross = self._memory_mask(encoder_tokens, mask)
        elif mask is not None:
            raise ValueError(
                "EncoderDecoder: mask cannot be used with packed rows, because rows.segments "
                "already says which tokens are visible. Leave one of the two out."
            )
        else:
            # `Mask.packed` takes the segment number of each token. Its argument `segments` is an
            # upper bound on the number of segments in a row.
            packed = functools.partial(Mask.packed, segments=rows.max_segments)
            inputs, targets = rows.segments
            mask = packed(inputs)
            decoder_mask = packed(targets, causal=True)
            # A segment of the targets attends to the segment of the inputs with the same number.
            cross = packed(inputs, targets)
        encoded = tap(self, "encoded", self.encode(encoder_tokens, mask=mask))
        memory = Memory(encoded, cross)
        return self._decode(decoder_tokens, memory, decoder_mask, counted=rows.counted)

    @on_any_mesh
    def decode(self, tokens: jax.Array, memory: Memory) -> jax.Array:
        """Returns the states of the targets, with teacher forcing; see `TextToText`.

        The mask in `memory` may also be an array, which has the same meaning as in `__call__`.
        """
        memory = Memory(memory.encoded, self._token_mask(memory.encoded, memory.mask) or Mask())
        return self._decode(tokens, memory, Mask(causal=True))

    def _decode(
        self, tokens: jax.Array, memory: Memory, mask: Mask, *, counted: jax.Array | None = None
    ) -> jax.Array:
        """Returns the states of the targets, with teacher forcing and a mask for self-attention."""
        if counted is None and mask.query_segments is None:
            counted = real_targets_mask(tokens, self.ids.padding)
        return self.decoder(
            self.embed(tokens),
            mask=mask,
            memory=memory,
            counted=counted,
            shared_positions=self.positions,
        )

    @on_any_mesh
    def encode_inputs(self, tokens: jax.Array, *, mask: MaskLike = None) -> Memory:
        """Encodes tokens ``[batch, k]``, and returns the memory to which `decode` attends.

        See `__call__` for the mask.
        """
        mask = self._token_mask(tokens, mask)
        return Memory(self.encode(tokens, mask=mask), self._memory_mask(tokens, mask))

    @on_any_mesh
    def encode(self, tokens: jax.Array, *, mask: MaskLike = None) -> jax.Array:
        """Encodes ``[batch, k]`` tokens to ``[batch, k, d_model]``.

        If a mask is given (see `__call__`), the states are in the order of the tokens. If no mask
        is given, the states of the real tokens come first in each row.
        """
        mask = self._token_mask(tokens, mask)
        if mask is None:
            tokens, _ = move_token_padding_last(tokens, self.ids.padding)
            mask = Mask.padded(num_real_tokens(tokens, self.ids.padding))
        if self.encoder_d_model is None:
            x = self.embed(tokens)
        else:
            x = self.look_up(self.encoder_embedding, tokens, self.encoder_embedding_scale)
        return self.encoder(x, mask=mask, shared_positions=self.positions)

    @on_any_mesh
    def init_cache(
        self, encoder_tokens: jax.Array, *, max_length: int, mask: MaskLike = None
    ) -> DecodingCache:
        """Encodes the inputs and returns the cache from which `extend` decodes.

        See `TextToText` for the arguments, and `__call__` for the mask.
        """
        memory = self.encode_inputs(encoder_tokens, mask=mask)
        x = jnp.zeros((encoder_tokens.shape[0], 0, self.d_model), memory.encoded.dtype)
        layers = self.decoder.init_cache(
            x, memory, max_length=max_length, shared_positions=self.positions
        )
        return DecodingCache(layers, memory.mask)

    @on_any_mesh
    def extend(self, tokens: jax.Array, cache: DecodingCache) -> tuple[jax.Array, DecodingCache]:
        """Decodes the next tokens; see `TextToText`."""
        x, layers = self.decoder.extend(
            self.embed(tokens),
            cache.layers,
            memory_mask=cache.memory_mask,
            shared_positions=self.positions,
        )
        return x, dataclasses.replace(cache, layers=layers)

    def _token_mask(self, tokens: jax.Array, mask: MaskLike) -> Mask | None:
        """Returns the mask of encoder tokens or states ``[batch, k, ...]``; see `__call__`."""
        return token_mask(mask, batch=tokens.shape[0], length=tokens.shape[1])

    def _memory_mask(self, tokens: jax.Array, mask: Mask | None) -> Mask:
        """Converts the encoder's mask to the mask of cross-attention to tokens ``[batch, k]``."""
        if mask is None:
            # `encode` has moved the padding to the end of each row.
            return Mask(key_lengths=num_real_tokens(tokens, self.ids.padding))
        return Mask(key_lengths=mask.key_lengths, key_valid=mask.key_valid)
