"""Writes figures as SVG files, for light and dark schemes and for wide and narrow screens."""

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
"""The colors of figures by name. Each has a value for light and for dark backgrounds."""

OURS, OTHER, BASELINE, LINE = (f"#0000c{i}" for i in range(4))
"""The colors that figures are drawn with.

The colors `OURS`, `OTHER`, `BASELINE` and `LINE` are placeholders. `save` replaces them with the
colors of `COLORS`, which depend on the color scheme.
"""

NARROW = "-narrow"
"""The suffix of the names of figures for narrow screens."""


def save(draw: Callable[[bool], Figure], path: pathlib.Path) -> None:
    """Writes a figure for wide screens, and ``NAME-narrow.svg`` for narrow screens such as phones.

    The background is transparent. The SVG contains text as text, not as shapes. The same numbers
    always give identical files.

    Args:
      draw: a function that returns the figure. The argument of `draw` says whether the figure is
        for narrow screens.
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
    """Replaces the colors of an SVG with CSS variables, whose values depend on the color scheme."""
    names = list(COLORS)

    def variable(match: re.Match[str]) -> str:
        """Returns the CSS variable for a placeholder, which falls back to the light color."""
        name = names[int(match[1])]
        return f"var(--{name}, {COLORS[name][0]})"

    svg = re.sub(r"#0000c(\d)", variable, svg)
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
