"""Runs the notebooks of the documentation from start to end, and saves their outputs."""

from __future__ import annotations

import os
import pathlib
import re
import sys
import tempfile
import time

import nbformat
from nbclient import NotebookClient

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "docs" / "notebooks"
SECONDS = 120
"""The maximum time in seconds for a cell to run."""


def main() -> None:
    """Runs all notebooks. Stops if a cell raises an error or takes too long.

    Temporary directories that a notebook creates are deleted, and their paths are removed from the
    notebook's outputs.
    """
    os.environ["PATH"] = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    for path in sorted(FOLDER.glob("*.ipynb")):
        start = time.perf_counter()
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as place:
            os.environ["TMPDIR"] = place
            NotebookClient(
                notebook, timeout=SECONDS, coalesce_streams=True, record_timing=False
            ).execute()
            del os.environ["TMPDIR"]
        text = re.sub(rf"{place}/\w+/", "", nbformat.writes(notebook))
        path.write_text(f"{text}\n", encoding="utf-8")
        print(f"{path.name}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
