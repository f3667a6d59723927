"""Models with other alignments that start as the model whose parameters they take."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from synthesizer_jax.alignments import Alignment, AttentionContext, Mixture
from synthesizer_jax.attention import Span
from synthesizer_jax.distillation.replacement import (
    Replacement,
    StackName,
    named_stacks,
    student_model,
)
from synthesizer_jax.messages import did_you_mean
from synthesizer_jax.mixers import Attention
from synthesizer_jax.models import Block, EncoderDecoder, UniversalStack, stacks_of
from synthesizer_jax.models.zoo import VARIANTS
from synthesizer_jax.typing import PyTree

STACKS: dict[StackName, str] = {"encoder": "attention", "decoder": "self_attention"}
"""The name of the self-attention in the layers of a stack."""


class Student(NamedTuple):
    """A model with other alignments, and its parameters.

    Attributes:
      model: the model, with looped layers.
      params: its parameters.
    """

    model: EncoderDecoder
    params: PyTree


def with_variants(
    model: EncoderDecoder, *, encoder: str | None, decoder: str | None, max_length: int
) -> EncoderDecoder:
    """Returns a model whose self-attention has the alignments of variants of the zoo.

    In a mixture the model's own alignment takes the place of the dot product.

    Args:
      model: a model with attention.
      encoder: a key of `VARIANTS`; None leaves the encoder as it is.
      decoder: the same for the decoder.
      max_length: number of positions of new tables.

    Raises:
      ValueError: there is no such variant, or the self-attention is not `Attention`.
    """
    check_stacks(model)
    replacements = []
    places: tuple[tuple[StackName, str | None], ...]
    places = ("encoder", encoder), ("decoder", decoder)
    for stack, name in places:
        if name is None:
            continue
        if name not in VARIANTS:
            raise ValueError(
                f"--{stack} is {name!r}{did_you_mean(name, VARIANTS)}; use {', '.join(VARIANTS)}"
            )
        own = _attention(_blocks(model, stack)[0], stack).alignment
        replacements.append(Replacement(VARIANTS[name](own, max_length), place=stack))
    return student_model(model, tuple(replacements))


def start_as(teacher: EncoderDecoder, student: EncoderDecoder, params: PyTree) -> Student:
    """Returns a student that computes what its teacher computes.

    Args:
      teacher: a model with looped layers.
      student: the same model, but for alignments of the self-attention, each a `Mixture` with the
        teacher's as one of its parts; see `Mixture.start_as`.
      params: the teacher's parameters, arrays or `checkpoints.streamed.Unread`.

    Raises:
      ValueError: an alignment of the student does not contain the teacher's, or another part of it does
        not start at zero.
    """
    params = dict(params)
    for stack, mixer in STACKS.items():
        layers = dict(params[stack])
        pairs = zip(_blocks(teacher, stack), _blocks(student, stack), strict=True)
        for i, (old_block, new_block) in enumerate(pairs):
            if old_block == new_block:
                continue
            old, new = _attention(old_block, stack), _attention(new_block, stack)
            layer = dict(layers[f"layers_{i}"])
            align = _start_alignment(
                old.alignment, new, layer[mixer].get("align", {}), d_model=student.d_model, layer=i
            )
            layer[mixer] = {**layer[mixer], "align": align}
            layers[f"layers_{i}"] = layer
        params[stack] = layers
    return Student(student, params)


def _start_alignment(
    teacher: Alignment, attention: Attention, params: PyTree, *, d_model: int, layer: int
) -> PyTree:
    """Returns the parameters of a layer's mixture that makes the teacher's logits."""
    mixture = attention.alignment
    parts = mixture.parts if isinstance(mixture, Mixture) else ()
    if not isinstance(mixture, Mixture) or teacher not in parts:
        raise ValueError(
            f"{type(mixture).__name__} does not contain the model's own {type(teacher).__name__}, so it "
            "cannot start as the model; fit and distill it with 'synthesizer-jax distill synthesize'"
        )
    return mixture.start_as(
        parts.index(teacher), params, initial_parameters(attention, d_model, seed=layer)
    )


def initial_parameters(attention: Attention, d_model: int, *, seed: int) -> PyTree:
    """Returns fresh parameters of the alignment of an attention layer.

    Args:
      attention: the layer.
      d_model: width of its tokens.
      seed: the seed.

    Raises:
      ValueError: the alignment has constants, such as a Fixed Random table.
    """
    alignment = attention.alignment
    one = Span(0, 1)
    context = AttentionContext(attention.num_heads, attention.head_dim, one, one)
    x = jnp.zeros((1, 1, d_model))
    variables = alignment.init(jax.random.key(seed), x, x, context)
    if "constants" in variables:
        raise ValueError(
            f"{type(alignment).__name__} has tables that are not trained; choose another alignment"
        )
    params: PyTree = variables.get("params", {})
    return params


def self_attention(model: EncoderDecoder, stack: StackName, layer: int) -> Attention | None:
    """Returns the self-attention of a layer; None if it is another mixer."""
    mixer = _blocks(model, stack)[layer].self_mixer
    return mixer if isinstance(mixer, Attention) else None


def check_stacks(model: EncoderDecoder) -> None:
    """Raises a `ValueError` where layers share their parameters."""
    for name, stack in stacks_of(model).items():
        if isinstance(stack, UniversalStack):
            raise ValueError(
                f"the {name} is a {type(stack).__name__}, whose layers have no alignments of their own"
            )


def _blocks(model: EncoderDecoder, stack: StackName) -> list[Block]:
    """Returns the blocks of all layers of a stack."""
    return [run.block for run in named_stacks(model)[stack].runs for _ in range(run.repeats)]


def _attention(block: Block, stack: StackName) -> Attention:
    """Returns the self-attention of a block."""
    if not isinstance(block.self_mixer, Attention):
        raise ValueError(
            f"the {stack}'s self-attention is a {type(block.self_mixer).__name__}, which has no alignment"
        )
    return block.self_mixer
