"""Tests TFDS data sets on disk.

The newest version is read. The metadata may name only classes of TFDS.
"""

import json

import pytest

from synthesizer_jax.tasks import stored, task_registry
from synthesizer_jax.tasks.stored import newest_version


def test_the_newest_version_is_read(tmp_path):
    for name in ("1..0", "²", "1", "2.0.0", "10.0.0", "v1.0.0"):
        directory = tmp_path / "glue/sst2" / name
        directory.mkdir(parents=True)
        splits = [{"name": "train", "shardLengths": ["20", "10" if name == "10.0.0" else "1"]}]
        (directory / "dataset_info.json").write_text(json.dumps({"splits": splits}))
    assert newest_version("glue/sst2", tmp_path) == tmp_path / "glue/sst2/10.0.0"
    assert newest_version("glue/cola", tmp_path) is None
    assert task_registry.find_task("glue_sst2_v002").stored_splits(tmp_path) == {"train": 30}


FOREIGN = '{"%s": "os.system"}'


@pytest.mark.parametrize(
    "text",
    [
        FOREIGN % "type",
        FOREIGN % r"\u0074ype",
        FOREIGN % r"python\u0043lassName",
        json.dumps({"content": FOREIGN % "python_class_name"}),
        '{"type": "os.system", "type": "tensorflow_datasets.core.features.Text"}',
    ],
)
def test_a_class_that_is_not_one_of_tfds_is_refused_however_it_is_written(text, tmp_path):
    (tmp_path / stored.FEATURES).write_text(text, encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"The file names the class 'os\.system', which is not part of TFDS"
    ):
        stored.check_classes(tmp_path)


def test_classes_of_tfds_and_texts_that_are_no_json_are_taken(tmp_path):
    features = {
        "type": "tensorflow_datasets.core.features.Text",
        "description": '{"type": of text}',
    }
    (tmp_path / stored.FEATURES).write_text(json.dumps(features), encoding="utf-8")
    stored.check_classes(tmp_path)
