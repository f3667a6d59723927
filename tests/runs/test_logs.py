"""Logs of runs on disks and in buckets; another directory stands for the bucket."""

import pathlib

import pytest

from synthesizer_jax.runs import log_directory
from synthesizer_jax.runs.events import EVENTS_FILE, Events, read_events
from synthesizer_jax.runs.log_directory import LogDirectory
from synthesizer_jax.runs.metrics import METRICS_FILE, MetricsWriter


@pytest.fixture
def bucket(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    directory = tmp_path / "bucket"
    (directory / "tensorboard").mkdir(parents=True)
    monkeypatch.setattr(log_directory, "in_bucket", lambda path: path == directory)
    monkeypatch.setattr(log_directory.tempfile, "tempdir", str(tmp_path))
    return directory


def test_on_a_disk_they_lie_in_the_run(tmp_path) -> None:
    found = LogDirectory(tmp_path)
    found.copy()
    found.close()
    assert found.path == tmp_path


def test_they_go_on_where_a_former_process_has_ended(bucket) -> None:
    for step in (1, 2):
        found = LogDirectory(bucket)
        writer = MetricsWriter(found.path, restored_step=step - 1)
        events = Events(found.path)
        writer.write(step, {"loss": 1.0}, kind="train")
        events.write("saved", step=step)
        found.copy()
        assert (bucket / METRICS_FILE).read_text().count("\n") == step
        events.write("end", step=step)
        writer.close()
        found.close()
        assert not found.path.exists()
    assert [e["event"] for e in read_events(bucket)] == ["saved", "end"] * 2
    assert any((bucket / "tensorboard").iterdir())


def test_only_what_has_changed_is_copied(bucket) -> None:
    found = LogDirectory(bucket)
    events = Events(found.path)
    events.write("start", step=0)
    found.copy()
    (bucket / EVENTS_FILE).unlink()
    found.copy()
    assert not (bucket / EVENTS_FILE).exists()
    events.write("end", step=1)
    found.close()
    assert (bucket / EVENTS_FILE).read_text().count("\n") == 2


def test_storage_that_takes_nothing_neither_stops_a_run_nor_loses_its_logs(bucket, caplog) -> None:
    found = LogDirectory(bucket)
    Events(found.path).write("start", step=0)
    (bucket / EVENTS_FILE).mkdir()  # nothing can be written there
    found.copy()
    found.close()
    assert f"{found.path} could not be copied to {bucket} now (IsADirectoryError" in caplog.text
    assert (found.path / EVENTS_FILE).exists()


def test_another_process_than_the_first_copies_nothing(bucket) -> None:
    found = LogDirectory(bucket, writes=False)
    assert found.path == bucket
    found.close()
