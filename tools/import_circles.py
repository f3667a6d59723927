"""Finds modules of the package that import each other, directly or through other modules.

Imports inside functions count. Imports that only type checkers read also count, because readers of
the code follow them too. The program prints every circle and fails if there is one:

python -m tools.import_circles
"""

from __future__ import annotations

import sys

import grimp

from tools.public_names import PACKAGE


def import_circles(graph: grimp.ImportGraph) -> list[tuple[str, ...]]:
    """Returns circles of imports, such as ``(a, b, a)`` if the modules a and b import each other.

    Every import that is part of a circle is in at least one of the circles that are returned. A
    circle is as short as the imports allow. Every circle begins with the alphabetically first of
    its names.
    """
    circles = set()
    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            chain = graph.find_shortest_chain(importer=imported, imported=importer)
            if chain is not None:
                # The shortest chain leads from the imported module back to the importer.
                first = chain.index(min(chain))
                circles.add((*chain[first:], *chain[: first + 1]))
    return sorted(circles)


if __name__ == "__main__":
    # Do not use a cache, because the package may have changed since the last call.
    found = import_circles(
        grimp.build_graph(PACKAGE, exclude_type_checking_imports=False, cache_dir=None)
    )
    for circle in found:
        print("These modules import each other:", " → ".join(circle))
    if found:
        sys.exit(
            "Move what the modules share to a module that both import, or pass it as an argument."
        )
