"""Attention beyond query times key: Synthesizer layers and T5 models in JAX and Flax.

Importing this package loads neither TensorFlow nor the network, and JAX when the first name is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from synthesizer_jax.version import __version__

if TYPE_CHECKING:
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

ROOMS = ("attention", "alignments", "flax_attention", "mixers", "models", "multi_head")
"""Where the names of this package come from: the first of these that has the name."""

SUBMODULES = (*ROOMS, "initializers", "parameters", "registry")
"""What is an attribute of this package without an import of its own."""


def __getattr__(name: str) -> Any:
    """A public name, imported when it is used; so the command line answers before JAX is there."""
    if name in SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in __all__:
        for room in ROOMS:
            found = importlib.import_module(f"{__name__}.{room}")
            if name in getattr(found, "__all__", vars(found)):
                globals()[name] = getattr(found, name)
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
