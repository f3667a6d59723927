"""Tests that all commands, options and recipes that the documentation mentions exist."""

import pathlib
import re
import shlex
from itertools import pairwise

import pytest
import typer

from synthesizer_jax.cli.main import app
from synthesizer_jax.cli.recipes import list_recipes, load_recipe
from tests.conftest import ROOT

PACKAGED = {row["recipe"].split(":")[0] for row in list_recipes()}
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(text: str) -> list[list[str]]:
    """Returns the arguments of all `synthesizer-jax` commands in a page's shell blocks."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.S)).replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in blocks.splitlines()]
    return [words[1:] for words in lines if words[:1] == ["synthesizer-jax"]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_have_its_options(page: pathlib.Path) -> None:
    for words in commands(page.read_text(encoding="utf-8")):
        command = typer.main.get_command(app)
        while hasattr(command, "commands"):
            name, *words = words
            assert name in command.commands, f"there is no command {name}"
            command = command.commands[name]
        options = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
        typed = {word for word in words[: [*words, "--"].index("--")] if word.startswith("--")}
        assert typed <= options | {"--help"}, command.name
        if command.name != "train" or "--import" in words:
            continue
        if words[0].split(":")[0] in PACKAGED:
            load_recipe(words[0], [v for name, v in pairwise(words) if name == "--set"])
