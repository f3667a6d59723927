"""Helps all benchmarks to parse options, describe the machine, format tables and write results."""

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
    """Returns a parser with the options `--json` and `--page` and one integer option per keyword.

    Args:
      description: the help text, whose line breaks are kept.
      **numbers: the default values of the integer options, by name.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, default in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument(
        "--json", type=pathlib.Path, help="also write all measurements to this JSON file"
    )
    parser.add_argument("--page", type=pathlib.Path, help="Markdown page to update with the table")
    return parser


MACHINE_PROGRAM = """
import json, jax
from synthesizer_jax.costs.utilization import product_rate
device = jax.devices()[0]
rate = product_rate(device.platform, jax.numpy.dtype("float32"))
name = f"{jax.device_count()} × {device.device_kind}"
print(json.dumps([name, jax.__version__, rate / 1e9]))
"""
"""A program that prints facts about JAX for the function `machine`."""


def machine() -> dict[str, str]:
    """Returns facts about the machine without importing JAX in this process."""
    process = subprocess.run(
        [sys.executable, "-c", MACHINE_PROGRAM], check=True, stdout=subprocess.PIPE
    )
    device, version, rate = json.loads(process.stdout.decode().splitlines()[-1])
    return {
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        "device": device,
        "cores": str(os.cpu_count()),
        "Python": platform.python_version(),
        "jax": version,
        "float32 matrix product": f"{rate:.0f} GFLOP/s",
    }


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """Formats a Markdown table.

    Args:
      rows: a dictionary for each row. A cell is empty if its key is missing or its value is None.
      columns: the columns by their keys in the rows. A column is written as ``heading`` or
        ``heading|format``. Columns with a format are aligned to the right.
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
    """Prints a section of a page, and writes the files of the options `--page` and `--json`.

    Args:
      name: the name of the section. HTML comments with this name enclose the section.
      text: the Markdown text of the section.
      result: all measurements, for `--json`.
      options: the parsed command line.
      facts: facts on which the measurements depend, such as versions. The facts are written in a
        line below the text.
    """
    note = "; ".join(f"{name}: {value}" for name, value in facts.items())
    command = " ".join(["python", *_without_output_options(sys.argv)])
    section = f"{text}\n\n`{command}` ({note})\n"
    print(section)
    if options.json:
        write_file(options.json, json.dumps({"facts": facts, **result}, indent=1) + "\n")
    if options.page:
        page = options.page.read_text(encoding="utf-8") if options.page.exists() else ""
        write_file(options.page, with_section(page, name, section))


def with_section(page: str, name: str, text: str) -> str:
    """Returns a page in which the section called `name` is replaced or appended."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if begin not in page:
        return f"{page.rstrip()}\n\n{begin}\n{text}{end}\n".lstrip()
    before, remainder = page.split(begin, 1)
    _, after = remainder.split(end, 1)
    return f"{before}{begin}\n{text}{end}{after}"


def write_file(path: pathlib.Path, text: str) -> None:
    """Writes a file atomically."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _without_output_options(arguments: Sequence[str]) -> list[str]:
    """Returns the command line without `--json` and `--page` and their values."""
    remaining = []
    iterator = iter(arguments)
    for argument in iterator:
        if argument in ("--json", "--page"):
            next(iterator, None)  # skips the value of the option
        else:
            remaining.append(argument)
    return ["benchmarks/" + pathlib.Path(remaining[0]).name, *remaining[1:]]
