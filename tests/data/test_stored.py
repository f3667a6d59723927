"""Damaged or hostile TFDS files end in one sentence; nothing that they name is imported."""

import json
import os
import pathlib
import shutil
import sys

import pytest
import seqio
from synthesizer_jax.data.seqio_members import SeqioExamples as Examples
from synthesizer_jax.data.seqio_members import SeqioTaskStream

from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.storage import write_dataset
from synthesizer_jax.tasks.stored import check_dataset, prepared_versions, stored_splits

TASK = "glue_sst2_v002"
LENGTHS = {"inputs": 64, "targets": 16}


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


def open_task(data_dir: pathlib.Path) -> seqio.Task:
    return task_registry.find_task(TASK).to_seqio(Bytes().build(), data_dir)


def rewrite(path: pathlib.Path, change) -> None:
    """Changes a JSON file in place."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_the_whole_data_set_is_read(data_dir):
    assert len(Examples(open_task(data_dir), "train", LENGTHS)) == 30


@pytest.mark.parametrize(
    ("damage", "live"),
    [("flipped", False), ("absent", False), ("flipped", True), ("absent", True)],
)
def test_damaged_records_name_the_data_set_and_the_remedy(data_dir, damage, live):
    (path,) = directory(data_dir).glob("*.tfrecord*")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    if damage == "absent":
        path.unlink()
    task = open_task(data_dir)
    with pytest.raises(ValueError, match="import it again with 'synthesizer-jax data imp") as error:
        if live:
            member = SeqioTaskStream(task, "train", LENGTHS, shard=(0, 1), seed=0, shuffle=False)
            for _ in range(31):
                next(member)
        else:
            len(Examples(task, "train", LENGTHS))
    assert f"{TASK}'s split 'train' cannot be read from {directory(data_dir)}" in str(error.value)
    assert "{{" not in str(error.value)


@pytest.mark.parametrize("name", ["dataset_info.json", "features.json"])
@pytest.mark.parametrize("content", ["", '{"splits": [', "[]", '{"splits": [{}]}', "\xff"])
def test_damaged_json_names_the_file_and_the_remedy(data_dir, name, content):
    path = directory(data_dir) / name
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match="import it again") as error:
        Examples(open_task(data_dir), "train", LENGTHS)
    assert str(directory(data_dir)) in str(error.value)


@pytest.mark.parametrize("damage", ["truncated", "empty", "missing", "twice"])
def test_records_that_are_not_those_that_were_written(data_dir, damage):
    (path,) = directory(data_dir).glob("*.tfrecord-00000-of-00001")
    data = path.read_bytes()
    end = 16 + int.from_bytes(data[:8], "little")  # of the first record
    damaged = {
        "truncated": data[:-9],
        "empty": b"",
        "missing": data[end:],
        "twice": data[:end] + data,
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(ValueError, match=r"split train in .* have [\d,]+ bytes, but by dataset_in"):
        open_task(data_dir)


def test_sizes_as_tfds_on_beam_writes_them(data_dir):
    (path,) = directory(data_dir).glob("*.tfrecord-00000-of-00001")
    size = path.stat().st_size

    def whole_files(info):
        info["splits"][0]["numBytes"] = str(size)

    rewrite(directory(data_dir) / "dataset_info.json", whole_files)
    assert len(Examples(open_task(data_dir), "train", LENGTHS)) == 30


@pytest.mark.parametrize("name", ["dataset_info.json", "features.json", "*.tfrecord*"])
def test_a_pipe_is_not_waited_for(data_dir, name):
    (path,) = directory(data_dir).glob(name)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(
        ValueError, match=f"{path.name} is no regular file; delete it, and import it again"
    ):
        Examples(open_task(data_dir), "train", LENGTHS)


def test_folders_that_are_no_versions_are_left_out(data_dir):
    for name in ("1..0", "²", "1", "2.0.0", "10.0.0", "v1.0.0"):
        shutil.copytree(directory(data_dir), data_dir / "glue/sst2" / name)
    assert list(prepared_versions("glue/sst2", data_dir)) == ["1.0.0", "2.0.0", "10.0.0"]
    assert task_registry.prepared_splits(TASK, data_dir) == {"train": 30}


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
    with pytest.raises(ValueError, match=r"features\.json names the class '.*\.Evil'; only"):
        Examples(open_task(data_dir), "train", LENGTHS)
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
        Examples(open_task(data_dir), "train", LENGTHS)
    assert str(directory(data_dir) / "dataset_info.json") in str(error.value)


def test_what_tfds_writes_itself_is_allowed(data_dir):
    check_dataset(directory(data_dir))
    assert stored_splits(directory(data_dir)) == {"train": 30}
