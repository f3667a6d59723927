"""Definitions of all tasks of T5, with T5's names and versions, and of tasks from other papers.

T5's tasks are described by Raffel et al. 2020.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from synthesizer_jax.data.objectives import OBJECTIVES
from synthesizer_jax.tasks import coreference, metrics, postprocessors, preprocessors
from synthesizer_jax.tasks.metrics import Metric
from synthesizer_jax.tasks.postprocessors import BOOLEAN
from synthesizer_jax.tasks.task import TRAINED, Preprocessor, Task

HELD_OUT = ("validation", "test")
UNLABELED = ("train", "validation")
_PARTS = ("validation_matched", "validation_mismatched", "test_matched", "test_mismatched")

MNLI = ("entailment", "neutral", "contradiction")
RTE = ("entailment", "not_entailment")
SENTENCES = ("sentence1", "sentence2")
PAIR = ("hypothesis", "premise")
_F1 = (metrics.f1_with_invalid, metrics.accuracy)


def classification(
    name: str,
    dataset: str,
    features: tuple[str, ...] | Mapping[str, str],
    labels: tuple[str, ...],
    *,
    prefix: str | None = None,
    **options: Any,
) -> Task:
    """Returns a task whose answers are label words.

    Args:
      name: the name of the task.
      dataset: the TFDS data set.
      features: the features of the input (see `preprocessors.classification`).
      labels: the label words, in the order of the integer labels.
      prefix: the first word of the input. The default is the last part of the name of the data set.
      **options: other fields of `Task`.
    """
    prefix = prefix or dataset.rpartition("/")[2]
    preprocess = functools.partial(
        preprocessors.classification, prefix=prefix, features=features, labels=labels
    )
    return Task(name, dataset, preprocess, label_words=labels, **options)


def _glue(config: str, *arguments: Any, **options: Any) -> Task:
    """Returns a GLUE task, with T5's name and version."""
    return classification(f"glue_{config}_v002", f"glue/{config}", *arguments, **options)


def _super(config: str, *arguments: Any, **options: Any) -> Task:
    """Returns a SuperGLUE task, with T5's name and version."""
    name, dataset = f"super_glue_{config}_v102", f"super_glue/{config}"
    return classification(name, dataset, *arguments, **options)


GLUE = (
    _glue("cola", ("sentence",), ("unacceptable", "acceptable"), metrics=(metrics.matthews,)),
    _glue("sst2", ("sentence",), ("negative", "positive")),
    _glue("mrpc", SENTENCES, ("not_equivalent", "equivalent"), metrics=_F1),
    _glue("qqp", ("question1", "question2"), ("not_duplicate", "duplicate"), metrics=_F1),
    Task(
        "glue_stsb_v002",
        "glue/stsb",
        functools.partial(preprocessors.similarity, prefix="stsb", features=SENTENCES),
        metrics=(metrics.pearson, metrics.spearman),
        label_words=tuple(f"{i / 5:.1f}" for i in range(26)),
        postprocess_fn=postprocessors.number,
    ),
    _glue("mnli", PAIR, MNLI, splits=("train", *_PARTS)),
    _glue("mnli_matched", PAIR, MNLI, prefix="mnli", splits=HELD_OUT),
    _glue("mnli_mismatched", PAIR, MNLI, prefix="mnli", splits=HELD_OUT),
    _glue("qnli", ("question", "sentence"), RTE),
    _glue("rte", SENTENCES, RTE),
    _glue("wnli", SENTENCES, ("not_entailment", "entailment")),
    _glue("ax", PAIR, MNLI, prefix="mnli", splits=("test",), metrics=()),
    Task(
        "glue_wnli_v002_simple_eval",
        "glue/wnli",
        coreference.wnli,
        splits=HELD_OUT,
        postprocess_fn=postprocessors.referent,
    ),
)
"""The tasks of GLUE in the order of T5's registry."""


