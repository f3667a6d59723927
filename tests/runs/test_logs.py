"""Logs of runs, on disks and where nothing can be appended to a file."""

import pathlib

import pytest

from synthesizer_jax import files
from synthesizer_jax.runs import metrics
from synthesizer_jax.runs.events import Events, read_events
from synthesizer_jax.runs.metrics import METRICS_FILE, MetricsWriter
from synthesizer_jax.runs.progress import Progress


@pytest.mark.parametrize("bucket", [False, True])
def test_a_log_goes_on_where_a_former_process_has_ended(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, bucket: bool
) -> None:
    for module in (files, metrics):
        monkeypatch.setattr(module, "in_bucket", lambda path: bucket)
    path = tmp_path / METRICS_FILE
    path.touch()
    for step in (1, 2):
        writer, events = MetricsWriter(tmp_path, restored_step=step - 1), Events(tmp_path)
        writer.write(step, {"loss": 1.0}, kind="train")
        assert path.read_text().count("\n") == (step - 1 if bucket else step)
        writer.flush()
        assert path.read_text().count("\n") == step
        events.write("saved", step=step)
        events.write("end", step=step)
        writer.close()
    assert [e["event"] for e in read_events(tmp_path)] == ["saved", "end"] * 2
    assert any((tmp_path / "tensorboard").iterdir())


def test_another_process_than_the_first_writes_nothing(tmp_path: pathlib.Path) -> None:
    writer, events = MetricsWriter(tmp_path, writes=False), Events(tmp_path, writes=False)
    writer.write(1, {"loss": 1.0}, kind="train")
    events.write("end", step=1)
    writer.close()
    assert not any(tmp_path.iterdir())


def test_an_optimizer_without_a_schedule_has_no_rate_to_show(
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = {"loss": 2.0, "padding": 0.25, "steps_per_second": 4.0, "tokens_per_second": 1000.0}
    Progress(total=12).log_training(4, values)
    assert capsys.readouterr().out == (
        "step  4/12  loss 2  padding 25%  4 steps/s  1,000 tokens/s  2.0 s left\n"
    )
