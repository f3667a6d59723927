"""Writes `costs/zoo.json`, the costs of the named models.

Run ``python -m tools.zoo_costs`` after changing the zoo or what `summarize` counts.
"""

from __future__ import annotations

import json

from synthesizer_jax.costs.zoo import COSTS, costs
from synthesizer_jax.models.zoo import ZOO


def main() -> None:
    """Writes the file."""
    rows = [f"{json.dumps(name)}: {json.dumps(costs(name))}" for name in ZOO]
    COSTS.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
