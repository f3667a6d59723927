"""What the named models cost, as a file: counting all of them takes a minute.

``python -m synthesizer_jax.models.costs`` after a change of the zoo or of what `summarize` counts.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from synthesizer_jax.models.summary import summarize
from synthesizer_jax.models.token_model import stacks
from synthesizer_jax.models.zoo import ZOO

COSTS = pathlib.Path(__file__).with_suffix(".json")
INPUTS_LENGTH, TARGETS_LENGTH = 512, 114
"""The lengths that the file's FLOPs are counted for."""


def costs(
    name: str, *, inputs_length: int = INPUTS_LENGTH, targets_length: int = TARGETS_LENGTH
) -> dict[str, Any]:
    """A named model's widths, depths and costs, as JSON.

    Args:
      name: a key of `ZOO`.
      inputs_length: encoder tokens that FLOPs are counted for.
      targets_length: decoder tokens.
    """
    model = ZOO[name]()
    lengths = lengths_of(model, inputs_length, targets_length)
    summary = summarize(model, inputs_length=lengths[0], targets_length=lengths[1])
    return {
        "d_model": model.d_model,
        "layers": [stack.num_layers for stack in stacks(model).values()],
        "flops_lengths": lengths,
        **dataclasses.asdict(summary),
    }


def lengths_of(model: Any, *asked: int) -> list[int]:
    """The lengths to count FLOPs for: those asked for, or the longest that a mixer addresses."""
    limits = [
        getattr(run.block.self_mixer, "max_length", None)
        for stack in stacks(model).values()
        for run in stack.runs
    ]
    longest = min((limit for limit in limits if limit is not None), default=max(asked))
    return [min(length, longest) for length in asked]


def main() -> None:
    """Writes the file."""
    rows = [f"{json.dumps(name)}: {json.dumps(costs(name))}" for name in ZOO]
    COSTS.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
