"""All tasks of T5 and of the papers; those of T5 have its names.

Beside GLUE, SuperGLUE and translation they are pre-training, summarization, question answering, language
modeling, dialogue and the classification of texts.
"""

from __future__ import annotations

from synthesizer_jax.data.objectives import OBJECTIVES
from synthesizer_jax.tasks import metrics
from synthesizer_jax.tasks.definitions import GLUE, SENTINEL, SUPER_GLUE
from synthesizer_jax.tasks.formats import Classification
from synthesizer_jax.tasks.generation_formats import (
    Dialogue,
    FirstAnswerSQuAD,
    LanguageModeling,
    SpanSQuAD,
    SQuAD,
    Summarization,
    TriviaQA,
)
from synthesizer_jax.tasks.task import Task
from synthesizer_jax.tasks.translation import TRANSLATION

SUMMARIZATION = (
    Task(  # See et al. 2017
        "cnn_dailymail_v002",
        "cnn_dailymail",
        Summarization(("article", "highlights")),
        metrics=(metrics.rouge,),
    ),
    Task(  # Narayan et al. 2018; not a task of T5
        "xsum_v110",
        "xsum",
        Summarization(("document", "summary")),
        metrics=(metrics.rouge_all,),
    ),
)

_SQUAD_SPLITS = ("train", "validation")

QUESTION_ANSWERING = (
    Task(  # Rajpurkar et al. 2016
        "squad_v010_allanswers",
        "squad/v1.1",
        SQuAD(),
        metrics=(metrics.squad,),
        splits=_SQUAD_SPLITS,
    ),
    Task(
        "squad_v010_context_free",
        "squad/v1.1",
        SQuAD(context=False),
        metrics=(metrics.squad,),
        splits=_SQUAD_SPLITS,
    ),
    Task(
        "squad_v010_allanswers_span",
        "squad/v1.1",
        SpanSQuAD(),
        metrics=(metrics.span_squad,),
        splits=_SQUAD_SPLITS,
    ),
    Task(
        "squad_v010",
        "squad/v1.1",
        FirstAnswerSQuAD(),
        metrics=(metrics.squad,),
        splits=_SQUAD_SPLITS,
    ),
    Task("trivia_qa_v010", "trivia_qa/rc", TriviaQA(), metrics=()),  # Joshi et al. 2017
)

LANGUAGE_MODELING = (
    Task(  # Chelba et al. 2013; rows are sentences
        "lm1b_v100_full_lm", "lm1b", LanguageModeling(), metrics=(), splits=("train", "test")
    ),
    *(
        Task(  # Merity et al. 2016; rows are articles
            f"wikitext_{size}_{version}_full_lm",
            f"wikitext/wikitext-{size}-{version.replace('_', '-')}",
            LanguageModeling(),
            metrics=(),
        )
        for size in (2, 103)
        for version in ("v1", "raw_v1")
    ),
)
"""Their measure is the held-out loss. ``v1`` of WikiText has ``<unk>`` for rare words."""

_UNLABELED_SPLITS = ("train", "validation")


def _pretraining(
    name: str, dataset: str, objective: str, *, splits: tuple[str, ...] = _UNLABELED_SPLITS
) -> Task:
    return Task(
        name,
        dataset,
        LanguageModeling(),
        metrics=(),
        splits=splits,
        objective=OBJECTIVES[objective],
    )


PRE_TRAINING = (
    _pretraining("c4_v220_span_corruption", "c4/en", "span_3_15_u_u"),  # Raffel et al. 2020
    _pretraining("c4_v220_prefix_lm", "c4/en", "prefix_lm"),
    _pretraining("c4_v220_full_lm", "c4/en", "full_lm"),
    *(
        _pretraining(f"c4{name}_v020_unsupervised", f"c4/en{config}", "span_3_15_u_u")
        for name, config in (
            ("", ""),
            ("_noclean", ".noclean"),
            ("_realnewslike", ".realnewslike"),
            ("_webtextlike", ".webtextlike"),
        )
    ),
    _pretraining(
        "wikipedia_20190301.en_v003_unsupervised",
        "wikipedia/20190301.en",
        "span_3_15_u_u",
        splits=("train",),
    ),
)
"""Texts with the objective that makes examples of them; T5 leaves that of ``unsupervised`` to its
configuration, whose choice for the published models it is here."""

_DIALOGUE_METRICS = (metrics.dialogue_bleu, metrics.rouge_l, metrics.distinct)

DIALOGUE = (
    Task(  # Zhang et al. 2018, Dinan et al. 2019
        "convai2_self_original",
        "convai2/self_original",
        Dialogue(),
        metrics=_DIALOGUE_METRICS,
        splits=("train", "validation"),
    ),
    Task(  # without personas, as in Tensor2Tensor
        "convai2_none_original",
        "convai2/none_original",
        Dialogue(),
        metrics=_DIALOGUE_METRICS,
        splits=("train", "validation"),
    ),
    Task(  # Lin et al. 2021; its test split is ConvAI2's validation split
        "xpersona_en",
        "xpersona/en",
        Dialogue(),
        metrics=_DIALOGUE_METRICS,
        splits=("validation", "test"),
    ),
)

TEXT_CLASSIFICATION = (
    Task(  # Zhang et al. 2015
        "ag_news_v100",
        "ag_news_subset",
        Classification(
            "ag_news", ("title", "description"), ("World", "Sports", "Business", "Sci/Tech")
        ),
        splits=("train", "test"),
    ),
    Task(  # Maas et al. 2011
        "imdb_reviews_v100",
        "imdb_reviews/plain_text",
        Classification("imdb", ("text",), ("negative", "positive")),
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
