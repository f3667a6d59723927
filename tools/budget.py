"""Prints the size of every room of the project beside its budget; ends with 1 where one is exceeded.

python -m tools.budget
"""

from __future__ import annotations

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

LINES = {
    "synthesizer_jax": 36_200,
    "synthesizer_jax/data + synthesizer_jax/tasks + synthesizer_jax/preparation + "
    "synthesizer_jax/evaluation": 7_925,
    "synthesizer_jax/attention": 6_300,
    "tests": 18_860,
    "benchmarks + tools": 4_715,
    "tpu_scripts": 450,
}
"""The most lines of folders, as ``wc -l`` counts them: Python's, and all of the launcher."""

WORDS = {"docs + README.md + CONTRIBUTING.md + CHANGELOG.md": 28_785}
"""The most words of pages, as ``wc -w`` counts them."""


def files(places: str, pattern: str) -> list[pathlib.Path]:
    """Returns the files of folders joined by `` + ``, and the files that are named themselves."""
    paths = [ROOT / place for place in places.split(" + ")]
    return [f for p in paths for f in ([p] if p.is_file() else p.rglob(pattern)) if f.is_file()]


def main() -> int:
    """Prints the table and returns the exit code."""
    rows = []
    for places, most in LINES.items():
        pattern = "*" if places == "tpu_scripts" else "*.py"
        found = [f for f in files(places, pattern) if "__pycache__" not in f.parts]
        rows.append((places, sum(f.read_bytes().count(b"\n") for f in found), most))
    for places, most in WORDS.items():
        rows.append((places, sum(len(f.read_text().split()) for f in files(places, "*.md")), most))
    for places, count, most in rows:
        print(f"{count:>7,} of {most:>7,}  {places}{'' if count <= most else '  (too many)'}")
    return int(any(count > most for _, count, most in rows))


if __name__ == "__main__":
    sys.exit(main())
