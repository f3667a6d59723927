"""Readers of files that are no tables; a reader is given the files of one part of a split.

It yields every row, None for one that is left out, and where it is. What it raises, `reading.Cursor` names.
"""

from __future__ import annotations

import html
import itertools
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias
from xml.etree import ElementTree

from etils import epy

from synthesizer_jax.preparation.importers.files import aligned_lines
from synthesizer_jax.preparation.importers.reading import (
    Row,
    open_file,
    read_lines,
    read_rows,
    uncompressed,
)

with epy.lazy_imports():
    import tensorflow_datasets as tfds

Reader: TypeAlias = Callable[[Sequence[pathlib.Path]], Iterator[tuple[str, Row | None]]]

_SEGMENT = re.compile(r"\s*<seg id=\"[^\"]*\">(.*)</seg>\s*")
_TAG = re.compile(r"\s*<[^>]+>.*")
_TITLE = re.compile(r" = [^=].* = ?")
_PERSONA = "your persona: "
_LANGUAGE = "{http://www.w3.org/XML/1998/namespace}lang"


def table(convert: Callable[[Row], Row], columns: Sequence[str] = ()) -> Reader:
    """Returns the reader of tables whose rows are converted; see `read_rows` for `columns`."""

    def read(paths: Sequence[pathlib.Path]) -> Iterator[tuple[str, Row]]:
        for path in paths:
            for where, row in read_rows(path, columns):
                yield where, convert(row)

    return read


def by_tfds(dataset: str, published: Reader | None = None) -> Reader:
    """Returns the reader of Parquet files with the features of a TFDS data set, or of a published file.

    `published` reads the latter; None: the code of TFDS's builder.
    """

    def read(paths: Sequence[pathlib.Path]) -> Iterator[tuple[str, Row | None]]:
        file = uncompressed(paths[0])
        with tempfile.TemporaryDirectory() as folder:
            builder = tfds.builder(dataset, data_dir=folder)
            if file.suffix == ".parquet":
                for where, row in itertools.chain(*map(read_rows, paths)):
                    values = {name: row[name] for name in builder.info.features}
                    # ReCoRD's lists are sets, which TFDS sorts.
                    yield where, {k: sorted(v) if type(v) is list else v for k, v in values.items()}
            elif published is not None:
                yield from published(paths)
            else:
                copy = pathlib.Path(folder) / "copy"
                with open_file(paths[0]) as source, copy.open("wb") as target:
                    shutil.copyfileobj(source, target)
                arguments = [str(copy)] + [file.stem.removeprefix("subset_")] * ("glue" in dataset)
                for number, (_, row) in enumerate(builder._generate_examples(*arguments), 1):
                    yield f"{paths[0]}, example {number}", row

    return read


def mrpc(paths: Sequence[pathlib.Path]) -> Iterator[tuple[str, Row]]:
    """Yields MRPC's rows from the files that GLUE makes of Microsoft's."""
    for number, (where, row) in enumerate(read_rows(paths[0])):
        texts = {"sentence1": row["#1 String"], "sentence2": row["#2 String"]}
        yield where, {**texts, "label": int(row.get("Quality", -1)), "idx": number}


def parallel(languages: tuple[str, str]) -> Reader:
    """Returns the reader of parallel text: two files of text, SGML or XML, or a TSV or TMX file.

    A row that lacks one of the languages is left out, as are lines of tags in IWSLT's training files.
    ``&amp;`` and the like in SGML and XML become the characters that they stand for, unlike in TFDS.
    """

    def read(paths: Sequence[pathlib.Path]) -> Iterator[tuple[str, Row | None]]:
        kind = uncompressed(paths[0]).suffix
        if len(paths) != (1 if kind in (".tsv", ".tmx") else 2):
            names = ", ".join(map(str, paths))
            raise ValueError(f"{names} are there; keep one file, or two of a language each")
        if kind == ".tsv":
            pairs = _tsv_pairs(paths[0])
        elif kind == ".tmx":
            pairs = enumerate(_tmx_units(paths[0]), 1)
        else:
            lines_of = _segments if kind in (".sgm", ".xml") else _plain_lines
            sides = aligned_lines(paths, lines_of)
            pairs = ((n, dict(zip(languages, texts, strict=True))) for n, texts in sides)
        for number, pair in pairs:
            texts = {language: pair.get(language, "") for language in languages}
            is_whole = all(text.strip() for text in texts.values())
            yield f"{paths[0]}, line {number}", texts if is_whole else None

    return read


