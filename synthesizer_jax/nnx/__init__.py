"""Layers and models as Flax NNX modules.

``nnx.Attention(num_heads=8, head_dim=64, in_features=512, rngs=nnx.Rngs(0))`` takes the arguments of the
Linen class and, because an NNX module is initialized when it is constructed, also the number of input
features and the random streams. Dropout follows the convention of `flax.nnx`: it is active until `eval`
is called. `to_nnx` converts a Linen module.
"""

from __future__ import annotations

from typing import Any

import flax.linen as linen
from flax import nnx

from synthesizer_jax.models import TokenModel
from synthesizer_jax.multi_head import MultiHeadAttention as LinenMultiHeadAttention
from synthesizer_jax.nnx.axes import axis_rules
from synthesizer_jax.nnx.class_factory import nnx_class
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
    """Converts a Linen module to an NNX module and initializes its parameters.

    Args:
      layer: an unbound Linen module: a mixer (including your own), a `MultiHeadAttention`, a block, a
        stack, or a model such as ``ZOO["synthesizer_rv_base"]()``.
      rngs: random streams; ``params`` is used for the parameters, and ``dropout`` is forked for dropout.
      in_features: number of input features; None for models, which take integer tokens.
      **options: ``cross``, ``deterministic`` and ``keep_rngs`` as in the classes of this package; for a
        `MultiHeadAttention`, arguments of the NNX class.

    Returns:
      An instance of the NNX class of the same name, for `nnx.jit`, `nnx.grad`, `nnx.Optimizer`,
      `nnx.split` and checkpoints.

    Raises:
      ValueError: `in_features` is missing, or the module has no NNX equivalent.
    """
    if isinstance(layer, TokenModel):
        return nnx_class(type(layer))(layer, rngs=rngs, **options)
    if in_features is None:
        raise ValueError(
            f"to_nnx: {type(layer).__name__} needs in_features, the number of features of its inputs"
        )
    if type(layer) is LinenMultiHeadAttention:
        return from_linen(layer, in_features, rngs=rngs, **options)
    if isinstance(layer, linen.MultiHeadDotProductAttention):
        raise ValueError(
            f"to_nnx: {type(layer).__name__} is Flax's attention layer or a subclass of it; use "
            "synthesizer_jax.nnx.MultiHeadAttention, a subclass of Flax's NNX layer"
        )
    return nnx_class(type(layer))(layer, rngs=rngs, in_features=in_features, **options)


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
