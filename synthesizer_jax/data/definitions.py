"""T5's GLUE and SuperGLUE tasks as one visible table (Raffel et al. 2020; T5's names and versions)."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from synthesizer_jax.data import metrics, postprocessors

TRAINED = ("train", "validation", "test")
HELD_OUT = ("validation", "test")


@dataclasses.dataclass(frozen=True)
class TaskDefinition:
    """A task, described without loading anything.

    Attributes:
      name: T5's name.
      dataset: TFDS data set and configuration, such as ``glue/cola``.
      prefix: first word of the input.
      features: the row's features in the order of the input.
      labels: label words in the order of the integers; empty where answers are free text.
      kind: which format: ``classification``, ``similarity``, ``multirc``, ``record``, ``wsc``,
        ``wsc_train``, ``dpr``, ``wnli`` or ``translation``.
      metrics: metric functions.
      splits: splits of the data set that the task exposes.
      rename: pairs (old, new) of features to rename first.
      sentinel: T5's sentinel form.
    """

    name: str
    dataset: str
    prefix: str = ""
    features: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    kind: str = "classification"
    metrics: tuple[metrics.Metric, ...] = (metrics.accuracy,)
    splits: tuple[str, ...] = TRAINED
    rename: tuple[tuple[str, str], ...] = ()
    sentinel: bool = False

    @property
    def preprocess(self) -> Callable[..., Any]:
        """Rows of the data set to ``inputs`` and ``targets`` strings (loads TensorFlow)."""
        from synthesizer_jax.data import coreference, preprocessors

        options: Any = {"prefix": self.prefix, "features": self.features}
        formats: dict[str, Callable[..., Any]] = {
            "classification": functools.partial(
                preprocessors.classification, labels=self.labels, **options
            ),
            "similarity": functools.partial(preprocessors.similarity, **options),
            "multirc": functools.partial(preprocessors.multirc, labels=self.labels),
            "record": preprocessors.record,
            "wsc": functools.partial(coreference.wsc, positive_only=False),
            "wsc_train": functools.partial(coreference.wsc, positive_only=True),
            "dpr": coreference.dpr,
            "translation": functools.partial(preprocessors.translation, **options),
            "wnli": coreference.wnli,
        }
        return formats[self.kind]

    def postprocess(self, answer: str, *, example: Any = None, is_target: bool = False) -> Any:
        """A decoded string, or a target's, to what the metrics compare.

        Args:
          answer: the string.
          example: the preprocessed row it belongs to.
          is_target: whether it is the target.
        """
        if self.sentinel:
            answer = postprocessors.without_sentinel(answer)
        if self.kind == "similarity":
            return postprocessors.number(answer)
        if self.kind == "multirc":
            if is_target:
                return postprocessors.multirc_target(answer, example, self.labels)
            return postprocessors.label_index(answer, self.labels)
        if self.kind == "record":
            return postprocessors.record_target(example) if is_target else answer
        if self.kind in ("wsc", "wsc_train", "wnli"):
            if is_target:
                return int(example["label"])
            referent = postprocessors.text(example["targets_pretokenized"])
            return postprocessors.names_referent(answer, referent)
        return postprocessors.label_index(answer, self.labels) if self.labels else answer

    def is_right(self, answer: str, example: Mapping[str, Any]) -> bool:
        """Whether an answer is right for one row, by the rule of the task's metric.

        Label words are compared as they are, and so is free text. STS-B: the answer rounds to the
        same fifth as the label. WSC and WNLI as coreference: it names the candidate exactly when
        the label says that the pronoun means it. ReCoRD: SQuAD's exact match with one of the
        answers. MultiRC: this row's own label, not the whole question's.

        Args:
          answer: a decoded string.
          example: the preprocessed row, with its ``targets_pretokenized``.

        Raises:
          ValueError: the row's label is hidden (`postprocessors.is_labelled`).
        """
        if not postprocessors.is_labelled(example):
            raise ValueError(f"{self.name}: no answer is right or wrong for a row without a label")
        target = postprocessors.text(example["targets_pretokenized"])
        wanted = self.postprocess(target, example=example, is_target=True)
        found = self.postprocess(answer, example=example)
        if self.kind == "similarity":
            return bool(np.rint(5 * wanted) == np.rint(5 * found))
        if self.kind == "multirc":
            return wanted["value"] == found
        if self.kind == "record":
            return any(metrics.exact(one, found) for one in wanted["answers"])
        return wanted == found


MNLI = ("entailment", "neutral", "contradiction")
RTE = ("entailment", "not_entailment")
BOOLEAN = ("False", "True")
SENTENCES = ("sentence1", "sentence2")
PAIR = ("hypothesis", "premise")


def _glue(config: str, features: tuple[str, ...], labels: tuple[str, ...], **rest: Any) -> Any:
    options = {"prefix": config, "features": features, "labels": labels, **rest}
    return TaskDefinition(f"glue_{config}_v002", f"glue/{config}", **options)


def _super(config: str, features: tuple[str, ...], labels: tuple[str, ...], **rest: Any) -> Any:
    options = {"prefix": config, "features": features, "labels": labels, **rest}
    return TaskDefinition(f"super_glue_{config}_v102", f"super_glue/{config}", **options)


_F1 = (metrics.f1_with_invalid, metrics.accuracy)
MNLI_SPLITS = (
    "train",
    "validation_matched",
    "validation_mismatched",
    "test_matched",
    "test_mismatched",
)

GLUE = (
    _glue("cola", ("sentence",), ("unacceptable", "acceptable"), metrics=(metrics.matthews,)),
    _glue("sst2", ("sentence",), ("negative", "positive")),
    _glue("mrpc", SENTENCES, ("not_equivalent", "equivalent"), metrics=_F1),
    _glue("qqp", ("question1", "question2"), ("not_duplicate", "duplicate"), metrics=_F1),
    _glue("stsb", SENTENCES, (), kind="similarity", metrics=(metrics.pearson, metrics.spearman)),
    _glue("mnli", PAIR, MNLI, splits=MNLI_SPLITS),
    _glue("mnli_matched", PAIR, MNLI, prefix="mnli", splits=HELD_OUT),
    _glue("mnli_mismatched", PAIR, MNLI, prefix="mnli", splits=HELD_OUT),
    _glue("qnli", ("question", "sentence"), RTE),
    _glue("rte", SENTENCES, RTE),
    _glue("wnli", SENTENCES, ("not_entailment", "entailment")),
    _glue("ax", PAIR, MNLI, prefix="mnli", splits=("test",), metrics=()),
    TaskDefinition("glue_wnli_v002_simple_eval", "glue/wnli", kind="wnli", splits=HELD_OUT),
)
"""Section by section as in T5's registry; labels in index order."""

