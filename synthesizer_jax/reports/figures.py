"""Pages of HTML in one style: their sections, tables, and charts that Matplotlib draws as inline SVG."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import pathlib
import platform
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jinja2
import matplotlib as mpl
import numpy as np
from cycler import cycler
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from synthesizer_jax.base.files import write_atomic
from synthesizer_jax.base.messages import escape_controls
from synthesizer_jax.version import __version__

FAINT = "#0000c9"
"""Stands for ``--c9`` of the style sheet, as other colors for its other variables: charts follow it."""

STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": cycler(color=[f"#0000c{i + 1}" for i in range(8)]),
    "axes.edgecolor": FAINT,
    "axes.grid": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.4,
    "text.parse_math": False,  # dollar signs do not start formulas
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "report",
}

Line: TypeAlias = tuple[Sequence[float] | np.ndarray, ...]
"""Equally many x and y, and for a band the lowest and the highest y."""


class Cell(NamedTuple):
    """A cell of a table, or one below another, with a smaller note below the text.

    Its kind is ``best``, ``right``, ``wrong``, ``code``, or a heading's color ``c1`` to ``c8``.
    """

    text: str
    kind: str = ""
    note: str = ""


class Section(NamedTuple):
    """A part of a page: charts, and the headings and rows of a table.

    `numbers` tells that all columns but the first are numbers, and `folded` that a click opens it.
    """

    title: str
    text: str
    charts: Sequence[Markup] = ()
    headings: Sequence[str | Cell] = ()
    rows: Sequence[Sequence[str | Cell]] = ()
    numbers: bool = True
    folded: bool = False


def write_page(
    path: pathlib.Path, *, title: str, template: str = "page.html.jinja", **variables: object
) -> None:
    """Writes a page atomically, with the versions of the libraries at its end.

    Its template extends ``base.html.jinja``, which has the style sheet; ``page.html.jinja`` takes
    ``sections`` of `Section` and ``sentences`` as variables; see `render`.
    """
    facts = {"synthesizer_jax": __version__, "Python": platform.python_version()}
    facts |= {name: importlib.metadata.version(name) for name in ("jax", "flax")}
    write_atomic(path, render(template, title=title, facts=facts, **variables))


def render(template: str, **variables: object) -> Markup:
    """Returns what a template of this package makes of variables; all text but `Markup` is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("synthesizer_jax.reports", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda text: text if isinstance(text, Markup) else escape_controls(str(text)),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return Markup(environment.get_template(template).render(**variables))


def line_chart(
    lines: Mapping[str, Line],
    *,
    x_label: str,
    y_label: str,
    points: Mapping[str, Line] | None = None,
    logarithmic: bool = True,
    logarithmic_x: bool = False,
    title: str = "",
) -> Markup:
    """Draws lines by name, each in its own color, with bands where they have some.

    `points` are lines with markers in the same colors, by the names of the others. The y axis may be
    `logarithmic` where the largest y is five times the smallest or more.
    """
    with drawing_style():
        columns = 1 if max(map(len, lines)) > 20 else 2
        height = 2.8 + 0.17 * -(-len(lines) // columns)  # with the legend
        figure = Figure(figsize=(4.8, height), layout="constrained")
        axes = figure.subplots()
        for i, (name, line) in enumerate(lines.items()):
            color, marked = f"C{i}", (points or {}).get(name, ([], []))
            dash = "-" if i < 8 else "--"  # colors are used again
            axes.plot(*line[:2], dash, color=color, linewidth=1.4, label=short_label(name))
            axes.plot(*marked[:2], "osD^vPX*"[i % 8] + dash, color=color, markersize=4)
            for x, *_, low, high in (both for both in (line, marked) if len(both) == 4):
                axes.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)
        drawn = [y for line in (*lines.values(), *(points or {}).values()) for y in line[1]]
        axes.set(xlabel=x_label, ylabel=y_label)
        if logarithmic and 0 < 5 * min(drawn, default=0) <= max(drawn):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_minor_locator(NullLocator())
        if logarithmic_x:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(100))
            axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.tick_params(length=0)
        axes.set_title(short_label(title), loc="left", fontweight="bold", fontsize=10)
        if len(lines) > 1:
            figure.legend(loc="outside upper left", frameon=False, ncols=columns)
        return to_svg(figure, title or y_label)


def heat_maps(
    panels: Mapping[str, np.ndarray],
    *,
    x_label: str,
    y_label: str,
    columns: Sequence[str] = (),
    number: str = "{:.2f}",
) -> Markup:
    """Shows matrices of the same shape as tables whose cells are shaded from 0; NaN is an empty cell.

    Negative numbers have another color.
    Rows, and columns without names, are counted from 1.
    """
    height, width = next(iter(panels.values())).shape
    return render(
        "heat_maps.html.jinja",
        panels={name: values.tolist() for name, values in panels.items()},
        most=max(1e-6, *(np.nanmax(np.abs(values)) for values in panels.values())),
        labels=(x_label, y_label),
        names=(columns or range(1, width + 1), range(1, height + 1)),
        number=number,
    )


def short_label(text: str) -> str:
    """Returns a name for a chart: one line, the middle of a longer one left out."""
    line = escape_controls(" ".join(text.split()))
    return line if len(line) <= 40 else f"{line[:19]}…{line[-20:]}"


@contextlib.contextmanager
def drawing_style() -> Iterator[None]:
    """Context manager in which charts are drawn in the style of the pages."""
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        # The browser's fonts are used, so characters missing in Matplotlib's font do not matter.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        yield


def to_svg(figure: Figure, label: str = "") -> Markup:
    """Returns a figure as SVG that follows the page's colors and width; `label` is what is read aloud."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    svg = re.sub("<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
    # Ids of groups would occur once in every chart of a page.
    svg = re.sub(r' id="[A-Za-z.]+_\d+"', "", svg)
    # The page sets the width; the view box keeps the proportions.
    opening = Markup(r'<svg role="img" aria-label="{}" \1').format(label.replace("\\", "/"))
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"', opening, svg, count=1, flags=re.S)
    return Markup(re.sub("(?<=: )#0000(c[1-9])", r"var(--\1)", svg))  # Matplotlib escapes text
