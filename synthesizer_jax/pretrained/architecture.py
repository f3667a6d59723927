"""The T5s of other libraries: one architecture with a few fields."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from synthesizer_jax.alignments import Mixture, RelativeBias
from synthesizer_jax.data.vocabularies import Bytes, SentencePiece
from synthesizer_jax.mixers import Attention
from synthesizer_jax.models import Block, EncoderDecoder, FeedForward, Run, Stack
from synthesizer_jax.models.layers import RMSNorm
from synthesizer_jax.models.zoo import dot_product
from synthesizer_jax.parameters import Variables


class Pretrained(NamedTuple):
    """A model of another library, as this one has it.

    Attributes:
      model: the unbound model.
      variables: ``{"params": …}``, float32, with looped layers.
      vocabulary: its configuration; None: the checkpoint has none.
    """

    model: EncoderDecoder
    variables: Variables
    vocabulary: Bytes | SentencePiece | None


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The fields in which published T5s differ.

    Attributes:
      vocab_size: rows of the embedding.
      d_model: width of the model.
      num_heads: number of heads.
      head_dim: width of one head.
      d_ff: width of the feed-forward layers.
      num_layers: layers of the encoder.
      num_decoder_layers: layers of the decoder.
      activations: of the feed-forward layers, see `FeedForward`.
      tied: the embedding is also the output projection (T5 1.0).
      num_buckets: buckets of the relative bias.
      max_distance: distances from here on share the last bucket.
      bias_per_layer: every layer has a relative bias of its own (umT5), not the first of a stack.
      epsilon: of the normalization.
      dropout_rate: one rate for all dropouts.
    """

    vocab_size: int
    d_model: int
    num_heads: int
    head_dim: int
    d_ff: int
    num_layers: int
    num_decoder_layers: int
    activations: tuple[str, ...]
    tied: bool
    num_buckets: int = 32
    max_distance: int = 128
    bias_per_layer: bool = False
    epsilon: float = 1e-6
    dropout_rate: float = 0.1

    def build(self) -> EncoderDecoder:
        """Returns the unbound model."""
        rate, dot = self.dropout_rate, dot_product(self.head_dim)
        norm = RMSNorm(epsilon=self.epsilon)
        feed_forward = FeedForward(self.d_ff, activations=self.activations, dropout_rate=rate)
        attention = Attention(self.num_heads, self.head_dim, alignment=dot, dropout_rate=rate)

        def stack(num_layers: int, cross: Attention | None) -> Stack:
            bias = RelativeBias(self.num_buckets, self.max_distance, bidirectional=cross is None)
            mixer = attention
            if self.bias_per_layer:
                mixer = attention.copy(alignment=Mixture((dot, bias), weights="sum"))
            block = Block(mixer, feed_forward, cross_mixer=cross, dropout_rate=rate, norm=norm)
            return Stack(
                (Run(block, num_layers),),
                bias=None if self.bias_per_layer else bias,
                norm=norm,
                dropout_rate=rate,
            )

        return EncoderDecoder(
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            encoder=stack(self.num_layers, None),
            decoder=stack(self.num_decoder_layers, attention),
            tied=self.tied,
        )
