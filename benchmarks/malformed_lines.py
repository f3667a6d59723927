"""Small distribution files: how they are damaged, and what a damaged one says when it is read plainly."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import os
import pathlib
import re
from typing import Any

import numpy as np
from malformed_cases import BYTES, Dice


@dataclasses.dataclass(frozen=True)
class Source:
    """A small file of a benchmark's task.

    Attributes:
      dataset: the TFDS name.
      file: its place.
      text: its contents.
      features: TFDS's features, and where a row has them.
      columns: of a tsv file without a header line.
      labels: the names of the classes; without them the label is a score.
      split: the TFDS split.
      nested: ReCoRD's form.
    """

    dataset: str
    file: str
    text: str
    features: dict[str, str]
    columns: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    split: str = "train"
    nested: bool = False

    @property
    def is_json(self) -> bool:
        """Whether every line is an object."""
        return ".jsonl" in self.file


@dataclasses.dataclass
class Expected:
    """What a file says: its rows, and how many that say nothing."""

    rows: list[dict[str, Any]]
    dropped: int


def write(source: Source, path: pathlib.Path, data: bytes | None = None) -> None:
    """Writes the file, compressed where its name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = source.text.encode() if data is None else data
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


# -- what a file says --------------------------------------------------------------------------------


def read_source(source: Source, path: pathlib.Path) -> Expected | str:
    """The rows of a file, or why it has none: every line split at tabs, or read as JSON."""
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.GzipFile(fileobj=io.BytesIO(data)).read()
        text = data.decode("utf-8").removeprefix("\ufeff")
    except (OSError, EOFError, ValueError, gzip.zlib.error) as error:  # type: ignore[attr-defined]
        return f"the file cannot be read ({error})"
    lines = re.split("\r\n|\r|\n", text)
    while lines and not lines[-1]:
        lines.pop()
    try:
        return read_objects(source, lines) if source.is_json else read_table(source, lines)
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        return f"no rows ({type(error).__name__}: {error})"


def read_table(source: Source, lines: list[str]) -> Expected:
    """Rows of tab-separated fields; those without all of them say nothing."""
    columns = list(source.columns) or lines.pop(0).split("\t")
    rows: list[dict[str, Any]] = []
    dropped = number = 0
    for line in lines:
        fields = line.split("\t")
        if not line and not source.columns:
            dropped += 1
            continue
        if len(fields) > len(columns) or fields == columns or (source.columns and len(fields) < 4):
            raise ValueError(f"{len(fields)} fields")
        row = dict(zip(columns, fields, strict=False))
        if all(row.get(c) is not None for c in source.features.values()) and label_given(
            source, row
        ):
            found = {f: value(source, f, row[c]) for f, c in source.features.items()}
            rows.append(found | {"idx": number})
        else:
            dropped += 1
        number += 1
    if not rows:
        raise ValueError("empty")
    return Expected(sorted(rows, key=lambda r: r["idx"]), dropped)


def label_given(source: Source, row: dict[str, str]) -> bool:
    """Whether a row has a label where it must."""
    return "label" not in source.features or bool(row[source.features["label"]])


def read_objects(source: Source, lines: list[str]) -> Expected:
    """Rows of JSON objects."""
    rows = []
    for number, line in enumerate(lines):
        row = json.loads(line, parse_constant=refuse)
        found = {f: value(source, f, at(row, path)) for f, path in source.features.items()}
        if source.nested:
            if not isinstance(row["idx"], int) or len(row["qas"]) != 1:
                raise ValueError("another form")
            found["order"] = row["qas"][0]["idx"]
        elif "idx" not in found:
            found["idx"] = number
        rows.append(found)
    keys = [row.get("order", row.get("idx")) for row in rows]
    if not rows or len(set(keys)) < len(keys):
        raise ValueError("none, or a number twice")
    rows.sort(key=lambda row: row.get("order", row.get("idx")))
    for row in rows:
        row.pop("order", None)
    return Expected(rows, 0)


def refuse(name: str) -> None:
    """JSON knows no NaN."""
    raise ValueError(name)


