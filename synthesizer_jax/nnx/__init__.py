"""The layers and models of this package as Flax NNX modules.

``nnx.Attention(num_heads=8, head_dim=64, in_features=512, rngs=nnx.Rngs(0))`` takes the arguments
of the Linen class. It also takes the number of input features and the random streams, because an
NNX module is initialized when it is constructed. As in `flax.nnx`, dropout is active until `eval`
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
    """Converts a Linen module to an NNX module, and initializes its parameters.

    Args:
      layer: an unbound Linen module. It may be a mixer, including your own, a feed-forward layer, a
        block, a stack, or a model such as ``ZOO["synthesizer_rv_base"]()``.
      rngs: the random streams. ``params`` initializes the parameters, and ``dropout`` is forked for
        dropout.
      **options: `in_features`, which all modules except models require; `deterministic` and
        `keep_rngs`, see `LinenModule`.

    Returns:
      An instance of the NNX class that has the name of the Linen class, or of one of its
      superclasses. If there is no such class, it is a `LinenModule`. It works with `nnx.jit`,
      `nnx.grad`, `nnx.Optimizer`, `nnx.split` and checkpoints.

    Raises:
      ValueError: if `in_features` is missing, or if the module is of another kind.
    """
    if not isinstance(
        layer, Mixer | models.FeedForward | models.Block | models.Stack | models.TokenModel
    ):
        raise ValueError(
            f"to_nnx: {type(layer).__name__} is not a mixer, feed-forward layer, block, stack or "
            "model. Use synthesizer_jax.nnx.MultiHeadAttention or flax.nnx.bridge.ToNNX."
        )

    # The classes of a Linen module, from the most to the least specific.
    named = (getattr(layers, cls.__name__, None) for cls in type(layer).__mro__)
    return next(filter(None, named), LinenModule)(layer, rngs=rngs, **options)


def axis_rules(
    **axes: str | tuple[str, ...] | None,
) -> tuple[tuple[str, str | tuple[str, ...] | None], ...]:
    """Returns rules for `nnx.logical_axis_rules` that cover every logical axis of this package.

    Under ``with nnx.logical_axis_rules(axis_rules(heads="tensor", mlp="tensor", embed="fsdp"))``,
    `nnx.get_partition_spec` returns axes of the mesh. Flax leaves names without a rule unchanged,
    and the mesh has no axes of these names. This is why the result contains a rule for every name.
    If you use logical names of your own as well, append their rules.

    Args:
      **axes: the mesh axis, or axes, to shard over, for names in `LOGICAL_AXES` and
        `ACTIVATION_AXES`. Names that are None or left out are not sharded.

    Returns:
      Pairs of a logical axis and its mesh axis, mesh axes, or None.

    Raises:
      ValueError: if a name is in neither table.
    """
    names = (*LOGICAL_AXES, *ACTIVATION_AXES)
    for name in axes.keys() - set(names):
        raise ValueError(
            f"axis_rules: there is no logical axis {name!r}{did_you_mean(name, names) or '.'}"
        )
    return tuple((name, axes.get(name)) for name in names)
