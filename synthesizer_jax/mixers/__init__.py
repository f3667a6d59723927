"""Mixers: whole token-mixing sub-layers, ``[batch, length, d_model]`` in and out."""

from synthesizer_jax.mixers.attention import Attention
from synthesizer_jax.mixers.base import Mixer, MixerCache
from synthesizer_jax.mixers.convolution import DynamicConvolution, LightweightConvolution
from synthesizer_jax.mixers.feed_forward import SentenceFeedForward, TokenFeedForward
from synthesizer_jax.mixers.linformer import Linformer
from synthesizer_jax.mixers.talking_heads import TalkingHeads
from synthesizer_jax.mixers.taps import TAPS

MIXERS: dict[str, type[Mixer]] = {
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

__all__ = ["MIXERS", "TAPS", "Mixer", "MixerCache", *MIXERS]
