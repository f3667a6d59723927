"""Layers and models as Flax NNX modules.

``nnx.Attention(num_heads=8, head_dim=64, in_features=512, rngs=nnx.Rngs(0))`` takes the arguments of the
Linen class, and besides them the width of the tokens and the random streams, because an NNX module has
its parameters from the start. Dropout is that of `flax.nnx`: it acts until `eval`. `to_nnx` converts a
Linen module.
"""

from __future__ import annotations

from typing import Any

import flax.linen as linen
from flax import nnx

from synthesizer_jax.models import TokenModel
from synthesizer_jax.multi_head import MultiHeadAttention as LinenMultiHeadAttention
from synthesizer_jax.nnx.axes import axis_rules
from synthesizer_jax.nnx.forms import form_of
from synthesizer_jax.nnx.mixers import (
    Attention,
    DynamicConvolution,
    LightweightConvolution,
    Linformer,
    SentenceFeedForward,
    TalkingHeads,
    TokenFeedForward,
)
from synthesizer_jax.nnx.models import (
    Block,
    Encoder,
    EncoderDecoder,
    FeedForward,
    LanguageModel,
    Stack,
    UniversalStack,
)
from synthesizer_jax.nnx.module import LinenModule, Loss, linen_variables
from synthesizer_jax.nnx.multi_head import MultiHeadAttention, from_linen


def to_nnx(
    layer: linen.Module, *, rngs: nnx.Rngs, in_features: int | None = None, **options: Any
) -> Any:
    """The NNX module of a Linen configuration, its parameters made at once.

    Args:
      layer: an unbound Linen module: a mixer, also one of your own, a `MultiHeadAttention`, a block, a
        stack, or a model such as ``ZOO["synthesizer_rv_base"]()``.
      rngs: random streams; ``params`` makes the parameters, and ``dropout`` is forked for dropout.
      in_features: width of the tokens; None for models, which read integers.
      **options: ``cross``, ``deterministic`` and ``keep_rngs`` as in the classes of this package.

    Returns:
      An instance of the NNX class of the same name, for `nnx.jit`, `nnx.grad`, `nnx.Optimizer`,
      `nnx.split` and checkpoints.

    Raises:
      ValueError: `in_features` is missing, or the module has no NNX form.
    """
    if isinstance(layer, TokenModel):
        return form_of(type(layer))(layer, rngs=rngs, **options)
    if in_features is None:
        name = type(layer).__name__
        raise ValueError(f"to_nnx: {name} reads vectors; give in_features, the width of its tokens")
    if type(layer) is LinenMultiHeadAttention:
        return from_linen(layer, in_features, rngs=rngs, **options)
    if isinstance(layer, linen.MultiHeadDotProductAttention):
        raise ValueError(
            f"to_nnx: {type(layer).__name__} is Flax's attention or a subclass of it; build "
            "synthesizer_jax.nnx.MultiHeadAttention, which is a subclass of Flax's NNX layer"
        )
    return form_of(type(layer))(layer, rngs=rngs, in_features=in_features, **options)


__all__ = [
    "Attention",
    "Block",
    "DynamicConvolution",
    "Encoder",
    "EncoderDecoder",
    "FeedForward",
    "LanguageModel",
    "LightweightConvolution",
    "LinenModule",
    "Linformer",
    "Loss",
    "MultiHeadAttention",
    "SentenceFeedForward",
    "Stack",
    "TalkingHeads",
    "TokenFeedForward",
    "UniversalStack",
    "axis_rules",
    "linen_variables",
    "to_nnx",
]
