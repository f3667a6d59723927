"""Tasks that are made of users' files: TFDS data sets with their definitions beside them.

``DATA_DIR/imported/NAME/1.0.0`` has the strings ``inputs`` and ``targets``; its ``task.json`` says which
metrics and label words the task has, which is known by its name wherever the directory is used.
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Mapping

from synthesizer_jax.base.files import describing
from synthesizer_jax.tasks import metrics, postprocessors, preprocessors, task_registry
from synthesizer_jax.tasks.stored import stored_splits
from synthesizer_jax.tasks.task import Task

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


def add_imported(data_dir: pathlib.Path) -> list[str]:
    """Makes the imported tasks of a data directory known, and returns their names.

    Raises:
      ValueError: a definition is damaged.
    """
    paths = sorted((data_dir / FOLDER).glob(f"*/{VERSION}/{DEFINITION}"))
    definitions = [read_definition(path) for path in paths]
    task_registry.add(definitions)
    return [definition.name for definition in definitions]


def read_definition(path: pathlib.Path) -> Task:
    """Reads the definition of an imported task.

    Raises:
      ValueError: it is damaged.
    """
    name = path.parent.parent.name
    with describing(path, "import the task again, or delete its directory"):
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["name"] != name:
            raise ValueError(f"it describes {data['name']!r}")
        is_numeric = any(METRICS[metric][1] == "numbers" for metric in data["metrics"])
        has_inputs = bool(data["has_inputs"])
        texts = functools.partial(preprocessors.language_modeling, feature="targets")
        return Task(
            name,
            f"{FOLDER}/{name}",
            None if has_inputs else texts,
            metrics=tuple(METRICS[metric][0] for metric in data["metrics"]),
            splits=tuple(stored_splits(path.parent)),
            label_words=tuple(data["words"]) or None,
            postprocess_fn=postprocessors.number if is_numeric else None,
            has_inputs=has_inputs,
        )
