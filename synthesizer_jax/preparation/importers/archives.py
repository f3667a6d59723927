"""Reads the archives of GLUE and SuperGLUE.

The module defines the files of each split, how these files are read, and how many rows they have.
Rows may have more fields than the data set has features. The expected numbers of rows are those of
TFDS, which drops some rows. The functions of this module that read files may raise any exception.
`reading.Cursor` adds the location in the file to the exception.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from etils import epy

from synthesizer_jax.base.registry import JSON
from synthesizer_jax.preparation.importers.reading import Row, read_lines, read_rows, uncompressed
from synthesizer_jax.tasks.definitions import DEFINITIONS

with epy.lazy_imports():
    import tensorflow_datasets as tfds

# The training and validation files of CoLA have no header, so their columns are named here.
_COLA = ("source", "is_acceptable", "mark", "sentence")
_MRPC = {"sentence1": "#1 String", "sentence2": "#2 String"}
# These two spans of WSC are not changed, although they do not occur in their texts.
_APART = ("Kamenev and Zinoviev", "Kamenev, Zinoviev, and Stalin")


@dataclasses.dataclass(frozen=True)
class SplitLayout:
    """The files of a split.

    Attributes:
      patterns: patterns of file names, in order of preference. The first pattern that matches any
        file is used, and all files that match this pattern belong to the split.
      rows: the published number of rows. `None` means that any number of rows is accepted.
    """

    patterns: tuple[str, ...]
    rows: int | None

    def find(self, source: pathlib.Path) -> list[pathlib.Path]:
        """Returns all files that match the first pattern for which there is a file.

        The files may be compressed with gzip. If no pattern matches, the list is empty.
        """
        for pattern in self.patterns:
            compressed = {path.with_suffix(""): path for path in source.glob(pattern + ".gz")}
            found = compressed | {path: path for path in source.glob(pattern)}
            if found:
                return [found[path] for path in sorted(found)]
        return []


Layout: TypeAlias = tuple[str, Mapping[str, SplitLayout]]
"""A pair of the name of a TFDS data set and its splits."""


def _benchmark(dataset: str, /, **splits: tuple[str, int | None]) -> Layout:
    """Returns the layout of a data set of GLUE or SuperGLUE.

    A split is either a file of the archive or several Parquet files. The names of folders may be
    written in lower case, or may be the names that TFDS uses. Parquet files in folders with TFDS's
    names have the columns of TFDS.

    Args:
      dataset: the name of the TFDS data set.
      **splits: for every split, the name of its file in the archive, and the published number of
        rows.
    """
    config = dataset.partition("/")[2]
    # A name such as `mnli_matched` consists of the name of a task and the name of a part of the
    # task's evaluation data.
    task, _, part = config.partition("_")
    layouts = {}
    for split, (file, rows) in splits.items():
        folder, _, name = file.rpartition("/")
        stems = (f"{config}/{split}", f"{task}/{split}_{part}")
        parquet = [stem + end for stem in stems for end in ("-*.parquet", "/*.parquet")]
        patterns = (file, f"{folder.lower()}/{name}", f"{config}/{name}", *parquet)
        layouts[split] = SplitLayout(patterns, rows)
    return dataset, layouts


def _glue(config: str, folder: str, *sizes: int | None, super_glue: bool = False) -> Layout:
    """Returns the layout of a GLUE or SuperGLUE data set whose files have the usual names."""
    names = ("train", "val" if super_glue else "dev", "test")
    kind = "jsonl" if super_glue else "tsv"
    files = [(f"{folder}/{name}.{kind}", size) for name, size in zip(names, sizes, strict=True)]
    splits = dict(zip(("train", "validation", "test"), files, strict=True))
    return _benchmark(f"{'super_' if super_glue else ''}glue/{config}", **splits)


_super = functools.partial(_glue, super_glue=True)

ARCHIVES: Mapping[str, Mapping[str, Mapping[str, SplitLayout]]] = {
    "glue": dict(
        (
            _glue("cola", "CoLA", 8_551, 1_043, 1_063),
            _glue("sst2", "SST-2", 67_349, 872, 1_821),
            _glue("mrpc", "MRPC", 3_668, 408, 1_725),
            # Any number of training rows is allowed for QQP, because its published files were
            # corrected.
            _glue("qqp", "QQP", None, 40_430, 390_965),
            _glue("stsb", "STS-B", 5_749, 1_500, 1_379),
            _benchmark(
                "glue/mnli",
                train=("MNLI/train.tsv", 392_702),
                validation_matched=("MNLI/dev_matched.tsv", 9_815),
                validation_mismatched=("MNLI/dev_mismatched.tsv", 9_832),
                test_matched=("MNLI/test_matched.tsv", 9_796),
                test_mismatched=("MNLI/test_mismatched.tsv", 9_847),
            ),
            _benchmark(
                "glue/mnli_matched",
                validation=("MNLI/dev_matched.tsv", 9_815),
                test=("MNLI/test_matched.tsv", 9_796),
            ),
            _benchmark(
                "glue/mnli_mismatched",
                validation=("MNLI/dev_mismatched.tsv", 9_832),
                test=("MNLI/test_mismatched.tsv", 9_847),
            ),
            _glue("qnli", "QNLI", 104_743, 5_463, 5_463),
            _glue("rte", "RTE", 2_490, 277, 3_000),
            _glue("wnli", "WNLI", 635, 71, 146),
            _benchmark("glue/ax", test=("**/diagnostic.tsv", 1_104)),
        )
    ),
    "super_glue": dict(
        (
            _super("boolq", "BoolQ", 9_427, 3_270, 3_245),
            _super("cb", "CB", 250, 56, 250),
            _super("copa", "COPA", 400, 100, 500),
            _super("multirc", "MultiRC", 27_243, 4_848, 9_693),
            _super("record", "ReCoRD", 100_730, 10_000, 10_000),
            _super("rte", "RTE", 2_490, 277, 3_000),
            _super("wic", "WiC", 5_428, 638, 1_400),
            _super("wsc.fixed", "WSC", 554, 104, 146),
            _benchmark("super_glue/axb", test=("AX-b/AX-b.jsonl", 1_104)),
            _benchmark("super_glue/axg", test=("AX-g/AX-g.jsonl", 356)),
        )
    ),
}
"""The splits of every data set of an archive, by the name that ``data import`` takes."""

DATASETS = tuple(
    dict.fromkeys(t.dataset for t in DEFINITIONS if t.dataset.partition("/")[0] not in ARCHIVES)
)
"""The data sets of tasks that have no archive.

