"""Attention beyond query times key: Synthesizer layers and T5 models in JAX and Flax.

Importing this package does not import TensorFlow or access the network. JAX is imported when the first name
is used.
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
    from synthesizer_jax.base.registry import register
    from synthesizer_jax.linen import MultiHeadAttention, attention_fn
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
    from synthesizer_jax.pretrained import (
        Decoding,
        encode,
        generate,
        generate_with_scores,
        load,
    )

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
    "encode",
    "explain",
    "generate",
    "generate_with_scores",
    "load",
    "register",
    "relative_bias",
    "t5",
]

_EXPORTING_MODULES = (
    "attention",
    "alignments",
    "linen",
    "mixers",
    "models",
    "pretrained",
    "base.registry",
)
"""The modules that define the public names; the first one that has a name is used.

Those that are packages are imported when they are accessed as attributes of the package, too.
"""


def __getattr__(name: str) -> object:
    """Imports a public name when it is first used, so that the command line starts without JAX."""
    if name in _EXPORTING_MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    for module_name in _EXPORTING_MODULES if name in __all__ else ():
        module = importlib.import_module(f"{__name__}.{module_name}")
        if name in getattr(module, "__all__", vars(module)):
            globals()[name] = getattr(module, name)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
