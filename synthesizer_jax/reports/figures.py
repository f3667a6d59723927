"""Pages of HTML: their sections, tables, and charts that Matplotlib draws as inline SVG."""

from __future__ import annotations

import contextlib
import io
import pathlib
import platform
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import flax
import jax
import jinja2
import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from synthesizer_jax.files import write_atomic
from synthesizer_jax.messages import escape_controls
from synthesizer_jax.version import __version__

STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.parse_math": False,  # dollar signs do not start formulas
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "report",
}


class Cell(NamedTuple):
    """A cell of a table that is shown in another way: as ``best``, ``right`` or ``wrong``."""

    text: str
    kind: str


class Section(NamedTuple):
    """A part of a page.

    Attributes:
      title: its heading.
      text: what it shows.
      charts: figures from this module.
      headings: those of a table.
      rows: its rows, a string or `Cell` for each heading.
      numbers: whether all columns but the first are numbers.
      folded: whether a click opens it.
    """

    title: str
    text: str
    charts: Sequence[Markup] = ()
    headings: Sequence[str] = ()
    rows: Sequence[Sequence[str | Cell]] = ()
    numbers: bool = True
    folded: bool = False


def write_page(
    path: pathlib.Path,
    *,
    title: str,
    sections: Sequence[Section],
    sentences: Sequence[str] = (),
) -> None:
    """Writes a page atomically, with the versions of the libraries at its end; all text is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("synthesizer_jax.reports", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda text: text if isinstance(text, Markup) else escape_controls(str(text)),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    facts = {
        "synthesizer_jax": __version__,
        "jax": jax.__version__,
        "flax": flax.__version__,
        "Python": platform.python_version(),
    }
    page = environment.get_template("page.html.jinja").render(
        title=title, sentences=sentences, sections=sections, facts=facts
    )
    write_atomic(path, page)


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


def heat_maps(panels: Mapping[str, np.ndarray], *, x_label: str, y_label: str) -> Markup:
    """Draws matrices of the same shape as numbers in colors from 0; NaN is an empty cell.

    Args:
      panels: the matrices by name.
      x_label: what their columns are, counted from 1.
      y_label: what their rows are, counted from 1.
    """
    height, width = next(iter(panels.values())).shape
    size = len(panels) * (0.42 * width + 0.5) + 0.8, 0.3 * height + 0.8
    with _style():
        figure = Figure(figsize=size, layout="constrained")
        (row,) = figure.subplots(1, len(panels), squeeze=False)
        most = max(1e-6, *(np.nanmax(values) for values in panels.values()))
        for (title, values), axes in zip(panels.items(), row, strict=True):
            extent = (0.5, width + 0.5, height + 0.5, 0.5)
            # The scale ends above the largest number, so that black text is readable on it.
            image = axes.imshow(
                values, cmap="Blues", vmin=0, vmax=1.3 * most, aspect="auto", extent=extent
            )
            axes.set_title(_label(title), fontsize=9)
            axes.locator_params(integer=True)
            axes.tick_params(length=0)
            for (i, j), value in np.ndenumerate(values):
                if not np.isnan(value):
                    axes.text(j + 1, i + 1, f"{value:.2f}", ha="center", va="center", fontsize=8)
        figure.colorbar(image, ax=list(row), shrink=0.8, pad=0.01)
        row[0].set(xlabel=x_label, ylabel=y_label)
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
