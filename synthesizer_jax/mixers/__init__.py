"""Mixers: whole token-mixing sub-layers, ``[batch, length, d_model]`` in and out."""

from synthesizer_jax.mixers.attention import Attention as Attention
from synthesizer_jax.mixers.attention import AttentionBase as AttentionBase
from synthesizer_jax.mixers.base import Mixer as Mixer
from synthesizer_jax.mixers.base import MixerCache as MixerCache
from synthesizer_jax.mixers.base import MixerInput as MixerInput
from synthesizer_jax.mixers.convolution import DynamicConvolution as DynamicConvolution
from synthesizer_jax.mixers.convolution import LightweightConvolution as LightweightConvolution
from synthesizer_jax.mixers.feed_forward import SentenceFeedForward as SentenceFeedForward
from synthesizer_jax.mixers.feed_forward import TokenFeedForward as TokenFeedForward
from synthesizer_jax.mixers.linformer import Linformer as Linformer
from synthesizer_jax.mixers.talking_heads import TalkingHeads as TalkingHeads
from synthesizer_jax.mixers.taps import TAPS as TAPS

_CLASSES: tuple[type[Mixer], ...] = (
    Attention,
    DynamicConvolution,
    LightweightConvolution,
    Linformer,
    SentenceFeedForward,
    TalkingHeads,
    TokenFeedForward,
)
MIXERS = {cls.__name__: cls for cls in _CLASSES}
"""All of them by name."""
