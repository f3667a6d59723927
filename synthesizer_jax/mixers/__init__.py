"""Mixers, which are layers that mix tokens, such as attention and its replacements.

The inputs and outputs of a mixer have the shape ``[batch, length, d_model]``.
"""

from synthesizer_jax.mixers.attention import Attention, AttentionBase
from synthesizer_jax.mixers.base import Mixer, MixerCache, MixerInput
from synthesizer_jax.mixers.convolution import DynamicConvolution, LightweightConvolution
from synthesizer_jax.mixers.feed_forward import SentenceFeedForward, TokenFeedForward
from synthesizer_jax.mixers.linformer import Linformer
from synthesizer_jax.mixers.merged import MergedAttention
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
    "MergedAttention",
    "Mixer",
    "MixerCache",
    "MixerInput",
    "SentenceFeedForward",
    "TalkingHeads",
    "TokenFeedForward",
]

_CLASSES: tuple[type[Mixer], ...] = (
    Attention,
    DynamicConvolution,
    LightweightConvolution,
    Linformer,
    MergedAttention,
    SentenceFeedForward,
    TalkingHeads,
    TokenFeedForward,
)
MIXERS = {cls.__name__: cls for cls in _CLASSES}
"""The mixer classes of this package, by name."""
