"""Attempts to import damaged distribution files of GLUE, SuperGLUE and Multi30k as TFDS data sets.

The stored data are read with TFDS and compared with those that `read_source`, an independent reader, reads
from the damaged file.
"""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import malformed_corpus
import malformed_lines
from malformed_cases import Case, CommandResult, Rng, run_checked
from malformed_lines import Source, read_source

HEADER = "index\tsentence1\tsentence2\tlabel\n"


def tsv_pairs(count: int, labels: tuple[str, ...]) -> str:
    """A tsv file of numbered sentence pairs with labels."""
    rows = (f"{i}\ta {i}\tb {i} „é“\t{labels[i % len(labels)]}\n" for i in range(count))
    return HEADER + "".join(rows)


def json_lines(*rows: Any) -> str:
    """A file of JSON lines."""
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
        tsv_pairs(5, RTE),
        {"sentence1": "sentence1", "sentence2": "sentence2", "label": "label"},
        labels=RTE,
    ),
    Source(
        "glue/qnli",
        "QNLI/subset_dev.tsv.gz",
        tsv_pairs(6, RTE).replace("sentence1", "question").replace("sentence2", "sentence"),
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
        json_lines(*({"sentence": f"fine {i} “é”", "label": i % 2} for i in range(5))),
        {"sentence": "sentence", "label": "label"},
        labels=("negative", "positive"),
        split="validation",
    ),
    Source(
        "super_glue/rte",
        "RTE/subset_train.jsonl",
        json_lines(*(PREMISE | {"label": RTE[i % 2], "idx": i} for i in range(5))),
        {"premise": "premise", "hypothesis": "hypothesis", "label": "label", "idx": "idx"},
        labels=RTE,
    ),
    Source(
        "super_glue/boolq",
        "BoolQ/subset_val.jsonl",
        json_lines(*({"question": "Q", "passage": f"p {i}", "label": i > 2, "idx": i} for i in range(5))),
        {"question": "question", "passage": "passage", "label": "label", "idx": "idx"},
        labels=("False", "True"),
        split="validation",
    ),
    Source(
        "super_glue/wsc.fixed",
        "WSC/subset_train.jsonl.gz",
        json_lines(*(WSC | {"label": i % 2 == 0, "idx": i} for i in range(4))),
        {"text": "text", "label": "label", "idx": "idx"}
        | {key: f"target.{key}" for key in WSC["target"]},  # type: ignore[attr-defined]
        labels=("False", "True"),
    ),
    Source(
        "super_glue/record",
        "ReCoRD/subset_train.jsonl",
        json_lines(*(
            RECORD
            | {"idx": i, "qas": [{"query": "@placeholder left", "idx": i, "answers": [{"text": "Bob"}]}]}
            for i in range(4)
        )),
        {"query": "qas.0.query", "passage": "passage.text"},
        nested=True,
    ),
)  # fmt: skip


def cases(directory: pathlib.Path, rng: Rng, count: int) -> Iterator[Case]:
    """Yields attempts, a twentieth of them with Multi30k, the others with a damaged file of one task.

    An undamaged file of another task lies in the same directory, and both have been imported before.
    """
    corpora = count // 20
    yield from malformed_corpus.cases(directory, rng, corpora)
    earlier = {name: import_all(directory, name) for name in ("glue", "super_glue")}
    for number in range(count - corpora):
        source = rng.choice(SOURCES)
        benchmark = source.dataset.partition("/")[0]
        folder, data = directory / f"files-{number}", directory / f"data-{number}"
        shutil.copytree(earlier[benchmark], data)
        write_other_task(benchmark, folder)
        path = folder / source.file
        path.parent.mkdir(exist_ok=True)
        name = malformed_lines.damage(source, path, rng)
        command = ["data", "import", benchmark, "--from", str(folder), "--data-dir", str(data)]
        yield make_case(source, path, data, f"{source.dataset}, {name}", command)
        shutil.rmtree(folder)
        shutil.rmtree(data)


def make_case(
    source: Source, path: pathlib.Path, data: pathlib.Path, name: str, command: list[str]
) -> Case:
    """An import that must store the contents of the file, or change nothing."""

    def check(result: CommandResult) -> str | None:
        if leftover := [p.name for p in data.iterdir() if p.name.startswith(".")]:
            return f"{leftover} is left"
        expected, stored = read_source(source, path), read_stored(source, data)
        if isinstance(expected, str):
            return f"{expected}, but {len(stored)} rows were stored"
        if stored != expected.rows:
            wrong = next((a, b) for a, b in zip(stored, expected.rows, strict=False) if a != b)
            return f"stored {wrong[0]}, the file says {wrong[1]}"
        is_reported = f"{expected.dropped} dropped" in result.out
        return (
            None
            if is_reported or not expected.dropped
            else f"{expected.dropped} rows dropped silently"
        )

    return Case(name, command, (str(path), str(path.parent)), (data,), check)


def import_all(directory: pathlib.Path, benchmark: str) -> pathlib.Path:
    """Imports all undamaged files; returns the data directory."""
    folder, data = directory / f"{benchmark}-files", directory / f"{benchmark}-data"
    write_other_task(benchmark, folder)
    for source in SOURCES:
        if source.dataset.startswith(f"{benchmark}/"):
            malformed_lines.write(source, folder / source.file)
    run_checked(["data", "import", benchmark, "--from", str(folder), "--data-dir", str(data)])
    for source in SOURCES:
        if source.dataset.startswith(f"{benchmark}/"):
            expected = read_source(source, folder / source.file)
            assert not isinstance(expected, str), f"{source.file}: {expected}"
            assert read_stored(source, data) == expected.rows, f"{source.file}: {expected.rows}"
    return data


def write_other_task(benchmark: str, folder: pathlib.Path) -> None:
    """Writes the undamaged file of another task."""
    if benchmark == "glue":
        path, content = folder / "WNLI/subset_train.tsv", tsv_pairs(3, ("0", "1"))
    else:
        row = {
            "premise": "P",
            "choice1": "A",
            "choice2": "B",
            "question": "cause",
            "label": 1,
            "idx": 0,
        }
        path, content = folder / "COPA/subset_train.jsonl", json_lines(row)
    path.parent.mkdir(parents=True)
    path.write_text(content, encoding="utf-8")


def read_stored(source: Source, data: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the stored examples with TFDS, sorted by idx, with the features of the source."""
    import tensorflow_datasets as tfds

    rows = list(tfds.as_numpy(tfds.load(source.dataset, split=source.split, data_dir=data)))
    if source.nested:
        rows = sorted(rows, key=lambda row: int(row["idx"]["query"]))
    else:
        rows = sorted(rows, key=lambda row: int(row["idx"]))
    names = [*source.features, *(["idx"] if not source.nested else [])]
    return [{name: to_python(row[name]) for name in names} for row in rows]


def to_python(value: Any) -> Any:
    """Converts a NumPy value to a Python value."""
    return value.decode() if isinstance(value, bytes) else value.item()
