"""The newest version of a TFDS data set is read."""

import json

from synthesizer_jax.tasks import task_registry
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
