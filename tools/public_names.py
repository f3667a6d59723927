"""Finds the package's public names, which the `__init__.py` files list in `__all__`.

The tool reads the files instead of importing them, because the environment of the documentation has
neither JAX nor Flax.
"""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = "synthesizer_jax"


def public_names() -> dict[str, list[str]]:
    """Returns a dictionary from the full names of packages to the names in their `__all__`.

    Raises:
      ValueError: if an `__all__` is computed. Programs that read the source, such as type checkers
        and the builder of the reference, can only read a literal list of names.
    """
    names = {}
    for path in sorted((ROOT / PACKAGE).rglob("__init__.py")):
        package = ".".join(path.relative_to(ROOT).parent.parts)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
                try:
                    names[package] = ast.literal_eval(node.value)
                except ValueError:
                    raise ValueError(
                        f"{path}, line {node.lineno}: __all__ is computed. Write a literal list of "
                        "names."
                    ) from None
    return names


def imported_names(package: str) -> Iterator[tuple[str, list[str]]]:
    """Yields each module that a package's `__init__.py` imports from, and the imported names."""
    path = ROOT / package.replace(".", "/") / "__init__.py"
    if not path.exists():
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}."):
            yield str(node.module), [alias.name for alias in node.names]


def names_without_entry(site: pathlib.Path) -> list[str]:
    """Returns the full public names that have no entry in the built reference.

    Args:
      site: the folder of the built site, in which the HTML id of an entry is the full name.
    """
    anchors: set[str] = set()
    for page in (site / "reference").glob("*.html"):
        anchors.update(re.findall(r'\bid="([\w.]+)"', page.read_text(encoding="utf-8")))
    full_names = (
        f"{package}.{name}" for package, names in public_names().items() for name in names
    )
    return [name for name in full_names if name not in anchors]
