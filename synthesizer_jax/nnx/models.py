"""Models and their parts as NNX classes; see `models.pyi`, which `tools.nnx_stubs` writes."""

from synthesizer_jax import models
from synthesizer_jax.nnx.class_factory import Layer, Model, StackLayer, make_nnx_class

_TOKENS = ("embed", "logits")
_CACHES = ("init_cache", "extend")
_DECODING = (*_TOKENS, "hidden", "encode_inputs", "decode", *_CACHES)

FeedForward = make_nnx_class(models.FeedForward, Layer, module=__name__)
Block = make_nnx_class(models.Block, StackLayer, *_CACHES, module=__name__)
Stack = make_nnx_class(models.Stack, StackLayer, *_CACHES, module=__name__)
UniversalStack = make_nnx_class(models.UniversalStack, StackLayer, *_CACHES, module=__name__)
Encoder = make_nnx_class(models.Encoder, Model, *_TOKENS, "pool", module=__name__)
EncoderDecoder = make_nnx_class(models.EncoderDecoder, Model, *_DECODING, "encode", module=__name__)
LanguageModel = make_nnx_class(models.LanguageModel, Model, *_DECODING, module=__name__)