def _tsv_pairs(path: pathlib.Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields the rows of a file such as ``corpus.de-en.tsv``, whose name says which column is which."""
    columns = uncompressed(path).name.split(".")[-2].split("-")
    for number, line in read_lines(path):
        texts = [text.strip() for text in line.split("\t")]
        yield number, dict(zip(columns, texts, strict=True)) if len(texts) == len(columns) else {}


def _plain_lines(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    tagged = path.name.startswith("train.tags.")
    for number, line in read_lines(path):
        if not (tagged and _TAG.fullmatch(line)):
            yield number, line.strip() if tagged else line


def _segments(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Yields the texts of the elements ``<seg id="…">``, one a line; other lines are left out."""
    for number, line in read_lines(path):
        if segment := _SEGMENT.fullmatch(line):
            yield number, html.unescape(segment.group(1)).strip()


def _tmx_units(path: pathlib.Path) -> Iterator[dict[str, str]]:
    """Yields the translation units of a TMX file, one after the other, by language."""
    with open_file(path) as file:
        parents = list[ElementTree.Element]()
        for event, element in ElementTree.iterparse(file, events=("start", "end")):
            if event == "start":
                parents.append(element)
                continue
            parents.pop()
            if element.tag == "tu":
                variants = element.iterfind("tuv")
                yield {
                    v.get(_LANGUAGE, "").lower(): (v.findtext("seg") or "").strip()
                    for v in variants
                }
                if parents:
                    parents[-1].remove(element)  # units that have been read are not kept


def lines(paths: Sequence[pathlib.Path]) -> Iterator[tuple[str, Row]]:
    """Yields every line that is not blank as a text."""
    for path in paths:
        for number, line in read_lines(path):
            if line.strip():
                yield f"{path}, line {number}", {"text": line}


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


def reviews(paths: Sequence[pathlib.Path]) -> Iterator[tuple[str, Row]]:
    """Yields IMDb's rows: one file per review, in the folder ``neg`` or ``pos``."""
    for path in paths:
        text = "\n".join(line for _, line in read_lines(path))
        yield str(path), {"text": text, "label": int(path.parent.name == "pos")}


def dialogues(paths: Sequence[pathlib.Path]) -> Iterator[tuple[str, Row]]:
    """Yields a row per reply of dialogues in ParlAI's format, as of Persona-Chat and ConvAI2.

    Lines are numbered from 1 in every dialogue; they are of the persona, or have an utterance and a reply.
    """
    persona, history = list[str](), list[str]()
    for number, line in read_lines(paths[0]):
        index, _, text = line.partition(" ")
        if index == "1":
            persona, history = [], []
        if text.startswith(_PERSONA):
            persona.append(text.removeprefix(_PERSONA))
            continue
        utterance, reply, *_ = text.split("\t")
        history.append(utterance)
        row = {"persona": list(persona), "history": list(history), "reply": reply}
        yield f"{paths[0]}, line {number}", row
        history.append(reply)


def trivia(paths: Sequence[pathlib.Path]) -> Iterator[tuple[str, Row]]:
    """Yields TriviaQA's rows by TFDS's code: ``qa/*.json``, and documents in ``evidence`` beside it."""
    evidence = paths[0].parent.parent / "evidence"
    if not evidence.is_dir():
        raise ValueError(f"the folder {evidence} with the documents is not there")
    with tempfile.TemporaryDirectory() as folder:
        builder = tfds.builder("trivia_qa/rc", data_dir=folder)
        places = (str(evidence / "web"), str(evidence / "wikipedia"))
        for key, row in builder._generate_examples(list(map(str, paths)), *places):
            yield f"{paths[0].parent}, question {key}", row
