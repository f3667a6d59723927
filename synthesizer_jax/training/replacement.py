"""What of a model is replaced by what, and where teacher and student are compared."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import flax.linen as nn

from synthesizer_jax.alignments import Alignment
from synthesizer_jax.mixers import Attention
from synthesizer_jax.models import Block, EncoderDecoder, Run, Stack, unroll
from synthesizer_jax.registry import register, replace

PLACES = ("encoder", "decoder", "cross")
SCOPES = ("mixer", "sublayer", "layer")


@register
@dataclasses.dataclass(frozen=True)
class Replacement:
    """What takes the place of what.

    Attributes:
      by: a mixer, or an alignment for the attention that is there.
      place: ``"encoder"`` or ``"decoder"`` self-attention, or the decoder's ``"cross"``-attention.
      scope: ``"mixer"``: norm, residual and feed-forward layer stay (ALR, ALSR, another alignment);
        ``"sublayer"``: norm and residual go too (ALRR); ``"layer"``: the whole layer goes (ELR).
      layers: which layers; None: all.
    """

    by: nn.Module
    place: str = "encoder"
    scope: str = "mixer"
    layers: tuple[int, ...] | None = None


def student_model(model: EncoderDecoder, replacements: tuple[Replacement, ...]) -> EncoderDecoder:
    """The teacher's model, looped, with its parts replaced.

    Raises:
      ValueError: an unknown place or scope, or a layer that is not there.
    """
    model = unroll(model)
    stacks = {"encoder": model.encoder, "decoder": model.decoder}
    for change in replacements:
        if change.place not in PLACES or change.scope not in SCOPES:
            raise ValueError(
                f"Replacement: place={change.place!r} and scope={change.scope!r}; allowed: "
                f"{', '.join(PLACES)} and {', '.join(SCOPES)}"
            )
        if change.scope != "mixer" and change.place != "encoder":
            raise ValueError(f"Replacement: scope={change.scope!r} is for encoders only")
        name = "encoder" if change.place == "encoder" else "decoder"
        blocks = [run.block for run in stacks[name].runs for _ in range(run.repeats)]
        for index in chosen(change, len(blocks)):
            blocks[index] = changed(blocks[index], change)
        runs = tuple(Run(b, len(list(same))) for b, same in itertools.groupby(blocks))
        stacks[name] = replace(stacks[name], runs=runs, bias=bias_of(stacks[name], runs))
    return replace(model, **stacks)


def chosen(change: Replacement, layers: int) -> tuple[int, ...]:
    """The layers of a replacement."""
    indices = tuple(range(layers)) if change.layers is None else change.layers
    if any(not 0 <= i < layers for i in indices):
        raise ValueError(f"Replacement: layers={indices}, but there are layers 0 to {layers - 1}")
    return indices


def changed(block: Block, change: Replacement) -> Block:
    """A block with one of its mixers replaced."""
    field = "cross_mixer" if change.place == "cross" else "self_mixer"
    old, new = getattr(block, field), change.by
    if isinstance(new, Alignment):
        if not isinstance(old, Attention):
            raise ValueError(
                f"Replacement: {type(new).__name__} is an alignment, but the {change.place} has "
                f"{type(old).__name__} and no attention to put it into; give a whole mixer"
            )
        new = replace(old, alignment=new)
    block = replace(block, **{field: new})
    if change.scope != "mixer":
        block = replace(block, self_residual=False)
    return replace(block, feed_forward=None) if change.scope == "layer" else block


def bias_of(stack: Stack, runs: tuple[Run, ...]) -> nn.Module | None:
    """The stack's position bias, as long as some layer has logits to add it to."""
    takes = any(getattr(run.block.self_mixer, "bias_heads", None) for run in runs)
    return stack.bias if takes else None


@dataclasses.dataclass(frozen=True)
class Site:
    """Where teacher and student are compared.

    Attributes:
      stack: ``encoder`` or ``decoder``.
      layer: ``layers_0``, …
      mixer: name of the replaced mixer inside the layer.
      inputs: what the student is given of the teacher's.
      outputs: what is compared, the first that both have in the same shape.
    """

    stack: str
    layer: str
    mixer: str
    inputs: str
    outputs: tuple[tuple[str, ...], ...]


def sites(model: EncoderDecoder, replacements: tuple[Replacement, ...]) -> Iterator[Site]:
    """The sites of all replaced layers."""
    for change in replacements:
        stack = "encoder" if change.place == "encoder" else "decoder"
        for index in chosen(change, getattr(model, stack).num_layers):
            mixer = {
                "encoder": "attention",
                "decoder": "self_attention",
                "cross": "encoder_decoder_attention",
            }[change.place]
            mixed = "cross_mixed" if change.place == "cross" else "self_mixed"
            outputs: dict[str, tuple[tuple[str, ...], ...]] = {
                "mixer": ((mixer, "heads"), (mixed,)),
                "sublayer": (("self_output",),),
                "layer": (("output",),),
            }
            inputs = "cross_input" if change.place == "cross" else "self_input"
            yield Site(stack, f"layers_{index}", mixer, inputs, outputs[change.scope])
