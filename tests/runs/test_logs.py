"""Tests logs of runs, on disks and on storage that cannot append to files."""

import pytest

from synthesizer_jax.base import files
from synthesizer_jax.runs import metrics
from synthesizer_jax.runs.events import EVENTS_FILE, add_event, read_events
from synthesizer_jax.runs.metrics import METRICS_FILE, MetricsWriter, read_metrics


@pytest.mark.parametrize("bucket", [False, True])
def test_a_log_continues_where_an_earlier_process_has_ended(tmp_path, monkeypatch, bucket) -> None:
    for module in (files, metrics):
        monkeypatch.setattr(module, "in_bucket", lambda path: bucket)
    path = tmp_path / METRICS_FILE
    path.touch()
    for step in (1, 2):
        writer = MetricsWriter(tmp_path, restored_step=step - 1)
        writer.write(step, {"loss": 1.0}, kind="train")
        assert path.read_text().count("\n") == (step - 1 if bucket else step)
        writer.flush()
        assert path.read_text().count("\n") == step
        add_event(tmp_path, "saved", step=step)
        add_event(tmp_path, "end", step=step)
        writer.close()
    assert [e["event"] for e in read_events(tmp_path)] == ["saved", "end"] * 2
    assert any((tmp_path / "tensorboard").iterdir())


DAMAGES = [b"\0\0\0\n", b'{"step": \xff\xfe\n', b"[]\n", b'{"step": 1, "k', b"[" * 9999 + b"\n"]


@pytest.mark.parametrize("damage", DAMAGES, ids=range(len(DAMAGES)))
def test_logs_are_cut_back_to_the_restored_step_and_to_what_can_be_read(
    tmp_path, damage, caplog
) -> None:
    path, events = tmp_path / METRICS_FILE, tmp_path / EVENTS_FILE
    lines = [f'{{"step": {s}, "kind": "train", "loss": 1.0}}\n'.encode() for s in range(1, 6)]
    torn = not damage.endswith(b"\n")
    path.write_bytes(b"".join(lines) + damage if torn else b"".join([lines[0], damage, *lines[1:]]))
    if not torn:
        with pytest.raises(
            ValueError, match=r"Line 2 of .* is damaged\. Remove it to read the others"
        ):
            read_metrics(path)
    MetricsWriter(tmp_path, restored_step=3).close()
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3]
    assert ("Line 2 of" in caplog.text) != torn
    events.write_bytes(damage)
    add_event(tmp_path, "end", step=3)
    assert [e["event"] for e in read_events(tmp_path)] == ["end"]
