"""What all mixers share."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax

from synthesizer_jax.attention import Mask
from synthesizer_jax.attention.products import dense_product
from synthesizer_jax.initializers import Initializer
from synthesizer_jax.parameters import with_axes

SITES = "sites"
"""The collection in which modules leave what distillation compares, when it is asked for."""


@dataclasses.dataclass(frozen=True)
class NewCache:
    """Asks a layer to start a cache with room for `max_length` positions (None: as many as given)."""

    max_length: int | None = None


FORCED = "forced"
"""The collection of values to use in place of a module's own, at the places of `SITES`."""


def site(module: nn.Module, name: str, value: jax.Array) -> jax.Array:
    """Leaves a value, and takes the forced one where there is one."""
    if module.has_variable(FORCED, name):
        value = module.get_variable(FORCED, name)
    leave(module, name, value)
    return value


def leave(module: nn.Module, name: str, value: jax.Array) -> None:
    """Leaves a value in `SITES` when that collection is asked for."""
    if module.is_mutable_collection(SITES) and not module.is_initializing():
        module.sow(SITES, name, value, reduce_fn=lambda _, new: new, init_fn=lambda: None)


def merge_heads(
    module: nn.Module,
    heads: jax.Array,
    d_model: int,
    *,
    kernel_init: Initializer,
    use_bias: bool = False,
) -> jax.Array:
    """The output projection ``out/kernel [heads, head_dim, d_model]``.

    Args:
      module: the mixer that makes the projection.
      heads: ``[batch, q, heads, head_dim]``; left in `SITES` as ``heads``.
      d_model: width of the result.
      kernel_init: initialiser of the kernel.
      use_bias: add a bias ``[d_model]``.

    Returns:
      ``[batch, q, d_model]``.
    """
    leave(module, "heads", heads)
    return nn.DenseGeneral(
        features=d_model,
        axis=(-2, -1),
        use_bias=use_bias,
        dtype=heads.dtype,
        kernel_init=with_axes(kernel_init, "heads", "kv", "embed"),
        bias_init=with_axes(nn.initializers.zeros_init(), "embed"),
        dot_general=dense_product,
        name="out",
        parent=module,
    )(heads)


def dropout_options(module: Any) -> dict[str, Any]:
    """`attend`'s dropout options: the mixer's `dropout_rate`, and its key where one was given."""
    dropping = module.dropout_rate > 0.0 and module.has_rng("dropout")
    return {
        "dropout_rate": module.dropout_rate if dropping else 0.0,
        "dropout_key": module.make_rng("dropout") if dropping else None,
    }


def self_attention_only(module: nn.Module, kv: Any, bias: Any, cache: Any = None) -> None:
    """Raises a `ValueError` for what a mixer's definition does not allow."""
    name = type(module).__name__
    if kv is not None:
        raise ValueError(f"{name} mixes a sequence with itself; use Attention as cross_mixer")
    if bias:
        raise ValueError(
            f"{name} has no logits to add a position bias to; give the stack bias=None"
        )
    if cache is not None:
        raise ValueError(
            f"{name} sees the whole sequence at once and cannot decode step by step; use it in "
            "encoders only"
        )


def not_causal(module: nn.Module, mask: Mask) -> None:
    """Raises a `ValueError` for masks of single queries, which a mixer of whole sequences breaks."""
    patterns = (mask.window, mask.ahead, mask.allowed)
    if mask.causal or any(pattern is not None for pattern in patterns):
        raise ValueError(
            f"{type(module).__name__} mixes all positions, later ones too; it has no causal form: use "
            "it in encoders, and another mixer in decoders"
        )


def not_packed(module: nn.Module, mask: Mask) -> None:
    """Raises a `ValueError` for packed rows."""
    if mask.key_segments is not None:
        raise ValueError(
            f"{type(module).__name__} reads a row as one sequence; train with packing off "
            "(data.pack=false)"
        )
