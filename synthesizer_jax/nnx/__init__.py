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

from synthesizer_jax import models
from synthesizer_jax.base.messages import did_you_mean
from synthesizer_jax.mixers import Mixer
from synthesizer_jax.nnx import layers
from synthesizer_jax.nnx.layers import (
    Attention,
    Block,
    DynamicConvolution,
    Encoder,
    EncoderDecoder,
    FeedForward,
    LanguageModel,
    LightweightConvolution,
    Linformer,
    SentenceFeedForward,
    Stack,
    TalkingHeads,
    TokenFeedForward,
    UniversalStack,
)
from synthesizer_jax.nnx.module import Constant, LinenModule, Loss, linen_variables
from synthesizer_jax.nnx.multi_head import MultiHeadAttention
from synthesizer_jax.primitives.parameters import ACTIVATION_AXES, LOGICAL_AXES

__all__ = [
    "Attention",
    "Block",
    "Constant",
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


def to_nnx(layer: linen.Module, *, rngs: nnx.Rngs, **options: Any) -> Any:
    """Converts a Linen module to an NNX module and initializes its parameters.

    Args:
      layer: an unbound Linen module: a mixer (including your own), a block, a stack, or a model such as
        ``ZOO["synthesizer_rv_base"]()``.
      rngs: random streams; ``params`` is used for the parameters, and ``dropout`` is forked for dropout.
      **options: ``in_features``, except for models; ``deterministic`` and ``keep_rngs``, see
        `LinenModule`.

    Returns:
      An instance of the NNX class of the same name, or of a Linen superclass' name, for `nnx.jit`,
      `nnx.grad`, `nnx.Optimizer`, `nnx.split` and checkpoints.

    Raises:
      ValueError: `in_features` is missing, or the module is none of these.
    """
    if not isinstance(layer, Mixer | models.FeedForward | models.Block | models.Stack | models.TokenModel):
        raise ValueError(
            f"to_nnx: {type(layer).__name__} is neither a mixer, block, stack nor model; use "
            "synthesizer_jax.nnx.MultiHeadAttention or flax.nnx.bridge.ToNNX"
        )
    named = (getattr(layers, cls.__name__, None) for cls in type(layer).__mro__)
    return next(filter(None, named), LinenModule)(layer, rngs=rngs, **options)


def axis_rules(
    **axes: str | tuple[str, ...] | None,
) -> tuple[tuple[str, str | tuple[str, ...] | None], ...]:
    """Returns rules for `nnx.logical_axis_rules` that cover every logical axis of this package.

    ``with nnx.logical_axis_rules(axis_rules(heads="tensor", mlp="tensor", embed="fsdp"))`` makes
    `nnx.get_partition_spec` return the axes of the mesh. Flax leaves names without a rule unchanged, so
    the result has a rule for each name; to use logical names of your own as well, append their rules.

    Args:
      **axes: for names of `LOGICAL_AXES` and `ACTIVATION_AXES`, the mesh axis or axes to shard over, or
        None. Names that are left out are not sharded.

    Raises:
      ValueError: a name is in neither table.
    """
    names = (*LOGICAL_AXES, *ACTIVATION_AXES)
    for name in axes.keys() - set(names):
        raise ValueError(f"axis_rules: unknown axis {name!r}{did_you_mean(name, names)}")
    return tuple((name, axes.get(name)) for name in names)
