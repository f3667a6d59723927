"""Charts as inline SVG, drawn by Matplotlib, and the Jinja environment of the pages."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from synthesizer_jax.messages import escape_controls

STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.parse_math": False,  # dollar signs do not start formulas
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "report",
}

ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("synthesizer_jax.reports", "."),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    finalize=lambda value: value if isinstance(value, Markup) else escape_controls(str(value)),
    trim_blocks=True,
    lstrip_blocks=True,
)


def line_chart(
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    x_label: str,
    y_label: str,
    points: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
    logarithmic: bool = True,
) -> Markup:
    """Draws lines.

    Args:
      lines: ``(x, y)`` by name.
      x_label: the label of the x axis.
      y_label: the label of the y axis, with its unit.
      points: ``(x, y)`` by the names of the lines.
      logarithmic: the scale of the y axis.
    """
    with _style():
        figure = Figure(figsize=(7.2, 3.2), layout="constrained")
        axes = figure.subplots()
        for name, line in lines.items():
            (drawn,) = axes.plot(*line, linewidth=1.4, label=_label(name))
            if points and name in points:
                held_out = f"{_label(name)}, held out"
                axes.plot(*points[name], "o-", color=drawn.get_color(), label=held_out)
        axes.set(xlabel=x_label, ylabel=y_label, yscale="log" if logarithmic else "linear")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
        axes.legend(frameon=False, ncols=2)
        return _to_svg(figure)


def heat_maps(
    rows: Mapping[str, Sequence[np.ndarray]],
    columns: Sequence[str],
    *,
    x_label: str,
    y_label: str,
    numbers: bool = False,
) -> Markup:
    """Draws matrices as colors from 0, one color scale per row of the figure.

    Args:
      rows: for each row of the figure its name and matrices of the same shape; NaN is an empty cell.
      columns: the names of the columns.
      x_label: what the columns of the matrices are, counted from 1.
      y_label: what their rows are, counted from 1.
      numbers: whether to write the numbers into the cells.
    """
    height, width = next(iter(rows.values()))[0].shape
    cell = (0.42, 0.3) if numbers else (2.2 / width, 2.2 / height)
    size = len(columns) * (cell[0] * width + 0.5) + 0.8, len(rows) * (cell[1] * height + 0.8)
    with _style():
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(len(rows), len(columns), squeeze=False)
        for (name, panels), line in zip(rows.items(), grid, strict=True):
            most = max(1e-6, *(np.nanmax(values) for values in panels))
            for title, values, axes in zip(columns, panels, line, strict=True):
                image = axes.imshow(
                    values,
                    cmap="Blues",
                    vmin=0,
                    vmax=1.3 * most if numbers else most,
                    aspect="auto",
                    extent=(0.5, width + 0.5, height + 0.5, 0.5),
                )
                axes.set_title(_label(f"{name} {title}".strip()), fontsize=9)
                axes.locator_params(integer=True)
                axes.tick_params(length=0)
                for (i, j), value in np.ndenumerate(values) if numbers else ():
                    if not np.isnan(value):
                        axes.text(
                            j + 1, i + 1, f"{value:.2f}", ha="center", va="center", fontsize=8
                        )
            line[0].set_ylabel(y_label)
            figure.colorbar(image, ax=list(line), shrink=0.8, pad=0.01)
        grid[-1][0].set_xlabel(x_label)
        return _to_svg(figure)


def _label(text: str) -> str:
    """Returns a name for a chart: one line, the middle of a longer one left out."""
    line = escape_controls(" ".join(text.split()))
    return line if len(line) <= 40 else f"{line[:19]}…{line[-20:]}"


@contextlib.contextmanager
def _style() -> Iterator[None]:
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        # The browser's fonts are used, so characters missing in Matplotlib's font do not matter.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        yield


def _to_svg(figure: Figure) -> Markup:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    svg = text[text.index("<svg") :]
    # The page sets the width; the view box keeps the proportions.
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"', r"<svg \1", svg, count=1, flags=re.S)
    return Markup(svg)  # Matplotlib escapes text
