"""How much of a trained model's self-attention depends on positions alone.

Each static form is fitted to every head (`fit`), and what it misses is measured on batches that it was not
fitted to: the mean over queries of ``KL(head ‖ form)``. Then heads are replaced by their fitted tables,
the most static first, and the loss of the whole model is measured.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

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
from synthesizer_jax.costs.summary import Summary, summarize
from synthesizer_jax.distillation.fit import (
    Layer,
    Statistics,
    collect_statistics,
    divergence,
    fit,
    stack_bias_logits,
    static_logits,
)
from synthesizer_jax.distillation.replacement import Replacement, StackName, student_model
from synthesizer_jax.distillation.transplant import STACKS, self_attention
from synthesizer_jax.mixers import Attention
from synthesizer_jax.models import EncoderDecoder
from synthesizer_jax.models.stack import StackBase
from synthesizer_jax.parameters import Variables
from synthesizer_jax.training.step import Batch, loss_sums
from synthesizer_jax.typing import PyTree

TABLE = "Random"
"""The form that can express any other; heads are replaced by it."""

FORMS: Mapping[str, Callable[[int, bool], Alignment]] = MappingProxyType(
    {
        TABLE: lambda n, causal: Random(max_length=n),
        "Factorized Random": lambda n, causal: FactorizedRandom(max_length=n),
        "RelativeBias": lambda n, causal: RelativeBias(bidirectional=not causal),
        "Gaussian": lambda n, causal: GaussianBias(trainable=True),
    }
)
"""Static alignments by name, for a number of positions and whether queries see only keys up to them."""

MOST_POINTS = 16
"""Measured numbers of replaced heads, besides none and all."""

EXCLUDED = -1e4
"""Weight logit of a mixture's part that is left out: its softmax is zero in float32."""


@dataclasses.dataclass(frozen=True, eq=False)
class Head:
    """A head of self-attention, and what static forms miss of it.

    Attributes:
      stack: ``encoder`` or ``decoder``.
      layer: number of the layer, from 0.
      head: number of the head, from 0.
      uniform: mean KL divergence from equal weights of all keys, in nats a query.
      bias: the same from the model's own position bias alone; None: it has none.
      divergences: the same from the best of each of `FORMS`, beside the position bias.
      attention: ``[n, n]`` mean weights over the examples.
      table: ``[n, n]`` weights of the fitted table.
    """

    stack: StackName
    layer: int
    head: int
    uniform: float
    bias: float | None
    divergences: Mapping[str, float]
    attention: np.ndarray = dataclasses.field(repr=False)
    table: np.ndarray = dataclasses.field(repr=False)

    @property
    def name(self) -> str:
        """Such as ``encoder 1.3``: stack, layer and head, the latter two from 1."""
        return f"{self.stack} {self.layer + 1}.{self.head + 1}"

    def explained(self, form: str) -> float:
        """Returns the share of `uniform` that a form explains; negative where equal weights are better."""
        return 1.0 - self.divergences[form] / max(self.uniform, 1e-9)


@dataclasses.dataclass(frozen=True)
class Point:
    """A model some of whose heads are replaced by tables.

    Attributes:
      replaced: how many.
      loss: nats per target token, of batches that the tables were not fitted to, when the most static
        heads are replaced.
      reversed_loss: the same when the least static heads are.
      costs: of a model that has no dot product in the most static heads.
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
      fitted: number of batches that forms were fitted to.
      held_out: number of batches that everything was measured on.
    """

    heads: Sequence[Head]
    points: Sequence[Point]
    fitted: int
    held_out: int

    def replaceable(self, tolerance: float) -> Point:
        """Returns the most replaced heads up to which the loss rises by at most a share of itself."""
        most = (1.0 + tolerance) * self.points[0].loss
        return list(itertools.takewhile(lambda point: point.loss <= most, self.points))[-1]


