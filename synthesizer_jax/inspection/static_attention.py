"""How much of a trained model's self-attention depends on positions alone.

Each static form is fitted to every head (`fit`), and what it misses is measured on held-out batches: the
mean over queries of ``KL(head ‖ form)``. Then heads are replaced by their fitted tables, the most static
first, and the loss of the whole model is measured.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from synthesizer_jax.alignments import (
    Alignment,
    FactorizedRandom,
    GaussianBias,
    Mixture,
    PerHead,
    Random,
    RelativeBias,
)
from synthesizer_jax.costs.summary import Summary, summarize
from synthesizer_jax.data.vocabularies import Vocabulary
from synthesizer_jax.distillation.fit import (
    Statistics,
    collect_statistics,
    divergence,
    fit,
    stack_bias_logits,
)
from synthesizer_jax.distillation.replacement import (
    STACKS,
    Layer,
    Replacement,
    blocks_of,
    self_attention,
    student_model,
)
from synthesizer_jax.distillation.transplant import check_stacks
from synthesizer_jax.messages import Phase, silent_phase
from synthesizer_jax.mixers import Attention
from synthesizer_jax.models import EncoderDecoder, unroll, unroll_variables
from synthesizer_jax.parameters import Variables
from synthesizer_jax.registry import replace
from synthesizer_jax.sharding import batch_sharding, use_mesh
from synthesizer_jax.tasks.streams import open_stream
from synthesizer_jax.training.experiment import Experiment
from synthesizer_jax.training.run_data import prepare_data
from synthesizer_jax.training.step import Batch, loss_sums
from synthesizer_jax.typing import PyTree

TABLE = "Random"
"""The form that can express any other; heads are replaced by it."""

UNIFORM, BIAS = "equal weights", "position bias"
"""Forms without parameters of their own; the second where the model has a position bias."""

EXCLUDED = -1e4
"""Weight logit of a mixture's part that is left out: its softmax is zero in float32."""

MOST_POINTS = 16
"""Measured numbers of replaced heads, besides none and all."""

Place: TypeAlias = tuple[str, int, int]
"""The stack, layer and number of a head."""


def static_forms(length: int, *, causal: bool) -> dict[str, Alignment]:
    """Returns the alignments that are fitted, by name, for so many positions."""
    return {
        TABLE: Random(max_length=length),
        "Factorized Random": FactorizedRandom(max_length=length),
        "Relative bias": RelativeBias(bidirectional=not causal),
        "Gaussian": GaussianBias((0.0,), trainable=True),
    }


class Head(NamedTuple):
    """A head of self-attention, and what static forms miss of it.

    Attributes:
      stack: ``encoder`` or ``decoder``.
      layer: number of the layer, from 0.
      head: number of the head, from 0.
      divergences: mean KL divergence from each form beside the position bias, and from `UNIFORM` and
        `BIAS`, in nats per query.
    """

    stack: str
    layer: int
    head: int
    divergences: Mapping[str, float]

    @property
    def name(self) -> str:
        """Such as ``encoder 1.3``: stack, layer and head, the latter two from 1."""
        return f"{self.stack} {self.layer + 1}.{self.head + 1}"


class LossPoint(NamedTuple):
    """A model some of whose heads are replaced by tables.

    Attributes:
      replaced: how many.
      loss: nats per target token of held-out batches when the most static heads are replaced.
      reversed_loss: the same when the least static heads are.
      costs: of a model that has tables in the most static heads.
    """

    replaced: int
    loss: float
    reversed_loss: float
    costs: Summary


@dataclasses.dataclass(frozen=True)
class StaticAttention:
    """What `measure_static_attention` found.

    Attributes:
      heads: all heads, the most static first.
      points: from none of them replaced to all.
      uniform_loss: nats per target token of held-out batches when all heads have equal weights.
      tolerance: the share by which the loss may rise.
      fitted: number of examples that forms were fitted to.
      held_out: number of examples that everything was measured on.
    """

    heads: Sequence[Head]
    points: Sequence[LossPoint]
    uniform_loss: float
    tolerance: float
    fitted: int
    held_out: int

    @property
    def highest_loss(self) -> float:
        """The loss at the end of the tolerance."""
        return (1.0 + self.tolerance) * self.points[0].loss

    @property
    def replaceable(self) -> LossPoint:
        """The last point before the loss first exceeds the tolerance."""
        return list(itertools.takewhile(lambda p: p.loss <= self.highest_loss, self.points))[-1]


