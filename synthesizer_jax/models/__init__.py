"""Models: stacks of blocks, encoder-decoders, language models, encoders, and named sizes."""

from synthesizer_jax.models.block import Block, LayerCache, Memory
from synthesizer_jax.models.encoder import Encoded, Encoder
from synthesizer_jax.models.encoder_decoder import EncoderDecoder
from synthesizer_jax.models.language_model import LanguageModel
from synthesizer_jax.models.layers import (
    FeedForward,
    LearnedPositions,
    PositionEmbedding,
    SinusoidalPositions,
)
from synthesizer_jax.models.stack import Run, Stack, stack_layers, unstack_layers
from synthesizer_jax.models.text_to_text import DecodingCache, Rows, TextToText
from synthesizer_jax.models.token_model import TokenModel, stacks_of, unroll, unroll_variables
from synthesizer_jax.models.universal import LOSSES, UniversalStack
from synthesizer_jax.models.zoo import VARIANTS, ZOO, Size, alignment, t5
from synthesizer_jax.primitives.norms import LayerNorm, RMSNorm

__all__ = [
    "LOSSES",
    "VARIANTS",
    "ZOO",
    "Block",
    "DecodingCache",
    "Encoded",
    "Encoder",
    "EncoderDecoder",
    "FeedForward",
    "LanguageModel",
    "LayerCache",
    "LayerNorm",
    "LearnedPositions",
    "Memory",
    "PositionEmbedding",
    "RMSNorm",
    "Rows",
    "Run",
    "SinusoidalPositions",
    "Size",
    "Stack",
    "TextToText",
    "TokenModel",
    "UniversalStack",
    "alignment",
    "stack_layers",
    "stacks_of",
    "t5",
    "unroll",
    "unroll_variables",
    "unstack_layers",
]
