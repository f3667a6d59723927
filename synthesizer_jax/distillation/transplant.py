"""Replaces the alignments of a model without changing its initial outputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from synthesizer_jax.alignments import Alignment, Mixture
from synthesizer_jax.attention import Span
from synthesizer_jax.base.messages import did_you_mean
from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.costs.host_memory import free_memory
from synthesizer_jax.costs.summary import num_elements
from synthesizer_jax.distillation.replacement import (
    STACKS,
    Replacement,
    blocks_of,
    check_layers_differ,
    is_sharing,
    self_attention,
    student_model,
)
from synthesizer_jax.mixers import Attention
from synthesizer_jax.models import EncoderDecoder, stacks_of
from synthesizer_jax.models.zoo import VARIANTS


def with_variants(
    model: EncoderDecoder, *, encoder: str | None, decoder: str | None, max_length: int
) -> EncoderDecoder:
    """Returns a model whose self-attention has the alignments of the given variants.

    If a variant is a mixture, the model's own alignment replaces the dot product in the mixture.

    Args:
      model: the model.
      encoder: the variant for the encoder, a key of `VARIANTS`. `None` does not change the encoder.
      decoder: the variant for the decoder, a key of `VARIANTS`. `None` does not change the decoder.
      max_length: the number of positions in new tables.

    Raises:
      ValueError: if a variant does not exist, if the self-attention is not `Attention`, or if a
        stack is a `UniversalStack`.
    """
    for stack in stacks_of(model):
        check_layers_differ(model, stack)
    replacements = []
    for stack, name in (("encoder", encoder), ("decoder", decoder)):
        if name is None:
            continue
        if name not in VARIANTS:
            raise ValueError(
                f"--{stack} is {name!r}, but there is no such variant"
                f"{did_you_mean(name, VARIANTS) or '.'} Use one of {', '.join(VARIANTS)}."
            )
        # Layers may have different alignments, such as rotary positions with different bases.
        layers: dict[Alignment, list[int]] = {}
        for i in range(stacks_of(model)[stack].num_layers):
            layers.setdefault(self_attention(model, (stack, i)).alignment, []).append(i)
        for own, indices in layers.items():
            alignment = VARIANTS[name](own, max_length)
            replacements.append(
                Replacement(alignment, place=stack, layers=tuple(indices))  # type: ignore[arg-type]
            )
    return student_model(model, tuple(replacements))


def start_as(teacher: EncoderDecoder, student: EncoderDecoder, params: PyTree) -> PyTree:
    """Returns parameters with which a student has the same outputs as its teacher.

    Args:
      teacher: a model with looped layers.
      student: the same model with different alignments in self-attention. Each new alignment is a
        `Mixture` that contains the teacher's alignment; see `Mixture.start_as`.
      params: the teacher's parameters, which are arrays or `checkpoints.streamed.Unread`.

    Raises:
      ValueError: if an alignment of the student does not contain the teacher's alignment, or if the
        logits of another part of the mixture cannot start at zero.
    """
    # The dictionaries that the code below changes are copied, so that the caller's dictionaries
    # stay unchanged.
    params = {**params, **{stack: dict(params[stack]) for stack in STACKS}}
    for stack, mixer in STACKS.items():
        pairs = zip(blocks_of(teacher, stack), blocks_of(student, stack), strict=True)
        for i, (old, new) in enumerate(pairs):
            if old == new:
                continue
            alignment = self_attention(teacher, (stack, i)).alignment
            attention = self_attention(student, (stack, i))
            mixture = attention.alignment
            if not isinstance(mixture, Mixture) or alignment not in mixture.parts:
                raise ValueError(
                    f"{type(mixture).__name__} does not contain the model's own "
                    f"{type(alignment).__name__}, so the new model cannot compute the same as the "
                    "old one at first. Fit and distill it with 'synthesizer-jax distill "
                    "synthesize'."
                )

            layer = params[stack][f"layers_{i}"]
            align = mixture.start_as(
                mixture.parts.index(alignment),
                layer[mixer].get("align", {}),
                initial_parameters(attention, student.width(stack), seed=i),
            )
            changed = {**layer[mixer], "align": align}
            if is_sharing(old.self_mixer) and not is_sharing(new.self_mixer):
                changed["cross_align"] = layer[mixer]["align"]
            params[stack][f"layers_{i}"] = {**layer, mixer: changed}
    return params


def initial_parameters(attention: Attention, d_model: int, *, seed: int) -> PyTree:
    """Returns new parameters for the alignment of an attention layer.

    Args:
      attention: the attention layer.
      d_model: the width of the tokens.
      seed: the seed of the parameters.

    Raises:
      ValueError: if there is too little memory, or if the alignment has constants, such as the
        table of a Fixed Random Synthesizer.
    """
    alignment = attention.alignment

    def init() -> PyTree:
        """Returns the variables of the alignment, whose shapes do not depend on the tokens."""
        x = jnp.zeros((1, 1, d_model))
        context = attention.context(Span(0, 1), Span(0, 1))
        return alignment.init(jax.random.key(seed), x, x, context)

    # Each element needs four bytes, and the random bits from which it is made need another four
    # bytes.
    needed = 8 * num_elements(jax.eval_shape(init))
    free = free_memory()
    if free is not None and needed > free:
        raise ValueError(
            f"The {type(alignment).__name__} of one layer needs {needed / 2**30:,.1f} GiB of "
            f"memory, but only {free / 2**30:,.1f} GiB are free. Choose a smaller max_length."
        )

    variables = init()
    if "constants" in variables:
        raise ValueError(
            f"{type(alignment).__name__} has tables that are not trained, which is not supported "
            "here. Choose another alignment."
        )
    return variables.get("params", {})
