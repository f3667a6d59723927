"""Pages of the site (mkdocs.yml) that do not lie in docs/: those of the root, and the reference."""

from __future__ import annotations

import ast
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import typer
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click

ROOT = pathlib.Path(__file__).resolve().parents[1]
OF_ROOT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}

WIDE = ("results.md", "performance.md")
"""Pages of wide tables, which take the place of the table of contents."""


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages of the root, with links as from docs/, and a page for every module that nav names."""
    for name, page in OF_ROOT.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        text = re.sub(r"\]\((?:docs/)?([^)]+)\)", lambda m: f"]({link(m[1])})", text)
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "commands.md", content=commands()))
    for page in pages(config.nav):
        if page.startswith("reference/"):
            module = page.removeprefix("reference/").removesuffix(".md")
            body = exported_names() if module == "synthesizer_jax" else reference(module)
            files.append(File.generated(config, page, content=f"# {module}\n\n{body}\n"))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: object) -> str:
    """Links the pages of the root by their names in the site, and names pages by titles, not by files."""
    if page.file.src_uri in WIDE:
        page.meta["hide"] = ["toc"]
    markdown = re.sub(r"\]\(\.\./([^)]+)\)", lambda m: f"]({link(m[1])})", markdown)
    return re.sub(r"\[[\w/]+\.md\]\(([\w/]+\.md)", lambda m: f"[{title(files, m[1])}]({m[1]}", markdown)


def on_page_content(html: str, **_: object) -> str:
    """Links full names, such as those of the Linen classes behind NNX's, to the reference."""
    name = r"<code>(synthesizer_jax(?:\.\w+)+)</code>"
    return re.sub(name, r'<autoref identifier="\1" optional><code>\1</code></autoref>', html)


def link(target: str) -> str:
    """Returns the address in the site of a target relative to the root or docs/."""
    return OF_ROOT.get(target, target)


def title(files: Files, page: str) -> str:
    """Returns the first heading of a page."""
    file = files.get_file_from_path(page)
    return file.content_string.partition("\n")[0].lstrip("# ") if file else page


def pages(nav: Any) -> Iterator[str]:
    """Yields the pages that a navigation names."""
    if isinstance(nav, str):
        yield nav
    for part in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from pages(part)


def commands() -> str:
    """Returns the page of all commands and options, which their parsers describe."""
    sys.path.insert(0, str(ROOT))
    from synthesizer_jax.cli.main import app
    from tpu_scripts.launch import make_parser

    program = typer.main.get_command(app)
    context = typer.Context(program, info_name="synthesizer-jax")
    described = get_docs_for_click(obj=program, ctx=context, name="synthesizer-jax", indent=1)
    parser = make_parser()
    parser.prog = "launch.py"
    launcher = f"## `tpu_scripts/launch.py`\n\n```text\n{parser.format_help()}```\n"
    return f"# Commands and options\n\n{described}\n{launcher}"


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
