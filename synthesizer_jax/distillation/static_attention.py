"""How much of a trained model's self-attention depends on positions alone.

Each static form is fitted to every head (`fit`), and what it misses is measured on held-out batches: the
mean over queries of ``KL(head ‖ form)``. Then heads are replaced by their fitted tables, the most static
first, and the loss of the whole model is measured.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

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
from synthesizer_jax.costs.summary import Summary
from synthesizer_jax.distillation.fit import (
    Layer,
    Statistics,
    attention_of,
    collect_statistics,
    divergence,
    fit,
    stack_bias_logits,
    static_logits,
)
from synthesizer_jax.distillation.replacement import StackName, named_stacks
from synthesizer_jax.distillation.table_switch import Place, TableSwitch
from synthesizer_jax.distillation.transplant import STACKS, check_stacks, self_attention
from synthesizer_jax.messages import Phase, silent_phase
from synthesizer_jax.models import EncoderDecoder
from synthesizer_jax.parameters import Variables
from synthesizer_jax.training.step import Batch
from synthesizer_jax.typing import PyTree

TABLE = "Random"
"""The form that can express any other; heads are replaced by it."""

FORMS: Mapping[str, Callable[[int, bool], Alignment]] = MappingProxyType(
    {
        TABLE: lambda n, causal: Random(max_length=n),
        "Factorized Random": lambda n, causal: FactorizedRandom(max_length=n),
        "Relative bias": lambda n, causal: RelativeBias(bidirectional=not causal),
        "Gaussian": lambda n, causal: GaussianBias((0.0,), trainable=True),
    }
)
"""Static alignments by name, for a number of positions and whether queries see only keys up to them."""

MOST_POINTS = 16
"""Measured numbers of replaced heads, besides none and all."""

MOST_PICTURES = 4
"""Of the most static heads of a stack, and of the least static."""


@dataclasses.dataclass(frozen=True)
class Head:
    """A head of self-attention, and what static forms miss of it.

    Attributes:
      stack: ``encoder`` or ``decoder``.
      layer: number of the layer, from 0.
      head: number of the head, from 0.
      uniform: mean KL divergence from equal weights of all keys, in nats per query.
      bias: the same from the model's own position bias alone; None: it has none.
      divergences: the same from the best of each of `FORMS`, beside the position bias.
    """

    stack: StackName
    layer: int
    head: int
    uniform: float
    bias: float | None
    divergences: Mapping[str, float]

    @property
    def place(self) -> Place:
        """Where it is."""
        return self.stack, self.layer, self.head

    @property
    def name(self) -> str:
        """Such as ``encoder 1.3``: stack, layer and head, the latter two from 1."""
        return f"{self.stack} {self.layer + 1}.{self.head + 1}"


class Picture(NamedTuple):
    """The weights of a head.

    Attributes:
      head: the head.
      attention: ``[n, n]`` mean weights over the examples.
      table: ``[n, n]`` weights of the fitted table.
    """

    head: Head
    attention: np.ndarray
    table: np.ndarray


@dataclasses.dataclass(frozen=True)
class Point:
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
      pictures: the most and the least static heads of each stack.
      uniform_loss: nats per target token of held-out batches when all heads have equal weights.
      tolerance: the share by which the loss may rise.
      fitted: number of examples that forms were fitted to.
      held_out: number of examples that everything was measured on.
    """

    heads: Sequence[Head]
    points: Sequence[Point]
    pictures: Sequence[Picture]
    uniform_loss: float
    tolerance: float
    fitted: int
    held_out: int

    @property
    def highest_loss(self) -> float:
        """The loss at the end of the tolerance."""
        return (1.0 + self.tolerance) * self.points[0].loss

    @property
    def replaceable(self) -> Point:
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

    def statistics(of: str, batches: Sequence[Batch]) -> dict[Layer, Statistics]:
        advance = phase(f"attention of {_count(batches):,} {of} examples", len(batches))
        return collect_statistics(model, variables, batches, layers, advance=advance)

    fitted, measured = statistics("training", fit_to), statistics("held-out", held_out)
    heads: list[Head] = []
    tables: dict[Layer, PyTree] = {}
    uniform: dict[Layer, PyTree] = {}
    advance = phase(f"fitting {len(FORMS)} forms to the heads of {len(layers)} layers", len(layers))
    for layer in layers:
        found, tables[layer], uniform[layer] = _fit_forms(
            model, variables["params"], layer, fitted[layer], measured[layer]
        )
        heads += found
        advance(1)
    heads.sort(key=lambda head: head.divergences[TABLE])
    counts = numbers_of_heads(len(heads))
    advance = phase(f"losses with 0 to {len(heads)} of {len(heads)} heads replaced", len(counts))
    switch = TableSwitch(model, variables, tables, held_out)
    if not np.isfinite(switch.loss([])):
        raise ValueError(
            "the loss of the model is not finite, so no change of it can be measured; give an earlier step"
        )
    places, points = [head.place for head in heads], []
    for count in counts:
        loss = switch.loss(places[:count])
        reversed_loss = switch.loss(places[len(places) - count :])
        points.append(Point(count, loss, reversed_loss, switch.costs(places[:count])))
        advance(1)
    return StaticAttention(
        heads=heads,
        points=points,
        pictures=list(_pictures(model, variables["params"], heads, measured, tables)),
        uniform_loss=TableSwitch(model, variables, uniform, held_out).loss(places),
        tolerance=tolerance,
        fitted=_count(fit_to),
        held_out=_count(held_out),
    )


