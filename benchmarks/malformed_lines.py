"""Small distribution files, damage to them, and an independent reader."""

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
from malformed_cases import BYTES, Rng


@dataclasses.dataclass(frozen=True)
class Source:
    """A small file of a benchmark's task.

    Attributes:
      dataset: the name in TFDS.
      file: the path.
      text: the contents.
      features: the features in TFDS, with their columns or paths in the file.
      columns: the columns of a tsv file without a header.
      labels: the names of the classes; empty if the label is a score.
      split: the split in TFDS.
      nested: whether the file has the nested format of ReCoRD.
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
        """Whether the file consists of JSON lines."""
        return ".jsonl" in self.file


@dataclasses.dataclass
class Expected:
    """The examples of a file, and the number of invalid lines."""

    rows: list[dict[str, Any]]
    dropped: int


def write(source: Source, path: pathlib.Path, data: bytes | None = None) -> None:
    """Writes the file, compressed if its name ends with ``.gz``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = source.text.encode() if data is None else data
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


# -- an independent reader --------------------------------------------------------------------------------


def read_source(source: Source, path: pathlib.Path) -> Expected | str:
    """Reads the examples of a file; returns a description if it is invalid."""
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
    """Reads lines of tab-separated fields; lines without all fields are dropped."""
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
        if all(row.get(c) is not None for c in source.features.values()) and has_label(source, row):
            features = {f: parse_value(source, f, row[c]) for f, c in source.features.items()}
            rows.append(features | {"idx": number})
        else:
            dropped += 1
        number += 1
    if not rows:
        raise ValueError("empty")
    return Expected(sorted(rows, key=lambda r: r["idx"]), dropped)


def has_label(source: Source, row: dict[str, str]) -> bool:
    """Whether a row has a label if it needs one."""
    return "label" not in source.features or bool(row[source.features["label"]])


def read_objects(source: Source, lines: list[str]) -> Expected:
    """Reads lines of JSON objects."""
    rows = []
    for number, line in enumerate(lines):
        row = json.loads(line, parse_constant=reject_constant)
        fields = {
            f: parse_value(source, f, lookup(row, path)) for f, path in source.features.items()
        }
        if source.nested:
            if not isinstance(row["idx"], int) or len(row["qas"]) != 1:
                raise ValueError("another form")
            fields["order"] = row["qas"][0]["idx"]
        elif "idx" not in fields:
            fields["idx"] = number
        rows.append(fields)
    keys = [row.get("order", row.get("idx")) for row in rows]
    if not rows or len(set(keys)) < len(keys):
        raise ValueError("no rows, or a duplicate number")
    rows.sort(key=lambda row: row.get("order", row.get("idx")))
    for row in rows:
        row.pop("order", None)
    return Expected(rows, 0)


def reject_constant(name: str) -> None:
    """Rejects NaN and infinities, which are not JSON."""
    raise ValueError(name)


def lookup(row: Any, path: str) -> Any:
    """A nested value of an object."""
    for key in path.split("."):
        row = row[int(key)] if key.isdecimal() else row[key]
    return row


def parse_value(source: Source, feature: str, raw: Any) -> Any:
    """Converts a field to the value that TFDS stores."""
    if feature in ("idx", "span1_index", "span2_index"):
        raw = int(raw) if isinstance(raw, str) and re.fullmatch("[0-9]+", raw) else raw
        if type(raw) is not int or not 0 <= raw < 2**31:
            raise ValueError(f"{feature} {raw!r}")
        return raw
    if feature != "label":
        if type(raw) is not str:
            raise ValueError(f"{feature} {raw!r} is no text")
        raw.encode()
        return raw
    if not source.labels:
        if not re.fullmatch(r"[0-9]+(\.[0-9]*)?(e[+-]?[0-9]+)?", raw):
            raise ValueError(f"score {raw!r}")
        if not 0 <= float(raw) <= 5:
            raise ValueError(f"score {raw!r}")
        return np.float32(raw).item()
    if type(raw) is bool:
        raw = str(raw) if source.labels == ("False", "True") else "no label"
    if str(raw) in ("0", "1"):
        return int(raw)
    return source.labels.index(raw)


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


def damage(source: Source, path: pathlib.Path, rng: Rng) -> str:
    """Writes the file with some damage; returns a description."""
    kinds = [damage_bytes, damage_packed, change_lines, change_encoding, replace_file]
    kinds += [change_value, change_value, change_value] if source.is_json else [change_field] * 3
    return rng.choice(kinds)(source, path, rng)


def damage_bytes(source: Source, path: pathlib.Path, rng: Rng) -> str:
    """Damages the bytes of the contents."""
    kind = rng.choice(BYTES)
    write(source, path, kind(source.text.encode(), rng))
    return kind.__name__


