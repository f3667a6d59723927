"""Replaces parts of a model.

This module also lists the activations at which the student is compared with the teacher.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

import flax.linen as nn

from synthesizer_jax.alignments import Alignment, DotProduct
from synthesizer_jax.base.registry import check_types, fields_of, register, replace
from synthesizer_jax.base.typing import Number
from synthesizer_jax.mixers import Attention, MergedAttention, Mixer
from synthesizer_jax.models import (
    Block,
    EncoderDecoder,
    Run,
    TokenModel,
    UniversalStack,
    stacks_of,
    unroll,
)

Layer: TypeAlias = tuple[str, int]
"""A pair with the name of a stack, ``encoder`` or ``decoder``, and the index of a layer in it."""

STACKS = {"encoder": "attention", "decoder": "self_attention"}
"""The name of self-attention in the layers of each stack."""

PLACES = {
    "encoder": ("encoder", STACKS["encoder"], "self"),
    "decoder": ("decoder", STACKS["decoder"], "self"),
    "cross": ("decoder", "encoder_decoder_attention", "cross"),
}
"""The stack, the mixer's name in a layer and the prefix of its taps, for each place."""


@register
@dataclasses.dataclass(frozen=True)
class Replacement:
    """Replaces a mixer in some or all layers of a stack.

    Attributes:
      by: the new mixer. If `by` is an alignment, the existing attention is kept but uses this
        alignment. In merged attention, `by` replaces the alignment of the decoder's own tokens.
      place: the mixer to replace. ``"encoder"`` and ``"decoder"`` stand for the self-attention of
        these stacks, and ``"cross"`` stands for the decoder's cross-attention.
      scope: the part of a layer that is replaced. ``"mixer"`` replaces only the mixer (ALR, ALSR,
        or another alignment). ``"sublayer"`` also replaces the norm and the residual connection of
        the mixer (ALRR). ``"layer"`` replaces the whole layer (ELR).
      layers: the indices of the layers. `None` stands for all layers.
    """

    by: nn.Module
    place: Literal["encoder", "decoder", "cross"] = "encoder"
    scope: Literal["mixer", "sublayer", "layer"] = "mixer"
    layers: tuple[Number, ...] | None = None


def student_model(model: EncoderDecoder, replacements: tuple[Replacement, ...]) -> EncoderDecoder:
    """Returns the teacher's model with replacements and with looped layers.

    Raises:
      ValueError: if a place, a scope or a layer does not exist, or if a stack is a
        `UniversalStack`.
    """
    model = unroll(model)
    for replacement in replacements:
        check_types(Replacement, fields_of(replacement), "Replacement")
        if replacement.scope != "mixer" and replacement.place != "encoder":
            raise ValueError(
                f"Replacement: The scope {replacement.scope!r} is only possible in the encoder, "
                f"but the place is {replacement.place!r}. Use scope='mixer'."
            )
        name = PLACES[replacement.place][0]
        check_layers_differ(model, name)

        stack = stacks_of(model)[name]
        blocks = blocks_of(model, name)
        for index in _layer_indices(replacement, len(blocks)):
            blocks[index] = _replace_mixer(blocks[index], replacement)
        # Neighboring layers with equal blocks are grouped into one `Run`.
        runs = tuple(Run(block, len(list(group))) for block, group in itertools.groupby(blocks))

        # Keep the stack's position bias only if at least one layer has logits to which the bias is
        # added.
        bias = stack.bias
        if not any(run.block.self_mixer.bias_heads for run in runs):
            bias = None
        model = replace(model, **{name: replace(stack, runs=runs, bias=bias)})
    return model


def blocks_of(model: TokenModel, stack: str) -> list[Block]:
    """Returns the blocks of all layers of a stack, in their order."""
    return [run.block for run in stacks_of(model)[stack].runs for _ in range(run.repeats)]


def check_layers_differ(model: TokenModel, stack: str) -> None:
    """Raises a `ValueError` if the layers of a stack share their parameters.

    The layers of a `UniversalStack` share their parameters, so a single layer cannot be replaced.
    """
    layers = stacks_of(model)[stack]
    if isinstance(layers, UniversalStack):
        raise ValueError(
            f"The {stack} is a {type(layers).__name__}, whose layers share their parameters and "
            "cannot be replaced. Choose a model whose layers have parameters of their own."
        )


