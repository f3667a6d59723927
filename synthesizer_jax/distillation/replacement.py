"""Replacement of a model's parts, and the activations at which teacher and student are compared."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

import flax.linen as nn

from synthesizer_jax.alignments import Alignment
from synthesizer_jax.base.registry import check_types, fields_of, register, replace
from synthesizer_jax.base.typing import Number
from synthesizer_jax.mixers import Attention
from synthesizer_jax.models import Block, EncoderDecoder, Run, TokenModel, UniversalStack, stacks_of, unroll

Layer: TypeAlias = tuple[str, int]
"""The name of a stack, ``encoder`` or ``decoder``, and the number of a layer."""

STACKS = {"encoder": "attention", "decoder": "self_attention"}
"""The name of the self-attention in the layers of a stack."""

PLACES = {
    "encoder": ("encoder", STACKS["encoder"], "self"),
    "decoder": ("decoder", STACKS["decoder"], "self"),
    "cross": ("decoder", "encoder_decoder_attention", "cross"),
}
"""By the place of a replacement: its stack, and the names of the mixer and of its taps in a layer."""


@register
@dataclasses.dataclass(frozen=True)
class Replacement:
    """A replacement of mixers.

    Attributes:
      by: a mixer, or an alignment for the existing attention.
      place: ``"encoder"`` or ``"decoder"`` for self-attention, or ``"cross"`` for the decoder's
        cross-attention.
      scope: ``"mixer"`` replaces the mixer only (ALR, ALSR, or another alignment), ``"sublayer"`` also
        its norm and residual connection (ALRR), and ``"layer"`` the whole layer (ELR).
      layers: indices of the layers; None: all.
    """

    by: nn.Module
    place: Literal["encoder", "decoder", "cross"] = "encoder"
    scope: Literal["mixer", "sublayer", "layer"] = "mixer"
    layers: tuple[Number, ...] | None = None


def student_model(model: EncoderDecoder, replacements: tuple[Replacement, ...]) -> EncoderDecoder:
    """Returns the teacher's model, unrolled, with replacements.

    Raises:
      ValueError: an unknown place or scope, a layer that does not exist, or a `UniversalStack`.
    """
    model = unroll(model)
    for replacement in replacements:
        check_types(Replacement, fields_of(replacement), "Replacement")
        if replacement.scope != "mixer" and replacement.place != "encoder":
            raise ValueError(f"Replacement: scope={replacement.scope!r} is for encoders only")
        name = PLACES[replacement.place][0]
        check_layers_differ(model, name)
        stack, blocks = stacks_of(model)[name], blocks_of(model, name)
        for index in _layer_indices(replacement, len(blocks)):
            blocks[index] = _replace_mixer(blocks[index], replacement)
        runs = tuple(Run(block, len(list(group))) for block, group in itertools.groupby(blocks))
        # A position bias is kept as long as a layer has logits to add it to.
        bias = stack.bias if any(run.block.self_mixer.bias_heads for run in runs) else None
        model = replace(model, **{name: replace(stack, runs=runs, bias=bias)})
    return model


def blocks_of(model: TokenModel, stack: str) -> list[Block]:
    """Returns the blocks of all layers of a stack."""
    return [run.block for run in stacks_of(model)[stack].runs for _ in range(run.repeats)]


def check_layers_differ(model: TokenModel, stack: str) -> None:
    """Raises a `ValueError` if the layers of a stack share their parameters, as in a `UniversalStack`."""
    layers = stacks_of(model)[stack]
    if isinstance(layers, UniversalStack):
        raise ValueError(
            f"the {stack} is a {type(layers).__name__}, whose layers share their parameters and cannot be "
            "replaced; choose a model with layers of their own"
        )


def self_attention(model: TokenModel, layer: Layer) -> Attention:
    """Returns the self-attention of a layer; raises a `ValueError` if it is another mixer."""
    stack, index = layer
    mixer = blocks_of(model, stack)[index].self_mixer
    if not isinstance(mixer, Attention):
        raise ValueError(
            f"the {stack}'s self-attention is a {type(mixer).__name__}, which has no alignment"
        )
    return mixer


def _layer_indices(replacement: Replacement, num_layers: int) -> tuple[int, ...]:
    """Returns the indices of the replaced layers."""
    if replacement.layers is None:
        return tuple(range(num_layers))
    if any(not 0 <= i < num_layers for i in replacement.layers):
        raise ValueError(
            f"Replacement: layers={replacement.layers}, but there are layers 0 to {num_layers - 1}"
        )
    return replacement.layers


def _replace_mixer(block: Block, replacement: Replacement) -> Block:
    """Returns a block with one of its mixers replaced."""
    field = "cross_mixer" if replacement.place == "cross" else "self_mixer"
    old, new = getattr(block, field), replacement.by
    if isinstance(new, Alignment):
        if not isinstance(old, Attention):
            raise ValueError(
                f"Replacement: {type(new).__name__} is an alignment, but the "
                f"{replacement.place} has a {type(old).__name__} instead of attention; use a mixer"
            )
        new = replace(old, alignment=new)
    changes: dict[str, object] = {field: new}
    if replacement.scope != "mixer":
        changes["self_residual"] = False
    if replacement.scope == "layer":
        changes["feed_forward"] = None
    return replace(block, **changes)


class TapPair(NamedTuple):
    """The taps of a replaced mixer.

    Attributes:
      stack: ``encoder`` or ``decoder``.
      layer: name of the layer: ``layers_0``, …
      mixer: name of the replaced mixer in the layer.
      inputs: path of the mixer's inputs, which the student takes from the teacher, in the collection.
      outputs: paths of the taps to compare; the first that both have in the same shape is used.
    """

    stack: str
    layer: str
    mixer: str
    inputs: str
    outputs: tuple[str, ...]


def tap_pairs(model: EncoderDecoder, replacements: tuple[Replacement, ...]) -> Iterator[TapPair]:
    """Yields the taps of all replaced mixers."""
    for replacement in replacements:
        stack, mixer, prefix = PLACES[replacement.place]
        outputs = {
            "mixer": (f"{mixer}/heads", f"{prefix}_mixed"),
            "sublayer": ("self_output",),
            "layer": ("output",),
        }[replacement.scope]
        for index in _layer_indices(replacement, stacks_of(model)[stack].num_layers):
            layer = f"layers_{index}"
            taps = tuple(f"{stack}/{layer}/{name}" for name in outputs)
            yield TapPair(stack, layer, mixer, f"{stack}/{layer}/{prefix}_input", taps)
