"""The layers and models of this package as Flax NNX modules.

An NNX class takes the arguments of the Linen class, as in
``nnx.Attention(num_heads=8, head_dim=64, in_features=512, rngs=nnx.Rngs(0))``. An NNX class also
takes the number of input features and the random streams, because an NNX module is initialized when
it is constructed. As in `flax.nnx`, dropout is active until `eval` is called. `to_nnx` converts a
Linen module to an NNX module.
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
    MergedAttention,
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
    "MergedAttention",
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
      layer: an unbound Linen module. Supported modules are mixers, including user-defined mixers,
        feed-forward layers, blocks, stacks, and models such as ``ZOO["synthesizer_rv_base"]()``.
      rngs: the random streams. The stream ``params`` initializes the parameters, and the stream
        ``dropout`` is forked for dropout.
      **options: the arguments `in_features`, `deterministic` and `keep_rngs` of `LinenModule`. All
        modules except models require `in_features`.

    Returns:
      An instance of the NNX class that has the same name as the Linen class or one of its
      superclasses, or otherwise an instance of `LinenModule`. The result works with `nnx.jit`,
      `nnx.grad`, `nnx.Optimizer`, `nnx.split` and checkpoints.

    Raises:
      ValueError: if `in_features` is missing, or if this kind of module is not supported.
    """
    if not isinstance(
        layer, Mixer | models.FeedForward | models.Block | models.Stack | models.TokenModel
    ):
        raise ValueError(
            f"to_nnx: {type(layer).__name__} is not a mixer, feed-forward layer, block, stack or "
            "model. Use synthesizer_jax.nnx.MultiHeadAttention or flax.nnx.bridge.ToNNX."
        )

    # Look for an NNX class with the name of the Linen class, and then of each of its superclasses.
    named = (getattr(layers, cls.__name__, None) for cls in type(layer).__mro__)
    return next(filter(None, named), LinenModule)(layer, rngs=rngs, **options)


def axis_rules(
    **axes: str | tuple[str, ...] | None,
) -> tuple[tuple[str, str | tuple[str, ...] | None], ...]:
    """Returns rules for `nnx.logical_axis_rules` that cover every logical axis of this package.

    Under ``with nnx.logical_axis_rules(axis_rules(heads="tensor", mlp="tensor", embed="fsdp"))``,
    `nnx.get_partition_spec` returns axes of the mesh. If no rule maps a logical axis, Flax would
    use its name as the name of a mesh axis that does not exist. The result therefore contains a
    rule for every logical axis of this package. If you also use logical axes of your own, append
    rules for them.

    Args:
      **axes: the mesh axis or mesh axes for each logical axis. The keywords are names in
        `LOGICAL_AXES` and `ACTIVATION_AXES`. Logical axes that are None or left out are not
        sharded.

    Returns:
      A pair for every logical axis. The first entry of a pair is the name of the logical axis. The
      second entry is a mesh axis, a tuple of mesh axes, or None.

    Raises:
      ValueError: if a keyword is in neither `LOGICAL_AXES` nor `ACTIVATION_AXES`.
    """
    names = (*LOGICAL_AXES, *ACTIVATION_AXES)
    for name in axes.keys() - set(names):
        raise ValueError(
            f"axis_rules: there is no logical axis {name!r}{did_you_mean(name, names) or '.'}"
        )
    return tuple((name, axes.get(name)) for name in names)
