"""Every mixer as an NNX class. Editors and type checkers read `mixers.pyi`, made by `stubs`."""

from synthesizer_jax import mixers
from synthesizer_jax.nnx.forms import Layer, form

Attention = form(mixers.Attention, Layer, module=__name__)
LightweightConvolution = form(mixers.LightweightConvolution, Layer, module=__name__)
DynamicConvolution = form(mixers.DynamicConvolution, Layer, module=__name__)
Linformer = form(mixers.Linformer, Layer, module=__name__)
SentenceFeedForward = form(mixers.SentenceFeedForward, Layer, module=__name__)
TalkingHeads = form(mixers.TalkingHeads, Layer, module=__name__)
TokenFeedForward = form(mixers.TokenFeedForward, Layer, module=__name__)