def _count(batches: Sequence[Batch]) -> int:
    """Returns the number of examples."""
    return sum(len(batch["encoder_input_tokens"]) for batch in batches)


def attention_layers(model: EncoderDecoder) -> tuple[Layer, ...]:
    """Returns the layers whose heads can be measured and replaced one by one.

    Their self-attention is a softmax of logits that are trained, and has the same alignment in all heads.
    """
    stacks = named_stacks(model).items()
    layers = [(name, i) for name, stack in stacks for i in range(stack.num_layers)]
    found = ((layer, self_attention(model, *layer)) for layer in layers)
    return tuple(layer for layer, a in found if a is not None and _is_measured(a.alignment))


def _is_measured(alignment: Alignment) -> bool:
    """Whether an alignment makes trained logits for any number of heads."""
    if isinstance(alignment, Mixture):
        return all(map(_is_measured, alignment.parts))
    if isinstance(alignment, PerHead | GaussianBias):
        return False
    is_fixed = isinstance(alignment, Random) and not alignment.trainable
    return alignment.makes_logits and not is_fixed


def _pictures(
    model: EncoderDecoder,
    params: PyTree,
    heads: Sequence[Head],
    measured: Mapping[Layer, Statistics],
    tables: Mapping[Layer, PyTree],
) -> Iterator[Picture]:
    """Yields the most static heads of each stack, and the least static."""
    for stack in STACKS:
        own = [head for head in heads if head.stack == stack]
        count = min(MOST_PICTURES, len(own) // 2)
        for head in [*own[:count], *own[len(own) - count :]] if count else own:
            layer = (head.stack, head.layer)
            mass = measured[layer].mass[head.head]
            logits = _table_logits(model, params, layer, tables[layer])[head.head]
            visible = np.tri(len(mass), dtype=bool) | (stack == "encoder")
            weights = jax.nn.softmax(jnp.where(visible, logits, -jnp.inf), axis=-1)
            mean = mass / np.maximum(mass.sum(-1, keepdims=True), 1e-9)
            yield Picture(head, np.asarray(mean), np.asarray(weights))


def _table_logits(model: EncoderDecoder, params: PyTree, layer: Layer, table: PyTree) -> jax.Array:
    """Returns the logits ``[heads, n, n]`` of a layer's table, beside the position bias."""
    attention = attention_of(model, layer)
    length = table["table"].shape[-1]
    random = attention.copy(alignment=Random(max_length=length))
    bias = stack_bias_logits(model, params, layer[0], num_heads=attention.num_heads, length=length)
    return static_logits(random, table, length=length, d_model=model.d_model) + bias


def numbers_of_heads(total: int) -> list[int]:
    """Returns the numbers of replaced heads that are measured: 0, up to `MOST_POINTS` more, all."""
    count = min(total, MOST_POINTS + 1)
    return [round(i * total / count) for i in range(count + 1)]


def _fit_forms(
    model: EncoderDecoder, params: PyTree, layer: Layer, fitted: Statistics, measured: Statistics
) -> tuple[list[Head], PyTree, PyTree]:
    """Returns the heads of a layer, and the parameters of tables: the fitted one, and of equal weights."""
    stack, number = layer
    attention = attention_of(model, layer)
    length, causal = fitted.mass.shape[-1], stack == "decoder"
    bias = stack_bias_logits(model, params, stack, num_heads=attention.num_heads, length=length)
    kl: dict[str, np.ndarray] = {}
    table: PyTree = {}
    for name, make in FORMS.items():
        form = attention.copy(alignment=make(length, causal))
        found, _ = fit(form, fitted, d_model=model.d_model, causal=causal, bias=bias, seed=number)
        logits = static_logits(form, found, length=length, d_model=model.d_model)
        kl[name] = np.asarray(divergence(logits + bias, measured))
        table = found if name == TABLE else table
    uniform = np.asarray(divergence(jnp.zeros_like(bias), measured))
    alone = np.asarray(divergence(bias, measured)) if bias.any() else None
    heads = [
        Head(
            stack,
            number,
            head,
            uniform=float(uniform[head]),
            bias=None if alone is None else float(alone[head]),
            divergences={name: float(values[head]) for name, values in kl.items()},
        )
        for head in range(attention.num_heads)
    ]
    return heads, table, {"table": jnp.zeros_like(table["table"]) - bias}
