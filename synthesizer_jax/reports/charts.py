"""Charts as inline SVG."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from synthesizer_jax.reports.text import label

COLOURS = ("#2a6f97", "#d1495b", "#66a182", "#8d6a9f", "#e09f3e", "#5f4b32", "#2ec4b6", "#b07aa1")
GREYS = ("#aab2ba", "#6d7780")
INK, FAINT = "#33383d", "#d7dbdf"

LABEL_POINTS = 7.5
INCHES_PER_TOKEN = 0.125
"""Of a heat map: enough for a label of that size on every row."""

Series = tuple[Sequence[float], Sequence[float]]


@contextlib.contextmanager
def _style() -> Iterator[None]:
    """Matplotlib without a display, in the page's style; text stays text, dollar signs included."""
    import matplotlib

    matplotlib.use("Agg")
    style: Any = {
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
    with matplotlib.rc_context(style), warnings.catch_warnings():
        # Text stays text, in a font of the browser: Matplotlib's need not have every character.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        yield


@_style()
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
    for colour, (name, (x, y)) in zip(itertools.cycle(COLOURS), series.items(), strict=False):
        axes.plot(x, y, color=colour, linewidth=1.6, label=label(name))
        if markers and name in markers:
            held_out = f"{label(name)}, held out"
            axes.plot(*markers[name], "o", color=colour, markersize=5, label=held_out)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.grid(axis="y", color=FAINT, linewidth=0.7)
    axes.legend(frameon=False, fontsize=9, ncols=2)
    return _svg(figure)


@_style()
def bar_chart(
    groups: Sequence[str],
    values: Mapping[str, Sequence[float]],
    *,
    y_label: str,
    grey: int = 0,
    size: tuple[float, float] = (9.6, 3.2),
) -> str:
    """Bars of several series side by side in every group, the last `grey` of them in greys."""
    figure, axes = _figure(1, 1, size)
    width = 0.8 / len(values)
    places = np.arange(len(groups))
    coloured = len(values) - grey
    colours = [COLOURS[i % len(COLOURS)] for i in range(coloured)]
    colours += [GREYS[i % len(GREYS)] for i in range(grey)]
    for i, (name, heights) in enumerate(values.items()):
        offset = (i - (len(values) - 1) / 2) * width
        axes.bar(places + offset, heights, width * 0.92, color=colours[i], label=label(name))
    axes.set_xticks(places, [label(group) for group in groups])
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel(y_label)
    axes.grid(axis="y", color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.legend(
        frameon=False, fontsize=9, ncols=len(values), loc="upper left", bbox_to_anchor=(0, 1.16)
    )
    return _svg(figure)


@_style()
def heat_maps(
    rows: Sequence[tuple[str, np.ndarray]], *, tokens: Sequence[str] | None = None
) -> str:
    """A grid of attention matrices: one row per layer, one column per head, one scale of colours a row.

    Args:
      rows: a label and weights ``[heads, q, k]`` in [0, 1] for every layer.
      tokens: words of the positions, every one of which is shown; None shows some numbers.
    """
    heads, length = rows[0][1].shape[0], rows[0][1].shape[-1]
    words = None if tokens is None else [label(token, 16) for token in tokens]
    longest = 0.05 * max(map(len, words)) if words else 0.2
    side = max(1.7, INCHES_PER_TOKEN * length if words else 0.0)
    size = (heads * side + longest + 1.0, len(rows) * (side + longest + 0.45))
    figure, grid = _figure(len(rows), heads, size)
    grid = np.reshape(grid, (len(rows), heads))
    for (name, weights), line in zip(rows, grid, strict=True):
        for head, axes in enumerate(line):
            image = axes.imshow(
                weights[head], cmap="magma_r", vmin=0, vmax=max(weights.max(), 1e-6)
            )
            axes.set_title(f"{label(name)}, head {head + 1}", fontsize=9, color=INK)
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
    return _svg(figure)


def _figure(rows: int, columns: int, size: tuple[float, float]) -> Any:
    from matplotlib import pyplot

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