def measure_static_attention(
    model: EncoderDecoder,
    variables: Variables,
    *,
    fit_to: Sequence[Batch],
    held_out: Sequence[Batch],
    tolerance: float = 0.01,
    phase: Phase = silent_phase,
) -> StaticAttention:
    """Fits static forms to every head of a model's self-attention.

    Args:
      model: the model, with looped layers.
      variables: its variables.
      fit_to: unpacked batches that the forms are fitted to.
      held_out: batches of the same shape, on which they are measured.
      tolerance: the share by which the loss may rise.
      phase: is told what is done.

    Raises:
      ValueError: no layer has self-attention that can be measured, or the model's loss is not finite.
    """
    check_stacks(model)
    layers = attention_layers(model)
    if not layers:
        raise ValueError(
            "the model has no self-attention that tables could replace; give one with the dot product, or "
            "another alignment that is trained and the same in all heads"
        )
    counts = [sum(len(b["encoder_input_tokens"]) for b in part) for part in (fit_to, held_out)]
    parts = zip(("training", "held-out"), (fit_to, held_out), counts, strict=True)
    fitted, measured = (
        collect_statistics(
            *(model, variables, part, layers),
            advance=phase(f"attention of {count:,} {of} examples", len(part)),
        )
        for of, part, count in parts
    )
    heads: list[Head] = []
    tables: dict[Layer, jax.Array] = {}
    biases: dict[Layer, jax.Array] = {}
    advance = phase(f"fitting static forms to the heads of {len(layers)} layers", len(layers))
    for layer in layers:
        length = fitted[layer].mass.shape[-1]
        biases[layer] = stack_bias_logits(model, variables["params"], layer, length=length)
        own, tables[layer] = _fit_forms(
            model, layer, fitted[layer], measured[layer], bias=biases[layer]
        )
        heads += own
        advance(1)
    heads.sort(key=lambda head: head.divergences[TABLE])
    places = [head[:3] for head in heads]
    loss = _loss_of_tables(model, variables, tables, held_out)
    points: list[LossPoint] = []
    numbers = numbers_of_heads(len(heads))
    advance = phase(f"losses with 0 to {len(heads)} of {len(heads)} heads replaced", len(numbers))
    for number in numbers:
        own_loss = reversed_loss = loss(tables, places[:number])
        if not np.isfinite(own_loss) and not number:
            raise ValueError(
                "the loss of the model is not finite, so no change of it can be measured; give an earlier "
                "step"
            )
        if 0 < number < len(heads):
            reversed_loss = loss(tables, places[len(places) - number :])
        costs = _costs(model, places[:number], held_out[0])
        points.append(LossPoint(number, own_loss, reversed_loss, costs))
        advance(1)
    return StaticAttention(
        heads=heads,
        points=points,
        uniform_loss=loss({layer: -bias for layer, bias in biases.items()}, places),
        tolerance=tolerance,
        fitted=counts[0],
        held_out=counts[1],
    )


def attention_layers(model: EncoderDecoder) -> tuple[Layer, ...]:
    """Returns the layers whose heads can be measured and replaced one by one.

    Their self-attention is a softmax of logits that are trained, and has the same alignment in all heads.
    """
    found = (
        ((stack, i), block.self_mixer)
        for stack in STACKS
        for i, block in enumerate(blocks_of(model, stack))
    )
    return tuple(
        layer for layer, m in found if isinstance(m, Attention) and _is_measured(m.alignment)
    )


def _is_measured(alignment: Alignment) -> bool:
    """Whether an alignment makes trained logits for any number of heads."""
    if isinstance(alignment, Mixture):
        return all(map(_is_measured, alignment.parts))
    if isinstance(alignment, PerHead | GaussianBias):
        return False
    is_fixed = isinstance(alignment, Random) and not alignment.trainable
    return alignment.makes_logits and not is_fixed


def _fit_forms(
    model: EncoderDecoder,
    layer: Layer,
    fitted: Statistics,
    measured: Statistics,
    *,
    bias: jax.Array,
) -> tuple[list[Head], jax.Array]:
    """Returns the heads of a layer, and the logits ``[heads, n, n]`` of their fitted tables."""
    attention, causal = self_attention(model, layer), layer[0] == "decoder"
    logits = {UNIFORM: jnp.zeros_like(bias)} | ({BIAS: bias} if bias.any() else {})
    table = bias
    for name, form in static_forms(bias.shape[-1], causal=causal).items():
        student = attention.copy(alignment=form)
        _, own = fit(
            student, fitted, d_model=model.d_model, causal=causal, bias=bias, seed=layer[1]
        )
        logits[name] = own + bias
        table = own if name == TABLE else table
    kl = {name: np.asarray(divergence(x, measured)).tolist() for name, x in logits.items()}
    heads = range(attention.num_heads)
    return [Head(*layer, h, {name: values[h] for name, values in kl.items()}) for h in heads], table


def numbers_of_heads(total: int) -> list[int]:
    """Returns the numbers of replaced heads that are measured: 0, up to `MOST_POINTS` more, all."""
    count = min(total, MOST_POINTS + 1)
    return [round(i * total / count) for i in range(count + 1)]


