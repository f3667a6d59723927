"""Encoder-decoders, language models and encoders, their stacks of blocks, and named models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

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
from synthesizer_jax.models.lora import LoRA, LoRARule
from synthesizer_jax.models.stack import Run, Stack, stack_layers, unstack_layers
from synthesizer_jax.models.token_model import (
    DecodingCache,
    Rows,
    TextToText,
    TokenModel,
    resolve_dtype,
    stacks_of,
    unroll,
    unroll_variables,
)
from synthesizer_jax.models.universal import LOSSES, UniversalStack
from synthesizer_jax.primitives.norms import LayerNorm, RMSNorm

if TYPE_CHECKING:
    from synthesizer_jax.models.zoo import VARIANTS, ZOO, Size, alignment, t5

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
    "LoRA",
    "LoRARule",
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
    "resolve_dtype",
    "stack_layers",
    "stacks_of",
    "t5",
    "unroll",
    "unroll_variables",
    "unstack_layers",
]


def __getattr__(name: str) -> object:
    """Imports `models.zoo` when one of its names is first used.

    The module is not needed to load a saved model.
    """
    if name in ("VARIANTS", "ZOO", "Size", "alignment", "t5"):
        return getattr(importlib.import_module("synthesizer_jax.models.zoo"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
