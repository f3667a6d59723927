"""Computes the costs of all models in the zoo, and writes them to `costs/zoo.json`.

This takes a minute or two. Run ``python -m tools.zoo_costs`` after changing the zoo, or after
changing what `summarize` counts.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib

import synthesizer_jax
from synthesizer_jax.base.registry import JSON, fields_of
from synthesizer_jax.costs.summary import summarize
from synthesizer_jax.models.token_model import TokenModel, stacks_of
from synthesizer_jax.models.zoo import ZOO

COSTS = pathlib.Path(synthesizer_jax.__file__).parent / "costs" / "zoo.json"
INPUTS_LENGTH, TARGETS_LENGTH = 512, 114
"""The sequence lengths for which the operations in `costs/zoo.json` are counted."""


def costs(name: str) -> dict[str, JSON]:
    """Returns the width, the numbers of layers and the costs of a model in `ZOO`, as JSON data."""
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
    """Limits lengths to the number of positions that all mixers of the model support."""
    limits = [
        fields_of(run.block.self_mixer).get("max_length")
        for stack in stacks_of(model).values()
        for run in stack.runs
    ]
    longest = min((limit for limit in limits if limit is not None), default=max(lengths))
    return [min(length, longest) for length in lengths]


def main() -> None:
    """Writes the file."""
    rows = [f"{json.dumps(name)}: {json.dumps(costs(name))}" for name in ZOO]
    COSTS.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
