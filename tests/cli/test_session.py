"""Tests the output and the exit code of all commands, as a user would run them."""

import json
import pathlib

import numpy as np

from synthesizer_jax.checkpoints.manager import restore_variables
from synthesizer_jax.distillation.distill import FINE_TUNED
from tests.cli.commands import run_all

IMPORT = (
    "data import mine --name own_files --data-dir DATA --from train=a.jsonl,validation=b.csv "
    "--input review:{text} --target {label} --labels 0=no,1=yes"
)
SMALL = (
    "--data-dir DATA --set data.mixture=own_files --set data.batch_size=8 "
    '--set vocabulary={"type":"Bytes"} --set training.save_every=2 --set training.log_every=1 '
    "--set model.encoder.runs.0.repeats=1 --set model.decoder.runs.0.repeats=1"
)
TRAIN = f"train quickstart:random_vanilla --workdir runs/mine {SMALL}"
EVAL = "eval --workdir runs/mine --data-dir DATA"
DISTILL = (
    "distill synthesize:random --teacher runs/mine --workdir runs/random --data-dir DATA "
    "--set replace.0.by.max_length=32 --set fit_batches=2 --set training.steps=1 "
    "--set fine_tune.steps=1 --set fine_tune.optimizer.learning_rate=Constant"
).replace("=Constant", '={"type":"Constant","value":0.001}')
GENERATE = "generate --workdir runs/{} review:good"

SESSION = [
    # Commands that list something, and mistakes that are found before any computation.
    ("recipes quickstart", 0, "training.steps=1200 int: 1 to"),
    ("recipes papers.replacement:alr", 0, "replace.0.scope=mixer 'mixer' or 'sublayer' or 'layer'"),
    ("recipes papers.replacement:alr:encoder:huge", 2, "alr.size is 'huge', but 'xs' or"),
    ("recipes papers.language_modeling:heads:16", 0, "self_mixer.head_dim=16"),
    ("recipes papers.language_modeling:heads:x", 2, "heads.head_dim is 'x', but int is expected"),
    (
        "recipes papers.translation:multi30k:x",
        2,
        "There is no system 'x', did you mean 'fix'? The systems are v, d, r",
    ),
    ("train quickstrat --workdir runs/x", 2, "did you mean 'quickstart'"),
    ("train papers.replacement:alr --workdir runs/x", 2, "returns a Distillation, expected Exper"),
    (f"{TRAIN} --set evaluation.method=sample", 2, "error: evaluation.method"),
    (f"{TRAIN} --set init_from=a.jsonl", 2, "contains no experiment.json. Give the directory"),
    (TRAIN, 2, "own_files"),  # the data set is not imported yet
    (
        "train finetune --workdir runs/x --data-dir d",
        2,
        "There is no SentencePiece model spiece.model",
    ),
    # Commands for the user's own data.
    ("data list glue --data-dir d", 2, "There is no mixture or task 'glue'"),
    ("data import glu --from .", 2, "no data set 'glu' to import, did you mean 'glue'"),
    ("data import glue --from .", 2, "error: . has none of the files of glue: CoLA/train.tsv"),
    ("data import glue --from . --name x", 2, "glue has its own format. The options --name"),
    ("data import mine --from . --target {x}", 2, "'data import mine' needs --name"),
    (IMPORT, 0, "train with --set data.mixture=own_files"),
    (
        IMPORT.replace("own_files", "others").replace("b.csv", "a.jsonl"),
        *(0, "train with --set data.mixture=others"),
    ),
    (
        IMPORT.replace("own_files", "typo").replace("train=", "traim="),
        *(0, "train with --set data.mixture=typo --set data.split=traim"),
    ),
    ("data list own_files --data-dir DATA", 0, "train 40, validation 6"),
    ("data list", 0, "mixtures: "),
    (
        "data show own_files --data-dir DATA --rows 1 --vocabulary bytes",
        0,
        "lengths of 40 rows in bytes",
    ),
    ("data check own_files --data-dir DATA", 0, "train 3"),  # rows 1, 3 and 5 are in both splits
    ("data vocabulary own_files --output v --data-dir DATA --size 32", 0, "32 pieces from 80"),
    ("data vocabulary multi30k_en_de --output v --data-dir DATA", 2, "a split 'train' in DATA"),
    (
        "data prepare own_files --data-dir DATA --workers 0",
        2,
        "--workers is 0, but it must be 1 to",
    ),
    # Training: a run prepares its data, continues, and refuses changed settings.
    (
        f"{TRAIN} --set training.steps=2",
        0,
        "runs/mine has finished its 2 steps. The score at step 2 is ",
    ),
    (f"{TRAIN} --set training.steps=4", 0, "model.dtype=auto is float32"),
    (f"{TRAIN} --set training.steps=4", 0, "next: synthesizer-jax eval --workdir runs/mine"),
    (
        f"train runs/mine --workdir runs/again {SMALL} --set training.steps=1",
        *(0, "initialized 0 parameters in 0 arrays"),
    ),
    ("train DATA --workdir runs/x", 2, "contains no experiment.json"),
    ("train runs/mien --workdir runs/x", 2, "no recipe and no directory 'runs/mien'"),
    # Commands that use the finished run.
    (f"{EVAL} --all", 0, "best steps"),
    (f"{EVAL} --split test", 2, "error: own_files has no"),
    (
        "predict runs/mine --data-dir DATA --split validation --method rank",
        *(0, "predictions: runs/mine"),
    ),
    (GENERATE.format("mine"), 0, ""),
    ("generate runs/mine review:good", 0, ""),
    (
        "generate review:good",
        2,
        "generate needs a run. Give its directory before the texts, or as --workdir",
    ),
    (
        "eval --data-dir DATA",
        2,
        "Give the directory of the run once, either as RUN or as --workdir RUN",
    ),
    (f"{GENERATE.format('mine')} --input a.jsonl", 2, "arguments or with --input, not both"),
    ("report runs/mine runs/again --output page.html", 0, "own_files │ accuracy"),
    ("doctor --workdir a.jsonl", 2, "File exists"),
    # Commands that make other runs from the finished run.
    ("average runs/mine runs/mean", 0, "holds the mean of the steps 2, 4"),
    (
        "convert runs/mine runs/mixture --encoder rw",
        2,
        "no such variant, did you mean 'r'? Use one of",
    ),
    (
        "convert runs/mine runs/mixture --encoder r",
        2,
        "same as the old one at first. Fit and distill",
    ),
    (
        "convert runs/mine runs/mixture --max-length 3",
        2,
        "can only be used with --encoder or --decoder",
    ),
    (
        "convert runs/mine runs/mixture --extra-ids 3",
        2,
        "--extra-ids can only be used with --vocabulary",
    ),
    (
        "convert runs/mine runs/mixture --vocabulary a.json --extra-ids 3",
        2,
        "--extra-ids is 3, but a.json already contains its sentinels",
    ),
    (
        "data prepare others --data-dir DATA --vocabulary a.json --bos",
        2,
        "a.json determines the sentinels and BOS. Leave --extra-ids and --bos out",
    ),
    (
        "data prepare others --data-dir DATA --vocabulary a.json",
        2,
        "There is no tokenizer a.json. Give the path of a tokenizer.json",
    ),
    ("convert runs/mine runs/mixture --encoder rv --max-length 1000000000", 2, "--max-length is"),
    ("convert runs/mine runs/mixture --encoder rv --max-length 1000000", 2, "GiB of memory"),
    ("convert runs/mine runs/mixture --encoder rv --max-length 32", 0, "parameters of runs/mine"),
    (GENERATE.format("mixture"), 0, ""),
    (
        "export runs/mine exported --to onnx",
        2,
        "--to is 'onnx', but it must be one of huggingface, peft",
    ),
    (DISTILL, 0, "Fitted 1 layers to 2 batches"),
    (GENERATE.format(f"random/{FINE_TUNED}"), 0, ""),
    (
        DISTILL.replace("runs/mine", "runs/mine/checkpoints/2"),
        *(2, "began with step 4 of its teacher, but --teacher names step 2"),
    ),
    ("distill quickstart --teacher runs/mine --workdir runs/x", 2, "expected Distillation"),
    (
        "inspect runs/mine --data-dir DATA --mixture others --no-static-forms --output heads.html",
        *(0, "page: "),
    ),
]


