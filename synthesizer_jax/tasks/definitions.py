"""T5's GLUE and SuperGLUE tasks as one table, with T5's names and versions (Raffel et al. 2020)."""

from __future__ import annotations

import dataclasses
from typing import TypedDict, Unpack

from synthesizer_jax.tasks import metrics
from synthesizer_jax.tasks.formats import (
    WNLI,
    WSC,
    Classification,
    MultiRC,
    PronounResolution,
    ReCoRD,
    Similarity,
)
from synthesizer_jax.tasks.task import Task

HELD_OUT = ("validation", "test")

MNLI = ("entailment", "neutral", "contradiction")
RTE = ("entailment", "not_entailment")
BOOLEAN = ("False", "True")
SENTENCES = ("sentence1", "sentence2")
PAIR = ("hypothesis", "premise")


class _Options(TypedDict, total=False):
    metrics: tuple[metrics.Metric, ...]
    splits: tuple[str, ...]
    rename: tuple[tuple[str, str], ...]


def _glue(
    config: str,
    features: tuple[str, ...],
    labels: tuple[str, ...],
    *,
    prefix: str | None = None,
    **options: Unpack[_Options],
) -> Task:
    text_format = Classification(prefix or config, features, labels)
    return Task(f"glue_{config}_v002", f"glue/{config}", text_format, **options)


def _super(
    config: str,
    features: tuple[str, ...],
    labels: tuple[str, ...],
    *,
    prefix: str | None = None,
    **options: Unpack[_Options],
) -> Task:
    text_format = Classification(prefix or config, features, labels)
    name, dataset = f"super_glue_{config}_v102", f"super_glue/{config}"
    return Task(name, dataset, text_format, **options)


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
    Task(
        "glue_stsb_v002",
        "glue/stsb",
        Similarity("stsb", SENTENCES),
        metrics=(metrics.pearson, metrics.spearman),
    ),
    _glue("mnli", PAIR, MNLI, splits=MNLI_SPLITS),
    _glue("mnli_matched", PAIR, MNLI, prefix="mnli", splits=HELD_OUT),
    _glue("mnli_mismatched", PAIR, MNLI, prefix="mnli", splits=HELD_OUT),
    _glue("qnli", ("question", "sentence"), RTE),
    _glue("rte", SENTENCES, RTE),
    _glue("wnli", SENTENCES, ("not_entailment", "entailment")),
    _glue("ax", PAIR, MNLI, prefix="mnli", splits=("test",), metrics=()),
    Task("glue_wnli_v002_simple_eval", "glue/wnli", WNLI(), splits=HELD_OUT),
)
"""In the order of T5's registry; labels in index order."""

SUPER_GLUE = (
    _super("boolq", ("passage", "question"), BOOLEAN),
    _super(
        "cb",
        PAIR,
        ("entailment", "contradiction", "neutral"),
        metrics=(metrics.mean_3class_f1, metrics.accuracy),
    ),
    _super("copa", ("choice1", "choice2", "premise", "question"), ("choice1", "choice2")),
    Task(
        "super_glue_multirc_v102",
        "super_glue/multirc",
        MultiRC(BOOLEAN),
        metrics=(metrics.multirc_f1, metrics.multirc_exact_match),
    ),
    Task(
        "super_glue_record_v102",
        "super_glue/record",
        ReCoRD(),
        metrics=(metrics.record_squad,),
    ),
    _super("rte", PAIR, RTE),
    _super("wic", ("sentence1", "sentence2", "word"), BOOLEAN),
    _super(
        "axb",
        PAIR,
        RTE,
        prefix="rte",
        rename=(("sentence1", "premise"), ("sentence2", "hypothesis")),
        splits=("test",),
        metrics=(metrics.matthews,),  # T5 computes none of AX-b and AX-g, whose rows have labels
    ),
    _super(
        "axg",
        PAIR,
        RTE,
        prefix="rte",
        splits=("test",),
        metrics=(metrics.accuracy, metrics.gender_parity),
    ),
    Task(
        "super_glue_wsc_v102_simple_train",
        "super_glue/wsc.fixed",
        WSC(positive_only=True),
        splits=("train",),
        metrics=(),
    ),
    Task(
        "super_glue_wsc_v102_simple_eval",
        "super_glue/wsc.fixed",
        WSC(),
        splits=HELD_OUT,
    ),
    Task(
        "dpr_v001_simple",
        "definite_pronoun_resolution",
        PronounResolution(),
        splits=("train", "test"),
    ),
)


def sentinel_name(name: str) -> str:
    """Returns T5's name of a task's sentinel format.

    ``_1_sentinel`` is inserted before the first of ``_train``, ``_dev``, ``_test``, ``_eval`` and
    ``.``, or else appended.
    """
    positions = [name.find(m) for m in ("_train", "_dev", "_test", "_eval", ".") if m in name]
    position = min(positions, default=len(name))
    return f"{name[:position]}_1_sentinel{name[position:]}"


SENTINEL = tuple(
    dataclasses.replace(d, name=sentinel_name(d.name), sentinel=True) for d in SUPER_GLUE
)
