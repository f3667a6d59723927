"""Tests commands whose runs and data are in simulated buckets of Google Cloud Storage."""

import pathlib
import signal

import pytest

from synthesizer_jax.data.prepared import PreparedTasks
from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.preparation.prepare import prepare
from synthesizer_jax.runs.metrics import METRICS_FILE, read_metrics
from tests import buckets
from tests.cli.commands import PIPES, RECIPE, run_all, start


@pytest.fixture(scope="module")
def store(synthetic_data: pathlib.Path):
    """Simulated buckets that contain the prepared synthetic data sets."""
    prepare("synthetic_sst2", PreparedTasks(synthetic_data, Bytes().build()))
    with buckets.serve() as store:
        store.upload(synthetic_data, "bucket/data")
        yield store


def train(workdir: str | pathlib.Path, steps: int) -> str:
    return (
        f"train {RECIPE} --workdir {workdir} --data-dir gs://bucket/data --set "
        f"training.steps={steps} --set mesh.fsdp=1 --set evaluation.every=4 --set "
        "model.encoder.runs.0.repeats=1 --set model.decoder.runs.0.repeats=1"
    )


def losses(text: bytes, directory: pathlib.Path) -> list[tuple[int, float]]:
    (directory / METRICS_FILE).write_bytes(text)
    records = read_metrics(directory / METRICS_FILE)
    return [(r["step"], r["loss"]) for r in records]


WRONG = {
    train("gs://nobucket/run", 8): "gs://nobucket/run",
    train(
        "s3://bucket/run", 8
    ): "s3:/bucket/run is neither a path on a disk nor a path in Google Cloud Storage",
    train(
        "gs://bucket", 8
    ): "gs://bucket is neither a path on a disk nor a path in Google Cloud Storage",
    "eval --workdir gs://bucket/nothing": "gs://bucket/nothing contains no experiment.json",
    "doctor --workdir gs://nobucket/new": "gs://nobucket/new",
}


def test_a_run_that_is_killed_and_what_a_user_gets_wrong(store, tmp_path) -> None:
    with start(train("gs://bucket/run", 100_000), store.environment, **PIPES) as process:
        while "evaluated" not in (line := process.stdout.readline()):
            assert line, process.stderr.read()
        process.send_signal(signal.SIGKILL)
    store.put("bucket/run/checkpoints/8/state/half", b"")  # an interrupted save

    page = tmp_path / "report.html"
    commands = (
        train("gs://bucket/run", 8),
        train(tmp_path / "undisturbed", 8),
        "eval --workdir gs://bucket/run --data-dir gs://bucket/data --max-examples 2",
        "generate --workdir gs://bucket/run sentence",
        f"report gs://bucket/run --output {page}",
    )
    doctor = "doctor --workdir gs://bucket/new"
    ended = run_all(tmp_path, [doctor, *WRONG, *commands], **store.environment)

    (code, healthy), *ended = ended
    assert code == 0 and "gs://bucket/new is writable\n" in healthy
    wrong, right = ended[: len(WRONG)], ended[len(WRONG) :]
    for (code, text), (command, part) in zip(wrong, WRONG.items(), strict=True):
        errors = [line for line in text.splitlines() if line.startswith("error: ")]
        assert (code, len(errors)) == (2, 1) and part in text, f"{command}: {text}"
    assert {name.split("/")[1] for name in store.names()} == {"data", "run"}

    assert [code for code, _ in right] == [0] * 5, right
    said = "".join(text for _, text in right)
    assert "gs://bucket/run has finished its 8 steps. The score at step 8 is " in said
    assert "predictions: gs://bucket/run/evaluation/8/part/TASK.jsonl" in said
    assert page.exists()
    assert "bucket/run/evaluation/8/part/results.json" in store.names()
    assert store.names("bucket/run/tensorboard/events.out.tfevents.")
    finished = [n for n in store.names() if n.count("/") == 4 and n.endswith("commit_success.txt")]
    assert "bucket/run/checkpoints/8/commit_success.txt" in finished
    assert "bucket/run/checkpoints/8/state/half" not in store.names()

    _, text = store.objects[f"bucket/run/{METRICS_FILE}"]
    undisturbed = (tmp_path / "undisturbed" / METRICS_FILE).read_bytes()
    assert losses(text, tmp_path) == losses(undisturbed, tmp_path)