def damage_packed(source: Source, path: pathlib.Path, rng: Rng) -> str:
    """Damages the bytes of the file, which may be compressed."""
    kind = rng.choice(BYTES)
    write(source, path)
    path.write_bytes(kind(path.read_bytes(), rng))
    return f"{kind.__name__} of the file"


def change_lines(source: Source, path: pathlib.Path, rng: Rng) -> str:
    """Inserts, deletes or reorders lines, or changes their ends."""
    lines = source.text.splitlines(keepends=True)
    index = rng.randrange(len(lines))
    extra = [
        "\n",
        "\r",
        " \n",
        "\t\n",
        "\t\t\t\t\t\n",
        lines[0],
        lines[index],
        "x\n",
        "{}\n",
        "[]\n",
        "null\n",
    ]
    extra += ["[" * 100_000 + "\n", '{"idx": 0}\n', "\0\0\0\n", "\x1a\n", "#\n", lines[index][:-3]]
    kind = rng.choice(["put", "put", "put", "delete", "swap", "CRLF", "CR", "no end", "reverse"])
    if kind == "put":
        line = rng.choice(extra)
        lines.insert(rng.randrange(len(lines) + 1), line)
        kind = f"put {line[:20]!r}"
    elif kind == "delete":
        del lines[index]
    elif kind == "swap":
        lines[0], lines[index] = lines[index], lines[0]
    elif kind == "reverse":
        lines.reverse()
    text = "".join(lines)
    text = text.replace("\n", {"CRLF": "\r\n", "CR": "\r"}.get(kind, "\n"))
    write(source, path, (text.rstrip() if kind == "no end" else text).encode())
    return f"lines: {kind}"


def change_field(source: Source, path: pathlib.Path, rng: Rng) -> str:
    """Changes, inserts, deletes or swaps fields of a tsv file."""
    rows = [line.split("\t") for line in source.text.splitlines()]
    kind = rng.choice(
        ["value", "value", "value", "value", "more", "less", "swap", "header", "last"]
    )
    row = rng.choice(rows)
    index = rng.randrange(len(row))
    if kind == "value":
        row[index] = rng.choice(FIELDS)
        kind = f"{row[index][:20]!r} in column {index + 1} of line {rows.index(row) + 1}"
    elif kind == "more":
        row.insert(index, "more")
    elif kind == "less":
        del row[index]
    elif kind == "last":  # labels are there
        row[-1] = rng.choice(FIELDS)
        kind = f"{row[-1][:20]!r} in the last column of line {rows.index(row) + 1}"
    elif kind == "swap":
        for fields in rows if rng.random() < 0.5 else rows[1:]:
            fields[0], fields[-1] = fields[-1], fields[0]
    else:
        rows[0] = [rng.choice(["Sentence1", "label", "sentence1", "score", ""]) for _ in rows[0]]
    write(source, path, "".join("\t".join(row) + "\n" for row in rows).encode())
    return f"field: {kind}"


def change_value(source: Source, path: pathlib.Path, rng: Rng) -> str:
    """Changes, deletes or renames a value of a JSON object."""
    rows = [json.loads(line) for line in source.text.splitlines()]
    number = rng.randrange(len(rows))
    node = rows[number]
    while True:  # somewhere in the tree
        key = rng.choice(sorted(node)) if isinstance(node, dict) else rng.randrange(len(node))
        if not (isinstance(node[key], dict | list) and node[key]) or rng.random() < 0.2:
            break
        node = node[key]
    kind = rng.choice(["value", "value", "value", "value", "delete", "rename"])
    if kind == "value" or not isinstance(node, dict):
        node[key] = rng.choice(VALUES)
        kind = f"{key} is {str(node[key])[:20]!a}"
    else:
        old = node.pop(key)
        if kind == "rename":
            node[rng.choice([f"{key} ", str(key).upper(), "", "type"])] = old
        kind = f"{kind} {key}"
    write(source, path, "".join(json.dumps(row) + "\n" for row in rows).encode())
    return f"line {number + 1}: {kind}"


def change_encoding(source: Source, path: pathlib.Path, rng: Rng) -> str:
    """Writes the contents in another encoding."""
    kind = rng.choice(["utf-16", "utf-32", "cp1252", "utf-8-sig", "utf-7", "cp037", "two marks"])
    text = "\ufeff\ufeff" + source.text if kind == "two marks" else source.text
    coding = "utf-8" if kind == "two marks" else kind
    write(source, path, text.encode(coding, errors="replace"))
    return f"encoding: {kind}"


def replace_file(source: Source, path: pathlib.Path, rng: Rng) -> str:
    """Replaces the file by something else."""
    kind = rng.choice(["pipe", "directory", "link", "device", "zeros", "gz", "not gz", "pretty"])
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
