"""What docs/finetune.md says to type, typed with a tiny model and few steps."""

import json
import pathlib
import re

import pytest
from safetensors.numpy import load_file

from tests.cli.test_readme import type_commands
from tests.pretrained.folders import FAMILIES, TINY, make_folder, make_tensors

pytestmark = pytest.mark.slow

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "finetune.md"
SMALL = "--set data.batch_size=8 --set data.inputs_length=128 --set evaluation.max_examples=16"
SHORTER = {
    "--set training.steps=1000": f"--set training.steps=2 {SMALL}",
    "distill synthesize:random": "distill synthesize:random --set fit_batches=1 "
    "--set training.steps=1 --set fine_tune.steps=1",
}


def test_every_command_of_the_page_works(real_data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    if not (real_data / "glue" / "CoLA").is_dir():
        pytest.skip("CoLA is not among the original files on this machine")
    (tmp_path / "GLUE_FILES").mkdir()
    (tmp_path / "GLUE_FILES" / "CoLA").symlink_to(real_data / "glue" / "CoLA")
    config = TINY | FAMILIES["ByT5"]
    tensors = make_tensors(config)
    make_folder(tmp_path / "PRETRAINED", config, tensors)
    program = "\n".join(re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S))
    for long, short in SHORTER.items():
        assert long in program
        program = program.replace(long, short)
    said = type_commands(program, tmp_path)
    started = "initialized              0 parameters in 0 arrays"
    assert said.count(started) == 3  # from two converted runs, and from the distilled one
    assert "fitted 3 layers to 1 batches" in said
    exported = load_file(tmp_path / "cola-t5" / "model.safetensors")
    assert {n: x.shape for n, x in exported.items()} == {n: x.shape for n, x in tensors.items()}
    assert sum((exported[n] != tensors[n]).any() for n in tensors) > 0.9 * len(tensors)
    (predicted,) = (tmp_path / "runs" / "cola" / "evaluation").glob("step_2.*.test.jsonl")
    rows = [json.loads(line) for line in predicted.read_text().splitlines()]
    assert rows and all(row["input"].startswith("cola sentence: ") for row in rows)
