"""Small figures of attention, as wide as a phone; `tiles` puts several side by side where there is room."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from synthesizer_jax.reports.figures import drawing_style, heat_maps, short_label, to_svg

WIDTH, MAPS = 3.6, 4
"""Inches of a figure; maps in a row of it."""


def tiles(charts: Iterable[Markup]) -> list[Markup]:
    """Returns one chart of figures side by side, one below the other on a phone; none of no figures."""
    inner = Markup("\n").join(map(Markup("<div>{}</div>").format, charts))
    columns = "grid-template-columns: repeat(auto-fill, minmax(min(100%, 280px), 1fr))"
    grid = f'<div class="tiles" style="display: grid; gap: 12px 24px; {columns}">\n{{}}\n</div>'
    return [Markup(grid).format(inner)] if inner else []


def _begin(title: str, height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    figure.suptitle(short_label(title), fontsize=9.5, x=0.02, ha="left")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def small_lines(
    title: str, lines: Mapping[str, Any], *, histogram: bool = False, **labels: str
) -> Markup:
    """Draws lines ``(x, y)`` by name from 0, or as filled steps over a logarithmic x axis.

    `labels` are `xlabel` and `ylabel`.
    """
    with drawing_style():
        figure, (axes,) = _begin(title, 2.3)
        for name, (x, y) in lines.items():
            if histogram:
                axes.fill_between(x, y, step="mid", alpha=0.35)
                axes.step(x, y, where="mid", linewidth=1.2, label=short_label(name))
            else:
                marker = "o-" if len(x) < 8 else "-"
                axes.plot(x, y, marker, linewidth=1.3, markersize=3, label=short_label(name))
        if histogram:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(100))
            axes.xaxis.set_major_formatter("{x:g}")
        values = np.concatenate([np.asarray(y, float) for _, y in lines.values()])
        low, high = min(0.0, np.nanmin(values, initial=0.0)), np.nanmax(values, initial=0.0)
        axes.set(ylim=(1.08 * low, 1.08 * high or 1.0), **labels)
        if len(lines) > 1:
            axes.legend(frameon=False, fontsize=7.5, ncols=2 if len(lines) > 4 else 1)
        return to_svg(figure)


def number_grid(
    title: str,
    values: np.ndarray,
    *,
    x_label: str,
    y_label: str,
    scale: float = 100.0,
    columns: Sequence[str] = (),
) -> Markup:
    """Shows a matrix as numbers, times a scale; rows and columns without names are counted from 1."""
    rows, width = values.shape
    return heat_maps(
        {title: scale * values},
        x_label=x_label,
        y_label=y_label,
        names=(columns or [*range(1, width + 1)], [*range(1, rows + 1)]),
        number="{:.0f}" if scale == 100.0 else "{:.2f}",
    )


def weight_maps(title: str, maps: np.ndarray) -> Markup:
    """Draws maps ``[heads, q, k]``, queries down and keys across, each from 0 to its largest weight."""
    rows, ratio = -(-len(maps) // MAPS), min(1.3, max(0.5, maps.shape[1] / maps.shape[2]))
    with drawing_style():
        figure, grid = _begin(title, 0.4 + rows * (0.22 + WIDTH / MAPS * ratio * 0.9), rows, MAPS)
        for i, axes in enumerate(grid):
            axes.set(xticks=[], yticks=[])
            axes.axis("on" if i < len(maps) else "off")
            if i < len(maps):
                axes.imshow(maps[i], cmap="BuPu", vmin=0, aspect="auto", interpolation="nearest")
                axes.set_title(f"head {i + 1}", fontsize=7, pad=2)
        return to_svg(figure)
