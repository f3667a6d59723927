"""The NNX classes of mixers and models. `LinenModule` documents the arguments that NNX adds."""

from synthesizer_jax import mixers, models
from synthesizer_jax.nnx.module import LinenModule

__all__ = [
    "Attention",
    "Block",
    "DynamicConvolution",
    "Encoder",
    "EncoderDecoder",
    "FeedForward",
    "LanguageModel",
    "LightweightConvolution",
    "Linformer",
    "MergedAttention",
    "SentenceFeedForward",
    "Stack",
    "TalkingHeads",
    "TokenFeedForward",
    "UniversalStack",
]


class Attention(LinenModule, linen_class=mixers.Attention):
    """`synthesizer_jax.mixers.Attention` as an NNX module."""


class DynamicConvolution(LinenModule, linen_class=mixers.DynamicConvolution):
    """`synthesizer_jax.mixers.DynamicConvolution` as an NNX module."""


class LightweightConvolution(LinenModule, linen_class=mixers.LightweightConvolution):
    """`synthesizer_jax.mixers.LightweightConvolution` as an NNX module."""


class Linformer(LinenModule, linen_class=mixers.Linformer):
    """`synthesizer_jax.mixers.Linformer` as an NNX module."""


class MergedAttention(LinenModule, linen_class=mixers.MergedAttention):
    """`synthesizer_jax.mixers.MergedAttention` as an NNX module."""


class SentenceFeedForward(LinenModule, linen_class=mixers.SentenceFeedForward):
    """`synthesizer_jax.mixers.SentenceFeedForward` as an NNX module."""


class TalkingHeads(LinenModule, linen_class=mixers.TalkingHeads):
    """`synthesizer_jax.mixers.TalkingHeads` as an NNX module."""


class TokenFeedForward(LinenModule, linen_class=mixers.TokenFeedForward):
    """`synthesizer_jax.mixers.TokenFeedForward` as an NNX module."""


class Block(LinenModule, linen_class=models.Block):
    """`synthesizer_jax.models.Block` as an NNX module."""


class Encoder(LinenModule, linen_class=models.Encoder):
    """`synthesizer_jax.models.Encoder` as an NNX module."""


class EncoderDecoder(LinenModule, linen_class=models.EncoderDecoder):
    """`synthesizer_jax.models.EncoderDecoder` as an NNX module."""


class FeedForward(LinenModule, linen_class=models.FeedForward):
    """`synthesizer_jax.models.FeedForward` as an NNX module."""


class LanguageModel(LinenModule, linen_class=models.LanguageModel):
    """`synthesizer_jax.models.LanguageModel` as an NNX module."""


class Stack(LinenModule, linen_class=models.Stack):
    """`synthesizer_jax.models.Stack` as an NNX module."""


class UniversalStack(LinenModule, linen_class=models.UniversalStack):
    """`synthesizer_jax.models.UniversalStack` as an NNX module."""
