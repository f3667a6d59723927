"""Readers of rows from the files of corpora.

A reader is given the files of one part of a split, and yields the line (or the place) and the row of every
example. Errors name file, line and reason.
"""

from __future__ import annotations

import csv
import functools
import gzip
import html
import itertools
import pathlib
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias
from xml.etree import ElementTree

from synthesizer_jax.tasks.importers.reading import (
    import_error,
    parse_value,
    read_json_lines,
    read_lines,
    read_text,
)
from synthesizer_jax.tasks.storage import Row

Place: TypeAlias = int | str
Rows: TypeAlias = Iterator[tuple[Place, Row | None]]
"""Rows, None for one that is left out, and where they are."""
Reader: TypeAlias = Callable[[Sequence[pathlib.Path]], Rows]

_SEGMENT = re.compile(r"\s*<seg id=\"[^\"]*\">(.*)</seg>\s*")
_TAG = re.compile(r"\s*<[^>]+>.*")
_TITLE = re.compile(r" = [^=].* = ?")
_PERSONA = "your persona: "
_LANGUAGE = "{http://www.w3.org/XML/1998/namespace}lang"
PAGE = ("text", "url", "timestamp", "content-type", "content-length")
"""The features of C4."""


def aligned(languages: tuple[str, str]) -> Reader:
    """Returns the reader of two text files whose lines are translations of each other.

    Args:
      languages: names of the two features.
    """
    return lambda paths: _pairs(paths, languages, read_lines, drop_empty=False)


def aligned_talks(languages: tuple[str, str]) -> Reader:
    """Returns the reader of IWSLT's files.

    Training files have lines of text between lines of tags, which are left out; the others are XML with
    one ``<seg>`` per sentence.
    """
    return lambda paths: _pairs(paths, languages, _talk_lines, drop_empty=True)


def parallel(languages: tuple[str, str]) -> Reader:
    """Returns the reader of WMT's files: two of text or SGML, or one of both languages, TSV or TMX.

    A row that lacks one of the languages is left out. Unlike in TFDS, ``&amp;`` and the like in SGML become
    the characters that they stand for.

    Args:
      languages: names of the two features.
    """

    def read(paths: Sequence[pathlib.Path]) -> Rows:
        kind = pathlib.Path(paths[0].name.removesuffix(".gz")).suffix
        if kind in (".tsv", ".tmx"):
            if len(paths) > 1:
                raise import_error(
                    paths[-1], "the file", f"{paths[0]} is there too; keep one of them"
                )
            return _tsv_pairs(paths[0]) if kind == ".tsv" else _tmx_pairs(paths[0], languages)
        lines_of = _segments if kind == ".sgm" else functools.partial(read_lines, whole=True)
        return _pairs(paths, languages, lines_of, drop_empty=True)

    return read


def _tsv_pairs(path: pathlib.Path) -> Rows:
    """Yields the rows of a file such as ``corpus.de-en.tsv``, whose name says which column is which."""
    columns = path.name.removesuffix(".gz").split(".")[-2].split("-")
    for number, line in read_lines(path):
        texts = [text.strip() for text in line.split("\t")]
        is_pair = len(texts) == len(columns) and all(texts)
        yield number, dict(zip(columns, texts, strict=True)) if is_pair else None


