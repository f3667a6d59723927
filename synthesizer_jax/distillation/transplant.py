"""Models with other alignments that start as the model whose parameters they take."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from synthesizer_jax.alignments import Mixture
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
    self_attention,
    student_model,
)
from synthesizer_jax.mixers import Attention
from synthesizer_jax.models import EncoderDecoder, stacks_of
from synthesizer_jax.models.zoo import VARIANTS


def with_variants(
    model: EncoderDecoder, *, encoder: str | None, decoder: str | None, max_length: int
) -> EncoderDecoder:
    """Returns a model whose self-attention has the alignments of variants of the zoo.

    In a mixture the model's own alignment takes the place of the dot product. `encoder` and `decoder` are
    keys of `VARIANTS`, None leaves the stack as it is; new tables have `max_length` positions.

    Raises:
      ValueError: there is no such variant, the self-attention is not `Attention`, or a stack is a
        `UniversalStack`.
    """
    for stack in stacks_of(model):
        check_layers_differ(model, stack)
    replacements = []
    for stack, name in (("encoder", encoder), ("decoder", decoder)):
        if name is None:
            continue
        if name not in VARIANTS:
            raise ValueError(
                f"--{stack} is {name!r}{did_you_mean(name, VARIANTS)}; use {', '.join(VARIANTS)}"
            )
        alignment = VARIANTS[name](self_attention(model, (stack, 0)).alignment, max_length)
        replacements.append(Replacement(alignment, place=stack))  # type: ignore[arg-type]
    return student_model(model, tuple(replacements))


def start_as(teacher: EncoderDecoder, student: EncoderDecoder, params: PyTree) -> PyTree:
    """Returns parameters with which a student computes what its teacher computes.

    Args:
      teacher: a model with looped layers.
      student: the same model, but for alignments of the self-attention, each a `Mixture` with the
        teacher's as one of its parts; see `Mixture.start_as`.
      params: the teacher's parameters, arrays or `checkpoints.streamed.Unread`.

    Raises:
      ValueError: an alignment of the student does not contain the teacher's, or another part of it does
        not start at zero.
    """
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
                    f"{type(alignment).__name__}, so it cannot start as the model; fit and distill it with "
                    "'synthesizer-jax distill synthesize'"
                )
            layer = params[stack][f"layers_{i}"]
            align = mixture.start_as(
                mixture.parts.index(alignment),
                layer[mixer].get("align", {}),
                initial_parameters(attention, student.width(stack), seed=i),
            )
            params[stack][f"layers_{i}"] = {**layer, mixer: {**layer[mixer], "align": align}}
    return params


def initial_parameters(attention: Attention, d_model: int, *, seed: int) -> PyTree:
    """Returns fresh parameters of the alignment of an attention layer.

    Raises:
      ValueError: the alignment has constants, such as a Fixed Random table.
    """
    alignment = attention.alignment
    context = attention.context(Span(0, 1), Span(0, 1))
    x = jnp.zeros((1, 1, d_model))
    init = lambda: alignment.init(jax.random.key(seed), x, x, context)
    # Four bytes, and four of the random bits that they are made of.
    needed, free = 8 * num_elements(jax.eval_shape(init)), free_memory()
    if free is not None and needed > free:
        raise ValueError(
            f"a layer's {type(alignment).__name__} needs {needed / 2**30:,.1f} GiB of memory, but "
            f"{free / 2**30:,.1f} GiB are free; choose a smaller max_length"
        )
    variables = init()
    if "constants" in variables:
        raise ValueError(
            f"{type(alignment).__name__} has tables that are not trained; choose another alignment"
        )
    return variables.get("params", {})
