"""Readers of archives: every row that is in the files of a split, None for one that is left out, and where.

Rows may have more fields than the data set has features. What a reader raises, `reading.Cursor` names.
"""

from __future__ import annotations

import itertools
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from etils import epy

from synthesizer_jax.base.registry import JSON
from synthesizer_jax.preparation.importers.files import SplitFiles
from synthesizer_jax.preparation.importers.reading import Row, read_lines, read_rows, uncompressed

with epy.lazy_imports():
    import tensorflow_datasets as tfds

Reader: TypeAlias = Callable[[Sequence[pathlib.Path]], Iterator[tuple[str, Row | None]]]

_TITLE = re.compile(r" = [^=].* = ?")
_COLA = ("source", "is_acceptable", "mark", "sentence")  # its training files have no header
_MRPC = {"sentence1": "#1 String", "sentence2": "#2 String"}
_APART = ("Kamenev and Zinoviev", "Kamenev, Zinoviev, and Stalin")  # no substrings of WSC's texts


def named(files: SplitFiles) -> Iterator[tuple[str, Row | None]]:
    """Yields the rows of files that a user names, None where a line of aligned files is blank."""
    for where, row in files.rows():
        is_whole = not files.aligned or all(str(text).strip() for text in row.values())
        yield where, row if is_whole else None


def aligned(paths: Sequence[pathlib.Path]) -> Iterator[tuple[str, Row | None]]:
    """Yields the rows of parallel text, a file of each language."""
    return named(SplitFiles(tuple(paths), aligned=True))


def or_parquet(read: Reader) -> Reader:
    """Returns the reader of a benchmark's archive, or of Parquet files."""

    def read_either(paths: Sequence[pathlib.Path]) -> Iterator[tuple[str, Row | None]]:
        if uncompressed(paths[0]).suffix != ".parquet":
            yield from read(paths)
            return
        for where, row in itertools.chain(*map(read_rows, paths)):
            # ReCoRD's lists are sets, which TFDS sorts.
            yield where, {k: sorted(v) if type(v) is list else v for k, v in row.items()}

    return read_either


def glue(config: str, paths: Sequence[pathlib.Path]) -> Iterator[tuple[str, Row | None]]:
    """Yields the rows of a file of GLUE, TSV without quotes; rows that lack a column are left out."""
    path = paths[0]
    settings = tfds.builder_cls("glue").builder_configs[config]
    columns = _MRPC if config == "mrpc" else settings.text_features
    lines = ((number, line.split("\t")) for number, line in read_lines(path) if line)
    has_header = config != "cola" or "test" in path.name
    header: Sequence[str] = next(lines, (0, []))[1] if has_header else _COLA
    for index, (number, cells) in enumerate(lines):
        values = dict(zip(header, cells, strict=False))
        row: dict[str, JSON] = {name: values.get(column) for name, column in columns.items()}
        is_labeled = settings.label_column in header
        row["label"] = (values.get(settings.label_column) or None) if is_labeled else -1
        yield f"{path}, line {number}", None if None in row.values() else {**row, "idx": index}


def super_glue(paths: Sequence[pathlib.Path]) -> Iterator[tuple[str, Row]]:
    """Yields the rows of a file of SuperGLUE, JSON lines; labels of test files are hidden."""
    hidden: Row = {"label": -1} if "test" in paths[0].name else {}
    for where, row in read_rows(paths[0]):
        if "qas" in row:
            rows = _record(row)
        elif isinstance(row.get("passage"), dict):
            rows = _multirc(row)
        else:
            rows = iter([_wsc(row) if "target" in row else row])
        yield from ((where, {**hidden, **found}) for found in rows)


def _record(row: Row) -> Iterator[Row]:
    """Yields ReCoRD's row of every query; entities and answers are sets."""
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
    """Yields MultiRC's row of every answer."""
    for question in row["passage"]["questions"]:
        for answer in question["answers"]:
            indices = {"paragraph": row["idx"], "question": question["idx"], "answer": answer["idx"]}
            yield {
                "paragraph": row["passage"]["text"],
                "question": question["question"],
                "answer": answer["text"],
                **({"label": answer["label"]} if "label" in answer else {}),
                "idx": indices,
            }


def _wsc(row: Row) -> Row:
    """Returns a row of WSC whose spans are substrings of the text, as TFDS's ``wsc.fixed`` has them."""
    row = {**row, **row["target"]}
    for span in ("span1", "span2"):
        text, index = row[f"{span}_text"], row[f"{span}_index"]
        if text in row["text"] or text in _APART:
            continue
        if "theyscold" in text:
            row["span2_index"] = 10
        is_lower = row["text"].split()[index][0].islower()
        text = (text[0].lower() if is_lower else text[0].upper()) + text[1:]
        row[f"{span}_text"] = text.rstrip(".").replace("\n", " ")
    return row


def articles(paths: Sequence[pathlib.Path]) -> Iterator[tuple[str, Row]]:
    """Yields WikiText's articles, without blank lines at both ends, which start with `` = Title = ``."""
    for path in paths:
        text, previous = list[str](), ""
        for number, line in read_lines(path):
            if _TITLE.fullmatch(line) and not previous.strip() and text:
                yield f"{path}, before line {number}", {"text": "\n".join(text).rstrip()}
                text = []
            if text or line.strip():
                text.append(line)
            previous = line
        if text:
            yield f"{path}, the end", {"text": "\n".join(text).rstrip()}