SUPER_GLUE = (
    _super("boolq", ("passage", "question"), BOOLEAN),
    _super(
        "cb",
        PAIR,
        ("entailment", "contradiction", "neutral"),
        metrics=(metrics.mean_3class_f1, metrics.accuracy),
    ),
    _super("copa", ("choice1", "choice2", "premise", "question"), ("choice1", "choice2")),
    _super(
        "multirc",
        ("question", "answer", "paragraph"),
        BOOLEAN,
        kind="multirc",
        metrics=(metrics.multirc_f1, metrics.multirc_exact_match),
    ),
    _super("record", (), (), kind="record", metrics=(metrics.record_squad,)),
    _super("rte", PAIR, RTE),
    _super("wic", ("sentence1", "sentence2", "word"), BOOLEAN),
    _super(
        "axb",
        PAIR,
        RTE,
        prefix="rte",
        rename=(("sentence1", "premise"), ("sentence2", "hypothesis")),
        splits=("test",),
        metrics=(),
    ),
    _super("axg", PAIR, RTE, prefix="rte", splits=("test",), metrics=()),
    TaskDefinition(
        "super_glue_wsc_v102_simple_train",
        "super_glue/wsc.fixed",
        kind="wsc_train",
        splits=("train",),
        metrics=(),
    ),
    TaskDefinition(
        "super_glue_wsc_v102_simple_eval",
        "super_glue/wsc.fixed",
        kind="wsc",
        splits=HELD_OUT,
    ),
    TaskDefinition(
        "dpr_v001_simple",
        "definite_pronoun_resolution",
        kind="dpr",
        splits=("train", "test"),
    ),
)


def sentinel_name(name: str) -> str:
    """T5's name of a task's sentinel form: ``_1_sentinel`` before the first of these endings."""
    marks = [name.find(m) for m in ("_train", "_dev", "_test", "_eval", ".") if m in name]
    at = min(marks, default=len(name))
    return f"{name[:at]}_1_sentinel{name[at:]}"


SENTINEL = tuple(
    dataclasses.replace(d, name=sentinel_name(d.name), sentinel=True) for d in SUPER_GLUE
)

EXTRA_METRICS: Mapping[str, tuple[metrics.Metric, ...]] = types.MappingProxyType(
    {
        "super_glue_axb_v102": (metrics.matthews,),
        "super_glue_axg_v102": (metrics.accuracy, metrics.gender_parity),
    }
)
"""Metrics that T5 does not compute: AX-b and AX-g carry labels. They enter no average."""