def check(place: pathlib.Path, expected: list[tuple[str, int, str]]) -> dict[str, str]:
    """Runs commands and checks their exit codes and outputs.

    An error must be a single line.
    """
    found = run_all(place, [command for command, _, _ in expected])
    texts = [(code, " ".join(text.split())) for code, text in found]
    other = [
        f"{command}: {code}: {text}"
        for (command, wanted, part), (code, text) in zip(expected, texts, strict=True)
        if code != wanted
        or part not in text
        or "Traceback" in text
        or text.count("error: ") != code // 2
    ]
    assert not other, "\n".join(other)
    return {command: text for (command, _, _), (_, text) in zip(expected, found, strict=True)}


def test_a_session_from_a_file_to_a_report(tmp_path) -> None:
    rows = [{"text": f"{'good' if n % 2 else 'bad'} {n}", "label": n % 2} for n in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "b.csv").write_text("text,label\n" + "".join(f"good {n},1\n" for n in range(6)))
    said = check(tmp_path, SESSION)
    run = tmp_path / "runs" / "mine"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2, 3, 4]
    rows = [json.loads(x) for x in (run / "evaluation/4/own_files.jsonl").read_text().splitlines()]
    assert [row["input"] for row in rows] == [f"review:good {n}" for n in range(6)]
    assert {row["target"] for row in rows} == {"yes"}
    assert {row["prediction"] for row in rows} <= {"no", "yes"}  # ranked labels
    assert json.loads((run / "experiment.json").read_text())["model"]["dtype"] == "float32"
    experiment = json.loads((tmp_path / "runs" / "again" / "experiment.json").read_text())
    assert experiment["init_from"] == "runs/mine"
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "review:good 1" in page
    assert "<svg" in (tmp_path / "heads.html").read_text(encoding="utf-8")
    # A converted run gives the same answers as the original run. The answers depend on all
    # parameters.
    assert said[GENERATE.format("mixture")] == said[GENERATE.format("mine")]
    assert said["generate runs/mine review:good"] == said[GENERATE.format("mine")]
    left = {path.name for path in (*tmp_path.iterdir(), *(tmp_path / "runs").iterdir())}
    assert not {"d", "exported", "x"} & left

    random = tmp_path / "runs" / "random"
    heads = json.loads((random / "fit.json").read_text())
    assert list(heads) == ["encoder/layers_0"]
    assert all(len(kl) == 4 and 0 <= min(kl) < max(kl) < 3 for kl in heads.values())
    assert (random / "distillation.json").is_file()
    assert json.loads((random / "teacher.json").read_text())["step"] == 4

    def params_of(place):
        """Returns the parameters of the newest checkpoint of a run."""
        return restore_variables(place / "checkpoints")[1]["params"]

    taught, student, tuned = map(params_of, (run, random, random / FINE_TUNED))
    np.testing.assert_array_equal(student["embedding"], taught["embedding"])
    assert 0 < np.abs(tuned["embedding"] - student["embedding"]).max() < 0.01
    table = student["encoder"]["layers_0"]["attention"]["align"]["table"]
    assert table.shape == (4, 32, 32) and np.ptp(table, axis=-1).min() > 0.1
