"""Every mixer as an NNX class; type checkers read `mixers.pyi`, which `tools.nnx_stubs` writes."""

from synthesizer_jax import mixers
from synthesizer_jax.nnx.class_factory import Layer, make_nnx_class

_CACHES = ("init_cache", "extend")

Attention = make_nnx_class(mixers.Attention, Layer, *_CACHES, module=__name__)
LightweightConvolution = make_nnx_class(
    mixers.LightweightConvolution, Layer, *_CACHES, module=__name__
)
DynamicConvolution = make_nnx_class(mixers.DynamicConvolution, Layer, *_CACHES, module=__name__)
Linformer = make_nnx_class(mixers.Linformer, Layer, *_CACHES, module=__name__)
SentenceFeedForward = make_nnx_class(mixers.SentenceFeedForward, Layer, *_CACHES, module=__name__)
TalkingHeads = make_nnx_class(mixers.TalkingHeads, Layer, *_CACHES, module=__name__)
TokenFeedForward = make_nnx_class(mixers.TokenFeedForward, Layer, *_CACHES, module=__name__)
