"""Attention beyond query times key: Synthesizer layers and T5 models in JAX and Flax.

Importing this package loads neither TensorFlow nor the network.
"""

from synthesizer_jax.alignments import (
    ALIGNMENTS,
    Alignment,
    Dense,
    DotProduct,
    FactorizedDense,
    FactorizedRandom,
    Mixture,
    Random,
    RelativeBias,
)
from synthesizer_jax.attention import Mask, Span, attend
from synthesizer_jax.mixers import MIXERS, Attention
from synthesizer_jax.models import ZOO, Block, EncoderDecoder, FeedForward, Run, Stack, t5
from synthesizer_jax.version import __version__

__all__ = [
    "ALIGNMENTS",
    "MIXERS",
    "ZOO",
    "Alignment",
    "Attention",
    "Block",
    "Dense",
    "DotProduct",
    "EncoderDecoder",
    "FactorizedDense",
    "FactorizedRandom",
    "FeedForward",
    "Mask",
    "Mixture",
    "Random",
    "RelativeBias",
    "Run",
    "Span",
    "Stack",
    "__version__",
    "attend",
    "t5",
]
