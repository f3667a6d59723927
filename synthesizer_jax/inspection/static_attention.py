"""How much of a trained model's self-attention depends on positions alone."""

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
"""The form that can express any other; heads are replaced by it."""

UNIFORM, BIAS = "equal weights", "position bias"
"""Forms without parameters of their own; the second where the model has a position bias."""

EXCLUDED = -1e4
"""Weight logit of a mixture's part that is left out: its softmax is zero in float32."""

MOST_POINTS = 16
"""Measured numbers of replaced heads, besides none and all."""

Head: TypeAlias = tuple[str, int, int]
"""The stack, layer and number of a head."""


def measure_static_attention(
    model: TokenModel,
    variables: Variables,
    *,
    fit_to: Mapping[Layer, Statistics],
    measure_on: Mapping[Layer, Statistics],
    batches: Sequence[Batch],
    phase: Phase = silent_phase,
) -> dict[str, Any]:
    """Fits static forms to heads of a model's self-attention, and replaces heads by fitted tables.

    Layers are looped. Forms are fitted to the statistics `fit_to` of layers that `can_be_static`.
    `measure_on` are statistics over other examples, and `batches` of these are what losses are measured on.

    Returns:
      ``divergences`` by stack, layer and head, and by form beside the model's position bias: the mean over
      queries of ``KL(head ‖ form)`` in nats, the most static head first. For an encoder-decoder
      ``replaced``, numbers of heads, and ``loss``, nats per target token when as many of the most static
      heads read their tables, without further training; and ``uniform_loss``, if all have equal weights.
    """
    divergences = dict[Head, dict[str, float]]()
    tables, biases = dict[Layer, jax.Array](), dict[Layer, jax.Array]()
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
        equal = {layer: -bias for layer, bias in biases.items()}
        replaced = [*((tables, heads[:n]) for n in numbers), (equal, heads)]
        *losses, uniform = _losses(model, variables, replaced, batches)
        results |= {"replaced": numbers, "loss": losses, "uniform_loss": uniform}
        advance(1)
    return results


def can_be_static(mixer: Mixer) -> bool:
    """Whether the heads of a mixer can be measured and replaced one by one.

    They are a softmax of logits that are trained, and have the same alignment.
    """
    is_softmax = isinstance(mixer, Attention) and is_softmax_of_logits(mixer)
    return is_softmax and _is_measured(mixer.alignment)


def _is_measured(alignment: Alignment) -> bool:
    """Whether an alignment makes trained logits for any number of heads."""
    if isinstance(alignment, Mixture):
        return all(map(_is_measured, alignment.parts))
    if isinstance(alignment, PerHead | GaussianBias):
        return False
    is_fixed = isinstance(alignment, Random) and not alignment.trainable
    return alignment.makes_logits and not is_fixed


def _fit_forms(
    model: TokenModel, layer: Layer, fitted: Statistics, bias: jax.Array
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Returns the logits ``[heads, n, n]`` of fitted forms, and the tables' without the bias."""
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
    alone = {n: fit(attention.copy(alignment=a), fitted, **options)[1] for n, a in forms.items()}
    logits = {UNIFORM: jnp.zeros_like(bias)} | ({BIAS: bias} if bias.any() else {})
    return logits | {name: x + bias for name, x in alone.items()}, alone[TABLE]


def _losses(
    model: EncoderDecoder,
    variables: Variables,
    replaced: Iterable[tuple[Mapping[Layer, jax.Array], Collection[Head]]],
    batches: Sequence[Batch],
) -> Iterator[float]:
    """Yields the loss, in nats per target token, for tables and the heads that read them.

    One program serves all: a model with mixtures of its own logits and tables.
    """
    for tables, chosen in replaced:
        params = jax.tree.map(lambda x: x, variables["params"])
        replacements = []
        for (stack, i), table in tables.items():
            alignment = self_attention(model, (stack, i)).alignment
            reads = np.array([(stack, i, head) in chosen for head in range(len(table))])
            mixer = params[stack][f"layers_{i}"][STACKS[stack]]
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
def _loss(variables: Variables, batch: Batch, *, model: EncoderDecoder) -> tuple[jax.Array, jax.Array]:
    """Returns the summed loss of a batch's target tokens, and their number."""
    sums = loss_sums(model, variables, batch, z_loss=0.0, label_smoothing=0.0)
    return sums.loss, sums.weight
