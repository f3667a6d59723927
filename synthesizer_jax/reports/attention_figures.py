"""Small figures of attention, as wide as a phone; `tiles` puts several side by side where there is room."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from synthesizer_jax.reports.figures import _label, _style, _to_svg

WIDTH = 3.6
"""Inches."""

COLUMNS = 4
"""Maps in a row."""


def tiles(charts: Iterable[Markup]) -> list[Markup]:
    """Returns one chart with figures side by side, one below the other on a phone; none of no figures."""
    inner = Markup("\n").join(map(Markup("<div>{}</div>").format, charts))
    columns = "grid-template-columns: repeat(auto-fill, minmax(min(100%, 280px), 1fr))"
    grid = f'<div class="tiles" style="display: grid; gap: 12px 24px; {columns}">\n{{}}\n</div>'
    return [Markup(grid).format(inner)] if inner else []


@contextlib.contextmanager
def _axes(title: str, height: float) -> Iterator[tuple[Figure, Axes]]:
    with _style():
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.subplots()
        figure.suptitle(_label(title), fontsize=9.5, x=0.02, ha="left")
        yield figure, axes


def small_lines(
    title: str,
    lines: Mapping[str, tuple[Sequence[float] | np.ndarray, Sequence[float] | np.ndarray]],
    *,
    x_label: str,
    y_label: str,
    logarithmic: bool = False,
    steps: bool = False,
) -> Markup:
    """Draws lines.

    Args:
      title: the title.
      lines: ``(x, y)`` by name.
      x_label: the label of the x axis.
      y_label: the label of the y axis.
      logarithmic: the scale of the x axis.
      steps: draws filled steps, of histograms.
    """
    with _axes(title, 2.3) as (figure, axes):
        for name, (x, y) in lines.items():
            if steps:
                axes.fill_between(x, y, step="mid", alpha=0.35)
                axes.step(x, y, where="mid", linewidth=1.2, label=_label(name))
            else:
                marker = "o-" if len(x) < 8 else "-"
                axes.plot(x, y, marker, linewidth=1.3, markersize=3, label=_label(name))
        axes.set(xlabel=x_label, ylabel=y_label)
        if logarithmic:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(100))
            axes.xaxis.set_major_formatter("{x:g}")
        highest = max(float(np.nanmax(y, initial=0.0)) for _, y in lines.values())
        axes.set_ylim(0, 1.08 * highest or None)
        if len(lines) > 1:
            axes.legend(frameon=False, fontsize=7.5, ncols=2 if len(lines) > 4 else 1)
        return _to_svg(figure)


def number_grid(
    title: str,
    values: np.ndarray,
    *,
    x_label: str,
    y_label: str,
    percent: bool = True,
    columns: Sequence[str] = (),
) -> Markup:
    """Draws a matrix as numbers in cells of color; NaN is an empty cell, negative numbers are red.

    Args:
      title: the title.
      values: the matrix; a color is full at 1 and −1, or at the largest absolute value.
      x_label: what columns are, counted from 1 unless they have names.
      y_label: what rows are, counted from 1.
      percent: shows numbers in percent.
      columns: names of the columns.
    """
    rows, width = values.shape
    with _axes(title, 0.75 + 0.24 * rows) as (figure, axes):
        most = 1.0 if percent else max(1e-6, float(np.nanmax(np.abs(values), initial=0.0)))
        extent = (0.5, width + 0.5, rows + 0.5, 0.5)
        axes.imshow(
            values, cmap="RdBu", vmin=-1.6 * most, vmax=1.6 * most, aspect="auto", extent=extent
        )
        axes.set(xlabel=x_label, ylabel=y_label)
        axes.set_xticks(range(1, width + 1), columns or None)
        axes.set_yticks(range(1, rows + 1))
        axes.tick_params(length=0, labelsize=7.5)
        if max(values.shape) <= 16:
            size = 8 if width <= 8 else 6.5
            for (i, j), value in np.ndenumerate(values):
                text = f"{100 * value:.0f}" if percent else f"{value:.2f}"
                if not np.isnan(value):
                    axes.text(j + 1, i + 1, text, ha="center", va="center", fontsize=size)
        return _to_svg(figure)


def weight_maps(title: str, maps: np.ndarray) -> Markup:
    """Draws maps ``[heads, q, k]``, queries down and keys across, each from 0 to its largest weight."""
    heads = len(maps)
    columns = min(COLUMNS, heads)
    rows = -(-heads // columns)
    ratio = min(1.3, max(0.5, maps.shape[1] / maps.shape[2]))
    with _style():
        size = WIDTH, 0.4 + rows * (0.22 + WIDTH / columns * ratio * 0.9)
        figure = Figure(figsize=size, layout="constrained")
        figure.suptitle(_label(title), fontsize=9.5, x=0.02, ha="left")
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat:
            axes.axis("off")
        for i, (head, axes) in enumerate(zip(maps, grid.flat, strict=False)):
            axes.axis("on")
            axes.imshow(head, cmap="BuPu", vmin=0, aspect="auto", interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            axes.set_title(f"head {i + 1}", fontsize=7, pad=2)
        return _to_svg(figure)
