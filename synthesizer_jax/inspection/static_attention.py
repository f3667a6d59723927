"""Measures how much of a trained model's self-attention depends only on positions."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from synthesizer_jax.alignments import (
    Alignment,
    FactorizedRandom,
    GaussianBias,
    Mixture,
    PerHead,
    Random,
    RelativeBias,
)
from synthesizer_jax.base.messages import Phase, silent_phase
from synthesizer_jax.distillation.fit import (
    Statistics,
    divergence,
    fit,
    is_softmax_of_logits,
    stack_bias_logits,
)
from synthesizer_jax.distillation.replacement import (
    STACKS,
    Layer,
    Replacement,
    self_attention,
    student_model,
)
from synthesizer_jax.mixers import Attention, Mixer
from synthesizer_jax.models import EncoderDecoder, TokenModel
from synthesizer_jax.primitives.parameters import Variables
from synthesizer_jax.training.step import Batch, loss_sums

TABLE = "Random"
"""The name of the form that can express all other forms. Heads are replaced by this form."""

UNIFORM, BIAS = "equal weights", "position bias"
"""The names of forms without parameters. `BIAS` is for models that have a position bias."""

EXCLUDED = -1e4
"""The logit for leaving out a part of a mixture. In float32, the weight of the part is zero."""

MOST_POINTS = 16
"""The largest number of measured points, from replacing no heads to replacing all heads."""

Head: TypeAlias = tuple[str, int, int]
"""A head as a tuple of the stack, the index of the layer, and the index of the head."""


def measure_static_attention(
    model: TokenModel,
    variables: Variables,
    *,
    fit_to: Mapping[Layer, Statistics],
    measure_on: Mapping[Layer, Statistics],
    batches: Sequence[Batch],
    phase: Phase = silent_phase,
) -> dict[str, Any]:
    """Fits static forms to the heads of self-attention, and replaces heads by fitted tables.

    Args:
      model: the model, with looped layers.
      variables: the variables of the model.
      fit_to: the statistics to which the forms are fitted, of layers for which `can_be_static` is
        true.
      measure_on: the statistics of the same layers over other examples, from which the divergences
        are computed.
      batches: batches of the other examples, on which the losses are computed.
      phase: a function that reports progress.

    Returns:
      A dictionary. The entries ``replaced``, ``loss`` and ``uniform_loss`` are present only if the
      model is an encoder-decoder and some heads were fitted:

      - ``divergences``: the mean over queries of ``KL(head ‖ form)`` in nats, by head and by form.
        A head is a tuple of stack, layer and number, and the most static head comes first. The
        forms are added to the model's position bias.
      - ``replaced``: a list of numbers of replaced heads. The loss was measured for each number.
        The most static heads are replaced first.
      - ``loss``: for each number in ``replaced``, the loss in nats per target token if that many
        heads use their tables, without further training.
      - ``uniform_loss``: the loss if all fitted heads have equal weights.
    """
    divergences: dict[Head, dict[str, float]] = {}
    tables: dict[Layer, jax.Array] = {}
    biases: dict[Layer, jax.Array] = {}
    advance = phase(f"fitting static forms to the heads of {len(fit_to)} layers", len(fit_to))
    for layer, statistics in fit_to.items():
        length = len(statistics.queries)
        biases[layer] = stack_bias_logits(model, variables["params"], layer, length=length)
        logits, tables[layer] = _fit_forms(model, layer, statistics, biases[layer])
        kl = {name: divergence(x, measure_on[layer]).tolist() for name, x in logits.items()}
        for head in range(len(biases[layer])):
            divergences[(*layer, head)] = {name: values[head] for name, values in kl.items()}
        advance(1)

    heads = sorted(divergences, key=lambda head: divergences[head][TABLE])
    results: dict[str, Any] = {"divergences": {head: divergences[head] for head in heads}}
    if isinstance(model, EncoderDecoder) and heads:
        count = min(len(heads), MOST_POINTS + 1)
        numbers = [round(i * len(heads) / count) for i in range(count + 1)]
        advance = phase(f"losses with up to {len(heads)} heads replaced", 1)
        # A table that cancels the position bias gives equal weights.
        equal = {layer: -bias for layer, bias in biases.items()}
        replaced = [*((tables, heads[:n]) for n in numbers), (equal, heads)]
        *losses, uniform = _losses(model, variables, replaced, batches)
        results |= {"replaced": numbers, "loss": losses, "uniform_loss": uniform}
        advance(1)
    return results


def can_be_static(mixer: Mixer) -> bool:
    """Returns whether the heads of a mixer can be measured and replaced one by one.

    The weights of the mixer must be a softmax of trained logits, and all heads must have the same
    alignment.
    """
    is_softmax = isinstance(mixer, Attention) and is_softmax_of_logits(mixer)
    return is_softmax and _is_measured(mixer.alignment)


def _is_measured(alignment: Alignment) -> bool:
    """Returns whether an alignment computes trained logits for any number of heads."""
    if isinstance(alignment, Mixture):
        return all(map(_is_measured, alignment.parts))
    if isinstance(alignment, PerHead | GaussianBias):
        return False
    is_fixed = isinstance(alignment, Random) and not alignment.trainable
    return alignment.makes_logits and not is_fixed


def _fit_forms(
    model: TokenModel, layer: Layer, fitted: Statistics, bias: jax.Array
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Returns the logits ``[heads, n, n]`` of the fitted forms, and those of the fitted table.

    The logits of the forms include the position bias. The separate logits of the table do not
    include the position bias.
    """
    attention = self_attention(model, layer)
    causal = layer[0] == "decoder" and not getattr(model, "prefix", False)
    length = bias.shape[-1]
    forms: dict[str, Alignment] = {
        TABLE: Random(max_length=length),
        "Factorized Random": FactorizedRandom(max_length=length),
        "Relative bias": RelativeBias(bidirectional=not causal),
        "Gaussian": GaussianBias((0.0,), trainable=True),
    }
    options: Any = {"d_model": model.d_model, "causal": causal, "bias": bias, "seed": layer[1]}
    without_bias = {
        name: fit(attention.copy(alignment=alignment), fitted, **options)[1]
        for name, alignment in forms.items()
    }
    logits = {UNIFORM: jnp.zeros_like(bias)}
    if bias.any():
        logits[BIAS] = bias
    for name, form in without_bias.items():
        logits[name] = form + bias
    return logits, without_bias[TABLE]