def _wsc(split: str, splits: tuple[str, ...], **options: Any) -> Task:
    """Returns the task that trains on WSC, or the task that evaluates WSC on the other splits."""
    name, dataset = f"super_glue_wsc_v102_simple_{split}", "super_glue/wsc.fixed"
    preprocess = functools.partial(coreference.wsc, positive_only=split == "train")
    return Task(
        name, dataset, preprocess, splits=splits, postprocess_fn=postprocessors.referent, **options
    )


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
        functools.partial(preprocessors.multirc, labels=BOOLEAN),
        metrics=(metrics.multirc_f1, metrics.multirc_exact_match),
        label_words=BOOLEAN,
        postprocess_fn=postprocessors.multirc,
    ),
    Task(
        "super_glue_record_v102",
        "super_glue/record",
        preprocessors.record,
        metrics=(metrics.record_squad,),
        postprocess_fn=postprocessors.record,
    ),
    _super("rte", PAIR, RTE),
    _super("wic", ("sentence1", "sentence2", "word"), BOOLEAN),
    _super(
        "axb",
        {"hypothesis": "sentence2", "premise": "sentence1"},
        RTE,
        prefix="rte",
        splits=("test",),
        # T5 computes no metrics for AX-b and AX-g, although their rows have labels.
        metrics=(metrics.matthews,),
    ),
    _super(
        "axg",
        PAIR,
        RTE,
        prefix="rte",
        splits=("test",),
        metrics=(metrics.accuracy, metrics.gender_parity),
    ),
    _wsc("train", ("train",), metrics=()),
    _wsc("eval", HELD_OUT),
    Task(
        "dpr_v001_simple", "definite_pronoun_resolution", coreference.dpr, splits=("train", "test")
    ),
)


def sentinel_name(name: str) -> str:
    """Returns T5's name for the variant of a task in the sentinel format.

    In the sentinel format, answers begin with a sentinel. The name has ``_1_sentinel`` inserted
    before the first of ``_train``, ``_dev``, ``_test``, ``_eval`` and ``.``. If the name contains
    none of these parts, ``_1_sentinel`` is appended.
    """
    positions = [name.find(m) for m in ("_train", "_dev", "_test", "_eval", ".") if m in name]
    position = min(positions, default=len(name))
    return f"{name[:position]}_1_sentinel{name[position:]}"


SENTINEL = tuple(
    dataclasses.replace(d, name=sentinel_name(d.name), sentinel=True) for d in SUPER_GLUE
)
"""The tasks of SuperGLUE in T5's sentinel format."""

LANGUAGES = dict(cs="Czech", de="German", en="English", fr="French", ja="Japanese", ro="Romanian")
"""A mapping from the codes of languages to the names of languages in T5's inputs."""


def _text_to_text(prefix: str, *features: str) -> Preprocessor:
    """Returns a preprocessor that puts a prefix before the source text."""
    return functools.partial(preprocessors.text_to_text, prefix=prefix, features=features)


def _translation(name: str, dataset: str, pair: tuple[str, str], *metrics: Metric) -> Task:
    """Returns a task that translates from the first language to the second language of a pair."""
    source, target = (LANGUAGES[language] for language in pair)
    preprocess = _text_to_text(f"translate {source} to {target}:", *pair)
    splits = UNLABELED if "wmt19" in name else TRAINED
    return Task(name, dataset, preprocess, metrics, splits)


def _wmt(name: str, target: str) -> Task:
    """Returns the task of T5 that translates a WMT corpus from English to a different language."""
    corpus = name.rpartition("_")[0]
    dataset = f"{corpus}_translate/{target}-en"
    return _translation(f"{name}_v003", dataset, ("en", target), metrics.bleu)


def _both_directions(corpus: str, *others: str, metrics: tuple[Metric, ...]) -> Iterator[Task]:
    """Yields the tasks that translate a corpus from English to other languages and back."""
    for pair in (("en", other) for other in others):
        for way in (pair, pair[::-1]):
            name, dataset = f"{corpus}_{'_'.join(way)}", f"{corpus}/{'_'.join(pair)}"
            yield _translation(name, dataset, way, *metrics)


_MANY = (metrics.bleu, metrics.bleu_13a, metrics.chrf)

TRANSLATION = (
    *(_wmt(f"{corpus}_ende", "de") for corpus in ("wmt_t2t", "wmt14")),
    *(_wmt(f"{corpus}_enfr", "fr") for corpus in ("wmt14", "wmt15")),
    _wmt("wmt16_enro", "ro"),
    _wmt("wmt19_ende", "de"),
    # Elliott et al. 2016, 2017
    *_both_directions("multi30k", "de", "fr", "cs", metrics=(metrics.bleu,)),
    # Cettolo et al. 2016
    *_both_directions("iwslt2016", "de", metrics=_MANY),
    # Cettolo et al. 2017
    *_both_directions("iwslt2017", "de", "fr", "ja", metrics=_MANY),
)
"""T5's tasks of the WMT conferences, and both directions of Multi30k and IWSLT."""


