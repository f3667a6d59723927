"""Mixers: whole token-mixing sub-layers, ``[batch, length, d_model]`` in and out."""

import flax.linen as nn

from synthesizer_jax.mixers.attention import Attention
from synthesizer_jax.mixers.base import SITES, NewCache
from synthesizer_jax.mixers.convolution import DynamicConvolution, LightweightConvolution
from synthesizer_jax.mixers.feed_forward import SentenceFeedForward, TokenFeedForward
from synthesizer_jax.mixers.linformer import Linformer
from synthesizer_jax.mixers.talking_heads import TalkingHeads

MIXERS: dict[str, type[nn.Module]] = {
    cls.__name__: cls
    for cls in (
        Attention,
        DynamicConvolution,
        LightweightConvolution,
        Linformer,
        SentenceFeedForward,
        TalkingHeads,
        TokenFeedForward,
    )
}

__all__ = ["MIXERS", "SITES", "NewCache", *MIXERS]
