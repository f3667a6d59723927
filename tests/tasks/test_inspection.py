"""Lengths of a task's rows, published sizes, and what splits share."""

import numpy as np
import pytest

from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.tasks import inspection, task_registry
from synthesizer_jax.tasks.imported import FileTask, Template, import_files
from synthesizer_jax.tasks.importers.files import find_splits


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """A task of two splits, one row of which is in both, and one twice."""
    place = tmp_path_factory.mktemp("inspected")
    (place / "a.csv").write_text("x,y\none,1\ntwo,2\none,1\nthree,3\n")
    (place / "b.csv").write_text("x,y\ntwo,9\nfour,4\n")
    task = FileTask("inspected", Template("say {x}"), Template("{y}"))
    import_files(task, find_splits([f"train={place}/a.csv,test={place}/b.csv"]), place / "data")
    yield place / "data"
    task_registry.TASKS.pop("inspected")


def test_rows_are_read_whole_and_in_order(data_dir):
    rows = list(inspection.read_rows("inspected", "train", Bytes().build(), data_dir=data_dir))
    texts = sorted(row["inputs_pretokenized"].decode() for row in rows)
    assert texts == ["say one", "say one", "say three", "say two"]
    (first,) = inspection.read_rows(
        "inspected", "train", Bytes().build(), data_dir=data_dir, count=1
    )
    np.testing.assert_array_equal(first["inputs"], rows[0]["inputs"])
    with pytest.raises(FileNotFoundError, match=r"no split 'dev' in .* \(found: train, test\)"):
        next(inspection.read_rows("inspected", "dev", Bytes().build(), data_dir=data_dir))


def test_splits_are_compared(data_dir):
    train, test = inspection.check_splits("inspected", data_dir)
    assert (train.rows, train.repeated, train.shared, train.is_complete) == (4, 1, {}, None)
    assert (test.rows, test.repeated, test.shared) == (2, 0, {"train": 1})


def test_published_sizes_are_known_by_the_data_set():
    assert inspection.published_sizes("glue/cola")["train"] == (8551,)
    assert inspection.published_sizes("glue/qqp")["train"] == (363849, 363846)
    assert inspection.published_sizes("multi30k/en_de")["validation"] == (1014,)
    assert inspection.published_sizes("nothing") == {}
    known = inspection.SplitCheck("t", "train", 5, (4, 5), 0, {})
    assert known.is_complete
    assert not inspection.SplitCheck("t", "train", 6, (4, 5), 0, {}).is_complete
