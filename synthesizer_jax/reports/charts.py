"""Charts as inline SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

COLOURS = ("#2a6f97", "#d1495b", "#66a182", "#8d6a9f")
INK, FAINT = "#33383d", "#d7dbdf"

Series = tuple[Sequence[float], Sequence[float]]


def line_chart(
    series: Mapping[str, Series],
    *,
    x_label: str,
    y_label: str,
    markers: Mapping[str, Series] | None = None,
    size: tuple[float, float] = (7.2, 3.2),
) -> str:
    """Lines over a logarithmic y axis with their names at the top, and marked points of the same names.

    Args:
      series: ``(x, y)`` by name.
      x_label: what x counts.
      y_label: what y measures, with its unit.
      markers: points ``(x, y)`` by the same names.
      size: inches.
    """
    figure, axes = _figure(1, 1, size)
    for colour, (name, (x, y)) in zip(COLOURS, series.items(), strict=False):
        axes.plot(x, y, color=colour, linewidth=1.6, label=name)
        if markers and name in markers:
            axes.plot(*markers[name], "o", color=colour, markersize=5, label=f"{name}, held out")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.grid(axis="y", color=FAINT, linewidth=0.7)
    axes.legend(frameon=False, fontsize=9, ncols=2)
    return _svg(figure)


def bar_chart(
    groups: Sequence[str],
    values: Mapping[str, Sequence[float]],
    *,
    y_label: str,
    size: tuple[float, float] = (9.6, 3.2),
) -> str:
    """Bars of several series side by side in every group."""
    figure, axes = _figure(1, 1, size)
    width = 0.8 / len(values)
    places = np.arange(len(groups))
    colours = (*COLOURS[:2], "#aab2ba", "#6d7780")
    for i, (name, heights) in enumerate(values.items()):
        offset = (i - (len(values) - 1) / 2) * width
        axes.bar(places + offset, heights, width * 0.92, color=colours[i % 4], label=name)
    axes.set_xticks(places, groups)
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel(y_label)
    axes.grid(axis="y", color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.legend(
        frameon=False, fontsize=9, ncols=len(values), loc="upper left", bbox_to_anchor=(0, 1.16)
    )
    return _svg(figure)


def heat_maps(
    rows: Sequence[tuple[str, np.ndarray]], *, tokens: Sequence[str] | None = None
) -> str:
    """A grid of attention matrices: one row per layer, one column per head.

    Args:
      rows: a label and weights ``[heads, q, k]`` in [0, 1] for every layer.
      tokens: words of the positions; None shows numbers.
    """
    heads = rows[0][1].shape[0]
    figure, grid = _figure(len(rows), heads, (2.35 * heads + 0.5, 2.35 * len(rows) + 0.4))
    grid = np.atleast_2d(grid)
    for (label, weights), line in zip(rows, grid, strict=True):
        for head, axes in enumerate(line):
            axes.imshow(weights[head], cmap="magma_r", vmin=0, vmax=max(weights[head].max(), 1e-6))
            axes.set_title(f"{label}, head {head + 1}", fontsize=8, color=INK)
            for spine in axes.spines.values():
                spine.set_visible(False)
            axes.tick_params(length=0, labelsize=5.5)
            if tokens is not None and head == 0:
                axes.set_yticks(range(len(tokens)), tokens)
            elif tokens is not None:
                axes.set_yticks([])
            if tokens is not None:
                axes.set_xticks(range(len(tokens)), tokens, rotation=90)
    return _svg(figure)


def _figure(rows: int, columns: int, size: tuple[float, float]) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: Any = {
        "font.family": "sans-serif",
        "font.size": 9,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": FAINT,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": INK,
        "ytick.color": INK,
        "svg.fonttype": "none",
        "svg.hashsalt": "report",
    }
    with pyplot.rc_context(style):
        return pyplot.subplots(rows, columns, figsize=size, layout="constrained")


def _svg(figure: Any) -> str:
    from matplotlib import pyplot

    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    pyplot.close(figure)
    text = buffer.getvalue()
    svg = text[text.index("<svg") :]
    # The page sets the width; the drawing keeps its proportions.
    return re.sub(
        r'<svg ([^>]*?)width="[^"]*" height="[^"]*"', r"<svg \1", svg, count=1, flags=re.S
    )
