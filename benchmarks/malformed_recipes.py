"""Attempts to load invalid recipe files."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

from malformed_cases import RECIPE, Case, CommandResult, Rng

HEADER = RECIPE.read_text(encoding="utf-8").partition("def default")[0]
GOOD = RECIPE.read_text(encoding="utf-8")


def body(line: str) -> str:
    """A recipe whose function has one line."""
    return f"{HEADER}def default():\n    {line}\n"


SOURCES: dict[str, str | bytes] = {
    "empty": "",
    "syntax": "def default(:\n",
    "indentation": "def default():\nreturn 3\n",
    "unfinished text": 'x = "\n',
    "no UTF-8": b"x = '\xff\xfe'\n",
    "zeros": bytes(100),
    "a zero between": GOOD.encode().replace(b"steps=6", b"steps=\0"),
    "another coding": b"# -*- coding: nonsense -*-\nx = 1\n",
    "deep": "x = " + "(" * 500 + ")" * 500 + "\n",
    "deeper": "x = " + "-" * 100_000 + "1\n",
    "division": body("return 1 / 0"),
    "division when imported": "1 / 0\n" + GOOD,
    "a name": body("return nothing"),
    "an attribute": body("return Experiment.nothing"),
    "a module": "import no_such_module_of_anyone\n",
    "a name of a module": "from synthesizer_jax.models import nothing\n",
    "3": body("return 3"),
    "nothing": body("pass"),
    "the class": body("return Experiment"),
    "a dictionary": body("return {'training': 1}"),
    "a generator": body("yield 3"),
    "endless": body("return default()"),
    "assertion": body("assert False"),
    "an exit": body("raise SystemExit(3)"),
    "an exit when imported": "raise SystemExit(0)\n",
    "an own error": HEADER + "class E(Exception): pass\ndef default():\n    raise E('a\\nb')\n",
    "no text in an error": body("raise ValueError"),
    "an argument": GOOD.replace("def default()", "def default(x)"),
    "another name": GOOD.replace("def default", "def other"),
    "no function": HEADER + "default = 3\n",
    "a coroutine": GOOD.replace("def default", "async def default"),
    "a field too many": GOOD.replace("steps=6", "stepz=6"),
    "a field too few": GOOD.replace("steps=6,", ""),
    "a wrong type": GOOD.replace("steps=6", "steps='6'"),
    "a wrong number": GOOD.replace("steps=6", "steps=-6"),
    "another object": GOOD.replace("vocabulary=Bytes()", "vocabulary=Bytes"),
    "no model": GOOD.replace("model=t5(", "model=(3, "),
    "good": GOOD,
    "good, with a mark": b"\xef\xbb\xbf" + GOOD.encode(),
    "good, with CRLF": GOOD.replace("\n", "\r\n"),
}


def cases(directory: pathlib.Path, rng: Rng, count: int) -> Iterator[Case]:
    """Yields attempts, first with every file once, then with random ones."""
    names = list(SOURCES)
    selected = names[:count] + [rng.choice(names) for _ in range(count - len(names))]
    for number, name in enumerate(selected):
        path = directory / f"recipe_{number}.py"
        source = SOURCES[name]
        path.write_bytes(source.encode() if isinstance(source, str) else source)
        yield make_case(name, path)


def make_case(name: str, path: pathlib.Path) -> Case:
    """Shows a recipe; an error must name its file."""

    def check(result: CommandResult) -> str | None:
        is_valid = name.startswith("good") and '"value": "synthetic_sst2"' in result.out
        return None if is_valid else "it is not a valid recipe"

    command = ["recipes", str(path), "--json"]
    return Case(name, command, (str(path),), (path.parent,), check)