TFDS can prepare such a data set, or a user can name the files to import.
"""


def published_rows(dataset: str) -> dict[str, int]:
    """Returns the published number of rows of each split of a data set, if it is known."""
    splits = ARCHIVES.get(dataset.partition("/")[0], {}).get(dataset, {})
    return {name: split.rows for name, split in splits.items() if split.rows}


def read_split(dataset: str, paths: Sequence[pathlib.Path]) -> Iterator[tuple[str, Row | None]]:
    """Yields the location and the values of each row of an archive's split.

    If a row is left out, its values are `None`.
    """
    if uncompressed(paths[0]).suffix == ".parquet":
        for where, row in itertools.chain(*map(read_rows, paths)):
            # The order in the lists of ReCoRD has no meaning, so sort the lists as TFDS does.
            yield where, {k: sorted(v) if type(v) is list else v for k, v in row.items()}
    elif dataset.startswith("glue/"):
        yield from _glue_rows(dataset.removeprefix("glue/"), paths[0])
    else:
        yield from _super_glue_rows(paths[0])


def _glue_rows(config: str, path: pathlib.Path) -> Iterator[tuple[str, Row | None]]:
    """Yields the rows of a file of GLUE, whose format is TSV without quotes.

    Rows that lack a column are left out. Only test files and diagnostic files may lack labels.
    """
    settings = tfds.builder_cls("glue").builder_configs[config]
    columns = _MRPC if config == "mrpc" else settings.text_features
    lines = ((number, line.split("\t")) for number, line in read_lines(path) if line)
    has_header = config != "cola" or "test" in path.name
    header: Sequence[str] = next(lines, (0, []))[1] if has_header else _COLA
    may_hide = path.name.startswith(("test", "diagnostic"))
    if header and settings.label_column not in header and not may_hide:
        raise ValueError(
            f"{path} has no column {settings.label_column!r}. Only test files may lack it."
        )
    for index, (number, cells) in enumerate(lines):
        values = dict(zip(header, cells, strict=False))
        row: dict[str, JSON] = {name: values.get(column) for name, column in columns.items()}
        is_labeled = settings.label_column in header
        row["label"] = (values.get(settings.label_column) or None) if is_labeled else -1
        yield f"{path}, line {number}", None if None in row.values() else {**row, "idx": index}


def _super_glue_rows(path: pathlib.Path) -> Iterator[tuple[str, Row]]:
    """Yields the rows of a file of SuperGLUE, which consists of JSON lines.

    Test files have no labels, so the rows of a test file get the label −1, which stands for a
    hidden label.
    """
    hidden: Row = {"label": -1} if "test" in path.name else {}
    for where, row in read_rows(path):
        if "qas" in row:
            rows = _record(row)
        elif isinstance(row.get("passage"), dict):
            rows = _multirc(row)
        else:
            rows = iter([_wsc(row) if "target" in row else row])
        yield from ((where, {**hidden, **values}) for values in rows)


def _record(row: Row) -> Iterator[Row]:
    """Yields a row for every query of ReCoRD.

    The entities and the answers of a row are sorted and contain no duplicates.
    """
    text = row["passage"]["text"]
    entities = {text[e["start"] : e["end"] + 1] for e in row["passage"]["entities"]}
    for query in row["qas"]:
        yield {
            "passage": text,
            "query": query["query"],
            "entities": sorted(entities),
            "answers": sorted({answer["text"] for answer in query.get("answers", ())}),
            "idx": {"passage": row["idx"], "query": query["idx"]},
        }


def _multirc(row: Row) -> Iterator[Row]:
    """Yields a row for every answer of MultiRC."""
    for question in row["passage"]["questions"]:
        for answer in question["answers"]:
            indices = {
                "paragraph": row["idx"],
                "question": question["idx"],
                "answer": answer["idx"],
            }
            yield {
                "paragraph": row["passage"]["text"],
                "question": question["question"],
                "answer": answer["text"],
                **({"label": answer["label"]} if "label" in answer else {}),
                "idx": indices,
            }


def _wsc(row: Row) -> Row:
    """Returns a row of WSC whose spans are substrings of the text, as in TFDS's ``wsc.fixed``."""
    row = {**row, **row["target"]}
    for span in ("span1", "span2"):
        text, index = row[f"{span}_text"], row[f"{span}_index"]
        if text in row["text"] or text in _APART:
            continue
        if "theyscold" in text:
            row["span2_index"] = 10
        # All other spans differ from their texts only in the first letter, which is upper or lower
        # case, in a period or in a line break.
        is_lower = row["text"].split()[index][0].islower()
        text = (text[0].lower() if is_lower else text[0].upper()) + text[1:]
        row[f"{span}_text"] = text.rstrip(".").replace("\n", " ")
    return row