_ARTICLE = _text_to_text("summarize:", "article", "highlights")

SUMMARIZATION = (  # See et al. 2017
    Task("cnn_dailymail_v002", "cnn_dailymail", _ARTICLE, (metrics.rouge,)),
)


def _squad(name: str, *, context: bool) -> Task:
    """Returns a task on SQuAD, with or without the paragraph in the input."""
    preprocess = functools.partial(preprocessors.squad, context=context)
    postprocess = postprocessors.all_answers
    return Task(
        name, "squad/v1.1", preprocess, (metrics.squad,), UNLABELED, postprocess_fn=postprocess
    )


QUESTION_ANSWERING = (  # Rajpurkar et al. 2016
    _squad("squad_v010_allanswers", context=True),
    _squad("squad_v010_context_free", context=False),
)


def _texts(name: str, dataset: str, splits: tuple[str, ...], objective: str | None = None) -> Task:
    """Returns a task without inputs. If an objective is named, it turns the texts into examples."""
    return Task(
        name,
        dataset,
        preprocessors.language_modeling,
        metrics=(),
        splits=splits,
        has_inputs=False,
        objective=OBJECTIVES[objective] if objective else None,
    )


LANGUAGE_MODELING = (
    # The rows of this task are sentences (Chelba et al. 2013).
    _texts("lm1b_v100_full_lm", "lm1b", ("train", "test")),
    # The rows of these tasks are articles (Merity et al. 2016).
    *(
        _texts(
            f"wikitext_{size}_{version}_full_lm",
            f"wikitext/wikitext-{size}-{version.replace('_', '-')}",
            TRAINED,
        )
        for size in (2, 103)
        for version in ("v1", "raw_v1")
    ),
)
"""Tasks that are evaluated by the loss on held-out texts.

In the versions ``v1`` of WikiText, rare words are replaced by ``<unk>``.
"""

PRE_TRAINING = (
    *(
        _texts(f"c4_v220_{name}", "c4/en", UNLABELED, objective)
        for name, objective in (
            ("span_corruption", "span_3_15_u_u"),  # Raffel et al. 2020
            ("prefix_lm", "prefix_lm"),
            ("full_lm", "full_lm"),
        )
    ),
    *(
        _texts(
            f"c4{config.replace('.', '_')}_v020_unsupervised",
            f"c4/en{config}",
            UNLABELED,
            "span_3_15_u_u",
        )
        for config in ("", ".noclean", ".realnewslike", ".webtextlike")
    ),
    _texts(
        "wikipedia_20190301.en_v003_unsupervised",
        "wikipedia/20190301.en",
        ("train",),
        "span_3_15_u_u",
    ),
)
"""Tasks that consist of texts. Each has the objective that turns its texts into examples.

T5 leaves the objective of its ``unsupervised`` tasks to its configuration. In this package, the
``unsupervised`` tasks have the objective of T5's published models.
"""


_DIALOGUE_SCORES = (metrics.dialogue_bleu, metrics.rouge_l, metrics.distinct)

DIALOGUE = tuple(
    Task(name, f"convai2/{config}", preprocessors.dialogue, _DIALOGUE_SCORES, UNLABELED)
    for name, config in (
        ("convai2_self_original", "self_original"),  # Zhang et al. 2018, Dinan et al. 2019
        ("convai2_none_original", "none_original"),  # without personas, as in Tensor2Tensor
    )
)

TEXT_CLASSIFICATION = (
    classification(  # Zhang et al. 2015
        "ag_news_v100",
        "ag_news_subset",
        ("title", "description"),
        ("World", "Sports", "Business", "Sci/Tech"),
        prefix="ag_news",
        splits=("train", "test"),
    ),
    classification(  # Maas et al. 2011
        "imdb_reviews_v100",
        "imdb_reviews/plain_text",
        ("text",),
        ("negative", "positive"),
        prefix="imdb",
        splits=("train", "test"),
    ),
)

DEFINITIONS = (
    *GLUE,
    *SUPER_GLUE,
    *SENTINEL,
    *TRANSLATION,
    *SUMMARIZATION,
    *QUESTION_ANSWERING,
    *LANGUAGE_MODELING,
    *PRE_TRAINING,
    *DIALOGUE,
    *TEXT_CLASSIFICATION,
)
