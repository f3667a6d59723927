"""Every command as a user types it, one after the other in one process: what it says, and its exit code."""

import json
import pathlib

import pytest

from tests.cli.commands import run_all

pytestmark = pytest.mark.slow

IMPORT = (
    "data import mine --name own_files --data-dir DATA --from train=a.jsonl,validation=b.csv "
    "--input review:{text} --target {label} --labels 0=no,1=yes"
)
SMALL = (
    "--data-dir DATA --set data.mixture=own_files --set data.batch_size=8 "
    '--set vocabulary={"type":"Bytes"} --set training.save_every=2 --set training.log_every=1'
)
TRAIN = f"train quickstart:random_vanilla --workdir runs/mine {SMALL}"
EVAL = "eval --workdir runs/mine --data-dir DATA"
TOLD = [
    # What there is, and what is mistaken before anything is computed.
    ("recipes", 0, "quickstart"),
    ("recipes quickstart", 0, "training.steps=6000 int: 1 to"),
    ("train quickstrat --workdir runs/x", 2, "did you mean 'quickstart'"),
    ("models t5_1_1_small", 0, "76,9"),
    ("models mesh_vanilla_base", 0, "222,903,552"),
    ("plan quickstart --topology v6e:4x4", 0, "16 chips"),
    (
        "plan quickstart --topology v6e-17",
        2,
        "error: v6e has no slice 'v6e-17'; near it are v6e:4x4",
    ),
    (f"{TRAIN} --set evaluation.method=sample", 2, "error: evaluation.method"),
    (f"{TRAIN} --set model.dtype=float17", 2, "'float32', 'bfloat16'"),
    (f"{TRAIN} --set training.steps=0", 2, "error: training.steps"),
    (f"{TRAIN} --set init_from=a.jsonl", 2, "holds no experiment.json; give the directory"),
    (TRAIN, 2, "own_files"),  # not imported yet
    # Data of one's own.
    ("data import glu --from .", 2, "'glu' cannot be imported, did you mean 'glue'"),
    ("data import glue --from .", 2, "error: no glue file in ."),
    ("data import glue --from . --name x", 2, "glue is imported as it is published; --name"),
    ("data import mine --from . --target {x}", 2, "'data import mine' needs --name"),
    (IMPORT, 0, "train with --set data.mixture=own_files"),
    ("data list own_files --data-dir DATA", 0, "train 40, validation 6"),
    ("data show own_files --data-dir DATA --rows 1", 0, "lengths of 40 rows in bytes"),
    ("data check own_files --data-dir DATA", 0, "train 3"),  # good 1, 3 and 5 are in both
    ("data vocabulary multi30k_en_de --output v --data-dir DATA", 2, "has training data in DATA"),
    # Training: prepared by itself, continued, refused.
    (f"{TRAIN} --set training.steps=2", 0, "runs/mine has finished its 2 steps: score "),
    (
        f"{TRAIN} --set training.steps=4 --set data.batch_size=4",
        2,
        "data.batch_size was 8 and is 4",
    ),
    (f"{TRAIN} --set training.steps=4", 0, "step 4/4 evaluated in"),
    (f"{TRAIN} --set training.steps=4", 0, "next: synthesizer-jax eval --workdir runs/mine"),
    (
        f"train quickstart:dot_product --workdir runs/other {SMALL} --set init_from=runs/mine",
        2,
        "a checkpoint of another model: 6 arrays",
    ),
    (
        f"train runs/mine --workdir runs/again {SMALL} --set training.steps=1",
        0,
        "initialized 0 parameters in 0 arrays",
    ),
    ("train DATA --workdir runs/x", 2, "holds no experiment.json"),
    ("average runs/mine runs/mean", 0, "holds the mean of the steps 2, 4"),
    # What a run is good for.
    (f"{EVAL} --all", 0, "best steps"),
    (f"{EVAL} --split test", 2, "error: own_files has no"),
    (f"{EVAL} --split train --max-examples 1 --method beam", 0, "own_files │ train │ 1"),
    (
        "predict --workdir runs/mine --data-dir DATA --split validation --method rank",
        0,
        "predictions: runs/mine",
    ),
    ("generate --workdir runs/mine review:", 0, ""),
    ("report runs/mine runs/again --output page.html", 0, "report: "),
    ("doctor --workdir runs/new", 0, "runs/new is writable"),
]
AFTER_DAMAGE = [
    (f"{EVAL} --step 4", 2, "checkpoints/4 cannot be read"),
    (EVAL, 0, "step 2"),
    ("generate --workdir runs/mine review:", 0, "checkpoints/4 cannot be read"),
    (f"{TRAIN} --set training.steps=4", 0, "set aside as"),
]


def check(place: pathlib.Path, expected: list[tuple[str, int, str]]) -> None:
    """Runs commands, and looks for an exit code and a text in what each says."""
    found = run_all(place, [command for command, _, _ in expected])
    texts = [(code, " ".join(text.split())) for code, text in found]
    other = [
        f"{command}: {code}: {text}"
        for (command, wanted, part), (code, text) in zip(expected, texts, strict=True)
        if code != wanted or part not in text
    ]
    assert not other, "\n".join(other)


def test_from_a_file_to_a_report(tmp_path) -> None:
    rows = [{"text": f"{'good' if n % 2 else 'bad'} {n}", "label": n % 2} for n in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "b.csv").write_text("text,label\n" + "".join(f"good {n},1\n" for n in range(6)))
    check(tmp_path, TOLD)
    run = tmp_path / "runs" / "mine"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2, 3, 4]
    rows = [json.loads(x) for x in (run / "evaluation/4/own_files.jsonl").read_text().splitlines()]
    assert [row["input"] for row in rows] == [f"review:good {n}" for n in range(6)]
    assert {row["target"] for row in rows} == {"yes"}
    assert {row["prediction"] for row in rows} <= {"no", "yes"}  # label words are ranked
    experiment = json.loads((tmp_path / "runs" / "again" / "experiment.json").read_text())
    assert experiment["init_from"] == "runs/mine"
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "review:good 1" in page and "Change of the parameters" in page

    for path in (run / "checkpoints" / "4" / "state").rglob("d/*"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1  # one bit in every file of arrays
        path.write_bytes(data)
    check(tmp_path, AFTER_DAMAGE)
