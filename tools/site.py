"""Adds generated pages to the site: the root's pages, the commands and the API reference."""

from __future__ import annotations

import logging
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import griffe
import typer
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click

ROOT = pathlib.Path(__file__).resolve().parents[1]
# MkDocs runs this file as a script, so the import path does not contain the repository's root.
# MkDocs restores the path afterwards.
sys.path.insert(0, str(ROOT))

from tools.public_names import (  # noqa: E402
    PACKAGE,
    imported_names,
    names_without_entry,
    public_names,
)

log = logging.getLogger("mkdocs.hooks.site")
OF_ROOT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}

WIDE = ("performance.md",)
"""The pages with wide tables. The table of contents of these pages is hidden."""


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages of the root and the commands, and a page for every module in the navigation.

    In the root's pages, links are rewritten so that they are relative to docs/.
    """
    for name, page in OF_ROOT.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        text = re.sub(r"\]\((?:docs/)?([^)]+)\)", lambda m: f"]({link(m[1])})", text)
        text = re.sub(r'(src|srcset)="docs/', r'\1="', text)
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "commands.md", content=commands()))
    for page in pages(config.nav):
        if page.startswith("reference/"):
            module = page.removeprefix("reference/").removesuffix(".md")
            body = exported_names() if module == PACKAGE else reference(module)
            files.append(File.generated(config, page, content=f"# {module}\n\n{body}\n"))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: object) -> str:
    """Changes the links of a page to other pages.

    Links to pages in the repository's root are rewritten, because these pages have other names in
    the site. If the text of a link is the name of a file, it is replaced by the title of the page.
    """
    if page.file.src_uri in WIDE:
        page.meta["hide"] = ["toc"]
    markdown = re.sub(r"\]\(\.\./([^)]+)\)", lambda m: f"]({link(m[1])})", markdown)
    return re.sub(
        r"\[[\w/]+\.md\]\(([\w/]+\.md)", lambda m: f"[{title(files, m[1])}]({m[1]}", markdown
    )


def on_page_content(html: str, page: Any, config: Any, **_: object) -> str:
    """Registers the page's anchors, and turns full names in code into links to the reference.

    For example, the docstrings of NNX classes mention Linen classes by their full names.
    """
    for name in re.findall(r'<a id="(synthesizer_jax[\w.]+)"></a>', html):
        config.plugins["autorefs"].register_anchor(page, name)
    name = r"<code>(synthesizer_jax(?:\.\w+)+)</code>"
    return re.sub(name, r'<autoref identifier="\1" optional><code>\1</code></autoref>', html)


def on_post_build(config: Any) -> None:
    """Warns about public names without an entry in the reference. Warnings fail a strict build."""
    for name in names_without_entry(pathlib.Path(config.site_dir)):
        log.warning(
            "%s is in __all__, but the reference has no entry for it. Give it a docstring where it "
            "is defined, and give its package a page in the nav of mkdocs.yml.",
            name,
        )


def link(target: str) -> str:
    """Returns the address of a page in the site.

    The target of the link is relative to the repository's root or to docs/.
    """
    return OF_ROOT.get(target, target)


def title(files: Files, page: str) -> str:
    """Returns the first heading of a page."""
    file = files.get_file_from_path(page)
    return file.content_string.partition("\n")[0].lstrip("# ") if file else page


def pages(nav: Any) -> Iterator[str]:
    """Yields all pages that are listed in a navigation."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for part in nav.values():
            yield from pages(part)
    elif isinstance(nav, list):
        for part in nav:
            yield from pages(part)


def commands() -> str:
    """Returns the page of all commands and options, which is generated from the parsers."""
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


def reference(module: str) -> str:
    """Returns the directive that documents a module."""
    return f"::: {module}"


def anchor(name: str) -> str:
    """Returns an HTML anchor to which references to a full name can link; see `on_page_content`."""
    return f'<a id="{name}"></a>'


def exported_names() -> str:
    """Returns a table of the names of `import synthesizer_jax`, each with a link to its entry."""
    modules = {name: module for module, names in imported_names(PACKAGE) for name in names}
    package = griffe.load(PACKAGE, search_paths=[str(ROOT)])
    lines = [
        "`import synthesizer_jax as sj` offers these names. Follow a name to its documentation. "
        "The pages of the other packages document further names.\n",
        "| name | what it is | from |",
        "| --- | --- | --- |",
    ]
    for name in sorted(public_names()[PACKAGE], key=str.lower):
        module = modules[name]
        target = f"{module}.{name}"
        docstring = package[target.removeprefix(f"{PACKAGE}.")].docstring
        summary = docstring.value.partition("\n")[0].replace("|", "\\|") if docstring else ""
        shown = f"`{name}`" if module == f"{PACKAGE}.version" else f"[`{name}`][{target}]"
        lines.append(f"| {anchor(f'{PACKAGE}.{name}')}{shown} | {summary} | `{module}` |")
    return "\n".join(lines)
