"""Models and their parts as NNX classes. Editors and type checkers read `models.pyi`, made by `stubs`."""

from synthesizer_jax import models
from synthesizer_jax.nnx.forms import Layer, Model, Residual, form

_TOKENS = ("embed", "logits")
_DECODING = (*_TOKENS, "hidden", "remember", "decode", "start", "step")

FeedForward = form(models.FeedForward, Layer, module=__name__)
Block = form(models.Block, Residual, module=__name__)
Stack = form(models.Stack, Residual, module=__name__)
UniversalStack = form(models.UniversalStack, Residual, module=__name__)
Encoder = form(models.Encoder, Model, *_TOKENS, "pool", module=__name__)
EncoderDecoder = form(models.EncoderDecoder, Model, *_DECODING, "encode", module=__name__)
LanguageModel = form(models.LanguageModel, Model, *_DECODING, module=__name__)
