"""Imports users' files as tasks. The module `tasks.task_registry` describes the written files."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from etils import epy

from synthesizer_jax.base.files import write_atomic
from synthesizer_jax.base.messages import Phase, did_you_mean, end_sentence, silent_phase
from synthesizer_jax.base.registry import JSON
from synthesizer_jax.preparation.importers.corpora import SplitReport
from synthesizer_jax.preparation.importers.files import SplitFiles
from synthesizer_jax.preparation.importers.reading import (
    Cursor,
    Row,
    find_field,
    is_blank,
    value_text,
)
from synthesizer_jax.preparation.writing import staging, write_dataset
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.postprocessors import UNKNOWN, parse_number
from synthesizer_jax.tasks.task_registry import DEFINITION_FILE, IMPORTED, IMPORTED_VERSION, METRICS

with epy.lazy_imports():
    import tensorflow_datasets as tfds


class Template:
    """A template for a text, with the names of fields in braces, such as ``review: {text}``.

    A name with a dot, such as ``meta.title``, refers to a field (``title``) of a JSON object that
    is the value of another field (``meta``).

    Args:
      text: the text with the names.

    Raises:
      ValueError: if there is a brace outside of a field.
    """

    def __init__(self, text: str):
        self.text = text
        # The pattern has a group, so `split` also returns the names of fields that it matches. The
        # names of fields are the parts with odd indices.
        self._parts = re.split(r"\{([^{}]+)\}", text)
        brace = re.search("[{}]", "".join(self._parts[::2]))
        if brace:
            raise ValueError(
                f"The template {text!r} has {brace[0]!r} outside of a field. Write a field as "
                "{NAME}."
            )

    @property
    def fields(self) -> list[str]:
        """The names of the fields, in the order in which the template contains them."""
        return self._parts[1::2]

    def __call__(self, row: Row) -> str:
        """Returns the text for a row.

        The text is empty if all fields that the template names are blank.

        Raises:
          ValueError: if the row lacks a field, or if the value of a field is neither a string nor a
            number.
        """
        values = [_field_text(row, field) for field in self.fields]
        if values and all(map(is_blank, values)):
            return ""
        # The parts with even indices are the texts around the values, so there is one more text
        # than there are values.
        pairs = itertools.zip_longest(self._parts[::2], values, fillvalue="")
        return "".join(itertools.chain.from_iterable(pairs))


def _field_text(row: Row, field: str) -> str:
    """Returns the value of a row's field as text.

    Raises:
      ValueError: see `Template`.
    """
    value: JSON = row
    names = [field] if field in row else field.split(".")
    for count, name in enumerate(names):
        if count and not isinstance(value, dict):
            outer = ".".join(names[:count])
            kind = "a list" if isinstance(value, list) else "not an object"
            raise ValueError(
                f"There is no field {field!r}, because {outer!r} is {kind}. A dot in a name leads "
                "to a field of a JSON object. Write the part that you need into its own field."
            )
        value = find_field(value if isinstance(value, dict) else {}, name, field=field)
    return value_text(value, field)


@dataclasses.dataclass(frozen=True)
class FileTask:
    """A task that is made from users' files.

    Attributes:
      name: the name of the task. The name consists of lower-case letters, digits and ``_``.
      inputs: a function that makes the input of a row. `None` means that the task has only targets.
      targets: a function that makes the target of a row. `None` means that all targets are hidden.
      metrics: names of metrics in `METRICS`.
      labels: a dictionary ``{value: word}`` of the allowed targets, in the order of the labels'
        indices. A target that equals a value is replaced by its word. Any other target must equal a
        word. If a row has an input and a blank target, the target is hidden. Only splits whose
        names begin with ``test`` may have hidden targets. If `labels` is empty, targets are free
        text.
    """

    name: str
    inputs: Callable[[Row], str] | None
    targets: Callable[[Row], str] | None
    metrics: tuple[str, ...] = ("accuracy",)
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not re.fullmatch("[a-z][a-z0-9_]*", self.name):
            raise ValueError(
                f"The name {self.name!r} is not allowed. Use only a-z, 0-9 and _, and begin with "
                "a letter."
            )
        if isinstance(self.targets, Template) and self.targets.text and not self.targets.fields:
            text = self.targets.text
            raise ValueError(
                f"The target {text!r} is the same for every row. Write {{{text}}} to use a field."
            )
        for value, word in self.labels.items():
            if is_blank(word):
                raise ValueError(f"The label of {value!r} is blank. Give every label a word.")
        self._check_metrics()

    def _check_metrics(self) -> None:
        """Raises a `ValueError` if a metric is unknown or does not fit the answers of the task."""
        for name in self.metrics:
            if name not in METRICS:
                hint = did_you_mean(name, METRICS) or "."
                raise ValueError(
                    f"There is no metric {name!r}{hint} Choose one of {', '.join(METRICS)}."
                )
        words = len(set(self.labels.values()))
        answers = "numbers" if self.is_numeric else "labels" if words else "texts"
        for name in self.metrics:
            compared = METRICS[name][1]
            is_binary = compared == "two labels" and answers == "labels" and words == 2
            if compared not in ("anything", answers) and not is_binary:
                raise ValueError(
                    f"The metric {name!r} compares {compared}, but the answers of this task are "
                    f"{answers} (number of labels: {words}, metrics: {', '.join(self.metrics)}). "
                    "Leave the metric out."
                )

    @property
    def is_numeric(self) -> bool:
        """Whether the metrics of the task compare numbers."""
        return any(METRICS[name][1] == "numbers" for name in self.metrics)

    def texts(self, row: Row) -> tuple[str, str]:
        """Returns the input and target of a row. The input is empty if the task has no inputs.

        Raises:
          ValueError: if a field is missing, or if the target is not allowed.
        """
        try:
            target = "" if self.targets is None else self.targets(row)
        except ValueError as error:
            remedy = ""
            if self.inputs:
                remedy = " Import rows without a target with another command that has --target ''."
            raise ValueError(f"{end_sentence(str(error))}{remedy}") from error
        target = self.labels.get(target, target)
        if is_blank(target):
            target = ""
        # If the task has inputs, the target may be hidden, and a hidden target is not checked.
        if self.inputs is None or target not in ("", UNKNOWN):
            self._check_target(target)
        if self.inputs is None:
            return "", target
        return self.inputs(row), target or UNKNOWN

    def _check_target(self, target: str) -> None:
        """Raises a `ValueError` if the task does not allow a target."""
        if self.labels and target not in self.labels.values():
            raise ValueError(
                f"The target {target!r} is none of the labels {', '.join(self.labels)}."
            )
        if self.is_numeric and math.isnan(parse_number(target, otherwise=math.nan)):
            raise ValueError(
                f"The target {target[:60]!r} is not a number, but the metric {self.metrics[0]} "
                "compares numbers."
            )


def import_files(
    task: FileTask,
    splits: Mapping[str, SplitFiles],
    data_dir: pathlib.Path,
    *,
    renew: bool = False,
    phase: Phase = silent_phase,
) -> list[SplitReport]:
    """Writes the data set and the definition of a task. If there is an error, nothing is written.

    Args:
      task: the task.
      splits: the files of each split.
      data_dir: a TFDS data directory.
      renew: whether to replace an imported task of the same name. If `renew` is `False`, the splits
        are added to the existing task.
      phase: a function that reports progress.

    Returns:
      A report for every split.

    Raises:
      ValueError: if a row is invalid, if a split is empty or exists already, or if a task of this
        package has the same name.
    """
    same_name = task_registry.TASKS.get(task.name)
    if same_name is not None and not same_name.dataset.startswith(f"{IMPORTED}/"):
        raise ValueError(
            f"The name {task.name!r} belongs to a task of this package. Choose another name."
        )
    dataset = f"{IMPORTED}/{task.name}"
    reports = [SplitReport(dataset, split, files.files) for split, files in splits.items()]
    cursor = Cursor()

    def rows(report: SplitReport) -> Iterator[Row]:
        convert = functools.partial(_format_row, task, report)
        return report.convert(splits[report.split].rows(), cursor, convert, phase=phase)

    with staging(data_dir, renew=renew) as folder:
        text = tfds.features.Text()
        with cursor.named():
            directory = write_dataset(
                dataset,
                IMPORTED_VERSION,
                {"inputs": text, "targets": text, "idx": np.int64},
                {report.split: functools.partial(rows, report) for report in reports},
                folder,
            )
        definition = {
            "name": task.name,
            "metrics": list(task.metrics),
            "words": list(dict.fromkeys(task.labels.values())),
            "has_inputs": task.inputs is not None,
            # Store the template of the inputs. If splits are added later, `staging` compares the
            # definitions, so that the inputs of all splits have the same form.
            "inputs": getattr(task.inputs, "text", None),
        }
        write_atomic(directory / DEFINITION_FILE, json.dumps(definition, indent=1) + "\n")
    task_registry.add(
        [task_registry.read_definition(data_dir / dataset / IMPORTED_VERSION / DEFINITION_FILE)]
    )
    return reports


def _format_row(task: FileTask, report: SplitReport, row: Row) -> Row:
    """Returns the input and the target of a row of the task, and counts its label.

    Raises:
      ValueError: if the target is missing in a split that must have targets.
    """
    inputs, target = task.texts(row)
    if task.inputs is None and not target:
        raise ValueError("The target is blank, and the task has no inputs. Remove the row.")
    may_hide = None in (task.inputs, task.targets) or report.split.startswith("test")
    if target == UNKNOWN and not may_hide:
        raise ValueError(
            "The target is blank or '<unk>', which means that the answer is not known. Add the "
            "answer, or import such rows with --from test=FILE."
        )
    if task.labels:
        report.targets[target] += 1
    report.blank_inputs += task.inputs is not None and is_blank(inputs)
    return {"inputs": inputs, "targets": target, "idx": report.rows}