def self_attention(model: TokenModel, layer: Layer) -> Attention:
    """Returns the self-attention of a layer.

    Raises:
      ValueError: if the layer has a mixer that is not an `Attention`.
    """
    stack, index = layer
    mixer = blocks_of(model, stack)[index].self_mixer
    if not isinstance(mixer, Attention):
        raise ValueError(
            f"The {stack}'s self-attention is a {type(mixer).__name__}, which has no alignment."
        )
    return mixer


def _layer_indices(replacement: Replacement, num_layers: int) -> tuple[int, ...]:
    """Returns the indices of the layers that are replaced."""
    if replacement.layers is None:
        return tuple(range(num_layers))
    if any(not 0 <= i < num_layers for i in replacement.layers):
        raise ValueError(
            f"Replacement: layers is {replacement.layers}, but the model only has the layers 0 to "
            f"{num_layers - 1}."
        )
    return replacement.layers


def _replace_mixer(block: Block, replacement: Replacement) -> Block:
    """Returns the block with one of its mixers replaced."""
    field = "cross_mixer" if replacement.place == "cross" else "self_mixer"
    old = getattr(block, field)
    new = replacement.by
    if isinstance(new, Alignment):
        if not isinstance(old, Attention):
            raise ValueError(
                f"Replacement: {type(new).__name__} is an alignment, but the mixer in the place "
                f"{replacement.place!r} is a {type(old).__name__} instead of an Attention. Use a "
                "mixer as the replacement."
            )
        new = _with_alignment(old, new)
    changes: dict[str, object] = {field: new}
    if replacement.scope != "mixer":
        changes["self_residual"] = False
    if replacement.scope == "layer":
        changes["feed_forward"] = None
    return replace(block, **changes)


def _with_alignment(attention: Attention, alignment: Alignment) -> Attention:
    """Returns attention with another alignment.

    In merged attention, the logits of the memory may share the projections of the old alignment. If
    the new alignment has no projections to share, the memory keeps the old alignment.
    """
    fields: dict[str, object] = {"alignment": alignment}
    if is_sharing(attention) and not isinstance(alignment, DotProduct):
        fields["cross_alignment"] = attention.alignment
    return replace(attention, **fields)


def is_sharing(mixer: Mixer) -> bool:
    """Returns whether a mixer's own tokens and the memory share the projections of an alignment."""
    return isinstance(mixer, MergedAttention) and mixer.cross_alignment is None


class TapPair(NamedTuple):
    """The paths of activations at which a replaced mixer is compared with the teacher's mixer.

    Attributes:
      stack: the name of the stack, ``encoder`` or ``decoder``.
      layer: the name of the layer, such as ``layers_0``.
      mixer: the name of the replaced mixer in the layer.
      inputs: the path of the mixer's inputs in the collection of taps. The student uses the
        teacher's inputs.
      outputs: the paths of activations that can be compared. The first activation that has the same
        shape in both models is compared.
    """

    stack: str
    layer: str
    mixer: str
    inputs: str
    outputs: tuple[str, ...]


def tap_pairs(model: EncoderDecoder, replacements: tuple[Replacement, ...]) -> Iterator[TapPair]:
    """Yields a `TapPair` for every replaced mixer."""
    for replacement in replacements:
        stack, mixer, prefix = PLACES[replacement.place]
        outputs_by_scope = {
            # Prefer to compare the outputs of the heads. If the replacement has no heads, the
            # outputs of the mixers are compared.
            "mixer": (f"{mixer}/heads", f"{prefix}_mixed"),
            "sublayer": ("self_output",),
            "layer": ("output",),
        }
        outputs = outputs_by_scope[replacement.scope]
        for index in _layer_indices(replacement, stacks_of(model)[stack].num_layers):
            layer = f"layers_{index}"
            yield TapPair(
                stack=stack,
                layer=layer,
                mixer=mixer,
                inputs=f"{stack}/{layer}/{prefix}_input",
                outputs=tuple(f"{stack}/{layer}/{name}" for name in outputs),
            )