def _tmx_pairs(path: pathlib.Path, languages: tuple[str, str]) -> Rows:
    """Yields the translation units of a TMX file, one after the other."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            parents, number = list[ElementTree.Element](), 0
            for event, element in ElementTree.iterparse(file, events=("start", "end")):
                if event == "start":
                    parents.append(element)
                    continue
                parents.pop()
                if element.tag != "tu":
                    continue
                number += 1
                texts = {
                    variant.get(_LANGUAGE, "").lower(): (variant.findtext("seg") or "").strip()
                    for variant in element.iterfind("tuv")
                }
                row = {language: texts.get(language, "") for language in languages}
                yield f"unit {number}", row if all(row.values()) else None
                if parents:
                    parents[-1].remove(element)  # units that have been read are not kept
    except (ElementTree.ParseError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise import_error(path, "the file", f"not TMX ({error})") from error


def _pairs(
    paths: Sequence[pathlib.Path],
    languages: tuple[str, str],
    read: Callable[[pathlib.Path], Iterator[tuple[int, str]]],
    *,
    drop_empty: bool,
) -> Rows:
    if len(paths) != 2:
        raise import_error(paths[-1], "the file", f"{len(paths)} files where two belong together")
    for sides in itertools.zip_longest(*map(read, paths)):
        if None in sides:
            line = next(side[0] for side in sides if side)
            reason = f"it ends before line {line} of the other language"
            raise import_error(paths[sides.index(None)], "the end", reason)
        texts = {language: text for language, (_, text) in zip(languages, sides, strict=True)}
        line = sides[0][0]
        empty = [side for side in range(2) if not sides[side][1].strip()]
        if empty and not drop_empty:
            reason = "an empty line, which is no translation"
            raise import_error(paths[empty[0]], line, reason)
        yield line, None if empty else texts


def _talk_lines(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    if ".xml" in path.suffixes:
        yield from _segments(path)
        return
    for number, line in read_lines(path):
        if not _TAG.fullmatch(line):
            yield number, line.strip()


def _segments(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Yields the texts of the elements ``<seg id="…">``, one a line; other lines are left out."""
    for number, line in read_lines(path):
        segment = _SEGMENT.fullmatch(line)
        if segment:
            yield number, html.unescape(segment.group(1)).strip()


def lines(paths: Sequence[pathlib.Path]) -> Rows:
    """Yields every line that is not blank as a text."""
    for path in paths:
        for number, line in read_lines(path):
            if line.strip():
                yield number, {"text": line}


def pages(paths: Sequence[pathlib.Path]) -> Rows:
    """Yields C4's pages from JSON lines; those of its mirrors lack some fields, which are empty."""
    for path in paths:
        for number, row in read_json_lines(path):
            if not isinstance(row.get("text"), str):
                raise import_error(path, number, "there is no text 'text'")
            yield number, {name: str(row.get(name) or "") for name in PAGE}


def articles(paths: Sequence[pathlib.Path]) -> Rows:
    """Yields the articles of WikiText, lines included, but for blank ones at both ends.

    An article starts with a title such as `` = Title = `` after a blank line; the titles of its sections
    have more signs.
    """
    for path in paths:
        start, text = 0, list[str]()
        previous = ""
        for number, line in read_lines(path):
            if _TITLE.fullmatch(line) and not previous.strip() and text:
                yield start, {"text": "\n".join(text).rstrip()}
                text = []
            start = start if text else number
            if text or line.strip():
                text.append(line)
            previous = line
        if text:
            yield start, {"text": "\n".join(text).rstrip()}


def summaries(paths: Sequence[pathlib.Path]) -> Rows:
    """Yields CNN/Daily Mail's rows from csv with the columns ``id``, ``article`` and ``highlights``."""
    for where, fields in _table(paths[0], header=("id", "article", "highlights")):
        yield where, {**fields, "publisher": ""}


def xsum(split: str) -> Reader:
    """Returns the reader of XSum's published files: the list of a split's ids, and a file per article."""

    def read(paths: Sequence[pathlib.Path]) -> Rows:
        listing = paths[0]
        ids = parse_value(listing, 1, read_text(listing))
        if not isinstance(ids, dict) or not isinstance(ids.get(split), list):
            raise import_error(listing, 1, f"there is no list {split!r}")
        by_id = {path.name.partition(".")[0]: path for path in paths[1:]}
        for number, article in enumerate(ids[split], 1):
            if article not in by_id:
                raise import_error(listing, f"{split} {number}", f"{article}.summary is not there")
            parts = read_text(by_id[article]).split("[SN]")
            if len(parts) < 9 or parts[5] != "FIRST-SENTENCE" or parts[7] != "RESTBODY":
                reason = "[SN]FIRST-SENTENCE[SN] and [SN]RESTBODY[SN] were expected"
                raise import_error(by_id[article], 1, reason)
            yield article, {"document": parts[8].strip(), "summary": parts[6].strip()}

    return read


