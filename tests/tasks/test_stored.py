"""Damaged TFDS files end in one sentence, and the newest version is read."""

import pathlib
import shutil

import numpy as np
import pytest
import tensorflow_datasets as tfds

from synthesizer_jax.data.prepared import PreparedTasks
from synthesizer_jax.preparation.prepare import prepare
from synthesizer_jax.preparation.writing import write_dataset
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.stored import newest_version, stored_splits
from tests.tasks.loading import BYTES, LENGTHS, quiet

TASK = "glue_sst2_v002"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A data directory with 30 rows of SST-2."""
    data_dir = tmp_path_factory.mktemp("data")
    rows = [{"sentence": f"film {i}", "label": i % 2, "idx": i} for i in range(30)]
    label = tfds.features.ClassLabel(names=["negative", "positive"])
    features = {"sentence": tfds.features.Text(), "label": label, "idx": np.int32}
    write_dataset("glue/sst2", "1.0.0", features, {"train": lambda: rows}, data_dir)
    return data_dir


@pytest.fixture
def data_dir(written: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(written, tmp_path / "data"))


def directory(data_dir: pathlib.Path) -> pathlib.Path:
    return data_dir / "glue/sst2/1.0.0"


def read(data_dir: pathlib.Path) -> int:
    """Prepares the task; returns its number of examples."""
    prepared = PreparedTasks(data_dir, BYTES)
    prepare(TASK, prepared, log=quiet)
    return len(prepared.open(TASK, "train", LENGTHS))


def test_the_newest_version_is_read(data_dir):
    assert stored_splits(directory(data_dir)) == {"train": 30}
    assert read(data_dir) == 30
    for name in ("1..0", "²", "1", "2.0.0", "10.0.0", "v1.0.0"):
        shutil.copytree(directory(data_dir), data_dir / "glue/sst2" / name)
    assert newest_version("glue/sst2", data_dir) == data_dir / "glue/sst2/10.0.0"
    assert newest_version("glue/cola", data_dir) is None
    assert task_registry.find_task(TASK).stored_splits(data_dir) == {"train": 30}


def test_only_classes_of_tfds_are_imported(data_dir):
    path = directory(data_dir) / "features.json"
    path.write_text(path.read_text().replace("tensorflow_datasets.core", "mine", 1))
    with pytest.raises(ValueError, match=r"features.json cannot be read: it names the class 'mine"):
        read(data_dir)


def damage(path: pathlib.Path, kind: str) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.unlink()
    if kind != "absent":
        contents = {"flipped": bytes(data), "truncated": bytes(data[:-9])}
        path.write_bytes(contents.get(kind, kind.encode("latin-1")))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("*.tfrecord*", kind) for kind in ("flipped", "absent", "truncated")),
        *(("dataset_info.json", kind) for kind in ("", "[]", "\xff")),
        *(("features.json", kind) for kind in ("", '{"splits": [')),
    ],
)
def test_damage_names_the_data_set_and_the_remedy(data_dir, name, kind):
    (path,) = directory(data_dir).glob(name)
    damage(path, kind)
    with pytest.raises(ValueError, match="import it again with") as error:
        read(data_dir)
    assert str(data_dir) in str(error.value) and "{{" not in str(error.value)
