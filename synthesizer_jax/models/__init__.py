"""Models: stacks of blocks, encoder-decoders, language models, encoders, and named sizes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from synthesizer_jax.models.block import Block as Block
from synthesizer_jax.models.block import LayerCache as LayerCache
from synthesizer_jax.models.block import Memory as Memory
from synthesizer_jax.models.encoder import Encoded as Encoded
from synthesizer_jax.models.encoder import Encoder as Encoder
from synthesizer_jax.models.encoder_decoder import EncoderDecoder as EncoderDecoder
from synthesizer_jax.models.language_model import LanguageModel as LanguageModel
from synthesizer_jax.models.layers import FeedForward as FeedForward
from synthesizer_jax.models.layers import LearnedPositions as LearnedPositions
from synthesizer_jax.models.layers import PositionEmbedding as PositionEmbedding
from synthesizer_jax.models.layers import SinusoidalPositions as SinusoidalPositions
from synthesizer_jax.models.stack import Run as Run
from synthesizer_jax.models.stack import Stack as Stack
from synthesizer_jax.models.stack import stack_layers as stack_layers
from synthesizer_jax.models.stack import unstack_layers as unstack_layers
from synthesizer_jax.models.token_model import DecodingCache as DecodingCache
from synthesizer_jax.models.token_model import Rows as Rows
from synthesizer_jax.models.token_model import TextToText as TextToText
from synthesizer_jax.models.token_model import TokenModel as TokenModel
from synthesizer_jax.models.token_model import stacks_of as stacks_of
from synthesizer_jax.models.token_model import unroll as unroll
from synthesizer_jax.models.token_model import unroll_variables as unroll_variables
from synthesizer_jax.models.universal import LOSSES as LOSSES
from synthesizer_jax.models.universal import UniversalStack as UniversalStack
from synthesizer_jax.primitives.norms import LayerNorm as LayerNorm
from synthesizer_jax.primitives.norms import RMSNorm as RMSNorm

if TYPE_CHECKING:
    from synthesizer_jax.models.zoo import VARIANTS as VARIANTS
    from synthesizer_jax.models.zoo import ZOO as ZOO
    from synthesizer_jax.models.zoo import Size as Size
    from synthesizer_jax.models.zoo import alignment as alignment
    from synthesizer_jax.models.zoo import t5 as t5


def __getattr__(name: str) -> object:
    """Imports the named models when they are first used, which a saved model does not need."""
    if name in ("VARIANTS", "ZOO", "Size", "alignment", "t5"):
        return getattr(importlib.import_module("synthesizer_jax.models.zoo"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