def at(row: Any, path: str) -> Any:
    """A value inside of an object."""
    for key in path.split("."):
        row = row[int(key)] if key.isdecimal() else row[key]
    return row


def value(source: Source, feature: str, given: Any) -> Any:
    """A field's value as its feature stores it."""
    if feature in ("idx", "span1_index", "span2_index"):
        given = int(given) if isinstance(given, str) and re.fullmatch("[0-9]+", given) else given
        if type(given) is not int or not 0 <= given < 2**31:
            raise ValueError(f"{feature} {given!r}")
        return given
    if feature != "label":
        if type(given) is not str:
            raise ValueError(f"{feature} {given!r} is no text")
        given.encode()
        return given
    if not source.labels:
        if not re.fullmatch(r"[0-9]+(\.[0-9]*)?(e[+-]?[0-9]+)?", given):
            raise ValueError(f"score {given!r}")
        if not 0 <= float(given) <= 5:
            raise ValueError(f"score {given!r}")
        return np.float32(given).item()
    if type(given) is bool:
        given = str(given) if source.labels == ("False", "True") else "no label"
    if str(given) in ("0", "1"):
        return int(given)
    return source.labels.index(given)


# -- damage ------------------------------------------------------------------------------------------

FIELDS = [
    *(
        "",
        " ",
        "x",
        "0",
        "1",
        "2",
        "-1",
        "nan",
        "inf",
        "1e3",
        "0_5",
        "٣",
        "５",
        "5.0001",
        "-0.5",
        "3.",
        " 1",
    ),
    *(
        "entailment ",
        "Entailment",
        "x" * 131_073,
        "x" * 131_072,
        "\0",
        "\u2028",
        "\ufeff",
        '"',
        "\x0b",
        "é",
    ),
    *(
        "a\rb",
        "\x1c",
        "\x85",
        "not_entailment",
        "acceptable",
        "1.0",
        "0x1",
        "True",
        "None",
        "\\N",
        "99999999999",
    ),
]
VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, -1, 1.0, 1.5, 2**31, 2**40, 10**400, "", "x", "0", "1", "9" * 5000, "-1"),
    *([], {}, [1], {"a": 1}, "\ud800", "a\udfffb", "\0", "\u2028", "\n", "\t", "é", "x" * 200_000, "True"),
    *("entailment", "not_entailment", float("nan"), float("inf"), 1e308, "1.0", "５", " 1", [[[[]]]]),
]  # fmt: skip


def damage(source: Source, path: pathlib.Path, dice: Dice) -> str:
    """Writes the file with one damage; says which."""
    kinds = [damage_bytes, damage_packed, change_lines, change_encoding, put_other]
    kinds += [change_value, change_value, change_value] if source.is_json else [change_field] * 3
    return dice.choice(kinds)(source, path, dice)


def damage_bytes(source: Source, path: pathlib.Path, dice: Dice) -> str:
    """Of the contents."""
    kind = dice.choice(BYTES)
    write(source, path, kind(source.text.encode(), dice))
    return kind.__name__


def damage_packed(source: Source, path: pathlib.Path, dice: Dice) -> str:
    """Of the file as it is stored."""
    kind = dice.choice(BYTES)
    write(source, path)
    path.write_bytes(kind(path.read_bytes(), dice))
    return f"{kind.__name__} of the file"


def change_lines(source: Source, path: pathlib.Path, dice: Dice) -> str:
    """Lines doubled, gone, empty, in between, headers, ends."""
    lines = source.text.splitlines(keepends=True)
    place = dice.randrange(len(lines))
    extra = [
        "\n",
        "\r",
        " \n",
        "\t\n",
        "\t\t\t\t\t\n",
        lines[0],
        lines[place],
        "x\n",
        "{}\n",
        "[]\n",
        "null\n",
    ]
    extra += ["[" * 100_000 + "\n", '{"idx": 0}\n', "\0\0\0\n", "\x1a\n", "#\n", lines[place][:-3]]
    kind = dice.choice(["put", "put", "put", "delete", "swap", "CRLF", "CR", "no end", "reverse"])
    if kind == "put":
        line = dice.choice(extra)
        lines.insert(dice.randrange(len(lines) + 1), line)
        kind = f"put {line[:20]!r}"
    elif kind == "delete":
        del lines[place]
    elif kind == "swap":
        lines[0], lines[place] = lines[place], lines[0]
    elif kind == "reverse":
        lines.reverse()
    text = "".join(lines)
    text = text.replace("\n", {"CRLF": "\r\n", "CR": "\r"}.get(kind, "\n"))
    write(source, path, (text.rstrip() if kind == "no end" else text).encode())
    return f"lines: {kind}"