def _loss_of_tables(
    model: EncoderDecoder,
    variables: Variables,
    tables: Mapping[Layer, jax.Array],
    batches: Sequence[Batch],
) -> Callable[[Mapping[Layer, jax.Array], Collection[Place]], float]:
    """Returns the loss, in nats per target token, as a function of tables and of the heads that read them.

    One program serves all: a model with mixtures of its own logits and tables.
    """
    replacements = []
    for layer, table in tables.items():
        mixture = Mixture((self_attention(model, layer).alignment, Random(table.shape[-1])))
        replacements.append(_replacement(mixture, layer))
    mixed = student_model(model, tuple(replacements))

    def loss(tables: Mapping[Layer, jax.Array], chosen: Collection[Place]) -> float:
        params = _reading_tables(model, variables["params"], tables, chosen)
        changed = {**variables, "params": params}
        sums = np.asarray([_loss(changed, batch, model=mixed) for batch in batches])
        total, tokens = sums.sum(0)
        return float(total / tokens)

    return loss


def _reading_tables(
    model: EncoderDecoder,
    params: PyTree,
    tables: Mapping[Layer, jax.Array],
    chosen: Collection[Place],
) -> PyTree:
    """Returns the parameters of mixtures in which these heads read their tables alone, others none."""
    params = {**params, **{stack: dict(params[stack]) for stack in STACKS}}
    for (stack, i), table in tables.items():
        heads = range(self_attention(model, (stack, i)).num_heads)
        reads_table = np.array([(stack, i, head) in chosen for head in heads])
        left_out = np.stack([reads_table, ~reads_table], axis=1)
        layer = params[stack][f"layers_{i}"]
        mixer = layer[STACKS[stack]]
        align = {
            "part_0": mixer.get("align", {}),
            "part_1": {"table": table},
            "weights": jnp.where(left_out, EXCLUDED, 0.0),
        }
        params[stack][f"layers_{i}"] = {**layer, STACKS[stack]: {**mixer, "align": align}}
    return params


def _costs(model: EncoderDecoder, heads: Sequence[Place], batch: Batch) -> Summary:
    """Returns the costs of a model that has tables in these heads, and nothing else there."""
    lengths = {stack: batch[f"{stack}_input_tokens"].shape[1] for stack in STACKS}
    replacements = []
    for layer, count in collections.Counter((stack, i) for stack, i, _ in heads).items():
        own, table = self_attention(model, layer), Random(lengths[layer[0]])
        by: Alignment = table
        if count < own.num_heads:
            by = PerHead((own.alignment, table), heads=(own.num_heads - count, count))
        replacements.append(_replacement(by, layer))
    student = student_model(model, tuple(replacements))
    return summarize(student, inputs_length=lengths["encoder"], targets_length=lengths["decoder"])


def _replacement(by: Alignment, layer: Layer) -> Replacement:
    return Replacement(by, place=layer[0], layers=(layer[1],))  # type: ignore[arg-type]


@functools.partial(jax.jit, static_argnames="model")
def _loss(
    variables: Variables, batch: Batch, *, model: EncoderDecoder
) -> tuple[jax.Array, jax.Array]:
    """Returns the summed loss of a batch's target tokens, and their number."""
    sums = loss_sums(model, variables, batch, z_loss=0.0, label_smoothing=0.0)
    return sums.loss, sums.weight


def measure_run(
    experiment: Experiment,
    variables: Variables,
    *,
    vocabulary: Vocabulary,
    data_dir: pathlib.Path,
    mesh: Mesh,
    examples: tuple[int, int],
    batch_size: int,
    tolerance: float,
    phase: Phase = silent_phase,
) -> StaticAttention:
    """Measures the static attention of a run's model, see `measure_static_attention`.

    Args:
      experiment: the run's, with the path of its vocabulary; its model is an encoder-decoder.
      variables: the model's.
      vocabulary: the vocabulary itself.
      data_dir: directory of the data sets.
      mesh: the mesh of the variables.
      examples: how many examples of the training data forms are fitted to, and how many of the
        evaluation's split they are measured on; rounded up to whole batches.
      batch_size: number of examples of a batch.
      tolerance: the share by which the loss may rise.
      phase: is told what is done.

    Raises:
      FileNotFoundError: there is no data.
      ValueError: see `measure_static_attention`.
    """
    model = unroll(experiment.model)
    assert isinstance(model, EncoderDecoder)
    changes: dict[str, object] = {"pack": False, "shards": 1, "buckets": ()}
    data = replace(experiment.data, batch_size=batch_size, **changes)
    splits = (data.split, experiment.evaluation.split)
    prepare_data(experiment, vocabulary, data_dir, training_splits=splits, evaluation_splits=())
    phase(f"reading examples of {data.mixture}", 1)
    batches = []
    for split, count in zip(splits, examples, strict=True):
        stream = open_stream(replace(data, split=split), vocabulary, data_dir=data_dir)
        rows = itertools.islice(stream, -(-count // batch_size))
        batches.append([jax.device_put(batch, batch_sharding(mesh)) for batch in rows])
    with use_mesh(mesh):
        return measure_static_attention(
            model,
            unroll_variables(experiment.model, variables),
            fit_to=batches[0],
            held_out=batches[1],
            tolerance=tolerance,
            phase=phase,
        )