def ag_news(paths: Sequence[pathlib.Path]) -> Rows:
    """Yields AG News' rows from csv without a header: class from 1, title, description."""
    columns = ("label", "title", "description")
    for where, fields in _table(paths[0], columns=columns):
        if fields["label"] not in ("1", "2", "3", "4"):
            raise import_error(paths[0], where, f"class {fields['label']!r} is not 1, 2, 3 or 4")
        yield where, {**fields, "label": int(fields["label"]) - 1}


def reviews(paths: Sequence[pathlib.Path]) -> Rows:
    """Yields IMDb's rows: one file per review, in the folder ``neg`` or ``pos``."""
    for path in paths:
        yield path.name, {"text": read_text(path), "label": int(path.parent.name == "pos")}


def dialogues(paths: Sequence[pathlib.Path]) -> Rows:
    """Yields a row per reply of dialogues in ParlAI's format, as of Persona-Chat and ConvAI2.

    Lines are numbered from 1 in every dialogue. Those of the persona begin with ``your persona:``; the
    others have an utterance, a tab and the reply, maybe followed by further fields.
    """
    persona, history = list[str](), list[str]()
    for number, line in read_lines(paths[0]):
        index, _, text = line.partition(" ")
        if not index.isdecimal() or not text:
            raise import_error(paths[0], number, "a number and a text were expected")
        if index == "1":
            persona, history = [], []
        if text.startswith(_PERSONA):
            persona.append(text.removeprefix(_PERSONA))
            continue
        utterance, *replies = text.split("\t")
        if not replies or not replies[0]:
            raise import_error(paths[0], number, "no tab and reply after the utterance")
        history.append(utterance)
        yield number, {"persona": list(persona), "history": list(history), "reply": replies[0]}
        history.append(replies[0])


def persona_json(paths: Sequence[pathlib.Path]) -> Rows:
    """Yields a row per reply of XPersona: a list of objects with ``persona`` and ``dialogue``."""
    path = paths[0]
    entries = parse_value(path, 1, read_text(path))
    for number, entry in enumerate(entries if isinstance(entries, list) else [entries], 1):
        where = f"dialogue {number}"
        persona = entry.get("persona") if isinstance(entry, dict) else None
        turns = entry.get("dialogue") if isinstance(entry, dict) else None
        if not _are_texts(persona) or not isinstance(turns, list):
            raise import_error(path, where, "'persona' and 'dialogue' were expected")
        history: list[str] = []
        for turn in turns:
            if not _are_texts(turn) or len(turn) != 2:
                raise import_error(path, where, "a turn is not an utterance and a reply")
            history.append(turn[0])
            yield where, {"persona": persona, "history": list(history), "reply": turn[1]}
            history.append(turn[1])


def _table(
    path: pathlib.Path, *, header: Sequence[str] = (), columns: Sequence[str] = ()
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields the fields of csv by column: those of `header`, which the first row names, or `columns`."""
    texts = (line + "\n" for _, line in read_lines(path))
    reader = csv.reader(texts, strict=True)
    try:
        names = list(columns) if columns else next(reader, [])
        missing = [name for name in header if name not in names]
        if missing:
            raise import_error(path, 1, f"no column {missing[0]!r} among {names}")
        for fields in reader:
            if not fields:
                continue  # a blank line
            if len(fields) != len(names):
                reason = f"{len(fields)} fields where {len(names)} belong"
                raise import_error(path, reader.line_num, reason)
            row = dict(zip(names, fields, strict=True))
            yield reader.line_num, {name: row[name] for name in (header or columns)}
    except csv.Error as error:
        raise import_error(path, reader.line_num, str(error)) from error


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
