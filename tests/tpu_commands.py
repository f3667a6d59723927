"""What `tpu_scripts/launch` knows of the program: its commands, arguments and options.

`python -m tests.tpu_commands tpu_scripts/commands.txt` renews the file that the launcher reads.
"""

import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import typer

from synthesizer_jax.cli.main import app

HEAD = """\
# Commands of synthesizer-jax with their arguments ([one] may be missing, one... may be many) and options
# (--a= takes a value, --a=! has to be given). To renew it: python -m tests.tpu_commands FILE
"""


def written() -> str:
    """The whole file."""
    return HEAD + "".join(f"{line}\n" for line in lines(typer.main.get_command(app)))


def lines(command: Any, name: str = "") -> Iterator[str]:
    """A line for a command, or those of a group's commands."""
    if hasattr(
        command, "commands"
    ):  # a group; by name, since some versions of typer bring their own click
        for word, one in sorted(command.commands.items()):
            yield from lines(one, f"{name} {word}".strip())
        return
    words = [described(one) for one in command.params]
    words.sort(key=lambda word: (word.startswith("--"), word if word.startswith("--") else ""))
    yield f"{name}: {' '.join(words)}".rstrip()


def described(parameter: Any) -> str:
    """An argument or an option, as the file's head explains."""
    if parameter.param_type_name == "argument":
        name = (parameter.name or "") + ("..." if parameter.nargs == -1 else "")
        return name if parameter.required else f"[{name}]"
    (name,) = (text for text in parameter.opts if text.startswith("--"))
    if parameter.is_flag:
        return " ".join([name, *parameter.secondary_opts])
    return f"{name}=!" if parameter.required else f"{name}="


if __name__ == "__main__":
    pathlib.Path(sys.argv[1]).write_text(written(), encoding="utf-8")
