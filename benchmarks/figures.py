"""Figures of the front page as SVG files, for light and dark, and for wide and narrow screens."""

from __future__ import annotations

import io
import pathlib
import re
from collections.abc import Callable

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks import report

COLORS = {
    "ours": ("#1f6fb4", "#6db3f2"),
    "other": ("#cc5f0a", "#f5a25a"),
    "baseline": ("#8a949e", "#8a949e"),
    "line": ("#a9b3bd", "#6b7682"),
    "text": ("#1c232a", "#dde4ea"),
}
"""The colors of figures by name, for a light and for a dark background."""

OURS, OTHER, BASELINE, LINE = (f"#0000c{i}" for i in range(4))
"""Colors to draw with. `save` replaces them by those of `COLORS`, which depend on the color scheme."""

NARROW = "-narrow"
"""What the names of figures for phones end with."""


def save(draw: Callable[[bool], Figure], path: pathlib.Path) -> None:
    """Writes a figure for wide screens and one for phones, ``NAME-narrow.svg``.

    The background is transparent, text stays text, and the same numbers make the same files.

    Args:
      draw: returns the figure. Its argument is whether the figure is for narrow screens.
      path: the SVG file of the wide figure.
    """
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": path.stem,
        "font.family": "sans-serif",
        "axes.edgecolor": LINE,
        "xtick.color": LINE,
        "xtick.labelcolor": "black",
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    for narrow in (False, True):
        buffer = io.StringIO()
        with mpl.rc_context(style):
            draw(narrow).savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        file = path.with_stem(path.stem + NARROW) if narrow else path
        report.write_file(file, with_color_scheme(buffer.getvalue()))


def with_color_scheme(svg: str) -> str:
    """Replaces the colors of an SVG by variables that have other values on a dark background."""
    names = list(COLORS)
    svg = re.sub(
        r"#0000c(\d)",
        lambda match: f"var(--{names[int(match[1])]}, {COLORS[names[int(match[1])]][0]})",
        svg,
    )
    light, dark = (
        " ".join(f"--{name}: {colors[scheme]};" for name, colors in COLORS.items())
        for scheme in (0, 1)
    )
    style = (
        "<style>\n"
        f"  svg {{ {light} }}\n"
        f"  @media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}\n"
        "  text { fill: var(--text); }\n"
        " </style>\n "
    )
    head, start, remainder = svg.partition("<defs>")
    return f"{head}{style}{start}{remainder}"
