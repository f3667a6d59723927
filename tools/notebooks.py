"""Runs the notebooks of the documentation from start to end, and keeps what they print and draw."""

from __future__ import annotations

import os
import pathlib
import sys
import time

import nbformat
from nbclient import NotebookClient

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "docs" / "notebooks"
SECONDS = 120
"""What a notebook may take on two CPU cores."""


def main() -> None:
    """Runs all; an error, or a notebook that takes too long, ends it."""
    os.environ["PATH"] = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    for path in sorted(FOLDER.glob("*.ipynb")):
        start = time.perf_counter()
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(
            notebook, timeout=SECONDS, coalesce_streams=True, record_timing=False
        ).execute()
        nbformat.write(notebook, path)
        print(f"{path.name}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