def measure_static_attention(
    model: EncoderDecoder,
    variables: Variables,
    *,
    fit_to: Sequence[Batch],
    held_out: Sequence[Batch],
) -> StaticAttention:
    """Fits static forms to every head of a model's self-attention.

    Args:
      model: the model, with looped layers.
      variables: its variables.
      fit_to: unpacked batches that the forms are fitted to.
      held_out: others of the same shape, on which they are measured.

    Raises:
      ValueError: no layer has self-attention with a softmax, or there are no batches.
    """
    layers = attention_layers(model)
    if not layers:
        raise ValueError(
            "the model has no self-attention whose logits could be replaced; give one with Attention"
        )
    fitted, measured = (
        collect_statistics(model, variables, batches, layers) for batches in (fit_to, held_out)
    )
    heads: list[Head] = []
    tables: dict[Layer, PyTree] = {}
    for layer in layers:
        found, tables[layer] = _fit_forms(
            model, variables["params"], layer, fitted[layer], measured[layer]
        )
        heads += found
    heads.sort(key=lambda head: head.divergences[TABLE])
    switch = _Switch(model, variables, tables)
    points = [
        Point(
            replaced=count,
            loss=switch.loss(heads[:count], held_out),
            reversed_loss=switch.loss(heads[len(heads) - count :], held_out),
            costs=_costs(model, heads[:count], fit_to[0]),
        )
        for count in numbers_of_heads(len(heads))
    ]
    return StaticAttention(heads, points, len(fit_to), len(held_out))


def attention_layers(model: EncoderDecoder) -> tuple[Layer, ...]:
    """Returns the layers whose self-attention is a softmax of logits."""
    stacks: dict[StackName, StackBase] = {"encoder": model.encoder, "decoder": model.decoder}
    layers = [(name, i) for name, stack in stacks.items() for i in range(stack.num_layers)]
    found = ((layer, self_attention(model, *layer)) for layer in layers)
    return tuple(layer for layer, a in found if a is not None and a.alignment.makes_logits)


def numbers_of_heads(total: int) -> list[int]:
    """Returns the numbers of replaced heads that are measured: 0, up to `MOST_POINTS` more, all."""
    count = min(total, MOST_POINTS + 1)
    return [round(i * total / count) for i in range(count + 1)]


def _fit_forms(
    model: EncoderDecoder, params: PyTree, layer: Layer, fitted: Statistics, measured: Statistics
) -> tuple[list[Head], PyTree]:
    """Returns the heads of a layer, and the parameters of its fitted table."""
    stack, number = layer
    attention = self_attention(model, stack, number)
    assert attention is not None
    length, causal = fitted.mass.shape[-1], stack == "decoder"
    bias = stack_bias_logits(model, params, stack, num_heads=attention.num_heads, length=length)
    kl, logits, table = {}, jnp.zeros(()), {}
    for name, make in FORMS.items():
        layer_of_form = attention.copy(alignment=make(length, causal))
        found, _ = fit(
            layer_of_form, fitted, d_model=model.d_model, causal=causal, bias=bias, seed=number
        )
        static = static_logits(layer_of_form, found, length=length, d_model=model.d_model) + bias
        kl[name] = np.asarray(divergence(static, measured))
        if name == TABLE:
            table, logits = found, static
    zeros = jnp.zeros_like(measured.mass)
    uniform = np.asarray(divergence(zeros, measured))
    alone = np.asarray(divergence(zeros + bias, measured))
    has_bias = bool(np.any(np.asarray(bias)))
    visible = np.tri(length, dtype=bool) if causal else np.ones((length, length), bool)
    weights = np.asarray(jax.nn.softmax(jnp.where(visible, logits, -jnp.inf), axis=-1))
    mean = measured.mass / np.maximum(measured.mass.sum(-1, keepdims=True), 1e-9)
    heads = [
        Head(
            stack,
            number,
            head,
            uniform=float(uniform[head]),
            bias=float(alone[head]) if has_bias else None,
            divergences={name: float(values[head]) for name, values in kl.items()},
            attention=np.asarray(mean[head]),
            table=weights[head],
        )
        for head in range(attention.num_heads)
    ]
    return heads, table


