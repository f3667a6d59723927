"""Models: stacks of blocks, T5 encoder-decoders and the zoo of named sizes."""

from synthesizer_jax.models.block import Block, Memory
from synthesizer_jax.models.encoder_decoder import EncoderDecoder, unroll, unroll_variables
from synthesizer_jax.models.layers import FeedForward, LearnedPositions, SinusoidalPositions
from synthesizer_jax.models.stack import Run, Stack, stack_layers, unstack_layers
from synthesizer_jax.models.summary import Summary, summarize
from synthesizer_jax.models.zoo import VARIANTS, ZOO, Size, alignment, t5

__all__ = [
    "VARIANTS",
    "ZOO",
    "Block",
    "EncoderDecoder",
    "FeedForward",
    "LearnedPositions",
    "Memory",
    "Run",
    "SinusoidalPositions",
    "Size",
    "Stack",
    "Summary",
    "alignment",
    "stack_layers",
    "summarize",
    "t5",
    "unroll",
    "unroll_variables",
    "unstack_layers",
]
