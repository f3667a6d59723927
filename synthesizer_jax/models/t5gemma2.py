"""T5Gemma 2 (Zhang et al. 2025), without its vision tower.

The layers are like those of Gemma 3. Most layers have self-attention with a window, and their
rotary positions have a smaller base than those of the other layers. In the decoder, one softmax
covers the tokens of the decoder and the tokens of the encoder. The encoder, the decoder and the
output projection share one embedding.
"""

from __future__ import annotations

import dataclasses
import itertools

from synthesizer_jax.alignments import DotProduct, LinearScaling
from synthesizer_jax.base.ids import SpecialIds
from synthesizer_jax.mixers import Attention, MergedAttention
from synthesizer_jax.models.block import Block
from synthesizer_jax.models.encoder import Encoder
from synthesizer_jax.models.encoder_decoder import EncoderDecoder
from synthesizer_jax.models.layers import FeedForward
from synthesizer_jax.models.stack import Run, Stack
from synthesizer_jax.primitives.initializers import Normal
from synthesizer_jax.primitives.norms import RMSNorm

END_OF_IMAGE = 256_000
"""The id of the token for the end of an image in the published vocabulary."""

GEMMA_IDS = SpecialIds(padding=0, end=1, start=2)
"""The ids of Gemma's vocabulary. The decoder's first input is BOS."""


@dataclasses.dataclass(frozen=True)
class Rotary:
    """The rotary positions of a layer.

    Attributes:
      base: the base of the rotary positions.
      factor: the number by which positions are divided.
    """

    base: float
    factor: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackSettings:
    """The sizes and settings of the encoder or the decoder.

    Attributes:
      has_window: whether the self-attention of each layer has a window.
      d_ff: width of the feed-forward layers.
      num_heads: number of heads of the queries.
      num_kv_heads: number of heads of the keys and values.
      head_dim: width of one head.
      window: the number of tokens in a window. In the decoder, a window ends with the query's own
        token. In the encoder, the query's own token is in the middle of the window. If `window` is
        even, the window reaches one token further after the query than before it.
      windowed: the rotary positions of layers with a window.
      unlimited: the rotary positions of layers without a window.
      scale: factor of the attention logits.
      activation: the activation of the feed-forward layers, which are gated.
      epsilon: the constant ε of all norms.
      dropout_rate: the dropout rate everywhere except on attention weights.
      attention_dropout: the dropout rate of attention weights.
    """

    has_window: tuple[bool, ...]
    d_ff: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 256
    window: int = 512
    windowed: Rotary = Rotary(10_000.0)
    unlimited: Rotary = Rotary(1_000_000.0, 8.0)
    scale: float = 256**-0.5
    activation: str = "gelu"
    epsilon: float = 1e-6
    dropout_rate: float = 0.0
    attention_dropout: float = 0.0

    def build(self, *, in_decoder: bool) -> Stack:
        """Returns the stack of the encoder or of the decoder."""
        norm = RMSNorm(epsilon=self.epsilon, offset=1.0)
        make_mixer = MergedAttention if in_decoder else Attention
        window: int | tuple[int, int] = self.window
        if not in_decoder:
            window = ((self.window + 1) // 2 - 1, self.window // 2)

        def block(has_window: bool) -> Block:
            """Returns a layer with or without a window."""
            rotary = self.windowed if has_window else self.unlimited
            dot = DotProduct(
                scale=self.scale,
                normalize_qk=norm,
                rotary_base=rotary.base,
                rotary_scaling=None if rotary.factor == 1.0 else LinearScaling(rotary.factor),
            )
            mixer = make_mixer(
                self.num_heads,
                self.head_dim,
                alignment=dot,
                num_kv_heads=self.num_kv_heads,
                window=window if has_window else None,
                dropout_rate=self.attention_dropout,
            )
            activations = (self.activation, "linear")
            return Block(
                mixer,
                FeedForward(self.d_ff, activations, self.dropout_rate),
                dropout_rate=self.dropout_rate,
                norm=norm,
                output_norm=True,
            )

        runs = tuple(
            Run(block(has_window), len(list(layers)))
            for has_window, layers in itertools.groupby(self.has_window)
        )
        return Stack(runs, norm=norm, dropout_rate=self.dropout_rate)


def t5gemma2(
    encoder: StackSettings,
    decoder: StackSettings | None,
    *,
    vocab_size: int = 262_144,
    d_model: int,
    end_of_image: int = END_OF_IMAGE,
    logits_soft_cap: float | None = None,
    ids: SpecialIds = GEMMA_IDS,
) -> EncoderDecoder | Encoder:
    """Returns a T5Gemma 2 that reads texts.

    Args:
      encoder: the settings of the encoder.
      decoder: the settings of the decoder. None means that the model is only an encoder.
      vocab_size: number of rows of the embedding.
      d_model: width of both stacks.
      end_of_image: the id of the token for the end of an image, whose input vector is not a row of
        the embedding.
      logits_soft_cap: see `TokenModel`.
      ids: the ids of padding, of the end of a text and of the decoder's first input.
    """
    common = {
        "vocab_size": vocab_size,
        "d_model": d_model,
        "embedding_scale": d_model**0.5,
        # With this initializer, embedded tokens and logits have a variance of about one.
        "embedding_init": Normal(d_model**-0.5),
        "separate_input": end_of_image,
        "ids": ids,
        "tied": True,
    }
    if decoder is None:
        return Encoder(encoder=encoder.build(in_decoder=False), **common)
    return EncoderDecoder(
        encoder=encoder.build(in_decoder=False),
        decoder=decoder.build(in_decoder=True),
        logits_scale=1.0,
        logits_soft_cap=logits_soft_cap,
        **common,
    )


@dataclasses.dataclass(frozen=True)
class T5Gemma2Size:
    """The sizes of a published T5Gemma 2, which are the same in the encoder and the decoder.

    Attributes:
      d_model: width of the model.
      layers: number of layers of each stack.
      d_ff: width of the feed-forward layers.
      heads: number of heads of the queries.
      kv_heads: number of heads of the keys and values.
      window: the size of the windows; see `StackSettings`.
    """

    d_model: int
    layers: int
    d_ff: int
    heads: int
    kv_heads: int
    window: int

    def build(self) -> EncoderDecoder:
        """Returns the model."""
        stack = StackSettings(
            has_window=window_pattern(self.layers),
            d_ff=self.d_ff,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            window=self.window,
        )
        model = t5gemma2(stack, stack, d_model=self.d_model)
        assert isinstance(model, EncoderDecoder)
        return model


def window_pattern(layers: int, every: int = 6) -> tuple[bool, ...]:
    """Returns for each layer whether it has a window. Every `every`-th layer has none."""
    return tuple((i + 1) % every != 0 for i in range(layers))


SIZES = {
    "270m": T5Gemma2Size(640, 18, 2048, 4, 1, 512),
    "1b": T5Gemma2Size(1152, 26, 6912, 4, 1, 512),
    "4b": T5Gemma2Size(2560, 34, 10240, 8, 4, 1024),
}
"""The published sizes. Each size is named after the number of parameters of a Gemma 3.

The training of the encoder and of the decoder started from this Gemma 3.
"""
