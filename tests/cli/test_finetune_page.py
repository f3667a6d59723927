"""What docs/finetune.md says to type, typed with a tiny model and few steps."""

import json
import pathlib
import re
import subprocess

import pytest
from safetensors.numpy import load_file

from tests.cli.test_readme import type_commands
from tests.environment import without_devices
from tests.pretrained.folders import FAMILIES, TINY, make_folder, make_tensors

pytestmark = pytest.mark.slow

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "finetune.md"
PEERS = REPOSITORY / ".venv-peers"
SMALL = "--set data.batch_size=8 --set data.inputs_length=128 --set evaluation.max_examples=16"
SHORTER = {
    "--set training.steps=1000": f"--set training.steps=2 {SMALL}",
    "distill synthesize:random": "distill synthesize:random --set fit_batches=1 "
    "--set training.steps=1 --set fine_tune.steps=1",
    "analyze runs/cola": "analyze runs/cola --examples 16 --held-out 16",
}
COMPARISON = """
import itertools, json, pathlib
import synthesizer_jax as sj

vocabulary = sj.load("runs/cola").vocabulary
path = pathlib.Path("runs/cola/evaluation/2/test/glue_cola_v002.jsonl")
for row in map(json.loads, path.read_text().splitlines()[:16]):
    inputs = tokenizer(row["input"], return_tensors="pt", max_length=128, truncation=True)
    ids = model.generate(**inputs, max_new_tokens=84, use_cache=False)[0, 1:].tolist()
    ids = list(itertools.takewhile(lambda i: i > 1, ids))  # padding ends a text here as EOS does
    print(vocabulary.decode(ids) == row["prediction"])
"""


@pytest.fixture(scope="module")
def place(real_data: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The directory in which all commands of the page were typed; ``said.txt`` is what they printed."""
    if not (real_data / "glue" / "CoLA").is_dir():
        pytest.skip("CoLA is not among the original files on this machine")
    place = tmp_path_factory.mktemp("finetune")
    (place / "GLUE_FILES").mkdir()
    (place / "GLUE_FILES" / "CoLA").symlink_to(real_data / "glue" / "CoLA")
    config = TINY | FAMILIES["ByT5"]
    make_folder(place / "PRETRAINED", config, make_tensors(config))
    program = "\n".join(re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S))
    for long, short in SHORTER.items():
        assert long in program
        program = program.replace(long, short)
    (place / "said.txt").write_text(type_commands(program, place), encoding="utf-8")
    return place


def test_every_command_of_the_page_works(place: pathlib.Path) -> None:
    said = (place / "said.txt").read_text(encoding="utf-8")
    tensors = make_tensors(TINY | FAMILIES["ByT5"])
    started = "initialized              0 parameters in 0 arrays"
    assert said.count(started) == 3  # from two converted runs, and from the distilled one
    assert "fitted 3 layers to 1 batches" in said
    exported = load_file(place / "cola-t5" / "model.safetensors")
    assert {n: x.shape for n, x in exported.items()} == {n: x.shape for n, x in tensors.items()}
    assert sum((exported[n] != tensors[n]).any() for n in tensors) > 0.9 * len(tensors)
    predicted = place / "runs" / "cola" / "evaluation" / "2" / "test" / "glue_cola_v002.jsonl"
    rows = [json.loads(line) for line in predicted.read_text().splitlines()]
    assert rows and all(row["input"].startswith("cola sentence: ") for row in rows)
    assert "most static can read a fitted table" in said
    assert "<svg" in (place / "cola.html").read_text(encoding="utf-8")


def test_transformers_predicts_the_same(place: pathlib.Path) -> None:
    if not (PEERS / ".installed").is_file():
        pytest.skip("transformers is not installed; make bench-peers does that")
    (snippet,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    ended = subprocess.run(
        [PEERS / "bin" / "python", "-c", snippet + COMPARISON],
        cwd=place,
        env=without_devices(),
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["True"] * 16
