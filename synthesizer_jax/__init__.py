"""Attention beyond query times key: Synthesizer layers and T5 models in JAX and Flax.

Importing this package loads neither TensorFlow nor the network.
"""

from synthesizer_jax.alignments import (
    ALIGNMENTS,
    Alignment,
    Bilinear,
    Dense,
    DotProduct,
    FactorizedDense,
    FactorizedRandom,
    Gaussian,
    GaussianBias,
    Mixture,
    PerHead,
    Random,
    RelativeBias,
)
from synthesizer_jax.attention import (
    Mask,
    Span,
    attend,
    dot_product_attention,
    explain,
    relative_bias,
)
from synthesizer_jax.flax_attention import attention_fn
from synthesizer_jax.mixers import (
    MIXERS,
    Attention,
    DynamicConvolution,
    LightweightConvolution,
    Linformer,
    SentenceFeedForward,
    TalkingHeads,
    TokenFeedForward,
)
from synthesizer_jax.models import (
    ZOO,
    Block,
    Encoder,
    EncoderDecoder,
    FeedForward,
    LanguageModel,
    Run,
    Stack,
    UniversalStack,
    t5,
)
from synthesizer_jax.multi_head import MultiHeadAttention
from synthesizer_jax.version import __version__

__all__ = [
    "ALIGNMENTS",
    "MIXERS",
    "ZOO",
    "Alignment",
    "Attention",
    "Bilinear",
    "Block",
    "Dense",
    "DotProduct",
    "DynamicConvolution",
    "Encoder",
    "EncoderDecoder",
    "FactorizedDense",
    "FactorizedRandom",
    "FeedForward",
    "Gaussian",
    "GaussianBias",
    "LanguageModel",
    "LightweightConvolution",
    "Linformer",
    "Mask",
    "Mixture",
    "MultiHeadAttention",
    "PerHead",
    "Random",
    "RelativeBias",
    "Run",
    "SentenceFeedForward",
    "Span",
    "Stack",
    "TalkingHeads",
    "TokenFeedForward",
    "UniversalStack",
    "__version__",
    "attend",
    "attention_fn",
    "dot_product_attention",
    "explain",
    "relative_bias",
    "t5",
]
