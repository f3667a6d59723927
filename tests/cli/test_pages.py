"""What README says to type, typed; and all commands of the pages exist."""

import json
import pathlib
import re
import shlex

import pytest
import typer

from synthesizer_jax.cli.main import app
from tests.cli.commands import run_all
from tests.conftest import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(text: str) -> list[list[str]]:
    """The words after `synthesizer-jax` of all such lines in a page's shell blocks."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.S)).replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in blocks.splitlines()]
    return [words[1:] for words in lines if words[:1] == ["synthesizer-jax"]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_have_its_options(page: pathlib.Path) -> None:
    for words in commands(page.read_text(encoding="utf-8")):
        command = typer.main.get_command(app)
        while hasattr(command, "commands"):
            name, *words = words
            assert name in command.commands, f"there is no command {name}"
            command = command.commands[name]
        options = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
        typed = {word for word in words[: [*words, "--"].index("--")] if word.startswith("--")}
        assert typed <= options | {"--help"}, command.name


@pytest.fixture
def place(real_data: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with the names that README uses, and the tasks that take the least time."""
    files = {
        **{f"GLUE_FILES/{task}": f"glue/{task}" for task in ("CoLA", "WNLI", "AX")},
        **{f"SUPER_GLUE_FILES/{task}": f"super_glue/{task}" for task in ("COPA", "WSC")},
        "spiece.model": "sentencepiece/t5_spiece.model",
    }
    for name, file in files.items():
        if not (real_data / file).exists():
            pytest.skip(f"{file} is not among the original files on this machine")
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(real_data / file)
    return tmp_path


def test_train_evaluate_predict_and_generate(place: pathlib.Path) -> None:
    section = PAGES[0].read_text(encoding="utf-8").split("\n## Train, evaluate, use\n")[1]
    ended = run_all(place, commands(section.split("\n## ")[0]))
    assert [code for code, _ in ended] == [0] * 6, ended
    said = "".join(text for _, text in ended)
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
