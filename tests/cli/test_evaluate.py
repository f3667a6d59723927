"""`eval` as a user types it: splits without labels, files of predictions, damaged manager."""

import json
import logging
import shutil

import numpy as np
import pytest

from synthesizer_jax.checkpoints import manager
from synthesizer_jax.cli import evaluate
from synthesizer_jax.data.prepared import PreparedTasks
from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.evaluation import leaderboards
from synthesizer_jax.evaluation.evaluation_sets import load_evaluation_set
from synthesizer_jax.evaluation.scoring import TaskResult
from synthesizer_jax.registry import replace
from synthesizer_jax.sharding import MeshShape
from synthesizer_jax.tasks import definitions, mixtures, prepare  # noqa: F401 - its tasks
from synthesizer_jax.training.experiment import Evaluation
from tests.cli import commands
from tests.evaluation import runs


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Data, and a run of two steps whose mesh divides the parameters by eight."""
    place = tmp_path_factory.mktemp("eval")
    runs.write_data(place / "data")
    experiment = runs.experiment(mesh=MeshShape(fsdp=8))
    evaluation = Evaluation(method="rank", batch_size=8, loss_batches=1)
    runs.write_run(place / "run", replace(experiment, evaluation=evaluation))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(mixtures.MIXTURES, runs.MIXTURE, runs.RATES)
        prepare.prepare(
            runs.MIXTURE,
            PreparedTasks(place / "data", Bytes().build()),
            training_splits=(),
            evaluation_splits=("train", "validation", "test"),
        )
        yield place


@pytest.fixture
def run(place, tmp_path):
    """A copy to spoil."""
    shutil.copytree(place / "run", tmp_path / "run")
    return tmp_path / "run"


def call(place, *arguments, workdir=None, command="eval"):
    arguments = [
        command,
        "--workdir",
        workdir or place / "run",
        "--data-dir",
        place / "data",
        *arguments,
    ]
    return " ".join(commands.call(*arguments).split())


def spoil(checkpoint):
    (checkpoint / "state" / "manifest.ocdbt").write_bytes(b"")


RTE = ("--task", "glue_rte_v002")


@pytest.mark.slow
def test_a_split_without_labels_is_predicted_and_written(place, tmp_path):
    shown = call(
        *(place, "--split", "test", "--save-predictions"),
        *(
            "--task",
            "glue_rte_v002",
            "--task",
            "multi30k_en_de",
            "--task",
            "super_glue_record_v102",
        ),
    )
    assert f"without the split 'test' in {place / 'data'}: super_glue_record_v102" in shown
    assert "unlabeled examples are predicted, not scored" in shown
    assert "held-out loss" in shown  # Multi30k's
    assert "label prior" not in shown
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
    shown = call(place, "--all", *RTE, "--task", "glue_stsb_v002")
    table = shown[shown.index("best steps") :]
    assert "glue_rte_v002" in table and "glue_stsb_v002" in table
    accuracies = {}
    for step in (2, 4):
        folder = place / "run" / "evaluation" / str(step) / "part"
        saved = json.loads((folder / "results.json").read_text())
        accuracies[step] = saved["tasks"][0]["metrics"]["accuracy"]
    best = max(accuracies, key=accuracies.get)
    row = table[table.index("glue_rte_v002") :].split("│")
    assert int(row[1]) == best
    assert row[2].split() == ["accuracy", f"{accuracies[best]:.2f}"]


def test_a_task_of_another_mixture_is_named_as_that(place):
    with pytest.raises(ValueError, match=r"mixture 'small_evaluation' has no task 'glue_rte_v2', did you "
                       r"mean 'glue_rte_v002'\?; its tasks: .*multi30k_en_de"):  # fmt: skip
        call(place, "--task", "glue_rte_v2")
    with pytest.raises(
        FileNotFoundError, match=r"super_glue_record_v102 has no .* split 'test' in"
    ):
        call(place, "--task", "super_glue_record_v102", "--split", "test")


def test_a_part_does_not_replace_the_results_of_the_whole(place):
    folder = place / "run" / "evaluation" / "4"
    call(place)
    whole = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert len(json.loads(whole["results.json"])["tasks"]) > 1
    call(place, *RTE)
    call(place, "--max-examples", "1")
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == whole


def test_leaderboard_files(place, tmp_path):
    tasks = ("glue_rte_v002", "glue_stsb_v002", "super_glue_multirc_v102", "multi30k_en_de")
    chosen = [x for t in tasks for x in ("--task", t)]
    files = tmp_path / "files"
    shown = call(place, *chosen, "--output", files, "--method", "greedy", command="predict")
    written = sorted(str(path.relative_to(files)) for path in files.rglob("*.*"))
    assert written == [
        *("glue/RTE.tsv", "glue/STS-B.tsv"),
        *("glue_rte_v002.jsonl", "glue_stsb_v002.jsonl", "multi30k_en_de.jsonl"),
        *("super_glue/MultiRC.jsonl", "super_glue_multirc_v102.jsonl"),
    ]
    rows = [json.loads(x) for x in (files / "glue_rte_v002.jsonl").read_text().splitlines()]
    invalid = sum(row["label"] == -1 for row in rows)
    assert invalid and f"glue/RTE.tsv is written; {invalid} predictions that are no valid" in shown
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


def test_tasks_without_a_leaderboard_are_predicted_all_the_same(place):
    """The files of the recipe's own split lie where its evaluation does; labels are scored."""
    for split, folder, rows in (("test", "test", 4), ("validation", ".", 7)):
        shown = call(place, "--task", "multi30k_en_de", "--split", split, command="predict")
        path = place / "run" / "evaluation" / "4" / folder / "multi30k_en_de.jsonl"
        assert f"predictions: {path.parent.resolve()}/TASK.jsonl" in shown and "bleu" in shown
        assert len(path.read_text().splitlines()) == rows
        assert ("no leaderboard of GLUE or SuperGLUE" in shown) == (split == "test")


