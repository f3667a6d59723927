"""Runs and data in buckets, as a user types it; `tests.buckets` stands for Google Cloud Storage."""

import json
import pathlib
import signal
import subprocess
import sys

import pytest

from synthesizer_jax.runs.metrics import METRICS_FILE, read_metrics
from tests import buckets
from tests.environment import COMMANDS, without_devices

pytestmark = pytest.mark.slow

RECIPE = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "reliability_run.py"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, synthetic_data: pathlib.Path):
    """Buckets with the synthetic data sets."""
    with buckets.serve(tmp_path_factory.mktemp("certificate")) as store:
        store.upload(synthetic_data, "bucket/data")
        yield store


def train(workdir: str | pathlib.Path, steps: int) -> list[str]:
    command = ["train", str(RECIPE), "--workdir", str(workdir), "--data-dir", "gs://bucket/data"]
    settings = (f"training.steps={steps}", "mesh.fsdp=1", "evaluation.every=4")
    return command + [word for setting in settings for word in ("--set", setting)]


def say(store: buckets.Buckets, place: pathlib.Path, *commands: list[str]) -> tuple[str, str]:
    """What commands print, run one after the other in one process, and their errors."""
    (place / "commands").write_text(json.dumps(commands))
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, str(place / "commands")],
        env=without_devices() | store.environment,
        capture_output=True,
        text=True,
    )
    return done.stdout, done.stderr


def losses(text: bytes, directory: pathlib.Path) -> list[tuple[int, float]]:
    (directory / METRICS_FILE).write_bytes(text)
    records = read_metrics(directory / METRICS_FILE)
    return [(r["step"], r["loss"]) for r in records]


def test_a_run_in_a_bucket_that_is_killed(store, tmp_path) -> None:
    environment = without_devices() | store.environment
    command = [sys.executable, "-m", "synthesizer_jax", *train("gs://bucket/run", 100_000)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while "evaluated" not in (line := process.stdout.readline()):
            assert line, process.stderr.read()
        process.send_signal(signal.SIGKILL)
    store.put("bucket/run/checkpoints/8/state/half", b"")  # a save that was cut off

    generate = ["generate", "--workdir", "gs://bucket/run", "cola sentence: the dog sleep ."]
    evaluate = ["eval", "--workdir", "gs://bucket/run", "--data-dir", "gs://bucket/data"]
    page = tmp_path / "report.html"
    said, errors = say(
        store,
        tmp_path,
        train("gs://bucket/run", 8),
        train(tmp_path / "undisturbed", 8),
        [*evaluate, "--max-examples", "2", "--save-predictions"],
        generate,
        ["report", "gs://bucket/run", "--output", str(page)],
    )
    assert said.count("=== exit 0\n") == 5, said + errors
    assert "gs://bucket/run has finished its 8 steps: score " in said
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


def test_what_a_user_gets_wrong(store, tmp_path) -> None:
    before = store.names()
    said, errors = say(
        store,
        tmp_path,
        train("gs://nobucket/run", 8),
        train("s3://bucket/run", 8),
        train("gs://bucket", 8),
        ["eval", "--workdir", "gs://bucket/nothing"],
        ["quickstart", "--workdir", "gs://bucket/quick"],
        ["doctor", "--workdir", "gs://bucket/new"],
        ["doctor", "--workdir", "gs://nobucket/new"],
    )
    assert said.count("=== exit 2\n") == 5, said + errors
    told = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(told) == 5
    for part, line in zip(
        (
            "gs://nobucket/run: the bucket does not answer as it should",
            "s3:/bucket/run is not a path on a disk or in Google Cloud Storage; use DIRECTORY",
            "gs://bucket is not a path on a disk or in Google Cloud Storage",
            "gs://bucket/nothing holds no experiment.json",
            "data sets are not written to a bucket (gs://bucket/quick/data); write them to",
        ),
        told,
        strict=True,
    ):
        assert part in line
    assert "ok   gs://bucket/new is writable\n" in said
    assert "FAIL gs://nobucket/new: the bucket does not answer as it should" in said
    assert store.names() == before
