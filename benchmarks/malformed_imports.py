"""Damaged distribution files of GLUE, SuperGLUE and Multi30k, imported as TFDS data sets.

What was stored is read with TFDS and compared with what `read_source` reads in the damaged file: lines
split at tabs, or JSON.
"""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import malformed_corpus
import malformed_lines
from malformed_cases import Case, Dice, Said, good
from malformed_lines import Source, read_source

HEADER = "index\tsentence1\tsentence2\tlabel\n"


def pairs(count: int, labels: tuple[str, ...]) -> str:
    """Numbered pairs of sentences and a label."""
    rows = (f"{i}\ta {i}\tb {i} „é“\t{labels[i % len(labels)]}\n" for i in range(count))
    return HEADER + "".join(rows)


def objects(*rows: Any) -> str:
    """JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)


RTE = ("entailment", "not_entailment")
PREMISE = {"premise": "P", "hypothesis": "H é"}
WSC = {
    "text": "the dog saw Ann . She ran",
    "target": {"span1_text": "Ann", "span1_index": 3, "span2_text": "She", "span2_index": 5},
}
RECORD = {
    "passage": {"text": "Bob met Al", "entities": [{"start": 8, "end": 9}, {"start": 0, "end": 2}]},
}

SOURCES = (
    Source(
        "glue/cola",
        "CoLA/subset_train.tsv",
        "".join(f"gj04\t{i % 2}\t{'*' * (i % 2)}\tThe dog “barks” {i}.\n" for i in range(6)),
        {"sentence": "sentence", "label": "is_acceptable"},
        columns=("source", "is_acceptable", "star", "sentence"),
        labels=("unacceptable", "acceptable"),
    ),
    Source(
        "glue/stsb",
        "STS-B/subset_train.tsv",
        "sentence1\tsentence2\tscore\n" + "".join(f"a\tb {i}\t{i}.250\n" for i in range(5)),
        {"sentence1": "sentence1", "sentence2": "sentence2", "label": "score"},
    ),
    Source(
        "glue/rte",
        "RTE/subset_train.tsv",
        pairs(5, RTE),
        {"sentence1": "sentence1", "sentence2": "sentence2", "label": "label"},
        labels=RTE,
    ),
    Source(
        "glue/qnli",
        "QNLI/subset_dev.tsv.gz",
        pairs(6, RTE).replace("sentence1", "question").replace("sentence2", "sentence"),
        {"question": "question", "sentence": "sentence", "label": "label"},
        labels=RTE,
        split="validation",
    ),
    Source(
        "glue/rte",
        "RTE/subset_test.tsv",
        "".join(f"{i}\ta {i}\tb\n" if i >= 0 else "index\tsentence1\tsentence2\n" for i in range(-1, 5)),
        {"sentence1": "sentence1", "sentence2": "sentence2"},
        split="test",
    ),
    Source(
        "glue/sst2",
        "SST-2/subset_dev.jsonl",
        objects(*({"sentence": f"fine {i} “é”", "label": i % 2} for i in range(5))),
        {"sentence": "sentence", "label": "label"},
        labels=("negative", "positive"),
        split="validation",
    ),
    Source(
        "super_glue/rte",
        "RTE/subset_train.jsonl",
        objects(*(PREMISE | {"label": RTE[i % 2], "idx": i} for i in range(5))),
        {"premise": "premise", "hypothesis": "hypothesis", "label": "label", "idx": "idx"},
        labels=RTE,
    ),
    Source(
        "super_glue/boolq",
        "BoolQ/subset_val.jsonl",
        objects(*({"question": "Q", "passage": f"p {i}", "label": i > 2, "idx": i} for i in range(5))),
        {"question": "question", "passage": "passage", "label": "label", "idx": "idx"},
        labels=("False", "True"),
        split="validation",
    ),
    Source(
        "super_glue/wsc.fixed",
        "WSC/subset_train.jsonl.gz",
        objects(*(WSC | {"label": i % 2 == 0, "idx": i} for i in range(4))),
        {"text": "text", "label": "label", "idx": "idx"}
        | {key: f"target.{key}" for key in WSC["target"]},  # type: ignore[attr-defined]
        labels=("False", "True"),
    ),
    Source(
        "super_glue/record",
        "ReCoRD/subset_train.jsonl",
        objects(*(
            RECORD
            | {"idx": i, "qas": [{"query": "@placeholder left", "idx": i, "answers": [{"text": "Bob"}]}]}
            for i in range(4)
        )),
        {"query": "qas.0.query", "passage": "passage.text"},
        nested=True,
    ),
)  # fmt: skip


def cases(place: pathlib.Path, dice: Dice, count: int) -> Iterator[Case]:
    """A twentieth is Multi30k; else the file of one task is damaged.

    Beside it lies the good one of another task, and both were imported before.
    """
    corpora = count // 20
    yield from malformed_corpus.cases(place, dice, corpora)
    earlier = {name: imported(place, name) for name in ("glue", "super_glue")}
    for number in range(count - corpora):
        source = dice.choice(SOURCES)
        benchmark = source.dataset.partition("/")[0]
        folder, data = place / f"files-{number}", place / f"data-{number}"
        shutil.copytree(earlier[benchmark], data)
        beside(benchmark, folder)
        path = folder / source.file
        path.parent.mkdir(exist_ok=True)
        name = malformed_lines.damage(source, path, dice)
        command = ["data", "import", benchmark, "--from", str(folder), "--data-dir", str(data)]
        yield case(source, path, data, f"{source.dataset}, {name}", command)
        shutil.rmtree(folder)
        shutil.rmtree(data)


def case(
    source: Source, path: pathlib.Path, data: pathlib.Path, name: str, command: list[str]
) -> Case:
    """An import that must give what the file says, or change nothing."""

    def check(said: Said) -> str | None:
        if left := [p.name for p in data.iterdir() if p.name.startswith(".")]:
            return f"{left} is left"
        expected, stored = read_source(source, path), read_stored(source, data)
        if isinstance(expected, str):
            return f"{expected}, but {len(stored)} rows were stored"
        if stored != expected.rows:
            wrong = next((a, b) for a, b in zip(stored, expected.rows, strict=False) if a != b)
            return f"stored {wrong[0]}, the file says {wrong[1]}"
        told = f"{expected.dropped} dropped" in said.out
        return None if told or not expected.dropped else f"{expected.dropped} rows dropped silently"

    return Case(name, command, (str(path), str(path.parent)), (data,), check)


def imported(place: pathlib.Path, benchmark: str) -> pathlib.Path:
    """A data directory with an earlier import of everything."""
    folder, data = place / f"{benchmark}-files", place / f"{benchmark}-data"
    beside(benchmark, folder)
    for source in SOURCES:
        if source.dataset.startswith(f"{benchmark}/"):
            malformed_lines.write(source, folder / source.file)
    good(["data", "import", benchmark, "--from", str(folder), "--data-dir", str(data)])
    for source in SOURCES:
        if source.dataset.startswith(f"{benchmark}/"):
            expected = read_source(source, folder / source.file)
            assert not isinstance(expected, str), f"{source.file}: {expected}"
            assert read_stored(source, data) == expected.rows, f"{source.file}: {expected.rows}"
    return data


def beside(benchmark: str, folder: pathlib.Path) -> None:
    """The good task."""
    if benchmark == "glue":
        path, text = folder / "WNLI/subset_train.tsv", pairs(3, ("0", "1"))
    else:
        row = {
            "premise": "P",
            "choice1": "A",
            "choice2": "B",
            "question": "cause",
            "label": 1,
            "idx": 0,
        }
        path, text = folder / "COPA/subset_train.jsonl", objects(row)
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")


def read_stored(source: Source, data: pathlib.Path) -> list[dict[str, Any]]:
    """The stored rows by their idx, with the features that the source has, as TFDS reads them."""
    import tensorflow_datasets as tfds

    rows = list(tfds.as_numpy(tfds.load(source.dataset, split=source.split, data_dir=data)))
    if source.nested:
        rows = sorted(rows, key=lambda row: int(row["idx"]["query"]))
    else:
        rows = sorted(rows, key=lambda row: int(row["idx"]))
    names = [*source.features, *(["idx"] if not source.nested else [])]
    return [{name: plain(row[name]) for name in names} for row in rows]


def plain(value: Any) -> Any:
    """NumPy's values as Python's."""
    return value.decode() if isinstance(value, bytes) else value.item()
