"""Synthesizer layers, other attention layers and T5 models in JAX and Flax.

Importing this package does not import TensorFlow or access the network. JAX is imported when a
public name is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from synthesizer_jax.version import __version__

if TYPE_CHECKING:
    from synthesizer_jax.alignments import (
        ALIGNMENTS,
        ALiBi,
        Alignment,
        Bilinear,
        Dense,
        DotProduct,
        FactorizedDense,
        FactorizedRandom,
        Gaussian,
        GaussianBias,
        LinearScaling,
        Mixture,
        PerHead,
        Random,
        RelativeBias,
        YaRN,
    )
    from synthesizer_jax.attention import (
        Mask,
        Span,
        attend,
        dot_product_attention,
        explain,
        relative_bias,
    )
    from synthesizer_jax.base.registry import register
    from synthesizer_jax.linen import MultiHeadAttention, attention_fn
    from synthesizer_jax.mixers import (
        MIXERS,
        Attention,
        DynamicConvolution,
        LightweightConvolution,
        Linformer,
        MergedAttention,
        SentenceFeedForward,
        TalkingHeads,
        TokenFeedForward,
    )
    from synthesizer_jax.models import (
        Block,
        Encoder,
        EncoderDecoder,
        FeedForward,
        LanguageModel,
        Run,
        Stack,
        UniversalStack,
    )
    from synthesizer_jax.models.zoo import ZOO, t5
    from synthesizer_jax.pretrained import Decoding, encode, generate, generate_with_scores, load

__all__ = [
    "ALIGNMENTS",
    "MIXERS",
    "ZOO",
    "ALiBi",
    "Alignment",
    "Attention",
    "Bilinear",
    "Block",
    "Decoding",
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
    "LinearScaling",
    "Linformer",
    "Mask",
    "MergedAttention",
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
    "YaRN",
    "__version__",
    "attend",
    "attention_fn",
    "dot_product_attention",
    "encode",
    "explain",
    "generate",
    "generate_with_scores",
    "load",
    "register",
    "relative_bias",
    "t5",
]

_MODULES = {
    "alignments": (
        "ALIGNMENTS",
        "ALiBi",
        "Alignment",
        "Bilinear",
        "Dense",
        "DotProduct",
        "FactorizedDense",
        "FactorizedRandom",
        "Gaussian",
        "GaussianBias",
        "LinearScaling",
        "Mixture",
        "PerHead",
        "Random",
        "RelativeBias",
        "YaRN",
    ),
    "attention": (
        "Mask",
        "Span",
        "attend",
        "dot_product_attention",
        "explain",
        "relative_bias",
    ),
    "base.registry": ("register",),
    "linen": (
        "MultiHeadAttention",
        "attention_fn",
    ),
    "mixers": (
        "MIXERS",
        "Attention",
        "DynamicConvolution",
        "LightweightConvolution",
        "Linformer",
        "MergedAttention",
        "SentenceFeedForward",
        "TalkingHeads",
        "TokenFeedForward",
    ),
    "models": (
        "Block",
        "Encoder",
        "EncoderDecoder",
        "FeedForward",
        "LanguageModel",
        "Run",
        "Stack",
        "UniversalStack",
    ),
    "models.zoo": (
        "ZOO",
        "t5",
    ),
    "pretrained": (
        "Decoding",
        "encode",
        "generate",
        "generate_with_scores",
        "load",
    ),
}
"""The modules that define the public names.

Each module is imported when one of its names is first used.
"""

_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    """Imports a public name when it is first used, so that the command line starts without JAX."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
