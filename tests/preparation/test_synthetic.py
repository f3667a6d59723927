"""Tests that the generated mixture is reproducible, balanced, complete, and in T5's formats."""

import collections
import hashlib
import json
import shutil

import pytest

from synthesizer_jax.preparation import synthetic
from synthesizer_jax.preparation.synthetic import NUM_LABELS, SIZES, VERSION, as_text
from synthesizer_jax.tasks.postprocessors import to_text
from synthesizer_jax.tasks.synthetic import DEFINITIONS, MIXTURE, VOCAB_SIZE, vocabulary
from tests.tasks.loading import load


@pytest.fixture(scope="module")
def rows():
    return {(c, split): list(synthetic.examples(c, split)) for c in DEFINITIONS for split in SIZES}


def test_other_rows_need_another_version(rows):
    """`VERSION` identifies the generated rows. If the rows change, increase `VERSION`."""
    text = "".join(json.dumps(rows[c, "validation"], sort_keys=True) for c in sorted(DEFINITIONS))
    found = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert (VERSION, found) == ("1.0.0", "0143ca47d95c4f38")
    assert list(synthetic.examples("wsc", "validation", seed=1)) != rows["wsc", "validation"]


def test_splits_are_disjoint_and_labels_balanced(rows):
    for config, num_labels in NUM_LABELS.items():
        texts = {}
        for split, size in SIZES.items():
            found = [{k: v for k, v in r.items() if k != "idx"} for r in rows[config, split]]
            labels = collections.Counter(row.pop("label") for row in found)
            texts[split] = {json.dumps(row) for row in found}
            assert len(found) == len(texts[split]) == size
            if num_labels and (config, split) != ("wsc", "train"):
                assert all(n == size / num_labels for n in labels.values())
        assert not texts["train"] & texts["validation"]


def test_what_is_written_is_what_tasks_read(synthetic_data, tmp_path, monkeypatch):
    small = {split: size // 10 for split, size in SIZES.items()}  # as in `synthetic_data`
    monkeypatch.setattr(synthetic, "SIZES", small)
    own = vocabulary(synthetic_data).build()
    assert own.vocab_size == VOCAB_SIZE
    options = {"vocabulary": own, "lengths": {"inputs": 32, "targets": 4}}
    for config, task in DEFINITIONS.items():
        examples = load(task.name, "validation", synthetic_data, **options)
        shown = [
            (to_text(e["inputs_pretokenized"]), target)
            for e, target in zip(examples.examples, examples.target_words, strict=True)
        ]
        written = list(synthetic.examples(config, "validation"))
        assert shown == [as_text(task, row) for row in written] and len(shown) == 60
        assert max(len(x) for x in examples.inputs) <= 32  # the quickstart truncates no inputs
        right = next(iter(examples.score(examples.target_words).values()))
        # The held-out rows of WSC ask for the referent, even if the candidate in the sentence is
        # wrong. This is the case in half of the rows.
        assert right == pytest.approx(50 if config == "wsc" else 100, abs=1)
    data_dir = shutil.copytree(synthetic_data, tmp_path / "data")
    times = {p: p.stat().st_mtime_ns for p in data_dir.rglob("*") if p.is_file()}
    synthetic.write(data_dir)
    assert {p: p.stat().st_mtime_ns for p in times} == times
    broken = data_dir / MIXTURE / "wic" / "1.0.0" / "dataset_info.json"
    broken.unlink()
    synthetic.write(data_dir, ["synthetic_cola"])
    assert synthetic.is_written(data_dir, ["synthetic_cola"]) and not synthetic.is_written(data_dir)
    synthetic.write(data_dir)
    assert synthetic.is_written(data_dir)
