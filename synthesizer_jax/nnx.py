"""Every mixer and alignment as a Flax NNX module.

``synthesizer_jax.nnx.Attention(in_features=512, rngs=nnx.Rngs(0), num_heads=8, head_dim=64)`` takes the
arguments of the Linen class, and besides them the width of the tokens and the random streams, because
an NNX module has its parameters from the start. A Linen module is wrapped by `to_nnx`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as linen
import jax.numpy as jnp
from flax import nnx

from synthesizer_jax.attention import Mask
from synthesizer_jax.mixers import MIXERS, SentenceFeedForward
from synthesizer_jax.multi_head_nnx import MultiHeadAttention


def to_nnx(
    layer: linen.Module, *, in_features: int, rngs: nnx.Rngs, cross: bool = False
) -> nnx.Module:
    """An NNX module with a Linen mixer's mathematics, its parameters made at once.

    Call it with the mixer's arguments: ``layer(x, mask=...)``. Dropout acts when ``rngs`` with a stream
    ``dropout`` is given at the call, as the Linen layer's does.

    Args:
      layer: an unbound Linen mixer, such as ``Attention(8, 64)``.
      in_features: width of the tokens.
      rngs: random streams; ``params`` makes the parameters.
      cross: the layer attends to other tokens than its own; only a layer whose parameters depend on
        that (`SentenceFeedForward`) needs to know.

    Returns:
      A module for `nnx.jit`, `nnx.grad`, `nnx.Optimizer`, `nnx.split` and checkpoints.
    """
    tokens = jnp.zeros((1, 1, in_features))
    causal = isinstance(layer, SentenceFeedForward) and layer.causal and not cross
    arguments = (tokens, tokens) if cross else (tokens,)
    with nnx.use_eager_sharding(False):
        module = nnx.bridge.ToNNX(layer, rngs=rngs)
        nnx.bridge.lazy_init(module, *arguments, mask=Mask(causal=causal))
    return module


def _wrapped(cls: type[linen.Module]) -> Callable[..., nnx.Module]:
    @functools.wraps(cls, updated=())
    def make(
        *args: Any, in_features: int, rngs: nnx.Rngs, cross: bool = False, **fields: Any
    ) -> nnx.Module:
        return to_nnx(cls(*args, **fields), in_features=in_features, rngs=rngs, cross=cross)

    return make


def __getattr__(name: str) -> Any:
    """The NNX form of a mixer, by its Linen name."""
    if name in MIXERS:
        return _wrapped(MIXERS[name])
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}; it has: {', '.join(MIXERS)}"
    )


def __dir__() -> list[str]:
    return [*globals(), *MIXERS]


def linen_variables(module: nnx.Module) -> dict[str, Any]:
    """A wrapped layer's variables as the Linen layer's `apply` takes them.

    Args:
      module: from `to_nnx` or one of the mixers of this module.
    """
    found: dict[str, Any] = {}
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        if isinstance(variable, nnx.RngState):
            continue
        collection = "params" if isinstance(variable, nnx.Param) else type(variable).__name__
        node = found.setdefault(collection, {})
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = variable[...]
    return found


__all__ = ["MultiHeadAttention", "linen_variables", "to_nnx", *MIXERS]
