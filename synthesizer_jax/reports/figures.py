"""Creates the sections, tables and charts of an HTML page. Matplotlib draws the charts as SVG."""

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
"""The placeholder for the color ``--c9`` of the style sheet.

Charts are drawn with the placeholders ``#0000c1`` to ``#0000c9``. The function `to_svg` replaces
the placeholders by the variables ``--c1`` to ``--c9`` of the style sheet. The charts therefore have
the colors of the page, even in dark mode.
"""

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
    "text.parse_math": False,  # a dollar sign must not start a formula
    "svg.fonttype": "none",  # write text as SVG text, not as paths
    "svg.hashsalt": "report",
}

Line: TypeAlias = tuple[Sequence[float] | np.ndarray, ...]
"""The x and y of a line, and for a band also the lowest y and the highest y, of equal length."""


class Cell(NamedTuple):
    """A cell of a table, or a part of a cell that has several parts.

    Attributes:
      text: the text.
      kind: the style of the cell: ``best``, ``right``, ``wrong``, ``code``, or the color of a
        heading, ``c1`` to ``c8``.
      note: a note in smaller print below the text.
    """

    text: str
    kind: str = ""
    note: str = ""


class Section(NamedTuple):
    """A section of a page, with a text, charts and a table.

    Attributes:
      title: the heading of the section.
      text: the text below the heading.
      charts: the charts, as HTML.
      headings: the headings of the table's columns.
      rows: the rows of the table.
      numbers: whether all columns except the first contain numbers.
      folded: whether the contents of the section are hidden until the reader clicks on the heading.
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
    """Writes an HTML page, which ends with the versions of the libraries.

    The file is replaced atomically.

    Args:
      path: the HTML file.
      title: the title of the page.
      template: the name of a template of this package. The template must extend
        ``base.html.jinja``, which contains the style sheet.
      **variables: the variables of the template. The variables of ``page.html.jinja`` are
        ``sections``, a list of `Section`, and ``sentences``.
    """
    facts = {"synthesizer_jax": __version__, "Python": platform.python_version()}
    facts |= {name: importlib.metadata.version(name) for name in ("jax", "flax")}
    write_atomic(path, render(template, title=title, facts=facts, **variables))


def render(template: str, **variables: object) -> Markup:
    """Renders a template of this package with the given variables.

    All texts are escaped, because the texts in runs may contain HTML. Only objects of the class
    `Markup` are not escaped.

    Args:
      template: the name of the template.
      **variables: the variables of the template. Each variable must be given.
    """
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
    """Draws lines. If a line consists of four sequences, a band is drawn around the line.

    Args:
      lines: the lines by name. Each line has its own color.
      x_label: the label of the x axis.
      y_label: the label of the y axis.
      points: further lines, which have markers. Each of these lines has the same color as the line
        in `lines` with the same name.
      logarithmic: whether the y axis may be logarithmic. The y axis becomes logarithmic if all
        values of y are positive, and the largest value is at least five times the smallest.
      logarithmic_x: whether the x axis is logarithmic.
      title: the title of the chart.
    """
    with drawing_style():
        columns = 1 if max(map(len, lines)) > 20 else 2
        height = 2.8 + 0.17 * -(-len(lines) // columns)  # the height includes the legend
        figure = Figure(figsize=(4.8, height), layout="constrained")
        axes = figure.subplots()
        for i, (name, line) in enumerate(lines.items()):
            color = f"C{i}"
            marked = (points or {}).get(name, ([], []))
            dash = "-" if i < 8 else "--"  # from the ninth line on, the eight colors repeat
            axes.plot(*line[:2], dash, color=color, linewidth=1.4, label=short_label(name))
            axes.plot(*marked[:2], "osD^vPX*"[i % 8] + dash, color=color, markersize=4)
            for drawn in (line, marked):
                if len(drawn) == 4:
                    x, _, low, high = drawn
                    axes.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)
        axes.set(xlabel=x_label, ylabel=y_label)
        every_y = [y for line in (*lines.values(), *(points or {}).values()) for y in line[1]]
        if logarithmic and 0 < 5 * min(every_y, default=0) <= max(every_y):
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
    """Shows matrices as tables, in which a cell is darker the farther its number is from 0.

    Negative and positive numbers have different colors. The cell is empty if the number is NaN.
    Rows are numbered from 1. Columns are numbered from 1 if they have no names.

    Args:
      panels: matrices of the same shape, by title.
      x_label: the label of the columns.
      y_label: the label of the rows.
      columns: the names of the columns.
      number: the format of the numbers.
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
    """Shortens a text to a single line of at most 40 characters, for the label of a chart.

    If the text is longer, the middle of the text is left out.
    """
    line = escape_controls(" ".join(text.split()))
    return line if len(line) <= 40 else f"{line[:19]}…{line[-20:]}"


@contextlib.contextmanager
def drawing_style() -> Iterator[None]:
    """Returns a context manager in which Matplotlib draws charts in the style of the pages."""
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        # The page uses the fonts of the browser, so ignore characters that Matplotlib's font lacks.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        yield


def to_svg(figure: Figure, label: str = "") -> Markup:
    """Converts a figure to SVG that has the colors of the page and adapts to the page's width.

    Args:
      figure: the figure.
      label: a description that screen readers read aloud.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    svg = re.sub("<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
    # Remove the ids of groups, because all charts use the same ids, but an id may occur only once
    # in a page.
    svg = re.sub(r' id="[A-Za-z.]+_\d+"', "", svg)
    # Remove the fixed width and height. The page determines the width, and the view box preserves
    # the proportions.
    opening = Markup(r'<svg role="img" aria-label="{}" \1').format(label.replace("\\", "/"))
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"', opening, svg, count=1, flags=re.S)
    # The SVG is safe HTML, because Matplotlib escapes texts.
    return Markup(re.sub("(?<=: )#0000(c[1-9])", r"var(--\1)", svg))