def _losses(
    model: EncoderDecoder,
    variables: Variables,
    replaced: Iterable[tuple[Mapping[Layer, jax.Array], Collection[Head]]],
    batches: Sequence[Batch],
) -> Iterator[float]:
    """Yields the loss in nats per target token, for each choice of heads that use tables.

    All choices share one compiled program. The program runs a model whose mixtures consist of the
    original logits and the tables. The weights of the mixtures select the original logits or the
    table for each head.
    """
    for tables, chosen in replaced:
        params = jax.tree.map(lambda x: x, variables["params"])
        replacements = []
        for (stack, i), table in tables.items():
            alignment = self_attention(model, (stack, i)).alignment
            reads = np.array([(stack, i, head) in chosen for head in range(len(table))])
            mixer = params[stack][f"layers_{i}"][STACKS[stack]]
            # A head that uses its table leaves out the original logits. Every other head leaves out
            # the table. `left_out` has the shape ``[heads, 2]``.
            left_out = np.stack([reads, ~reads], axis=1)
            mixer["align"] = {
                "part_0": mixer.get("align", {}),
                "part_1": {"table": table},
                "weights": jnp.where(left_out, EXCLUDED, 0.0),
            }
            mixture = Mixture((alignment, Random(table.shape[-1])))
            replacements.append(Replacement(mixture, place=stack, layers=(i,)))  # type: ignore[arg-type]
        mixed = student_model(model, tuple(replacements))
        changed = {**variables, "params": params}
        sums = np.asarray([_loss(changed, batch, model=mixed) for batch in batches])
        yield float(np.divide(*sums.sum(0)))


@functools.partial(jax.jit, static_argnames="model")
def _loss(
    variables: Variables, batch: Batch, *, model: EncoderDecoder
) -> tuple[jax.Array, jax.Array]:
    """Returns the summed loss of a batch's target tokens, and the number of these tokens."""
    sums = loss_sums(model, variables, batch, z_loss=0.0, label_smoothing=0.0)
    return sums.loss, sums.weight
