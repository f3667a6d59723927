"""The costs of the models of the zoo; ``zoo.json`` stores them, as computing all of them takes a minute."""

from __future__ import annotations

import dataclasses
import pathlib

from synthesizer_jax.base.registry import JSON, fields_of
from synthesizer_jax.costs.summary import summarize
from synthesizer_jax.models.token_model import TokenModel, stacks_of
from synthesizer_jax.models.zoo import ZOO

COSTS = pathlib.Path(__file__).with_suffix(".json")
INPUTS_LENGTH, TARGETS_LENGTH = 512, 114
"""The lengths for which the operations in the file are counted."""


def costs(name: str) -> dict[str, JSON]:
    """Returns the width, the numbers of layers and the costs of a model of `ZOO` as JSON data."""
    model = ZOO[name]()
    lengths = _limit_lengths(model, INPUTS_LENGTH, TARGETS_LENGTH)
    summary = summarize(model, inputs_length=lengths[0], targets_length=lengths[1])
    return {
        "d_model": model.d_model,
        "layers": [stack.num_layers for stack in stacks_of(model).values()],
        "flops_lengths": lengths,
        **dataclasses.asdict(summary),
    }


def _limit_lengths(model: TokenModel, *lengths: int) -> list[int]:
    """Returns the lengths, cut to the number of positions that every mixer has."""
    limits = [
        fields_of(run.block.self_mixer).get("max_length")
        for stack in stacks_of(model).values()
        for run in stack.runs
    ]
    longest = min((limit for limit in limits if limit is not None), default=max(lengths))
    return [min(length, longest) for length in lengths]