class _Switch:
    """A model in which every head may read its fitted table in the place of its own logits.

    Args:
      model: the model, with looped layers.
      variables: its variables.
      tables: the parameters of `TABLE` by layer.
    """

    def __init__(self, model: EncoderDecoder, variables: Variables, tables: Mapping[Layer, PyTree]):
        self._variables, self._tables = variables, tables
        self._model = student_model(model, tuple(_switches(model, tables)))

    def loss(self, heads: Iterable[Head], batches: Sequence[Batch]) -> float:
        """Returns the mean loss of target tokens in nats when these heads read their tables."""
        chosen = {(head.stack, head.layer, head.head) for head in heads}
        params = dict(self._variables["params"])
        for (stack, layer), table in self._tables.items():
            layers = dict(params[stack])
            sublayer = dict(layers[f"layers_{layer}"])
            mixer = dict(sublayer[STACKS[stack]])
            flags = [(stack, layer, h) in chosen for h in range(self._num_heads((stack, layer)))]
            on = jnp.asarray(flags)[:, None]
            mixer["align"] = {
                "part_0": mixer["align"],
                "part_1": table,
                "weights": jnp.where(on == jnp.asarray([True, False]), EXCLUDED, 0.0),
            }
            params[stack] = layers | {f"layers_{layer}": sublayer | {STACKS[stack]: mixer}}
        sums = [
            _loss({**self._variables, "params": params}, batch, model=self._model)
            for batch in batches
        ]
        total, tokens = np.asarray(sums).sum(0)
        return float(total / tokens)

    def _num_heads(self, layer: Layer) -> int:
        attention = self_attention(self._model, *layer)
        assert attention is not None
        return attention.num_heads


def _switches(model: EncoderDecoder, tables: Mapping[Layer, PyTree]) -> Iterator[Replacement]:
    """Yields the mixtures of a layer's own alignment and a table."""
    for (stack, layer), table in tables.items():
        attention = self_attention(model, stack, layer)
        assert attention is not None
        random = Random(max_length=table["table"].shape[-1])
        yield Replacement(Mixture((attention.alignment, random)), place=stack, layers=(layer,))


@functools.partial(jax.jit, static_argnames="model")
def _loss(
    variables: Variables, batch: Batch, *, model: EncoderDecoder
) -> tuple[jax.Array, jax.Array]:
    """Returns the summed loss of a batch's target tokens, and their number."""
    sums = loss_sums(model, variables, batch, z_loss=0.0, label_smoothing=0.0)
    return sums.loss, sums.weight


def _costs(model: EncoderDecoder, replaced: Iterable[Head], batch: Batch) -> Summary:
    """Returns the costs of a model in which tables take the place of some heads' own alignment."""
    counts: dict[Layer, int] = {}
    for head in replaced:
        counts[head.stack, head.layer] = counts.get((head.stack, head.layer), 0) + 1
    lengths: dict[StackName, int] = {
        "encoder": batch["encoder_input_tokens"].shape[1],
        "decoder": batch["decoder_input_tokens"].shape[1],
    }
    replacements = []
    for (stack, layer), count in counts.items():
        attention = self_attention(model, stack, layer)
        assert attention is not None
        by = _with_tables(attention, count, Random(max_length=lengths[stack]))
        replacements.append(Replacement(by, place=stack, layers=(layer,)))
    return summarize(
        student_model(model, tuple(replacements)),
        inputs_length=lengths["encoder"],
        targets_length=lengths["decoder"],
    )


def _with_tables(attention: Attention, count: int, table: Random) -> Alignment:
    """Returns an alignment with tables in so many of the heads."""
    if count == attention.num_heads:
        return table
    return PerHead((attention.alignment, table), heads=(attention.num_heads - count, count))
