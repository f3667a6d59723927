"""Tests the report about a task: lengths of rows, published sizes, and common rows of splits."""

import dataclasses

import numpy as np
import pytest

from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.preparation import task_contents
from synthesizer_jax.preparation.file_tasks import FileTask, Template, import_files
from synthesizer_jax.preparation.importers.files import find_splits
from synthesizer_jax.tasks import task_registry
from tests.cli.commands import invoke

BYTES = Bytes().build()


def test_commands_that_read_rows_show_their_progress(tmp_path, monkeypatch):
    monkeypatch.setattr(task_registry, "TASKS", dict(task_registry.TASKS))
    (tmp_path / "a.csv").write_text("x,y\n" + "".join(f"word{i} {i},{i}\n" for i in range(99)))
    data_dir = tmp_path / "data"
    splits = find_splits([f"train={tmp_path}/a.csv,test={tmp_path}/a.csv"])
    import_files(FileTask("mine", Template("say {x}"), Template("{y}")), splits, data_dir)
    start = ["loading TensorFlow", "reading mine, train"]
    vocabulary = f"data vocabulary mine --size 40 --output {tmp_path}/spiece.model"
    for command, phases in {
        "data show mine": start,
        "data check mine": [*start, "reading mine, test"],
        vocabulary: [*start, "training a vocabulary of 40 pieces"],
    }.items():
        assert invoke(command, "--data-dir", data_dir).stderr.splitlines() == phases


def test_rows_are_read_whole_and_splits_compared(tmp_path, monkeypatch):
    """Rows are read without truncation, and splits are compared.

    One row is in both splits, and one row occurs twice in the same split.
    """
    monkeypatch.setattr(task_registry, "TASKS", dict(task_registry.TASKS))
    (tmp_path / "a.csv").write_text("x,y\none,1\ntwo,2\none,1\nthree,3\n")
    (tmp_path / "b.csv").write_text("x,y\ntwo,9\nfour,4\n")
    task = FileTask("mine", Template("say {x}"), Template("{y}"))
    data_dir = tmp_path / "data"
    splits = find_splits([f"train={tmp_path}/a.csv,test={tmp_path}/b.csv"])
    import_files(task, splits, data_dir)
    rows = list(task_contents.read_rows("mine", "train", BYTES, data_dir=data_dir))
    texts = sorted(row["inputs_pretokenized"].decode() for row in rows)
    assert texts == ["say one", "say one", "say three", "say two"]
    (first,) = task_contents.read_rows("mine", "train", BYTES, data_dir=data_dir, count=1)
    np.testing.assert_array_equal(first["inputs"], rows[0]["inputs"])
    with pytest.raises(
        FileNotFoundError, match=r"'dev' in .* Its splits there are train, test\. Choose"
    ):
        next(task_contents.read_rows("mine", "dev", BYTES, data_dir=data_dir))
    train, test = task_contents.check_splits("mine", data_dir)
    assert (train.rows, train.repeated, train.shared, train.is_complete) == (4, 1, {}, None)
    assert (test.rows, test.repeated, test.shared) == (2, 0, {"train": 1})
    published = [dataclasses.replace(train, published=rows).is_complete for rows in (4, 5)]
    assert published == [True, False]
