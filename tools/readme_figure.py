"""Draws the README's figure, `docs/attention.svg`, from the measurements in `docs/performance.md`.

Run ``python -m tools.readme_figure`` after
`benchmarks/attention.py --bias --page docs/performance.md`. A narrow figure for phones is written
to `docs/attention-narrow.svg`.
"""

from __future__ import annotations

import pathlib
import re

from matplotlib.figure import Figure

from benchmarks import figures

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SECTION = "attention 8x512x8x64 float32, T5's relative bias"
SYSTEMS = {
    "jax.nn xla": "jax.nn.dot_product_attention",
    "einsum": "einsum and softmax",
    "DotProduct": "dot product (ours)",
    "Dense": "Dense Synthesizer (ours)",
    "Random": "Random Synthesizer (ours)",
    "Gaussian": "hard-coded Gaussian (ours)",
}
"""The table rows that are drawn, with their labels."""
COLUMNS = {4: "forward and backward pass, ms", 7: "temporary memory, MB"}
"""The table columns that are drawn, as indices counted from 1, with their labels."""


def _read_table(page: str) -> dict[str, list[str]]:
    """Returns the cells of each row in the table of the attention benchmark, by row name.

    Args:
      page: the content of `docs/performance.md`.
    """
    section = page.split(f"<!-- {SECTION} -->")[1].split(f"<!-- /{SECTION} -->")[0]
    rows = [line.split("|") for line in section.splitlines() if re.match(r"\| \S", line)]
    return {row[1].strip(): [cell.strip() for cell in row] for row in rows}


def main() -> None:
    """Writes the figures."""
    table = _read_table((DOCS / "performance.md").read_text(encoding="utf-8"))
    labels = list(SYSTEMS.values())
    colors = [figures.OURS if label.endswith("(ours)") else figures.BASELINE for label in labels]

    def draw(narrow: bool) -> Figure:
        """Returns the figure, whose panels are stacked vertically if the figure is narrow."""
        figure = Figure(figsize=(4.4, 4.8) if narrow else (9, 2.4), layout="constrained")
        panels = figure.subplots(*((2, 1) if narrow else (1, 2)), sharey=True)
        for axes, (column, label) in zip(panels, COLUMNS.items(), strict=True):
            values = [float(table[row][column - 1]) for row in SYSTEMS]
            bars = axes.barh(labels, values, color=colors, height=0.65)
            axes.bar_label(bars, [f"{value:.0f}" for value in values], padding=3)
            axes.set_xlabel(label)
            axes.spines["left"].set_visible(False)
            axes.tick_params(axis="y", length=0)
            axes.margins(x=0.12)
        panels[0].invert_yaxis()
        return figure

    figures.save(draw, DOCS / "attention.svg")


if __name__ == "__main__":
    main()