def test_predictions_of_some_examples_are_no_leaderboard_file(place):
    shown = call(place, *RTE, "--max-examples", "2", command="predict")
    assert "unlabeled" in shown and "leaderboard" not in shown
    folder = place / "run" / "evaluation" / "4" / "test" / "part"
    assert len((folder / "glue_rte_v002.jsonl").read_text().splitlines()) == 2
    assert not (folder / "glue").exists()


def test_a_split_that_is_not_there_is_answered_with_those_that_are(place):
    with pytest.raises(FileNotFoundError, match=r"'tset' in .*; choose train or validation or test, or "
                       "import the original files"):  # fmt: skip
        call(place, *RTE, "--split", "tset", command="predict")


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (-1, True),
        (0, False),
        (1, False),
        (float("nan"), True),
        (-0.5, True),
        (7.0, False),
        ("x", False),
    ],
)
def test_values_that_are_no_answers(value, wanted):
    assert leaderboards._is_invalid(value) == wanted


def test_tasks_of_one_leaderboard_file_are_refused_before_it_is_written(place, tmp_path):
    examples = load_evaluation_set(
        "glue_rte_v002",
        "test",
        PreparedTasks(place / "data", Bytes().build()),
        lengths={"inputs": 32, "targets": 8},
    )
    answers = [(examples, ["entailment"] * len(examples.examples))] * 2
    with pytest.raises(ValueError, match=r"the same leaderboard file as another task, .*RTE\.tsv"):
        leaderboards.write_submission(tmp_path / "files", answers)
    assert not (tmp_path / "files").exists()


def test_a_damaged_newest_checkpoint_gives_way_to_an_older_one(place, run, caplog):
    spoil(run / "checkpoints" / "4")
    with caplog.at_level(logging.WARNING):
        shown = call(place, *RTE, workdir=run)
    assert "step 2" in shown
    (warning,) = [r.getMessage() for r in caplog.records if "cannot be read" in r.message]
    assert str(run / "checkpoints" / "4") in warning and "step 2 is used" in warning
    problem = r"checkpoints/4 cannot be read .*; choose another with --step, of 2$"
    with pytest.raises(ValueError, match=problem):
        call(place, "--step", "4", *RTE, workdir=run)
    shown = call(place, "--all", *RTE, workdir=run)
    assert "step 4 is skipped" in shown and "glue_rte_v002" in shown


