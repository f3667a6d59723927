"""The original files of the small tasks, where a machine has them."""

import csv
import gzip
import io
import json
import pathlib

import pytest
import tensorflow_datasets as tfds

from synthesizer_jax.tasks.importers import import_benchmark


@pytest.fixture(scope="module")
def imported(real_data: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A data directory of the small tasks alone."""
    chosen, out = tmp_path_factory.mktemp("chosen"), tmp_path_factory.mktemp("tfds")
    for name in ("glue/CoLA", "glue/RTE", "glue/MRPC", "glue/WNLI", "glue/AX"):
        (chosen / name).parent.mkdir(exist_ok=True)
        (chosen / name).symlink_to(real_data / name)
    for name in ("super_glue/CB", "super_glue/COPA", "super_glue/WSC", "super_glue/ReCoRD"):
        (chosen / name).parent.mkdir(exist_ok=True)
        (chosen / name).symlink_to(real_data / name)
    for benchmark, found in (("glue", 13), ("super_glue", 11)):
        report = import_benchmark(benchmark, chosen, out)
        assert sum(split.file is not None for split in report.splits) == found
        assert all(split.dropped == 0 for split in report.splits)
    return out


def rows(data_dir: pathlib.Path, name: str, split: str) -> dict[int, dict]:
    dataset = tfds.load(name, split=split, data_dir=data_dir, download=False)
    return {int(row["idx"]): row for row in tfds.as_numpy(dataset)}


def original(path: pathlib.Path) -> io.StringIO:
    return io.StringIO(gzip.decompress(path.read_bytes()).decode("utf-8-sig"))


@pytest.mark.slow
@pytest.mark.parametrize(("split", "size"), [("train", 8551), ("validation", 1043)])
def test_cola(imported: pathlib.Path, real_data: pathlib.Path, split: str, size: int) -> None:
    stem = {"train": "train", "validation": "dev"}[split]
    lines = original(real_data / f"glue/CoLA/{stem}.tsv.gz").read().splitlines()
    wanted = [(fields[3].encode(), int(fields[1])) for fields in (x.split("\t") for x in lines)]
    found = rows(imported, "glue/cola", split)
    assert len(found) == size
    assert [(found[i]["sentence"], found[i]["label"]) for i in range(size)] == wanted


def test_rte_and_mrpc(imported: pathlib.Path, real_data: pathlib.Path) -> None:
    text = original(real_data / "glue/RTE/dev.tsv.gz")
    reader = csv.DictReader(text, delimiter="\t", quoting=csv.QUOTE_NONE)
    wanted = [(r["sentence2"].encode(), int(r["label"] != "entailment")) for r in reader]
    found = rows(imported, "glue/rte", "validation")
    assert [(found[i]["sentence2"], found[i]["label"]) for i in range(277)] == wanted

    text = original(real_data / "glue/MRPC/dev.tsv.gz")
    reader = csv.DictReader(text, delimiter="\t", quoting=csv.QUOTE_NONE)
    pairs = {(r["#1 String"].encode(), r["#2 String"].encode(), int(r["Quality"])) for r in reader}
    dev = rows(imported, "glue/mrpc", "validation").values()
    assert {(r["sentence1"], r["sentence2"], r["label"]) for r in dev} == pairs
    assert len(rows(imported, "glue/mrpc", "train")) == 3668


def test_wsc_spans_are_parts_of_their_texts(
    imported: pathlib.Path, real_data: pathlib.Path
) -> None:
    found = rows(imported, "super_glue/wsc.fixed", "train")
    assert len(found) == 554
    assert sum(row["label"] for row in found.values()) == 259
    left_alone = (b"Kamenev and Zinoviev", b"Kamenev, Zinoviev, and Stalin")
    for row in found.values():
        assert row["span1_text"] in row["text"] or row["span1_text"] in left_alone
        assert row["span2_text"] in row["text"]
    lines = original(real_data / "super_glue/WSC/train.jsonl.gz").read().splitlines()
    changed = [
        i
        for i, line in enumerate(lines)
        if json.loads(line)["target"]["span1_text"].encode() != found[i]["span1_text"]
    ]
    assert 0 < len(changed) < 100


def test_copa_cb_and_the_diagnostic(imported: pathlib.Path, real_data: pathlib.Path) -> None:
    lines = original(real_data / "super_glue/COPA/train.jsonl.gz").read().splitlines()
    wanted = [json.loads(line)["label"] for line in lines]
    found = rows(imported, "super_glue/copa", "train")
    assert [found[i]["label"] for i in range(400)] == wanted
    assert len(rows(imported, "super_glue/cb", "validation")) == 56
    diagnostic = rows(imported, "glue/ax", "test")
    assert {row["label"] for row in diagnostic.values()} == {-1}
    assert diagnostic[0]["hypothesis"] == b"The cat did not sit on the mat."
