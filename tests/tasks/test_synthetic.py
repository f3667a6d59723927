"""The generated mixture: the same everywhere, balanced, disjoint, in T5's formats, whole on disk."""

import hashlib
import json
import shutil

import pytest

from synthesizer_jax.tasks import synthetic
from synthesizer_jax.tasks.formats import WSC
from synthesizer_jax.tasks.postprocessors import to_text
from synthesizer_jax.tasks.synthetic.definitions import as_text, config_name
from synthesizer_jax.tasks.synthetic.rows import HELD_OUT, SIZES, SOURCES
from synthesizer_jax.tasks.synthetic.storage import VERSION
from tests.tasks.loading import load


@pytest.fixture(scope="module")
def rows():
    return {
        (config, split): synthetic.examples(config, split) for config in SOURCES for split in SIZES
    }


def test_rows_depend_on_the_seed_alone():
    def digest(seed):
        found = synthetic.examples("mnli", "validation", seed=seed)
        return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()

    assert digest(0) == digest(0) != digest(1)


def test_other_rows_need_another_version(rows):
    """What is written is recognised by `storage.VERSION`; a change of the rows raises it."""
    text = "".join(json.dumps(rows[c, "validation"], sort_keys=True) for c in sorted(SOURCES))
    found = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert (VERSION, found) == ("1.0.0", "0143ca47d95c4f38")


def test_splits_are_disjoint_and_as_large_as_said(rows):
    assert HELD_OUT > 1
    for config in SOURCES:
        texts = {}
        for split, size in SIZES.items():
            found = rows[config, split]
            assert len(found) == size
            texts[split] = {
                json.dumps(
                    {k: v for k, v in r.items() if k not in ("idx", "label")}, sort_keys=True
                )
                for r in found
            }
        assert not texts["train"] & texts["validation"]
        assert len(texts["validation"]) == SIZES["validation"] >= 500


def test_labels_are_balanced(rows):
    for config, source in SOURCES.items():
        if not source.labels:
            continue
        labels = [r["label"] for r in rows[config, "validation"]]
        for label in set(labels):
            assert abs(labels.count(label) / len(labels) - 1 / source.labels) < 0.02


@pytest.mark.slow
def test_the_seqio_tasks_make_the_strings_that_the_baselines_read(synthetic_data, rows):
    vocabulary = synthetic.vocabulary(synthetic_data).build()
    assert vocabulary.vocab_size == synthetic.VOCAB_SIZE
    options = {"vocabulary": vocabulary, "lengths": {"inputs": 32, "targets": 4}}
    for task in synthetic.DEFINITIONS:
        examples = load(task.name, "validation", synthetic_data, **options)
        shown = [
            (to_text(e["inputs_pretokenized"]), target)
            for e, target in zip(examples.examples, examples.target_words, strict=True)
        ]
        assert shown == [as_text(task, row) for row in rows[config_name(task), "validation"]]
        # Nothing is cut at the quickstart's lengths, and every answer is a right one.
        assert all(vocabulary.decode(x.tolist()) for x in examples.inputs)
        assert max(len(x) for x in examples.inputs) <= 32
        right = next(iter(examples.score(examples.target_words).values()))
        # WSC's held-out rows ask for the referent whether it is the right one or not.
        assert right == pytest.approx(50 if isinstance(task.format, WSC) else 100, abs=1)


@pytest.mark.slow
def test_writing_again_keeps_what_is_there_and_mends_what_is_not(synthetic_data, tmp_path):
    data_dir = shutil.copytree(synthetic_data, tmp_path / "data")
    files = sorted(p for p in data_dir.rglob("*") if p.is_file())
    times = {p: p.stat().st_mtime_ns for p in files}
    synthetic.write(data_dir)
    assert {p: p.stat().st_mtime_ns for p in files} == times
    broken = data_dir / synthetic.MIXTURE / "wic" / "1.0.0" / "dataset_info.json"
    content = broken.read_bytes()
    broken.unlink()
    assert not synthetic.is_written(data_dir)
    synthetic.write(data_dir)
    assert synthetic.is_written(data_dir)
    assert json.loads(broken.read_bytes())["name"] == json.loads(content)["name"]