def test_without_a_readable_checkpoint_nothing_is_evaluated(place, run):
    for step in (2, 4):
        spoil(run / "checkpoints" / str(step))
    with pytest.raises(ValueError, match=r"checkpoints/4 cannot be read .*put a good copy"):
        call(place, *RTE, workdir=run)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint that can be read \(tried 2, 4\)"):
        call(place, "--all", *RTE, workdir=run)
    with pytest.raises(
        FileNotFoundError, match="has no checkpoint 3; give --step with one of 2, 4"
    ):
        call(place, "--step", "3", *RTE, workdir=run)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(FileNotFoundError, match=r"checkpoints has no checkpoint yet; train first"):
        call(place, *RTE, workdir=run)


def test_a_checkpoint_that_training_deletes_meanwhile_gives_way_to_a_newer_one(
    place, run, monkeypatch, caplog
):
    directory = run / "checkpoints"
    (directory / "4").rename(run / "newer")
    read = manager.read_variables

    def read_while_training(checkpoint, layout, **options):
        if checkpoint.name == "2":
            (run / "newer").rename(directory / "4")
            shutil.rmtree(checkpoint)
        return read(checkpoint, layout, **options)

    monkeypatch.setattr(manager, "read_variables", read_while_training)
    assert "step 4" in call(place, *RTE, workdir=run)
    assert "cannot be read" not in caplog.text


def test_of_all_checkpoints_those_that_vanish_are_passed_over(place, run, monkeypatch):
    found = manager.finished_steps
    first = iter([[1, 2, 4]])
    listed = lambda directory: next(first, None) or found(directory)
    monkeypatch.setattr(manager, "finished_steps", listed)
    shown = call(place, "--all", *RTE, workdir=run)
    assert "step 1 is skipped" in shown
    assert "step 2" in shown and "step 4" in shown


@pytest.mark.slow
def test_a_diverged_model_is_evaluated_and_written_as_json(place, tmp_path):
    runs.write_run(tmp_path / "run", runs.experiment(), steps=(4,), value=float("nan"))
    tasks = (*RTE, "--task", "multi30k_en_de")
    call(place, *tasks, "--save-predictions", workdir=tmp_path / "run")
    folder = tmp_path / "run" / "evaluation" / "4" / "part"
    texts = [(folder / "results.json").read_text()]
    texts += (folder / "glue_rte_v002.jsonl").read_text().splitlines()
    for text in texts:
        assert "NaN" not in text and "Infinity" not in text
    assert json.loads(texts[0])["loss"] is None


def test_following_waits_for_checkpoints_until_the_last_step(place, monkeypatch):
    hidden, real = [], manager.finished_steps
    monkeypatch.setattr(manager, "finished_steps", lambda x: real(x) if hidden else real(x)[:1])
    monkeypatch.setattr(evaluate.time, "sleep", hidden.append)
    shown = call(place, *RTE, "--follow")
    assert hidden == [evaluate.POLL_SECONDS]
    assert shown.index("step 2") < shown.index("step 4")


def test_averages_of_the_benchmarks_that_were_evaluated(capsys):
    metrics = {"matthews_corrcoef": 50.0}
    cola = TaskResult("glue_cola_v002", "validation", 5, 5, metrics, ("",) * 5, np.zeros(5))
    evaluate.print_results(3, [cola], {})
    shown = capsys.readouterr().out
    assert "GLUE average: incomplete, not computed" in shown and "SuperGLUE" not in shown
    evaluate.print_results(3, [cola], {"GLUE": 61.25})
    assert "GLUE average: 61.25" in capsys.readouterr().out


def test_following_ends_when_the_run_has_stopped_early(place, run):
    """Step 4 is not its last, and no more will come."""
    shutil.rmtree(run / "checkpoints" / "4")
    events = [{"time": 1.0, "event": name, "step": 2} for name in ("stopped", "end")]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert "step 2" in call(place, *RTE, "--follow", workdir=run)
