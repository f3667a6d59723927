"""What README says to type, typed."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.environment import without_devices

pytestmark = pytest.mark.slow

README = pathlib.Path(__file__).resolve().parents[2] / "README.md"


def commands(heading: str) -> str:
    """The first shell block below a heading."""
    section = README.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1]
    found = re.search(r"```bash\n(.*?)```", section, re.S)
    assert found is not None
    return found[1]


@pytest.fixture
def place(real_data: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with the names that README uses, and the tasks that take the least time."""
    files = {
        **{f"GLUE_FILES/{task}": f"glue/{task}" for task in ("CoLA", "STS-B", "WNLI", "AX")},
        **{f"SUPER_GLUE_FILES/{task}": f"super_glue/{task}" for task in ("CB", "COPA", "WSC")},
        "spiece.model": "sentencepiece/t5_spiece.model",
    }
    for name, file in files.items():
        if not (real_data / file).exists():
            pytest.skip(f"{file} is not among the original files on this machine")
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(real_data / file)
    return tmp_path


def type_commands(program: str, place: pathlib.Path) -> str:
    """Runs commands of a page in a directory, and returns what they print."""
    path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        ["bash", "-euc", program],
        cwd=place,
        env={**without_devices(), "PATH": path, "XDG_STATE_HOME": str(place)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_train_evaluate_predict_and_generate(place: pathlib.Path) -> None:
    said = type_commands(commands("Train, evaluate, use"), place)
    assert re.search(r"step 20/20  evaluated in .*: score [\d.]+, loss [\d.]+", said)
    assert "runs/rv has finished its 20 steps: score " in said
    for task in ("glue_cola_v002", "super_glue_copa_v102", "super_glue_wsc_v102_simple_eval"):
        assert task in said
    predicted = place / "predictions" / "glue_cola_v002.jsonl"
    row = json.loads(predicted.read_text().splitlines()[0])
    assert row["input"].startswith("cola sentence: ") and row["prediction"]
    submitted = (place / "predictions" / "glue" / "CoLA.tsv").read_text().splitlines()
    assert submitted[0] == "index\tprediction" and len(submitted) == 1064
    assert len(said.splitlines()[-1]) > 0
