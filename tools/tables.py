"""Writes the tables of the documentation that are generated from the package.

Run ``python -m tools.tables``.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable

from tools.tasks_table import tasks_table
from tools.variants_table import variants_table

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
TABLES: dict[str, Callable[[], str]] = {"tasks": tasks_table, "variants": variants_table}
"""The functions that return the generated tables, by the names of the tables.

The table NAME is written between the lines ``<!-- NAME -->`` and ``<!-- /NAME -->`` of NAME.md.
"""


def renewed(name: str) -> tuple[pathlib.Path, str]:
    """Returns the path and the new text of the page that contains a table."""
    path = DOCS / f"{name}.md"
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    before, _, remainder = path.read_text(encoding="utf-8").partition(begin)
    _, _, after = remainder.partition(end)
    return path, f"{before}{begin}{TABLES[name]()}{end}{after}"


if __name__ == "__main__":
    for name in TABLES:
        path, text = renewed(name)
        path.write_text(text, encoding="utf-8")
