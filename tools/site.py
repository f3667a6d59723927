"""Pages of the site (mkdocs.yml) that do not lie in docs/: those of the root, and the reference."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).resolve().parents[1]
OF_ROOT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages of the root, with links as from docs/, and a page for every module that nav names."""
    for name, page in OF_ROOT.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        text = re.sub(r"\]\((?:docs/)?([^)]+)\)", lambda m: f"]({link(m[1])})", text)
        files.append(File.generated(config, page, content=text))
    for page in pages(config.nav):
        if page.startswith("reference/"):
            module = page.removeprefix("reference/").removesuffix(".md")
            body = exported_names() if module == "synthesizer_jax" else reference(module)
            files.append(File.generated(config, page, content=f"# {module}\n\n{body}\n"))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Links the pages of the root by their names in the site."""
    return re.sub(r"\]\(\.\./([^)]+)\)", lambda m: f"]({link(m[1])})", markdown)


def link(target: str) -> str:
    """Returns the address in the site of a target relative to the root or docs/."""
    return OF_ROOT.get(target, target)


def pages(nav: Any) -> Iterator[str]:
    """Yields the pages that a navigation names."""
    if isinstance(nav, str):
        yield nav
    for part in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from pages(part)


def imported_names(module: str) -> Iterator[tuple[str, list[str]]]:
    """Yields the modules that a package imports from, and the public names."""
    path = ROOT / module.replace(".", "/") / "__init__.py"
    tree = ast.parse(path.read_text(encoding="utf-8")) if path.exists() else ast.parse("")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{module}."):
            yield str(node.module), [x.name for x in node.names if x.name[0] not in "_*"]


def hidden_names(module: str) -> dict[str, str]:
    """Returns the names of a package that modules of the same name hide, and where they are defined."""
    package = ROOT / module.replace(".", "/")
    return {
        name: f"{source}.{name}"
        for source, names in imported_names(module)
        for name in names
        if (package / f"{name}.py").exists()
    }


def reference(module: str) -> str:
    """Returns the directives that document a module."""
    shown = "    options: {show_root_heading: true, show_root_toc_entry: true, heading_level: 2}"
    hidden = [f"::: {name}\n{shown}" for name in hidden_names(module).values()]
    return "\n\n".join([f"::: {module}", *hidden])


def exported_names() -> str:
    """Returns the package's names, linked to the modules that define them."""
    lines = ["What `import synthesizer_jax` offers; the modules hold more.\n"]
    for module, names in imported_names("synthesizer_jax"):
        hidden = hidden_names(module)
        targets = {name: hidden.get(name, f"{module}.{name}") for name in names}
        linked = ", ".join(f"[`{name}`][{target}]" for name, target in targets.items())
        lines += [f"- `{module}`: {linked}"] if names else []
    return "\n".join(lines)
