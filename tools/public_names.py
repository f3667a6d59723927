"""The public names of the package: what the `__init__.py` of its packages list in `__all__`.

The files are read, not imported, because the environment of the documentation has neither JAX nor Flax.
"""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = "synthesizer_jax"


def public_names() -> dict[str, list[str]]:
    """Returns the names in the `__all__` of every package that has one, by the package's full name.

    Raises:
      ValueError: an `__all__` is computed. Readers of the source, such as type checkers and the builder of
        the reference, see the names of a literal list only.
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
                        f"{path}, line {node.lineno}: __all__ is computed; write a literal list of "
                        "names"
                    ) from None
    return names


def imported_names(package: str) -> Iterator[tuple[str, list[str]]]:
    """Yields the modules of a package that its `__init__.py` imports from, and the names it imports."""
    path = ROOT / package.replace(".", "/") / "__init__.py"
    tree = ast.parse(path.read_text(encoding="utf-8")) if path.exists() else ast.parse("")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}."):
            yield str(node.module), [alias.name for alias in node.names]


def hidden_names(package: str) -> dict[str, str]:
    """Returns the public names of a package that also name one of its modules, and their full names.

    ``synthesizer_jax.attention.attend`` is a function when it is imported, but readers of the source find
    the module `attend.py` under this name.
    """
    folder = ROOT / package.replace(".", "/")
    return {
        name: f"{module}.{name}"
        for module, names in imported_names(package)
        for name in names
        if (folder / f"{name}.py").exists()
    }


def names_without_entry(site: pathlib.Path) -> list[str]:
    """Returns the full public names to which no element of the built reference belongs.

    Args:
      site: the folder of the built site. The element of a name has the name as its HTML id.
    """
    anchors: set[str] = set()
    for page in (site / "reference").glob("*.html"):
        anchors.update(re.findall(r'\bid="([\w.]+)"', page.read_text(encoding="utf-8")))
    full_names = (
        f"{package}.{name}" for package, names in public_names().items() for name in names
    )
    return [name for name in full_names if name not in anchors]
