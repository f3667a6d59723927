"""Row-by-row checks of SuperGLUE's JSON lines; TFDS's own code interprets the rows."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from synthesizer_jax.tasks.importers.layouts import Source, Split
from synthesizer_jax.tasks.importers.reading import Row, import_error, parse_object, read_lines
from synthesizer_jax.tasks.importers.staged import Staged

if TYPE_CHECKING:
    import tensorflow_datasets as tfds

_INTEGERS = ("start1", "start2", "end1", "end2", "span1_index", "span2_index")

T = TypeVar("T")
Fail = Callable[[str], ValueError]


def stage(
    builder: tfds.core.GeneratorBasedBuilder,
    split: Split,
    source: Source,
    *,
    target: pathlib.Path,
) -> Staged:
    """Copies the lines of `source` to `target` uncompressed and checks every row.

    Args:
      builder: the TFDS builder of the task.
      split: the split to read; only test splits may lack labels.
      source: the jsonl file.
      target: the file to write.

    Raises:
      ValueError: a row is invalid or repeats an `idx`.
    """
    if source.format != "jsonl":
        raise ValueError(f"{source.path}: SuperGLUE is read from jsonl; nothing was imported")
    config = builder.builder_config
    check_row = {"multirc": _check_multirc, "record": _check_record}.get(config.name, _check_flat)
    labeled = split.name != "test"
    seen: set[Hashable] = set()
    with target.open("w", encoding="utf-8", newline="\n") as file:
        for number, line in read_lines(source.path):
            row = parse_object(source.path, number, line)

            def fail(reason: str, number: int = number) -> ValueError:
                return import_error(source.path, number, reason)

            for key in check_row(row, config, labeled=labeled, fail=fail):
                if key in seen:
                    raise fail(f"idx {key} is there twice")
                seen.add(key)
            file.write(line + "\n")
    return Staged(source.path, {"data_file": str(target), "split": split.name}, len(seen))


def _check_flat(
    row: Row, config: tfds.core.BuilderConfig, *, labeled: bool, fail: Fail
) -> Iterator[Hashable]:
    """Checks one row of any task but MultiRC and ReCoRD and yields its idx."""
    values = row
    if config.name.startswith("wsc"):
        values = row | _get(row, "target", dict, fail=fail)
    for feature in config.features:
        if feature in _INTEGERS:
            _check_int32(_get(values, feature, int, fail=fail), feature, fail)
        else:
            _get(values, feature, str, fail=fail)
    if "label" in row:
        _check_label(row["label"], config, fail)
    elif labeled:
        raise fail("'label' is missing")
    if config.name.startswith("wsc"):
        num_words = len(values["text"].split())
        for feature in ("span1_index", "span2_index"):
            if not 0 <= values[feature] < num_words:
                raise fail(f"{feature!r} is {values[feature]} in a text of {num_words} words")
    yield _index(row, fail)


def _check_multirc(
    row: Row, config: tfds.core.BuilderConfig, *, labeled: bool, fail: Fail
) -> Iterator[Hashable]:
    """Checks one row of MultiRC and yields the (paragraph, question, answer) idx of each answer."""
    del config
    passage = _get(row, "passage", dict, fail=fail)
    _get(passage, "text", str, fail=fail)
    for question in _objects(passage, "questions", fail):
        _get(question, "question", str, fail=fail)
        for answer in _objects(question, "answers", fail):
            _get(answer, "text", str, fail=fail)
            label = answer.get("label")
            if label not in ((0, 1) if labeled else (0, 1, None)):
                raise fail(f"answer label {label!r} is not 0 or 1")
            yield tuple(_index(level, fail) for level in (row, question, answer))


def _check_record(
    row: Row, config: tfds.core.BuilderConfig, *, labeled: bool, fail: Fail
) -> Iterator[Hashable]:
    """Checks one row of ReCoRD and yields the idx of each query."""
    del config
    _index(row, fail)
    passage = _get(row, "passage", dict, fail=fail)
    length = len(_get(passage, "text", str, fail=fail))
    for entity in _objects(passage, "entities", fail):
        start, end = _get(entity, "start", int, fail=fail), _get(entity, "end", int, fail=fail)
        if not 0 <= start <= end < length:
            raise fail(f"entity {start} to {end} lies outside a passage of {length} characters")
    for query in _objects(row, "qas", fail):
        _get(query, "query", str, fail=fail)
        if labeled or "answers" in query:
            for answer in _objects(query, "answers", fail):
                _get(answer, "text", str, fail=fail)
        yield _index(query, fail)


def _check_label(label: object, config: tfds.core.BuilderConfig, fail: Fail) -> None:
    classes = tuple(config.label_classes)
    if config.name == "copa" or classes == ("False", "True"):
        is_valid = isinstance(label, int) and label in (0, 1)  # JSON's true and false too
        allowed = "0, 1, false or true"
    else:
        is_valid, allowed = label in classes, " or ".join(classes)
    if not is_valid:
        raise fail(f"label {str(label)[:40]!r} is not {allowed}")


def _index(row: Row, fail: Fail) -> int:
    """Returns a row's idx; AX-b stores it as a string."""
    value = row.get("idx")
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value[:20])
    else:
        value = _get(row, "idx", int, fail=fail)
    _check_int32(value, "idx", fail)
    return value


def _check_int32(value: int, key: str, fail: Fail) -> None:
    if not 0 <= value < 2**31:
        raise fail(f"{key!r} is {value}, not a number from 0 to 2,147,483,647")


def _get(row: Row, key: str, expected_type: type[T], *, fail: Fail) -> T:
    value = row.get(key)
    if not isinstance(value, expected_type) or isinstance(value, bool):
        problem = "is missing" if key not in row else f"is {type(value).__name__}"
        raise fail(f"{key!r} {problem}, {expected_type.__name__} was expected")
    return value


def _objects(row: Row, key: str, fail: Fail) -> Iterable[Row]:
    values = _get(row, key, list, fail=fail)
    if not all(isinstance(value, dict) for value in values):
        raise fail(f"{key!r} holds something that is not a JSON object")
    return values
