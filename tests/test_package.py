"""What a newcomer types: imports, the README's code, the command line's errors."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from synthesizer_jax.cli.main import app, one_line

ROOT = pathlib.Path(__file__).resolve().parents[1]


def test_importing_the_package_loads_no_tensorflow_and_no_network():
    program = (
        "import socket, sys\n"
        "socket.socket.connect = None\n"
        "import synthesizer_jax\n"
        "heavy = {'tensorflow', 'seqio', 'tensorflow_datasets', 'orbax', 'torch', 'matplotlib'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_readmes_examples_run_as_written():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    scope: dict = {}
    for block in blocks[:-1]:  # the last trains
        exec(block, scope)
    assert scope["y"].shape == (2, 128, 512)
    assert float(abs(scope["y"] - scope["y_ref"]).max()) < 1e-5


def test_the_cookbooks_snippets_run_in_order():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/layers.md").read_text(), flags=re.S)
    scope: dict = {"__name__": "cookbook"}
    for block in blocks:
        exec(block, scope)
    assert "Decay" in scope


def test_the_readmes_table_of_variants_is_that_of_the_registries():
    from synthesizer_jax.reports.variants import updated

    text = (ROOT / "README.md").read_text()
    message = "run: python -m synthesizer_jax.reports.variants README.md"
    assert updated(text) == text, message


def test_models_lists_names_and_counts():
    result = CliRunner().invoke(app, ["models", "mesh_random_*", "--json"])
    rows = json.loads(result.stdout)
    assert list(rows) == [
        "mesh_random_base",
        "mesh_random_plus_base",
        "mesh_random_plus_alpha_base",
    ]
    assert rows["mesh_random_base"]["parameters"] == 254_360_576
    assert rows["mesh_random_base"]["tables_per_layer"] == 8 * 512 * 512
    shown = CliRunner().invoke(app, ["models", "mesh_random_base"])
    assert "254,360,576" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["models", "nothing*"], "no model is called 'nothing*'"),
        (["train", "nowhere", "--workdir", "w"], "there is no recipe 'nowhere'"),
        (
            ["train", "finetune", "--workdir", "w", "--set", "training.stps=1"],
            "Training has no field 'stps', did you mean 'steps'",
        ),
        (["eval", "--workdir", "nothing"], "nothing holds no experiment.json"),
        (["generate", "--workdir", "nothing", "hello"], "nothing holds no experiment.json"),
        (
            ["train", "finetune", "--workdir", "w", "--data-dir", "d"],
            "there is no SentencePiece model spiece.model",
        ),
        (["data", "tasks", "glue", "--data-dir", "d"], "there is no mixture or task 'glue'"),
    ],
)
def test_a_users_mistake_is_one_line(tmp_path, arguments, message):
    done = subprocess.run(
        [sys.executable, "-c", "from synthesizer_jax.cli.main import run; run()", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    assert message in lines[0]
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [], "something half-written was left"


def test_error_messages_lose_their_line_breaks():
    assert one_line(ValueError("a\n  b")) == "a b"
    assert "SYNTHESIZER_JAX_TRACEBACK=1" in one_line(RuntimeError("x"))
