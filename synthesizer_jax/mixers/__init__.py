"""Mixers: whole token-mixing sub-layers, ``[batch, length, d_model]`` in and out."""

from synthesizer_jax.mixers.attention import Attention, AttentionBase
from synthesizer_jax.mixers.base import Mixer, MixerCache, MixerInput
from synthesizer_jax.mixers.convolution import DynamicConvolution, LightweightConvolution
from synthesizer_jax.mixers.feed_forward import SentenceFeedForward, TokenFeedForward
from synthesizer_jax.mixers.linformer import Linformer
from synthesizer_jax.mixers.talking_heads import TalkingHeads
from synthesizer_jax.mixers.taps import TAPS

__all__ = [
    "MIXERS",
    "TAPS",
    "Attention",
    "AttentionBase",
    "DynamicConvolution",
    "LightweightConvolution",
    "Linformer",
    "Mixer",
    "MixerCache",
    "MixerInput",
    "SentenceFeedForward",
    "TalkingHeads",
    "TokenFeedForward",
]

MIXERS: dict[str, type[Mixer]] = {
    name: globals()[name]
    for name in __all__
    if name not in ("MIXERS", "TAPS", "AttentionBase", "Mixer", "MixerCache", "MixerInput")
}
"""All of them by name."""
