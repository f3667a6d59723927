"""Tasks that are made of users' files: written as TFDS data sets, with their definitions beside them.

``DATA_DIR/imported/NAME/1.0.0`` is a TFDS data set of the strings ``inputs`` and ``targets``, and its
``task.json`` says which metrics and label words the task has. Such a task is known by its name wherever
that data directory is used.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import math
import pathlib
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from synthesizer_jax.data.task_streams import SIDES
from synthesizer_jax.data.vocabularies import Vocabulary
from synthesizer_jax.files import write_atomic
from synthesizer_jax.messages import did_you_mean
from synthesizer_jax.registry import JSON
from synthesizer_jax.tasks import metrics, task_registry
from synthesizer_jax.tasks.formats import Written
from synthesizer_jax.tasks.importers.files import Rows, value_text
from synthesizer_jax.tasks.importers.reading import Row
from synthesizer_jax.tasks.postprocessors import UNKNOWN, parse_number
from synthesizer_jax.tasks.storage import install, temporary_folder, write_dataset
from synthesizer_jax.tasks.stored import stored_splits
from synthesizer_jax.tasks.task import Task

ROW_LENGTHS: Mapping[str, int] = {"inputs": 512, "targets": 84}
"""The tokens of a row of the recipe `finetune`."""
FOLDER, DEFINITION, VERSION = "imported", "task.json", "1.0.0"

METRICS: Mapping[str, tuple[metrics.Metric, str]] = {
    "accuracy": (metrics.accuracy, "anything"),
    "bleu": (metrics.bleu, "texts"),
    "bleu_13a": (metrics.bleu_13a, "texts"),
    "chrf": (metrics.chrf, "texts"),
    "f1": (metrics.f1_with_invalid, "two labels"),
    "matthews": (metrics.matthews, "labels"),
    "pearson": (metrics.pearson, "numbers"),
    "rouge": (metrics.rouge_all, "texts"),
    "spearman": (metrics.spearman, "numbers"),
}
"""Metrics by the names that ``--metric`` takes, and what they compare."""


class Template:
    """A text with fields of a row in braces, such as ``review: {text}``; dots enter JSON objects.

    Args:
      text: the template; ``{{`` and ``}}`` are braces.

    Raises:
      ValueError: a brace is not closed, or a field has no name or a conversion.
    """

    def __init__(self, text: str):
        try:
            self._parts = list(string.Formatter().parse(text))
        except ValueError as error:
            raise ValueError(f"the template {text!r} cannot be read: {error}") from None
        for _, field, spec, conversion in self._parts:
            if field is not None and (not field or spec or conversion):
                raise ValueError(
                    f"the template {text!r} has a field without a name or with a format; write {{NAME}}"
                )

    def __call__(self, row: Row) -> str:
        """Returns the text of a row.

        Raises:
          ValueError: the row lacks a field, or it is no text or number.
        """
        return "".join(
            literal + ("" if field is None else _field_text(row, field))
            for literal, field, _, _ in self._parts
        )


def _field_text(row: Row, field: str) -> str:
    """Returns the text of a field of a row."""
    value: JSON = row
    for name in [field] if field in row else field.split("."):
        if not isinstance(value, dict):
            raise ValueError(f"there is no field {field!r}: what {name!r} would be in is no object")
        if name not in value:
            raise ValueError(
                f"there is no field {field!r}{did_you_mean(name, value)}; there are {', '.join(value)}"
            )
        value = value[name]
    try:
        return value_text(value)
    except ValueError as error:
        raise ValueError(f"the field {field!r} is {error}") from None


@dataclasses.dataclass(frozen=True)
class FileTask:
    """A task that is made of files.

    Attributes:
      name: its name: lower-case letters, digits and ``_``.
      inputs: makes the input of a row; None: the task has targets only.
      targets: makes the target of a row.
      metrics: names in `METRICS`.
      labels: ``{value: word}`` of the allowed targets, in index order; empty: free text. A target that is a
        value is replaced by its word; one that is neither is an error. The empty target of a row with
        an input is a hidden one.
    """

    name: str
    inputs: Callable[[Row], str] | None
    targets: Callable[[Row], str]
    metrics: tuple[str, ...] = ("accuracy",)
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not re.fullmatch("[a-z][a-z0-9_]*", self.name):
            raise ValueError(
                f"the name {self.name!r} has other characters than a-z, 0-9 and _; choose another"
            )
        for name in self.metrics:
            if name not in METRICS:
                raise ValueError(
                    f"there is no metric {name!r}{did_you_mean(name, METRICS)}; choose of "
                    f"{', '.join(METRICS)}"
                )
        for value, word in self.labels.items():
            if word in ("", UNKNOWN):
                raise ValueError(
                    f"the label {value!r} has the word {word!r}, which marks hidden targets"
                )
        words = len(set(self.labels.values()))
        numeric = _is_numeric(self.metrics)
        compared = {"anything", "numbers" if numeric else "labels" if words else "texts"}
        if words == 2 and not numeric:
            compared.add("two labels")
        for name in self.metrics:
            if METRICS[name][1] not in compared:
                given = _count(words, "label") if words else "no labels"
                raise ValueError(
                    f"the metric {name!r} compares {METRICS[name][1]}; with {given} and the metrics "
                    f"{', '.join(self.metrics)} answers are {max(compared - {'anything'})}; leave it out"
                )

    def texts(self, row: Row) -> tuple[str, str]:
        """Returns the input (empty if the task has none) and the target of a row."""
        target = self.targets(row)
        if self.labels:
            target = self.labels.get(target, target)
            if target not in self.labels.values() and target not in ("", UNKNOWN):
                raise ValueError(
                    f"the target {target!r} is none of the labels {', '.join(self.labels)}"
                )
        numeric = _is_numeric(self.metrics) and target not in ("", UNKNOWN)
        if numeric and math.isnan(parse_number(target, otherwise=math.nan)):
            raise ValueError(
                f"the target {target[:60]!r} is no number, which the metric {self.metrics[0]} compares"
            )
        if self.inputs is None:
            return "", target
        return self.inputs(row), target or UNKNOWN


@dataclasses.dataclass
class SplitSummary:
    """What an import found in a split.

    Attributes:
      split: the split.
      vocabulary: whose tokens lengths are measured in, with EOS; None: words.
      rows: number of rows.
      longest: ``{feature: (length, where)}`` of the longest text.
      truncated: ``{feature: number of rows}`` that are longer than `ROW_LENGTHS`; without a vocabulary at
        least so many, since a word has a token or more.
      undecodable: number of lines with bytes that are not UTF-8.
      repeated: number of rows that an earlier row of the split equals.
      shared: ``{other split: number of rows that are also in it}``, of the splits before.
      targets: how often each label occurs; empty for free text.
      digests: of all rows.
    """

    split: str
    vocabulary: Vocabulary | None = None
    rows: int = 0
    longest: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)
    truncated: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    undecodable: int = 0
    repeated: int = 0
    shared: dict[str, int] = dataclasses.field(default_factory=dict)
    targets: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    digests: set[bytes] = dataclasses.field(default_factory=set)

    def add(self, texts: tuple[str, str], where: str, *, count_target: bool) -> None:
        """Counts a row."""
        self.rows += 1
        for name, text in zip(SIDES, texts, strict=True):
            length = self._length(text)
            self.truncated[name] += length > ROW_LENGTHS[name]
            if length > self.longest.get(name, (-1, ""))[0]:
                self.longest[name] = length, where
        digest = hashlib.blake2b("\0".join(texts).encode(), digest_size=16).digest()
        self.repeated += digest in self.digests
        self.digests.add(digest)
        if count_target:
            self.targets[texts[1]] += 1

    def _length(self, text: str) -> int:
        return (
            len(text.split()) if self.vocabulary is None else len(self.vocabulary.encode(text)) + 1
        )

    def lines(self) -> Iterator[str]:
        """Yields the summary as text."""
        yield f"{self.split}: {_count(self.rows, 'row')}"
        unit = "word" if self.vocabulary is None else "token"
        for name, (length, where) in self.longest.items():
            if length:
                yield f"  longest {name}: {_count(length, unit)} ({where})"
            # Of texts alone, objectives make segments.
            if self.longest["inputs"][0] and (count := self.truncated[name]):
                least = "at least " if self.vocabulary is None else ""
                yield (
                    f"  {name} truncated to rows of {ROW_LENGTHS[name]} tokens: {least}{count:,} "
                    f"({count / self.rows:.1%})"
                )
        if self.targets:
            counts = (f"{word} {n:,}" for word, n in self.targets.most_common())
            yield f"  targets: {', '.join(counts)}"
        if self.repeated:
            yield f"  repeats of earlier rows: {self.repeated:,}"
        for other, n in self.shared.items():
            yield f"  also in {other}: {_count(n, 'row')}"
        if self.undecodable:
            lines = _count(self.undecodable, "line")
            yield f"  not UTF-8, with bytes replaced by U+FFFD: {lines}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def import_files(
    task: FileTask,
    splits: Mapping[str, Rows],
    data_dir: pathlib.Path,
    *,
    vocabulary: Vocabulary | None = None,
    renew: bool = False,
) -> list[SplitSummary]:
    """Writes a task's data set, all of it or nothing, and its definition.

    Args:
      task: the task.
      splits: the rows of its splits.
      data_dir: a TFDS data directory; created if it does not exist.
      vocabulary: whose tokens the summaries count; None: words.
      renew: whether an imported task of the same name is replaced; otherwise the splits are added to it.

    Raises:
      ValueError: a row is broken, a split is empty or there already, or the name is that of a task of
        the package.
    """
    import tensorflow_datasets as tfds

    known = task_registry.TASKS.get(task.name)
    if known is not None and not known.dataset.startswith(f"{FOLDER}/"):
        raise ValueError(
            f"the name {task.name!r} is that of a task of this package; choose another"
        )
    found = [SplitSummary(split, vocabulary) for split in splits]
    with temporary_folder(data_dir) as folder:
        directory = write_dataset(
            FOLDER,
            task.name,
            version=VERSION,
            description=f"{task.name}, imported files",
            features={
                "inputs": tfds.features.Text(),
                "targets": tfds.features.Text(),
                "idx": np.int64,
            },
            splits={s.split: _reader(task, splits[s.split], s) for s in found},
            data_dir=folder,
        )
        write_atomic(directory / DEFINITION, json.dumps(_to_json(task), indent=1) + "\n")
        install([directory], folder, data_dir, renew=renew)
    for i, summary in enumerate(found):
        for other in found[:i]:
            if n := len(summary.digests & other.digests):
                summary.shared[other.split] = n
    task_registry.add([_read_definition(data_dir / FOLDER / task.name / VERSION / DEFINITION)])
    return found


def _reader(
    task: FileTask, rows: Rows, summary: SplitSummary
) -> Callable[[], Iterator[Mapping[str, object]]]:
    """Returns a function that reads a split, formats its rows and counts them."""

    def read() -> Iterator[Mapping[str, object]]:
        for index, (where, row) in enumerate(rows):
            try:
                texts = task.texts(row)
            except ValueError as error:
                raise ValueError(f"{where}: {error}; nothing was imported") from None
            summary.add(texts, where, count_target=bool(task.labels))
            yield {"inputs": texts[0], "targets": texts[1], "idx": index}
        if not summary.rows:
            files = ", ".join(map(str, rows.files))
            raise ValueError(
                f"{files}: the split {summary.split!r} has no rows; nothing was imported"
            )
        summary.undecodable = rows.undecodable

    return read


def _make_definition(
    name: str,
    metric_names: Sequence[str],
    words: Sequence[str],
    *,
    splits: Sequence[str],
    has_inputs: bool,
) -> Task:
    """Returns the definition of an imported task."""
    numeric = _is_numeric(metric_names)
    return Task(
        name,
        f"{FOLDER}/{name}",
        Written(tuple(words), numeric=numeric, has_inputs=has_inputs),
        metrics=tuple(METRICS[metric][0] for metric in metric_names),
        splits=tuple(splits),
    )


def _is_numeric(metric_names: Sequence[str]) -> bool:
    """Returns whether metrics compare numbers."""
    return any(METRICS[name][1] == "numbers" for name in metric_names)


def _to_json(task: FileTask) -> dict[str, JSON]:
    """Returns what `_read_definition` reads."""
    return {
        "name": task.name,
        "metrics": list(task.metrics),
        "words": list(dict.fromkeys(task.labels.values())),
        "has_inputs": task.inputs is not None,
    }


def add_imported(data_dir: pathlib.Path) -> list[str]:
    """Makes the imported tasks of a data directory known, and returns their names.

    Raises:
      ValueError: a definition is damaged.
    """
    paths = sorted((data_dir / FOLDER).glob(f"*/{VERSION}/{DEFINITION}"))
    definitions = [_read_definition(path) for path in paths]
    task_registry.add(definitions)
    return [definition.name for definition in definitions]


def _read_definition(path: pathlib.Path) -> Task:
    """Reads the definition of an imported task.

    Raises:
      ValueError: it is damaged.
    """
    name = path.parent.parent.name
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        words = data["words"]
        if data["name"] != name or not all(isinstance(word, str) for word in words):
            raise ValueError(f"it describes {data['name']!r}")
        return _make_definition(
            name,
            data["metrics"],
            words,
            splits=list(stored_splits(path.parent)),
            has_inputs=bool(data["has_inputs"]),
        )
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged ({error}); import the task again, or delete its directory"
        ) from None
