"""Replacement of a model's parts, and the activations at which teacher and student are compared."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Literal, TypeAlias

import flax.linen as nn

from synthesizer_jax.alignments import Alignment
from synthesizer_jax.mixers import Attention
from synthesizer_jax.models import Block, EncoderDecoder, Run, unroll
from synthesizer_jax.models.stack import Stack
from synthesizer_jax.registry import check_types, fields_of, register, replace
from synthesizer_jax.typing import Number

StackName: TypeAlias = Literal["encoder", "decoder"]


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
      ValueError: an unknown place or scope, or a layer that does not exist.
    """
    model = unroll(model)
    stacks = named_stacks(model)
    for replacement in replacements:
        check_types(Replacement, fields_of(replacement), "Replacement")
        if replacement.scope != "mixer" and replacement.place != "encoder":
            raise ValueError(f"Replacement: scope={replacement.scope!r} is for encoders only")
        name = _stack_name(replacement)
        stack = stacks[name]
        blocks = [run.block for run in stack.runs for _ in range(run.repeats)]
        for index in _layer_indices(replacement, len(blocks)):
            blocks[index] = _replace_mixer(blocks[index], replacement)
        runs = tuple(Run(block, len(list(group))) for block, group in itertools.groupby(blocks))
        stacks[name] = replace(stack, runs=runs, bias=_remaining_bias(stack, runs))
    return replace(model, **stacks)


def named_stacks(model: EncoderDecoder) -> dict[StackName, Stack]:
    """Returns the encoder and the decoder by their names."""
    return {"encoder": model.encoder, "decoder": model.decoder}


def _stack_name(replacement: Replacement) -> StackName:
    return "encoder" if replacement.place == "encoder" else "decoder"


def _layer_indices(replacement: Replacement, num_layers: int) -> tuple[int, ...]:
    """The indices of the replaced layers."""
    if replacement.layers is None:
        return tuple(range(num_layers))
    if any(not 0 <= i < num_layers for i in replacement.layers):
        raise ValueError(
            f"Replacement: layers={replacement.layers}, but there are layers 0 to {num_layers - 1}"
        )
    return replacement.layers


def _replace_mixer(block: Block, replacement: Replacement) -> Block:
    """A block with one of its mixers replaced."""
    is_cross = replacement.place == "cross"
    old, new = (block.cross_mixer if is_cross else block.self_mixer), replacement.by
    if isinstance(new, Alignment):
        if not isinstance(old, Attention):
            raise ValueError(
                f"Replacement: {type(new).__name__} is an alignment, but the "
                f"{replacement.place} has a {type(old).__name__} instead of attention; use a mixer"
            )
        new = replace(old, alignment=new)
    block = replace(block, **{"cross_mixer" if is_cross else "self_mixer": new})
    if replacement.scope != "mixer":
        block = replace(block, self_residual=False)
    return replace(block, feed_forward=None) if replacement.scope == "layer" else block


def _remaining_bias(stack: Stack, runs: tuple[Run, ...]) -> Alignment | None:
    """The stack's position bias, or None if no layer has logits to add it to."""
    takes_bias = any(run.block.self_mixer.bias_heads for run in runs)
    return stack.bias if takes_bias else None


@dataclasses.dataclass(frozen=True)
class TapPair:
    """The taps of a replaced mixer.

    Attributes:
      stack: ``encoder`` or ``decoder``.
      layer: name of the layer: ``layers_0``, …
      mixer: name of the replaced mixer in the layer.
      inputs: name of the tap of the mixer's inputs, which the student takes from the teacher.
      outputs: paths of the taps to compare; the first that both have in the same shape is used.
    """

    stack: StackName
    layer: str
    mixer: str
    inputs: str
    outputs: tuple[tuple[str, ...], ...]


def tap_pairs(model: EncoderDecoder, replacements: tuple[Replacement, ...]) -> Iterator[TapPair]:
    """Yields the taps of all replaced mixers."""
    mixers = {
        "encoder": "attention",
        "decoder": "self_attention",
        "cross": "encoder_decoder_attention",
    }
    for replacement in replacements:
        stack, mixer = _stack_name(replacement), mixers[replacement.place]
        prefix = "cross" if replacement.place == "cross" else "self"
        outputs: dict[str, tuple[tuple[str, ...], ...]] = {
            "mixer": ((mixer, "heads"), (f"{prefix}_mixed",)),
            "sublayer": (("self_output",),),
            "layer": (("output",),),
        }
        num_layers = named_stacks(model)[stack].num_layers
        for index in _layer_indices(replacement, num_layers):
            yield TapPair(
                stack=stack,
                layer=f"layers_{index}",
                mixer=mixer,
                inputs=f"{prefix}_input",
                outputs=outputs[replacement.scope],
            )
