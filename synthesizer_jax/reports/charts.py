"""Charts as inline SVG."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup

from synthesizer_jax.reports.text import shorten_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ("#2a6f97", "#d1495b", "#66a182", "#8d6a9f", "#e09f3e", "#5f4b32", "#2ec4b6", "#b07aa1")
GREYS = ("#aab2ba", "#6d7780")
INK, FAINT = "#33383d", "#d7dbdf"

LABEL_POINTS = 7.5
INCHES_PER_TOKEN = 0.125
"""Size of heat maps with a label of `LABEL_POINTS` for every token."""

Series = tuple[Sequence[float], Sequence[float]]


@contextlib.contextmanager
def _matplotlib_style() -> Iterator[None]:
    """Sets Matplotlib's style; text in the SVG stays text, and dollar signs do not start formulas."""
    import matplotlib

    with (
        matplotlib.rc_context(
            {
                "font.family": "sans-serif",
                "font.size": 9,
                "text.color": INK,
                "text.parse_math": False,
                "axes.labelcolor": INK,
                "axes.edgecolor": FAINT,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "xtick.color": INK,
                "ytick.color": INK,
                "svg.fonttype": "none",
                "svg.hashsalt": "report",
            }
        ),
        warnings.catch_warnings(),
    ):
        # The browser's fonts are used, so characters missing in Matplotlib's font do not matter.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        yield


@_matplotlib_style()
def line_chart(
    series: Mapping[str, Series],
    *,
    x_label: str,
    y_label: str,
    markers: Mapping[str, Series] | None = None,
    logarithmic: bool = True,
    size: tuple[float, float] = (7.2, 3.2),
) -> Markup:
    """Draws lines.

    Args:
      series: lines ``(x, y)`` by name.
      x_label: the label of the x axis.
      y_label: the label of the y axis, with its unit.
      markers: points ``(x, y)`` by the names of the lines.
      logarithmic: the scale of the y axis.
      size: width and height in inches.
    """
    figure = _new_figure(size)
    axes = figure.subplots()
    for color, (name, (x, y)) in zip(itertools.cycle(COLORS), series.items(), strict=False):
        axes.plot(x, y, color=color, linewidth=1.6, label=shorten_label(name))
        if markers and name in markers:
            held_out = f"{shorten_label(name)}, held out"
            axes.plot(*markers[name], "o", color=color, markersize=5, label=held_out)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter("")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(axis="y", color=FAINT, linewidth=0.7)
    axes.legend(frameon=False, fontsize=9, ncols=2)
    return _to_svg(figure)


@_matplotlib_style()
def bar_chart(
    groups: Sequence[str],
    values: Mapping[str, Sequence[float]],
    *,
    y_label: str,
    gray: int = 0,
    size: tuple[float, float] = (9.6, 3.2),
) -> Markup:
    """Draws groups of bars.

    Args:
      groups: the names of the groups.
      values: one value per group, by name of the series.
      y_label: the label of the y axis.
      gray: the number of series at the end that are gray.
      size: width and height in inches.
    """
    figure = _new_figure(size)
    axes = figure.subplots()
    width = 0.8 / len(values)
    places = np.arange(len(groups))
    colored = len(values) - gray
    colors = [COLORS[i % len(COLORS)] for i in range(colored)]
    colors += [GREYS[i % len(GREYS)] for i in range(gray)]
    for i, (name, heights) in enumerate(values.items()):
        offset = (i - (len(values) - 1) / 2) * width
        axes.bar(places + offset, heights, width * 0.92, color=colors[i], label=shorten_label(name))
    axes.set_xticks(places, [shorten_label(group) for group in groups])
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel(y_label)
    axes.grid(axis="y", color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.legend(
        frameon=False, fontsize=9, ncols=len(values), loc="upper left", bbox_to_anchor=(0, 1.16)
    )
    return _to_svg(figure)


@_matplotlib_style()
def heat_maps(
    rows: Sequence[tuple[str, np.ndarray]],
    *,
    columns: Sequence[str] | None = None,
    tokens: Sequence[str] | None = None,
) -> Markup:
    """Draws attention weights: one row per layer, one column per head, one color scale per row.

    Args:
      rows: a label and weights ``[heads, q, k]`` in [0, 1] for every layer.
      columns: the names of the columns; None: ``head 1``, ``head 2``, …
      tokens: labels of all positions; None labels some positions with their numbers.
    """
    heads, length = rows[0][1].shape[0], rows[0][1].shape[-1]
    names = [f"head {i + 1}" for i in range(heads)] if columns is None else columns
    words = None if tokens is None else [shorten_label(token, 16) for token in tokens]
    longest = 0.05 * max(map(len, words)) if words else 0.2
    side = max(1.7, INCHES_PER_TOKEN * length if words else 0.0)
    size = (heads * side + longest + 1.0, len(rows) * (side + longest + 0.45))
    figure = _new_figure(size)
    grid = figure.subplots(len(rows), heads, squeeze=False)
    for (name, weights), line in zip(rows, grid, strict=True):
        for head, axes in enumerate(line):
            image = axes.imshow(
                weights[head], cmap="magma_r", vmin=0, vmax=max(weights.max(), 1e-6)
            )
            title = f"{shorten_label(name)}, {shorten_label(names[head])}"
            axes.set_title(title, fontsize=9, color=INK)
            axes.spines[:].set_visible(False)
            axes.tick_params(length=0, labelsize=LABEL_POINTS)
            if words is not None:
                axes.set_xticks(range(length), words, rotation=90)
                axes.set_yticks(range(length), words if head == 0 else [""] * length)
            else:
                axes.locator_params(integer=True)
        bar = figure.colorbar(image, ax=list(line), shrink=0.8, aspect=18, pad=0.01)
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0, labelsize=LABEL_POINTS)
    return _to_svg(figure)


@_matplotlib_style()
def grids(panels: Mapping[str, np.ndarray], *, x_label: str, y_label: str) -> Markup:
    """Draws tables of numbers from 0 side by side, colored by the numbers on one scale.

    Args:
      panels: ``[rows, columns]`` by title, all of the same shape; NaN is an empty cell.
      x_label: what the columns are, counted from 1.
      y_label: what the rows are, counted from 1.
    """
    num_rows, num_columns = next(iter(panels.values())).shape
    width, height = max(0.42 * num_columns, 1.4) + 0.5, max(0.3 * num_rows, 0.6) + 0.8
    figure = _new_figure((len(panels) * width, height))
    line = figure.subplots(1, len(panels), squeeze=False)[0]
    most = max(1.3 * max(np.nanmax(values) for values in panels.values()), 1e-6)
    for (title, values), axes in zip(panels.items(), line, strict=True):
        axes.imshow(values, cmap="Blues", vmin=0, vmax=most, aspect="auto")
        for (row, column), value in np.ndenumerate(values):
            if not np.isnan(value):
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8)
        axes.set_title(shorten_label(title), fontsize=9, color=INK)
        axes.set_xticks(range(num_columns), range(1, num_columns + 1))
        axes.set_yticks(range(num_rows), range(1, num_rows + 1))
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labelsize=LABEL_POINTS)
        axes.set_xlabel(x_label)
    line[0].set_ylabel(y_label)
    return _to_svg(figure)


def _new_figure(size: tuple[float, float]) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained")


def _to_svg(figure: Figure) -> Markup:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    svg = text[text.index("<svg") :]
    # The page sets the width; the view box keeps the proportions.
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"', r"<svg \1", svg, count=1, flags=re.S)
    return Markup(svg)  # Matplotlib escapes text
