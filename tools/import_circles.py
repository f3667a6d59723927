"""Finds modules of the package that import each other, directly or through other modules.

Imports inside functions count, too. So do imports that only type checkers read, because readers of
the code follow them as well. The program prints every circle, and fails if it finds one:

python -m tools.import_circles
"""

from __future__ import annotations

import sys

import grimp

from tools.public_names import PACKAGE


def import_circles(graph: grimp.ImportGraph) -> list[tuple[str, ...]]:
    """Returns circles of imports, such as ``(a, b, a)`` if the modules a and b import each other.

    The function does not return all circles. For every import that is part of a circle, it returns
    a shortest circle that contains the import. A circle begins with the module whose name is
    alphabetically first.
    """
    circles = set()
    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            chain = graph.find_shortest_chain(importer=imported, imported=importer)
            if chain is not None:
                # This chain leads from the imported module back to the importer. Rotate it so that
                # it begins with its smallest name.
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