def change_field(source: Source, path: pathlib.Path, dice: Dice) -> str:
    """A field of a tsv file: another value, swapped columns, one more, one less, another header."""
    rows = [line.split("\t") for line in source.text.splitlines()]
    kind = dice.choice(
        ["value", "value", "value", "value", "more", "less", "swap", "header", "last"]
    )
    row = dice.choice(rows)
    place = dice.randrange(len(row))
    if kind == "value":
        row[place] = dice.choice(FIELDS)
        kind = f"{row[place][:20]!r} in column {place + 1} of line {rows.index(row) + 1}"
    elif kind == "more":
        row.insert(place, "more")
    elif kind == "less":
        del row[place]
    elif kind == "last":  # labels are there
        row[-1] = dice.choice(FIELDS)
        kind = f"{row[-1][:20]!r} in the last column of line {rows.index(row) + 1}"
    elif kind == "swap":
        for each in rows if dice.random() < 0.5 else rows[1:]:
            each[0], each[-1] = each[-1], each[0]
    else:
        rows[0] = [dice.choice(["Sentence1", "label", "sentence1", "score", ""]) for _ in rows[0]]
    write(source, path, "".join("\t".join(row) + "\n" for row in rows).encode())
    return f"field: {kind}"


def change_value(source: Source, path: pathlib.Path, dice: Dice) -> str:
    """A value of a JSON object: another one, none, under another or under two keys."""
    rows = [json.loads(line) for line in source.text.splitlines()]
    number = dice.randrange(len(rows))
    inside = rows[number]
    while True:  # somewhere in the tree
        key = (
            dice.choice(sorted(inside)) if isinstance(inside, dict) else dice.randrange(len(inside))
        )
        if not (isinstance(inside[key], dict | list) and inside[key]) or dice.random() < 0.2:
            break
        inside = inside[key]
    kind = dice.choice(["value", "value", "value", "value", "delete", "rename"])
    if kind == "value" or not isinstance(inside, dict):
        inside[key] = dice.choice(VALUES)
        kind = f"{key} is {str(inside[key])[:20]!a}"
    else:
        old = inside.pop(key)
        if kind == "rename":
            inside[dice.choice([f"{key} ", str(key).upper(), "", "type"])] = old
        kind = f"{kind} {key}"
    write(source, path, "".join(json.dumps(row) + "\n" for row in rows).encode())
    return f"line {number + 1}: {kind}"


def change_encoding(source: Source, path: pathlib.Path, dice: Dice) -> str:
    """The same text in other bytes."""
    kind = dice.choice(["utf-16", "utf-32", "cp1252", "utf-8-sig", "utf-7", "cp037", "two marks"])
    text = "\ufeff\ufeff" + source.text if kind == "two marks" else source.text
    coding = "utf-8" if kind == "two marks" else kind
    write(source, path, text.encode(coding, errors="replace"))
    return f"encoding: {kind}"


def put_other(source: Source, path: pathlib.Path, dice: Dice) -> str:
    """Something else in the place of the file."""
    kind = dice.choice(["pipe", "directory", "link", "device", "zeros", "gz", "not gz", "pretty"])
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("nowhere")
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "zeros":
        path.write_bytes(bytes(4096))
    elif kind == "gz":
        path.write_bytes(gzip.compress(gzip.compress(source.text.encode())))
    elif kind == "not gz":
        path.write_bytes(source.text.encode())
    elif kind == "pretty":
        write(source, path, source.text.replace("{", "{\n").replace("\t", "\t\t").encode())
    else:
        write(source, path)
    return f"other: {kind}"
