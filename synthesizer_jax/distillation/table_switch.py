"""A model in which any heads read tables in the place of their own logits."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from synthesizer_jax.alignments import Alignment, Mixture, PerHead, Random
from synthesizer_jax.costs.summary import Summary, summarize
from synthesizer_jax.distillation.fit import Layer, attention_of
from synthesizer_jax.distillation.replacement import Replacement, StackName, student_model
from synthesizer_jax.distillation.transplant import STACKS
from synthesizer_jax.models import EncoderDecoder
from synthesizer_jax.parameters import Variables
from synthesizer_jax.training.step import Batch, loss_sums
from synthesizer_jax.typing import PyTree

Place: TypeAlias = tuple[StackName, int, int]
"""The stack, layer and number of a head."""

EXCLUDED = -1e4
"""Weight logit of a mixture's part that is left out: its softmax is zero in float32."""


class TableSwitch:
    """Measures a model some of whose heads read tables; one program serves all choices of heads.

    Args:
      model: the model, with looped layers.
      variables: its variables.
      tables: the parameters of `Random` by layer.
      batches: what the loss is measured on.
    """

    def __init__(
        self,
        model: EncoderDecoder,
        variables: Variables,
        tables: Mapping[Layer, PyTree],
        batches: Sequence[Batch],
    ):
        self._own, self._variables, self._tables = model, variables, tables
        self._batches = batches
        mixtures = []
        for (stack, layer), table in tables.items():
            own = attention_of(model, (stack, layer)).alignment
            by = Mixture((own, Random(max_length=table["table"].shape[-1])))
            mixtures.append(Replacement(by, place=stack, layers=(layer,)))
        self._mixed = student_model(model, tuple(mixtures))
        self._losses: dict[frozenset[Place], float] = {}

    def loss(self, heads: Iterable[Place]) -> float:
        """Returns the mean loss of target tokens in nats when these heads read their tables."""
        chosen = frozenset(heads)
        if chosen not in self._losses:
            variables = {**self._variables, "params": self._params(chosen)}
            sums = [_loss(variables, batch, model=self._mixed) for batch in self._batches]
            total, tokens = np.asarray(sums).sum(0)
            self._losses[chosen] = float(total / tokens)
        return self._losses[chosen]

    def _params(self, chosen: frozenset[Place]) -> PyTree:
        """Returns the parameters of the mixtures that give these heads their tables alone."""
        params = dict(self._variables["params"])
        for (stack, layer), table in self._tables.items():
            layers = dict(params[stack])
            sublayer = dict(layers[f"layers_{layer}"])
            mixer = dict(sublayer[STACKS[stack]])
            num_heads = attention_of(self._own, (stack, layer)).num_heads
            reads_table = np.array([(stack, layer, h) in chosen for h in range(num_heads)])
            left_out = np.stack([reads_table, ~reads_table], axis=1)
            mixer["align"] = {
                "part_0": mixer.get("align", {}),
                "part_1": table,
                "weights": jnp.where(left_out, EXCLUDED, 0.0),
            }
            params[stack] = layers | {f"layers_{layer}": sublayer | {STACKS[stack]: mixer}}
        return params

    def costs(self, heads: Iterable[Place]) -> Summary:
        """Returns the costs of a model that has tables in these heads, and nothing else there."""
        counts = collections.Counter((stack, layer) for stack, layer, _ in heads)
        lengths: dict[StackName, int] = {
            "encoder": self._batches[0]["encoder_input_tokens"].shape[1],
            "decoder": self._batches[0]["decoder_input_tokens"].shape[1],
        }
        replacements = []
        for (stack, layer), count in counts.items():
            own, table = attention_of(self._own, (stack, layer)), Random(lengths[stack])
            by: Alignment = table
            if count < own.num_heads:
                by = PerHead((own.alignment, table), heads=(own.num_heads - count, count))
            replacements.append(Replacement(by, place=stack, layers=(layer,)))
        return summarize(
            student_model(self._own, tuple(replacements)),
            inputs_length=lengths["encoder"],
            targets_length=lengths["decoder"],
        )


@functools.partial(jax.jit, static_argnames="model")
def _loss(
    variables: Variables, batch: Batch, *, model: EncoderDecoder
) -> tuple[jax.Array, jax.Array]:
    """Returns the summed loss of a batch's target tokens, and their number."""
    sums = loss_sums(model, variables, batch, z_loss=0.0, label_smoothing=0.0)
    return sums.loss, sums.weight
