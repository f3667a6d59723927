"""Which rows have a known answer, by each task's own rule."""

import json

import pytest

from synthesizer_jax.tasks import postprocessors
from synthesizer_jax.tasks.definitions import GLUE, SENTINEL, SUPER_GLUE
from synthesizer_jax.tasks.importers import import_corpus
from synthesizer_jax.tasks.postprocessors import is_labeled
from tests.tasks.loading import load


def row(targets: str, **rest) -> dict:
    return {"targets_pretokenized": targets.encode(), **rest}


@pytest.mark.parametrize("task", [*GLUE, *SUPER_GLUE, *SENTINEL], ids=lambda task: task.name)
def test_rows_without_a_label_are_told_apart(task):
    groups = {f"idx/{n}": 0 for n in ("paragraph", "question", "passage", "query")}
    hidden = {
        postprocessors.number: row("-1.0", label=-1.0),
        postprocessors.record: row("<unk>", answers=[], **groups),
        postprocessors.referent: row("Ann", label=-1),
    }.get(task.postprocess_fn, row("<unk>", **groups))
    labeled = {
        postprocessors.number: row("0.0", label=0.0),
        postprocessors.record: row("Ann", answers=[b"Ann"], **groups),
        postprocessors.referent: row("Ann", label=0),
    }.get(task.postprocess_fn, row((task.label_words or ("Ann",))[0], **groups))
    assert is_labeled(labeled)
    assert not is_labeled(hidden)  # DPR has none


def test_imported_test_splits_are_told_apart_too(tmp_path):
    source, data = tmp_path / "files", tmp_path / "data"
    wsc = {"span1_text": "Ann", "span1_index": 0, "span2_text": "she", "span2_index": 3}
    question = {"question": "Q", "idx": 0, "answers": [{"text": "A", "idx": 0}]}
    files = {
        "glue/SST-2/subset_test.tsv": "index\tsentence\n0\tfine\n",
        "glue/STS-B/subset_test.tsv": "index\tsentence1\tsentence2\n0\tA\tB\n",
        "glue/WNLI/subset_test.tsv": "index\tsentence1\tsentence2\n0\tAnn said she won\tAnn won\n",
        "super_glue/WSC/subset_test.jsonl": {"text": "Ann said that she won", "target": wsc},
        "super_glue/MultiRC/subset_test.jsonl": {"passage": {"text": "T", "questions": [question]}},
        "super_glue/ReCoRD/subset_test.jsonl": {
            "passage": {"text": "Ann", "entities": [{"start": 0, "end": 2}]},
            "qas": [{"query": "@placeholder", "idx": 0}],
        },
    }
    for name, content in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        line = content if isinstance(content, str) else json.dumps(content | {"idx": 0})
        (source / name).write_text(line + "\n")
    for benchmark in ("glue", "super_glue"):
        import_corpus(benchmark, source, data)
    found = [task.name for task in (*GLUE, *SUPER_GLUE) if "test" in task.stored_splits(data)]
    assert len(found) == 7  # WNLI twice
    for name in found:
        rows = load(name, "test", data)
        assert [is_labeled(example) for example in rows.examples] == [False]
