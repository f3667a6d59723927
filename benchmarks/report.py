"""What benchmark scripts share: facts of the machine, a table, JSON, and a section of a page."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any


def arguments(description: str | None, **numbers: int) -> argparse.ArgumentParser:
    """A command line with `--json`, `--page` and an integer option for each number, its default."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, default in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--json", type=pathlib.Path, help="write everything measured here too")
    parser.add_argument("--page", type=pathlib.Path, help="Markdown page to keep the table in")
    return parser


def machine() -> dict[str, str]:
    """What the numbers were made with; starts no JAX in this process."""
    program = (
        "import json, jax\n"
        "from synthesizer_jax.training.utilisation import product_rate\n"
        "d = jax.devices()[0]\n"
        "rate = product_rate(d.platform, jax.numpy.dtype('float32'))\n"
        "print(json.dumps([f'{jax.device_count()} × {d.device_kind}', jax.__version__, rate / 1e9]))"
    )
    found = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE)
    device, version, rate = json.loads(found.stdout.decode().splitlines()[-1])
    return {
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        "device": device,
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "jax": version,
        "float32 product, GFLOP/s": f"{rate:.0f}",
    }


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """A Markdown table.

    Args:
      rows: what to show.
      columns: key of a row → ``heading`` or ``heading|format``; missing values are left blank.
    """
    headings = [c.split("|")[0] for c in columns.values()]
    formats = [c.split("|")[1] if "|" in c else "" for c in columns.values()]
    lines = ["| " + " | ".join(headings) + " |"]
    lines.append("| " + " | ".join("---:" if f else "---" for f in formats) + " |")
    for row in rows:
        values = [row.get(key) for key in columns]
        cells = ["" if v is None else format(v, f) for v, f in zip(values, formats, strict=True)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write(
    name: str, text: str, *, result: Mapping[str, Any], options: Any, facts: Mapping[str, str]
) -> None:
    """Prints a result and writes it where `--json` and `--page` say.

    Args:
      name: of the section in the page, kept in place between two comments.
      text: Markdown.
      result: everything measured.
      options: the command line, with `json` and `page`.
      facts: `machine`'s.
    """
    note = ", ".join(f"{k} {v}" for k, v in facts.items())
    command = " ".join(["python", *_shown(sys.argv)])
    section = f"{text}\n\n`{command}`: {note}.\n"
    print(section)
    if options.json:
        place(options.json, json.dumps({"facts": facts, **result}, indent=1) + "\n")
    if options.page:
        old = options.page.read_text(encoding="utf-8") if options.page.exists() else ""
        place(options.page, with_section(old, name, section))


def with_section(page: str, name: str, text: str) -> str:
    """The page with the text between its marks of that name, at the end where there are none."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if begin not in page:
        return f"{page.rstrip()}\n\n{begin}\n{text}{end}\n".lstrip()
    before, rest = page.split(begin, 1)
    _, after = rest.split(end, 1)
    return f"{before}{begin}\n{text}{end}{after}"


def place(path: pathlib.Path, text: str) -> None:
    """Writes a file aside and renames it."""
    aside = path.with_suffix(path.suffix + ".tmp")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


def _shown(arguments: Sequence[str]) -> list[str]:
    """The command without the places that only say where its output goes."""
    shown, skip = [], False
    for argument in arguments:
        if skip or argument in ("--json", "--page"):
            skip = not skip
            continue
        shown.append(argument)
    return ["benchmarks/" + pathlib.Path(shown[0]).name, *shown[1:]]
