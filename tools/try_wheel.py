"""Installs the wheel in dist/ in a new environment, and tries it outside of the repository."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]


def main() -> None:
    """Runs README.md's examples without optional packages, then the quickstart with them."""
    (wheel,) = (ROOT / "dist").glob("*.whl")
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S)
    with tempfile.TemporaryDirectory() as place:
        python = f"{place}/venv/bin/python"
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

        def run(*words: str) -> None:
            """Runs a command in the temporary directory."""
            subprocess.run(words, check=True, cwd=place, env=environment)

        def install(extras: str) -> None:
            """Installs the wheel together with some optional packages."""
            pip = (python, "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"))
            run(*pip, f"{wheel}{extras}")

        run(sys.executable, "-m", "venv", "venv")
        install("")
        run(python, "-c", "\n".join([*examples, "assert y.shape == x.shape"]))
        install("[data,report]")
        run(f"{place}/venv/bin/synthesizer-jax", "quickstart", "--set", "training.steps=20")
        assert pathlib.Path(place, "runs", "quickstart", "report.html").stat().st_size > 10_000
    print(f"{wheel.name} works without the repository.")


if __name__ == "__main__":
    main()
