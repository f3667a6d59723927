"""Models: stacks of blocks, encoder-decoders, language models, encoders, and named sizes."""

from typing import TypeAlias

from synthesizer_jax.models.block import Block, Memory
from synthesizer_jax.models.encoder import Encoded, Encoder
from synthesizer_jax.models.encoder_decoder import EncoderDecoder
from synthesizer_jax.models.language_model import LanguageModel
from synthesizer_jax.models.layers import (
    FeedForward,
    LayerNorm,
    LearnedPositions,
    RMSNorm,
    SinusoidalPositions,
)
from synthesizer_jax.models.stack import Run, Stack, stack_layers, unstack_layers
from synthesizer_jax.models.summary import Summary, count, forward_flops, summarize
from synthesizer_jax.models.token_model import TokenModel, stacks, unroll, unroll_variables
from synthesizer_jax.models.universal import LOSSES, UniversalStack
from synthesizer_jax.models.zoo import VARIANTS, ZOO, Size, alignment, t5

TextToText: TypeAlias = EncoderDecoder | LanguageModel
"""Models that read inputs and write targets."""

__all__ = [
    "LOSSES",
    "VARIANTS",
    "ZOO",
    "Block",
    "Encoded",
    "Encoder",
    "EncoderDecoder",
    "FeedForward",
    "LanguageModel",
    "LayerNorm",
    "LearnedPositions",
    "Memory",
    "RMSNorm",
    "Run",
    "SinusoidalPositions",
    "Size",
    "Stack",
    "Summary",
    "TextToText",
    "TokenModel",
    "UniversalStack",
    "alignment",
    "count",
    "forward_flops",
    "stack_layers",
    "stacks",
    "summarize",
    "t5",
    "unroll",
    "unroll_variables",
    "unstack_layers",
]
