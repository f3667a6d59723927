"""Damaged or hostile TFDS files end in one sentence; nothing that they name is imported."""

import json
import pathlib
import shutil
import sys

import pytest

from synthesizer_jax.data.prepared import PreparedTasks
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.prepare import prepare
from synthesizer_jax.tasks.storage import write_dataset
from synthesizer_jax.tasks.stored import check_dataset, prepared_versions, stored_splits
from tests.tasks.loading import BYTES, LENGTHS, quiet

TASK = "glue_sst2_v002"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A data directory with 30 rows of SST-2."""
    import numpy as np
    import tensorflow_datasets as tfds

    data_dir = tmp_path_factory.mktemp("data")
    rows = [{"sentence": f"film {i}", "label": i % 2, "idx": i} for i in range(30)]
    write_dataset(
        "glue",
        "sst2",
        version="1.0.0",
        description="Made rows.",
        features={
            "sentence": tfds.features.Text(),
            "label": tfds.features.ClassLabel(names=["negative", "positive"]),
            "idx": np.int32,
        },
        splits={"train": lambda: rows},
        data_dir=data_dir,
    )
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


def rewrite(path: pathlib.Path, change) -> None:
    """Changes a JSON file in place."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_the_whole_data_set_is_read(data_dir):
    assert read(data_dir) == 30


@pytest.mark.parametrize("damage", ["flipped", "absent", "truncated"])
def test_damaged_records_name_the_data_set_and_the_remedy(data_dir, damage):
    (path,) = directory(data_dir).glob("*.tfrecord*")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data if damage == "flipped" else data[:-9])
    if damage == "absent":
        path.unlink()
    with pytest.raises(ValueError, match="import it again with 'synthesizer-jax data imp") as error:
        read(data_dir)
    assert f"{TASK}'s split 'train' of glue/sst2 in {data_dir} cannot be read" in str(error.value)
    assert "{{" not in str(error.value)


@pytest.mark.parametrize("name", ["dataset_info.json", "features.json"])
@pytest.mark.parametrize("content", ["", '{"splits": [', "[]", '{"splits": [{}]}', "\xff"])
def test_damaged_json_names_the_file_and_the_remedy(data_dir, name, content):
    path = directory(data_dir) / name
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match="import it again") as error:
        read(data_dir)
    assert str(data_dir) in str(error.value)


def test_folders_that_are_no_versions_are_left_out(data_dir):
    for name in ("1..0", "²", "1", "2.0.0", "10.0.0", "v1.0.0"):
        shutil.copytree(directory(data_dir), data_dir / "glue/sst2" / name)
    assert list(prepared_versions("glue/sst2", data_dir)) == ["1.0.0", "2.0.0", "10.0.0"]
    assert task_registry.find_task(TASK).stored_splits(data_dir) == {"train": 30}


EVIL = "evil_features.Evil"
LEGACY = {"type": "tensorflow_datasets.core.features.features_dict.FeaturesDict"}


@pytest.mark.parametrize(
    "features",
    [
        {"pythonClassName": EVIL, "tensor": {}},
        {"featuresDict": {"features": {"a": {"python_class_name": EVIL}}}},
        LEGACY | {"content": {"a": {"type": EVIL, "content": {}}}},
        LEGACY | {"content": json.dumps({"features": {"a": {"pythonClassName": EVIL}}})},
        {"jsonFeature": {"json": json.dumps({"a": [{"type": EVIL, "content": {}}]})}},
        {"pythonClassName": "tensorflow_datasets_evil.Evil"},
    ],
)
def test_no_module_is_imported_because_a_file_says_so(data_dir, tmp_path, monkeypatch, features):
    modules = tmp_path / "modules"
    modules.mkdir()
    for name in ("evil_features", "tensorflow_datasets_evil"):
        text = f"open({str(tmp_path / 'was_imported')!r}, 'w')\nclass Evil: ...\n"
        (modules / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(modules))
    (directory(data_dir) / "features.json").write_text(json.dumps(features))
    with pytest.raises(
        ValueError, match=r"features\.json cannot be read: it names the class '.*\.Evil'; only"
    ):
        read(data_dir)
    assert not (tmp_path / "was_imported").exists()
    assert not {"evil_features", "tensorflow_datasets_evil"} & set(sys.modules)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "../../x"),
        ("name", ".."),
        ("configName", "/etc"),
        ("version", "../1.0.0"),
        ("filepathTemplate", "../{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"),
        ("filepath_template", "/etc/passwd"),
        ("filepathTemplate", ["/etc/passwd"]),
    ],
)
def test_no_file_outside_of_the_directory_is_opened(data_dir, key, value):
    def change(info):
        (info["splits"][0] if key.lower().startswith("filepath") else info)[key] = value

    rewrite(directory(data_dir) / "dataset_info.json", change)
    with pytest.raises(ValueError, match=rf"points out of its directory \({key} is") as error:
        read(data_dir)
    assert str(directory(data_dir) / "dataset_info.json") in str(error.value)


def test_what_tfds_writes_itself_is_allowed(data_dir):
    check_dataset(directory(data_dir))
    assert stored_splits(directory(data_dir)) == {"train": 30}
