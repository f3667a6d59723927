"""Draws the README's figure, `docs/attention.svg`, from the measurements in `docs/performance.md`.

Run ``python -m tools.readme_figure`` after `benchmarks/attention.py --bias --page docs/performance.md`.
"""

from __future__ import annotations

import pathlib
import re

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
SECTION = "attention 8x512x8x64 float32, T5's relative bias"
SYSTEMS = {
    "jax.nn xla": "jax.nn.dot_product_attention",
    "einsum": "einsum and softmax",
    "DotProduct": "dot product (ours)",
    "Dense": "Dense Synthesizer (ours)",
    "Random": "Random Synthesizer (ours)",
    "Gaussian": "hard-coded Gaussian (ours)",
}
"""The rows to draw and their labels."""
COLUMNS = {4: "forward and backward pass, ms", 7: "temporary memory, MB"}
"""The columns to draw, by index (from 1), and their labels."""


def _read_table(page: str) -> dict[str, list[str]]:
    """Reads the cells of the section's table, by the name of the row.

    Args:
      page: the content of `docs/performance.md`.
    """
    section = page.split(f"<!-- {SECTION} -->")[1].split(f"<!-- /{SECTION} -->")[0]
    rows = [line.split("|") for line in section.splitlines() if re.match(r"\| \S", line)]
    return {row[1].strip(): [cell.strip() for cell in row] for row in rows}


def main() -> None:
    """Writes the figure."""
    table = _read_table((DOCS / "performance.md").read_text(encoding="utf-8"))
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "readme", "font.family": "sans-serif"}
    figure, panels = plt.subplots(1, 2, figsize=(9, 2.4), sharey=True, layout="constrained")
    colors = ["#8a8f98" if not name.endswith("(ours)") else "#2f6fdb" for name in SYSTEMS.values()]
    for axes, (column, label) in zip(panels, COLUMNS.items(), strict=True):
        values = [float(table[row][column - 1]) for row in SYSTEMS]
        bars = axes.barh(list(SYSTEMS.values()), values, color=colors, height=0.65)
        axes.bar_label(bars, [f"{value:.0f}" for value in values], padding=3, fontsize=9)
        axes.set_xlabel(label)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.margins(x=0.12)
    panels[0].invert_yaxis()
    figure.savefig(DOCS / "attention.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
