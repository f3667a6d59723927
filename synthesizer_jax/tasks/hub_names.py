"""The names of data sets, languages and metrics on the Hugging Face hub.

Model cards use these names, because the hub links and compares models by them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import NamedTuple

from synthesizer_jax.tasks.task import Task

# The hub's names for the kinds of tasks.
TEXT_CLASSIFICATION = "text-classification"
QUESTION_ANSWERING = "question-answering"
SUMMARIZATION = "summarization"
TRANSLATION = "translation"
TEXT_GENERATION = "text-generation"


class HubData(NamedTuple):
    """A data set on the hub.

    Attributes:
      name: the name of the data set, ``OWNER/NAME``.
      config: the name of the configuration. `None` means that the hub's data set has only one
        configuration, or that its configurations have other names than in TFDS.
    """

    name: str
    config: str | None = None


_WITH_CONFIGS: Mapping[str, str] = {
    "glue": "nyu-mll/glue",
    "super_glue": "aps/super_glue",
    "wikitext": "Salesforce/wikitext",
    "wmt14_translate": "wmt/wmt14",
    "wmt15_translate": "wmt/wmt15",
    "wmt16_translate": "wmt/wmt16",
    "wmt19_translate": "wmt/wmt19",
    "wmt_t2t_translate": "wmt/wmt_t2t",
}
"""Maps the TFDS data sets whose configurations have the same names on the hub to hub names."""

_WITHOUT_CONFIGS: Mapping[str, str] = {
    "ag_news_subset": "fancyzhx/ag_news",
    "c4": "allenai/c4",
    "cnn_dailymail": "abisee/cnn_dailymail",
    "definite_pronoun_resolution": "community-datasets/definite_pronoun_resolution",
    "imdb_reviews": "stanfordnlp/imdb",
    "iwslt2017": "IWSLT/iwslt2017",
    "lm1b": "billion-word-benchmark/lm1b",
    "squad": "rajpurkar/squad",
}
"""Maps all other TFDS data sets that the hub has to their names on the hub."""

_ENGLISH = {*_WITH_CONFIGS, *_WITHOUT_CONFIGS, "convai2", "wikipedia"}
"""The TFDS data sets whose texts are English, unless they are for translation."""

_PAIR = re.compile(r"(?:wmt\w+_translate|iwslt\d+|multi30k)/([a-z]{2})[-_]([a-z]{2})")
"""Matches the TFDS data sets for translation, such as ``wmt14_translate/de-en``."""

_KINDS: Mapping[str, str] = {
    "cnn_dailymail": SUMMARIZATION,
    "squad/v1.1": QUESTION_ANSWERING,
    "super_glue/record": QUESTION_ANSWERING,
}
"""Maps TFDS data sets to the kinds of their tasks, if a task's fields do not show the kind."""


def data_of(task: Task) -> HubData | None:
    """Returns the hub's data set with the rows of a task, or `None` if it is not known."""
    dataset, _, config = task.dataset.partition("/")
    if dataset in _WITH_CONFIGS:
        return HubData(_WITH_CONFIGS[dataset], config or None)
    if dataset in _WITHOUT_CONFIGS:
        return HubData(_WITHOUT_CONFIGS[dataset])
    return None


def languages_of(task: Task) -> tuple[str, ...]:
    """Returns the codes of the languages of a task's texts, or `()` if they are not known."""
    if pair := _PAIR.fullmatch(task.dataset):
        return pair.groups()
    return ("en",) if task.dataset.partition("/")[0] in _ENGLISH else ()


def kind_of_task(task: Task) -> str:
    """Returns the hub's name for the kind of a task, such as ``text-classification``."""
    if task.dataset in _KINDS:
        return _KINDS[task.dataset]
    if _PAIR.fullmatch(task.dataset):
        return TRANSLATION
    return TEXT_CLASSIFICATION if task.label_words else TEXT_GENERATION


class HubMetric(NamedTuple):
    """A metric on the hub.

    Attributes:
      name: the name of the metric.
      scale: the number by which a score of this package is multiplied. Many of the hub's metrics
        are between 0 and 1, but the metrics of T5's tasks are in percent.
    """

    name: str
    scale: float


METRICS: Mapping[str, HubMetric] = {
    "accuracy": HubMetric("accuracy", 0.01),
    "bleu": HubMetric("sacrebleu", 1.0),
    "bleu_13a": HubMetric("sacrebleu", 1.0),
    "chrf": HubMetric("chrf", 1.0),
    "em": HubMetric("exact_match", 0.01),
    "exact_match": HubMetric("exact_match", 0.01),
    "f1": HubMetric("f1", 0.01),
    "matthews_corrcoef": HubMetric("matthews_correlation", 0.01),
    "mean_3class_f1": HubMetric("f1", 0.01),
    "pearson_corrcoef": HubMetric("pearsonr", 0.01),
    "perplexity": HubMetric("perplexity", 1.0),
    "rouge1": HubMetric("rouge", 0.01),
    "rouge2": HubMetric("rouge", 0.01),
    "rougeL": HubMetric("rouge", 0.01),
    "rougeLsum": HubMetric("rouge", 0.01),
    "spearman_corrcoef": HubMetric("spearmanr", 0.01),
}
"""Maps the names of this package's scores to the metrics of the hub."""


def input_form(task: Task) -> str | None:
    """Returns the form of a task's inputs, such as ``cola sentence: …``.

    The ellipsis stands for a text. The result is `None` if the form is not known.
    """
    preprocess = task.preprocess
    if not isinstance(preprocess, functools.partial) or "prefix" not in preprocess.keywords:
        return None
    prefix, features = preprocess.keywords["prefix"], tuple(preprocess.keywords["features"])
    if prefix.endswith(":"):
        # The preprocessor `text_to_text` puts only its prefix before a text.
        return f"{prefix} …"
    return " ".join([prefix, *(f"{name}: …" for name in features)])
