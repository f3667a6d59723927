"""Tests the commands `eval`, `predict` and `generate` as a user would run them.

The tests include result files, damaged checkpoints and lines of input text.
"""

import io
import json
import logging
import re
import shutil
from types import SimpleNamespace

import pytest

from synthesizer_jax.base.registry import replace
from synthesizer_jax.cli import generate
from synthesizer_jax.data.prepared import PreparedTasks
from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.evaluation import benchmarks
from synthesizer_jax.evaluation.evaluation_sets import load_evaluation_set
from synthesizer_jax.preparation import prepare
from synthesizer_jax.sharding import MeshShape
from synthesizer_jax.tasks import definitions, mixtures  # noqa: F401
from synthesizer_jax.training.experiment import Evaluation
from tests.cli import commands
from tests.evaluation import runs
from tests.training.tiny import damage


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with data, and a run of two steps that shards parameters over eight devices."""
    place = tmp_path_factory.mktemp("eval")
    runs.write_data(place / "data")
    experiment = runs.experiment(mesh=MeshShape(fsdp=8))
    evaluation = Evaluation(method="rank", batch_size=8, loss_batches=1)
    runs.write_run(place / "run", replace(experiment, evaluation=evaluation))
    splits = {"training_splits": (), "evaluation_splits": ("train", "validation", "test")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(mixtures.MIXTURES, runs.MIXTURE, runs.RATES)
        prepare.prepare(runs.MIXTURE, PreparedTasks(place / "data", Bytes().build()), **splits)
        yield place


@pytest.fixture
def run(place, tmp_path):
    """A copy of the run that the test may damage."""
    return shutil.copytree(place / "run", tmp_path / "run")


def call(place, options, *words, workdir=None, command="eval"):
    where = ("--workdir", workdir or place / "run", "--data-dir", place / "data")
    return " ".join(commands.call(f"{command} {options}", *where, *words).split())


RTE = "--task glue_rte_v002"


def test_a_split_without_labels_is_predicted_and_written(place):
    shown = call(place, f"--split test {RTE} --task multi30k_en_de --task super_glue_record_v102")
    assert f"Tasks without the split 'test' in {place / 'data'}: super_glue_record_v102" in shown
    assert "unlabeled: predicted, not scored" in shown
    assert "overall: score" in shown and " loss " in shown  # of Multi30k
    folder = place / "run" / "evaluation" / "4" / "test" / "part"
    files = {path.name: path.read_text().splitlines() for path in folder.iterdir()}
    assert set(files) == {"glue_rte_v002.jsonl", "multi30k_en_de.jsonl", "results.json"}
    for i, line in enumerate(map(json.loads, files["glue_rte_v002.jsonl"])):
        assert (line["idx"], line["target"], line["target_label"]) == (i, None, None)
        assert line["prediction"] == ("entailment", "not_entailment")[line["label"]]
        assert line["score"] == line["scores"][line["prediction"]] <= 0
    translated = [json.loads(line) for line in files["multi30k_en_de.jsonl"]]
    assert sorted(line["target"] for line in translated) == [f"Wort {i}" for i in range(4)]
    saved = json.loads("".join(files["results.json"]))
    hidden, known = saved["tasks"]
    assert (hidden["n"], hidden["labeled"], hidden["metrics"], hidden["loss"]) == (5, 0, {}, None)
    assert known["labeled"] == 4 and set(known["metrics"]) == {"bleu"}


def test_every_checkpoint_and_each_tasks_best(place):
    shown = call(place, f"--all {RTE} --task glue_stsb_v002")
    assert "label words: loss" in shown and "prior" not in shown
    table = shown[shown.index("best steps") :]
    accuracies = {}
    for step in (2, 4):
        folder = place / "run" / "evaluation" / str(step) / "part"
        saved = json.loads((folder / "results.json").read_text())
        accuracies[step] = saved["tasks"][0]["metrics"]["accuracy"]
    best = max(accuracies, key=accuracies.get)
    row = table[table.index("glue_rte_v002") :].split("│")
    assert int(row[1]) == best and "glue_stsb_v002" in table
    assert row[2].split() == ["accuracy", f"{accuracies[best]:.2f}"]


@pytest.mark.parametrize(
    ("command", "options", "error", "message"),
    [
        (
            *("eval", "--task glue_rte_v2", ValueError),
            r"mixture 'small_evaluation' has no task 'glue_rte_v2', did you mean 'glue_rte_v002'\? "
            "Its tasks are .*multi30k_en_de",
        ),
        (
            *("eval", "--task super_glue_record_v102 --split test", FileNotFoundError),
            r"super_glue_record_v102 has no .* split 'test' in",
        ),
        (
            *("predict", f"{RTE} --split tset", FileNotFoundError),
            r"'tset' in .*\. Choose train or validation or test with --split or evaluation\.split"
            r", or add the missing split\. Import .* with",
        ),
    ],
)
def test_missing_things_are_answered_with_existing_ones(place, command, options, error, message):
    with pytest.raises(error, match=message):
        call(place, options, command=command)


def test_a_part_does_not_replace_the_results_of_the_whole(place):
    folder = place / "run" / "evaluation" / "4"
    call(place, "")
    whole = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert len(json.loads(whole["results.json"])["tasks"]) > 1
    call(place, RTE)
    call(place, "--max-examples 1")
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == whole


def test_leaderboard_files(place, tmp_path):
    tasks = ("glue_rte_v002", "glue_stsb_v002", "super_glue_multirc_v102", "multi30k_en_de")
    chosen = " ".join(f"--task {task}" for task in tasks)
    files = tmp_path / "files"
    shown = call(place, f"{chosen} --method greedy --output {files}", command="predict")
    written = sorted(str(path.relative_to(files)) for path in files.rglob("*.*"))
    assert written == [
        *("glue/RTE.tsv", "glue/STS-B.tsv"),
        *("glue_rte_v002.jsonl", "glue_stsb_v002.jsonl", "multi30k_en_de.jsonl"),
        *("super_glue/MultiRC.jsonl", "super_glue_multirc_v102.jsonl"),
    ]
    rows = [json.loads(x) for x in (files / "glue_rte_v002.jsonl").read_text().splitlines()]
    invalid = sum(row["label"] == -1 for row in rows)
    assert invalid and f"glue/RTE.tsv ({invalid} predictions were not valid answers" in shown
    lines = (files / "glue" / "RTE.tsv").read_text().splitlines()
    assert lines[0] == "index\tprediction" and len(lines) == 6
    assert {line.split("\t")[1] for line in lines[1:]} <= {"entailment", "not_entailment"}
    path = files / "super_glue" / "MultiRC.jsonl"
    (first, _) = map(json.loads, path.read_text().splitlines())
    assert first["idx"] == 0
    questions = first["passage"]["questions"]
    assert [q["idx"] for q in questions] == [0, 1]
    assert [a["idx"] for a in questions[1]["answers"]] == [3, 4, 5]
    assert {a["label"] for q in questions for a in q["answers"]} <= {0, 1}


VALUES = {-1: True, 0: False, 1: False, float("nan"): True, -0.5: True, 7.0: False, "x": False}


def test_values_that_are_no_answers(place, tmp_path):
    assert {value: benchmarks._is_invalid(value) for value in VALUES} == VALUES
    prepared = PreparedTasks(place / "data", Bytes().build())
    lengths = {"inputs": 32, "targets": 8}
    examples = load_evaluation_set("glue_rte_v002", "test", prepared, lengths=lengths)
    answers = [(examples, ["entailment"] * len(examples.examples))] * 2
    with pytest.raises(ValueError, match=r"the same leaderboard file as another task, .*RTE\.tsv"):
        benchmarks.write_submission(tmp_path / "files", answers)
    assert not (tmp_path / "files").exists()


def test_a_damaged_newest_checkpoint_gives_way_to_an_older_one(place, run, caplog):
    damage(run / "checkpoints" / "4")
    with caplog.at_level(logging.WARNING):
        shown = call(place, RTE, workdir=run)
    assert "step 2" in shown
    (warning,) = [r.getMessage() for r in caplog.records if "cannot be read" in r.message]
    assert str(run / "checkpoints" / "4") in warning and "Step 2 is used" in warning
    problem = r"checkpoints/4 cannot be read .*\. Choose step 2\.$"
    with pytest.raises(ValueError, match=problem):
        call(place, f"--step 4 {RTE}", workdir=run)
    shown = call(place, f"--all {RTE}", workdir=run)
    assert "Step 4 is skipped" in shown and "glue_rte_v002" in shown
    damage(run / "checkpoints" / "2")
    with pytest.raises(ValueError, match=r"checkpoints/4 cannot be read .*Put a good copy"):
        call(place, RTE, workdir=run)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint that can be read \(tried 2, 4\)"):
        call(place, f"--all {RTE}", workdir=run)
    with pytest.raises(
        FileNotFoundError, match=r"no checkpoint of step 3\. Choose one of the steps 2 and 4"
    ):
        call(place, f"--step 3 {RTE}", workdir=run)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(
        FileNotFoundError, match=r"checkpoints contains no checkpoint yet\. Train the model first"
    ):
        call(place, RTE, workdir=run)


def test_a_diverged_model_is_evaluated_and_written_as_json(place, tmp_path):
    runs.write_run(tmp_path / "run", runs.experiment(), steps=(4,), value=float("nan"))
    call(place, f"{RTE} --task multi30k_en_de", workdir=tmp_path / "run")
    folder = tmp_path / "run" / "evaluation" / "4" / "part"
    texts = [(folder / "results.json").read_text()]
    texts += (folder / "glue_rte_v002.jsonl").read_text().splitlines()
    for text in texts:
        assert "NaN" not in text and "Infinity" not in text
    assert json.loads(texts[0])["loss"] is None


TEXTS = ["a\u2028b", "the dog sleeps"]


def say(place, options, *words):
    result = commands.invoke(f"generate --workdir {place / 'run'} {options}", *words)
    reading, generating = result.stderr.splitlines()
    assert reading == "reading a checkpoint"
    assert re.fullmatch(r"generating texts \(inputs: \d\)", generating)
    return result.stdout


def test_several_texts_and_their_scores(place):
    """With `--samples`, all output lines for the same input are consecutive.

    The first line for each input is the text that is printed without `--samples`.
    """
    options = "--max-length 4 --beams 3 --alpha 1.0"
    best = say(place, options, *TEXTS)
    several = say(place, f"{options} --samples 3 --scores", *TEXTS).splitlines()
    scores, texts = zip(*(line.split("\t") for line in several), strict=True)
    assert "".join(f"{text}\n" for text in texts[::3]) == best
    assert len(texts) == 6 and all(float(score) < 0 for score in scores)


def test_samples_are_repeated_by_their_seed_and_stay_alone(place):
    options = "--max-length 4 --temperature 0.9 --top-k 99 --top-p 0.95 --samples 2 --min-length 2"
    options += " --relative-length 2"
    found = say(place, f"{options} --seed 3", *TEXTS)
    assert len(found.splitlines()) == 4
    assert say(place, f"{options} --seed 3 --batch-size 1", *TEXTS) == found
    assert say(place, f"{options} --seed 4", *TEXTS) != found
    with pytest.raises(ValueError, match=r"top_p is 1\.5, but it must be above 0 and at most 1"):
        say(place, "--top-p 1.5 --temperature 1", "text")


def test_files_of_inputs_and_outputs_have_the_same_texts(place, tmp_path):
    shown = say(place, "", *TEXTS)
    assert len(shown.splitlines()) == 2
    (tmp_path / "in.txt").write_text("\ufeff" + "\r\n".join(TEXTS) + "\r\n", "utf-8", newline="")
    say(place, f"--input {tmp_path}/in.txt --output {tmp_path}/out.txt --batch-size 1")
    assert (tmp_path / "out.txt").read_text() == shown
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.txt", "out.txt"]


def test_inputs_are_checked_before_the_model_is_read(tmp_path, monkeypatch):
    nowhere = f"generate --workdir {tmp_path}"
    with pytest.raises(FileNotFoundError, match=r"--output .*There is no directory .*absent"):
        commands.call(f"{nowhere} --output {tmp_path}/absent/x text")
    (tmp_path / "latin").write_bytes("Größe".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin, line 1: the byte 0xf6 is not UTF-8\. .*iconv"):
        commands.call(f"{nowhere} --input {tmp_path}/latin")
    message = "There is no input. Give texts as arguments, a file with --input, or lines on stdin"
    with pytest.raises(ValueError, match=message):
        commands.call(nowhere)
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(generate, "sys", SimpleNamespace(stdin=terminal))
    with pytest.raises(ValueError, match=message):
        commands.call(nowhere)
    with pytest.raises(FileNotFoundError, match=r"contains no experiment\.json"):
        commands.call(f"{nowhere} text")
    piped = SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO(b"a\rb\xe2\x80\xa8c\r\n\nd"))
    monkeypatch.setattr(generate, "sys", SimpleNamespace(stdin=piped))
    assert generate._read_lines(None, None) == ["a\rb\u2028c", "", "d"]
