"""Lengths of a task's rows, published sizes, and what splits share."""

import numpy as np
import pytest

from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.tasks import inspection, task_registry
from synthesizer_jax.tasks.imported import FileTask, Template, import_files
from synthesizer_jax.tasks.importers.files import find_splits

BYTES = Bytes().build()


def test_rows_are_read_whole_and_splits_compared(tmp_path, monkeypatch):
    """Two splits, one row of which is in both, and one twice."""
    monkeypatch.setattr(task_registry, "TASKS", dict(task_registry.TASKS))
    (tmp_path / "a.csv").write_text("x,y\none,1\ntwo,2\none,1\nthree,3\n")
    (tmp_path / "b.csv").write_text("x,y\ntwo,9\nfour,4\n")
    task, data_dir = FileTask("mine", Template("say {x}"), Template("{y}")), tmp_path / "data"
    splits = find_splits([f"train={tmp_path}/a.csv,test={tmp_path}/b.csv"])
    import_files(task, splits, data_dir)
    rows = list(inspection.read_rows("mine", "train", BYTES, data_dir=data_dir))
    texts = sorted(row["inputs_pretokenized"].decode() for row in rows)
    assert texts == ["say one", "say one", "say three", "say two"]
    (first,) = inspection.read_rows("mine", "train", BYTES, data_dir=data_dir, count=1)
    np.testing.assert_array_equal(first["inputs"], rows[0]["inputs"])
    with pytest.raises(FileNotFoundError, match=r"no split 'dev' in .* \(found: train, test\)"):
        next(inspection.read_rows("mine", "dev", BYTES, data_dir=data_dir))
    train, test = inspection.check_splits("mine", data_dir)
    assert (train.rows, train.repeated, train.shared, train.is_complete) == (4, 1, {}, None)
    assert (test.rows, test.repeated, test.shared) == (2, 0, {"train": 1})


def test_sizes_are_compared_and_lengths_summarized():
    assert inspection.SplitCheck("t", "train", 5, (5,), 0, {}).is_complete
    assert not inspection.SplitCheck("t", "train", 6, (5,), 0, {}).is_complete
    lengths = inspection.Lengths("targets", np.array([1, 2, 3, 4, 4, 8, 9, 100]))
    assert lengths.truncated_share(8) == 2 / 8
    assert lengths.histogram(8, bins=2) == [("1–4", 5), ("5–8", 1), ("over 8", 2)]
    assert lengths.histogram(2) == [("1", 1), ("2", 1), ("over 2", 6)]
    rows = [{"targets": [1, 1]}, {"targets": [1]}]
    assert inspection.Lengths.of(rows, "targets").lengths.tolist() == [2, 1]
    assert inspection.Lengths.of(rows, "inputs").lengths.tolist() == [0, 0]
