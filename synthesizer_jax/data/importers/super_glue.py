"""SuperGLUE's JSON lines, checked row by row; what a row means stays TFDS's own code."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

from synthesizer_jax.data.importers.layouts import Source, Split
from synthesizer_jax.data.importers.reading import broken, parse_object, read_lines
from synthesizer_jax.data.importers.staged import Staged

_INTEGERS = ("start1", "start2", "end1", "end2", "span1_index", "span2_index")

Fail = Callable[[str], ValueError]


def stage(builder: Any, split: Split, source: Source, target: pathlib.Path) -> Staged:
    """Copies `source` to `target` unchanged but for its packing, checking every row.

    Args:
      builder: the TFDS builder of the task.
      split: the split being read; only a test split may lack labels.
      source: the jsonl file.
      target: the file to write.

    Raises:
      ValueError: a row is broken or repeats an `idx`.
    """
    if source.format != "jsonl":
        raise ValueError(f"{source.path}: SuperGLUE is read from jsonl; nothing was imported")
    config = builder.builder_config
    examples = {"multirc": _multirc, "record": _record}.get(config.name, _flat)
    labelled = split.name != "test"
    seen: set[Hashable] = set()
    with target.open("w", encoding="utf-8", newline="\n") as out:
        for number, line in read_lines(source.path):
            row = parse_object(source.path, number, line)

            def fail(reason: str, number: int = number) -> ValueError:
                return broken(source.path, number, reason)

            for key in examples(row, config, labelled, fail):
                if key in seen:
                    raise fail(f"idx {key} is there twice")
                seen.add(key)
            out.write(line + "\n")
    return Staged(source.path, {"data_file": str(target), "split": split.name}, len(seen))


def _flat(row: dict[str, Any], config: Any, labelled: bool, fail: Fail) -> Iterator[Hashable]:
    """One example a row: all tasks but MultiRC and ReCoRD. Yields its idx."""
    values = row
    if config.name.startswith("wsc"):
        values = row | _get(row, "target", dict, fail)
    for feature in config.features:
        if feature in _INTEGERS:
            _check_int32(_get(values, feature, int, fail), feature, fail)
        else:
            _get(values, feature, str, fail)
    if "label" in row:
        _check_label(row["label"], config, fail)
    elif labelled:
        raise fail("'label' is missing")
    if config.name.startswith("wsc"):
        words = len(values["text"].split())
        for feature in ("span1_index", "span2_index"):
            if not 0 <= values[feature] < words:
                raise fail(f"{feature!r} is {values[feature]} in a text of {words} words")
    yield _index(row, fail)


def _multirc(row: dict[str, Any], config: Any, labelled: bool, fail: Fail) -> Iterator[Hashable]:
    """One example an answer. Yields (paragraph, question, answer) indices."""
    del config
    passage = _get(row, "passage", dict, fail)
    _get(passage, "text", str, fail)
    for question in _objects(passage, "questions", fail):
        _get(question, "question", str, fail)
        for answer in _objects(question, "answers", fail):
            _get(answer, "text", str, fail)
            label = answer.get("label")
            if label not in ((0, 1) if labelled else (0, 1, None)):
                raise fail(f"answer label {label!r} is not 0 or 1")
            yield tuple(_index(part, fail) for part in (row, question, answer))


def _record(row: dict[str, Any], config: Any, labelled: bool, fail: Fail) -> Iterator[Hashable]:
    """One example a query. Yields query indices."""
    del config
    _index(row, fail)
    passage = _get(row, "passage", dict, fail)
    length = len(_get(passage, "text", str, fail))
    for entity in _objects(passage, "entities", fail):
        start, end = _get(entity, "start", int, fail), _get(entity, "end", int, fail)
        if not 0 <= start <= end < length:
            raise fail(f"entity {start} to {end} lies outside a passage of {length} characters")
    for query in _objects(row, "qas", fail):
        _get(query, "query", str, fail)
        if labelled or "answers" in query:
            for answer in _objects(query, "answers", fail):
                _get(answer, "text", str, fail)
        yield _index(query, fail)


def _check_label(label: Any, config: Any, fail: Fail) -> None:
    classes = tuple(config.label_classes)
    if config.name == "copa" or classes == ("False", "True"):
        legal = isinstance(label, int) and label in (0, 1)  # JSON's true and false too
        allowed = "0, 1, false or true"
    else:
        legal, allowed = label in classes, " or ".join(classes)
    if not legal:
        raise fail(f"label {str(label)[:40]!r} is not {allowed}")


def _index(row: dict[str, Any], fail: Fail) -> int:
    """A row's idx; AX-b writes it as a string."""
    value = row.get("idx")
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value[:20])
    else:
        value = _get(row, "idx", int, fail)
    _check_int32(value, "idx", fail)
    return value


def _check_int32(value: int, key: str, fail: Fail) -> None:
    if not 0 <= value < 2**31:
        raise fail(f"{key!r} is {value}, not a number from 0 to 2,147,483,647")


def _get(row: dict[str, Any], key: str, kind: type, fail: Fail) -> Any:
    value = row.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        found = "is missing" if key not in row else f"is {type(value).__name__}"
        raise fail(f"{key!r} {found}, {kind.__name__} was expected")
    return value


def _objects(row: dict[str, Any], key: str, fail: Fail) -> Iterable[dict[str, Any]]:
    values = _get(row, key, list, fail)
    if not all(isinstance(value, dict) for value in values):
        raise fail(f"{key!r} holds something that is not a JSON object")
    return values
