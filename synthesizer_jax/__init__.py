"""Attention beyond query times key: Synthesizer layers and T5 models in JAX and Flax.

Importing this package does not import TensorFlow or access the network. JAX is imported when the first name
is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from synthesizer_jax.version import __version__ as __version__

if TYPE_CHECKING:
    from synthesizer_jax.alignments import ALIGNMENTS as ALIGNMENTS
    from synthesizer_jax.alignments import ALiBi as ALiBi
    from synthesizer_jax.alignments import Alignment as Alignment
    from synthesizer_jax.alignments import Bilinear as Bilinear
    from synthesizer_jax.alignments import Dense as Dense
    from synthesizer_jax.alignments import DotProduct as DotProduct
    from synthesizer_jax.alignments import FactorizedDense as FactorizedDense
    from synthesizer_jax.alignments import FactorizedRandom as FactorizedRandom
    from synthesizer_jax.alignments import Gaussian as Gaussian
    from synthesizer_jax.alignments import GaussianBias as GaussianBias
    from synthesizer_jax.alignments import LinearScaling as LinearScaling
    from synthesizer_jax.alignments import Mixture as Mixture
    from synthesizer_jax.alignments import PerHead as PerHead
    from synthesizer_jax.alignments import Random as Random
    from synthesizer_jax.alignments import RelativeBias as RelativeBias
    from synthesizer_jax.alignments import YaRN as YaRN
    from synthesizer_jax.attention import Mask as Mask
    from synthesizer_jax.attention import Span as Span
    from synthesizer_jax.attention import attend as attend
    from synthesizer_jax.attention import dot_product_attention as dot_product_attention
    from synthesizer_jax.attention import explain as explain
    from synthesizer_jax.attention import relative_bias as relative_bias
    from synthesizer_jax.base.registry import register as register
    from synthesizer_jax.linen import MultiHeadAttention as MultiHeadAttention
    from synthesizer_jax.linen import attention_fn as attention_fn
    from synthesizer_jax.mixers import MIXERS as MIXERS
    from synthesizer_jax.mixers import Attention as Attention
    from synthesizer_jax.mixers import DynamicConvolution as DynamicConvolution
    from synthesizer_jax.mixers import LightweightConvolution as LightweightConvolution
    from synthesizer_jax.mixers import Linformer as Linformer
    from synthesizer_jax.mixers import SentenceFeedForward as SentenceFeedForward
    from synthesizer_jax.mixers import TalkingHeads as TalkingHeads
    from synthesizer_jax.mixers import TokenFeedForward as TokenFeedForward
    from synthesizer_jax.models import Block as Block
    from synthesizer_jax.models import Encoder as Encoder
    from synthesizer_jax.models import EncoderDecoder as EncoderDecoder
    from synthesizer_jax.models import FeedForward as FeedForward
    from synthesizer_jax.models import LanguageModel as LanguageModel
    from synthesizer_jax.models import Run as Run
    from synthesizer_jax.models import Stack as Stack
    from synthesizer_jax.models import UniversalStack as UniversalStack
    from synthesizer_jax.models.zoo import ZOO as ZOO
    from synthesizer_jax.models.zoo import t5 as t5
    from synthesizer_jax.pretrained import Decoding as Decoding
    from synthesizer_jax.pretrained import encode as encode
    from synthesizer_jax.pretrained import generate as generate
    from synthesizer_jax.pretrained import generate_with_scores as generate_with_scores
    from synthesizer_jax.pretrained import load as load

_NAMES = {
    "alignments": (
        "ALIGNMENTS ALiBi Alignment Bilinear Dense DotProduct FactorizedDense FactorizedRandom Gaussian "
        "GaussianBias LinearScaling Mixture PerHead Random RelativeBias YaRN"
    ),
    "attention": "Mask Span attend dot_product_attention explain relative_bias",
    "base.registry": "register",
    "linen": "MultiHeadAttention attention_fn",
    "mixers": (
        "MIXERS Attention DynamicConvolution LightweightConvolution Linformer SentenceFeedForward "
        "TalkingHeads TokenFeedForward"
    ),
    "models": "Block Encoder EncoderDecoder FeedForward LanguageModel Run Stack UniversalStack",
    "models.zoo": "ZOO t5",
    "pretrained": "Decoding encode generate generate_with_scores load",
}
"""The modules that define public names, which are imported when one of these is first used."""

_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted({*_MODULES, "__version__"})


def __getattr__(name: str) -> object:
    """Imports a public name when it is first used, so that the command line starts without JAX."""
    if name in _NAMES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _MODULES:
        globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
