"""Translation tasks: T5's of WMT, and both directions of Multi30k and IWSLT, in T5's format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from synthesizer_jax.tasks.formats import Translation
from synthesizer_jax.tasks.metrics import Metric, bleu, bleu_13a, chrf
from synthesizer_jax.tasks.task import TRAINED, Task

LANGUAGES: Mapping[str, str] = MappingProxyType(
    {
        "cs": "Czech",
        "de": "German",
        "en": "English",
        "fr": "French",
        "ja": "Japanese",
        "ro": "Romanian",
    }
)
"""English names of languages by code."""

PAIRS: Mapping[str, tuple[tuple[str, str], ...]] = MappingProxyType(
    {
        "multi30k": (("en", "de"), ("en", "fr"), ("en", "cs")),  # Elliott et al. 2016, 2017
        "iwslt2016": (("en", "de"),),  # Cettolo et al. 2016
        "iwslt2017": (("en", "de"), ("en", "fr"), ("en", "ja")),  # Cettolo et al. 2017
    }
)
"""Pairs of languages by corpus; every pair gives two tasks."""


def translation_task(
    name: str,
    dataset: str,
    languages: tuple[str, str],
    *,
    metrics: tuple[Metric, ...] = (bleu,),
    splits: tuple[str, ...] = TRAINED,
) -> Task:
    """Returns the task ``translate English to German: …``.

    Args:
      name: of the task.
      dataset: its TFDS data set, whose features are language codes.
      languages: codes of the source and the target language.
      metrics: metric functions.
      splits: the splits of the data set.
    """
    source, target = (LANGUAGES[language] for language in languages)
    text_format = Translation(f"translate {source} to {target}:", languages)
    return Task(name, dataset, text_format, metrics, splits)


WMT = (
    translation_task("wmt_t2t_ende_v003", "wmt_t2t_translate/de-en", ("en", "de")),
    translation_task("wmt14_ende_v003", "wmt14_translate/de-en", ("en", "de")),
    translation_task("wmt14_enfr_v003", "wmt14_translate/fr-en", ("en", "fr")),
    translation_task("wmt15_enfr_v003", "wmt15_translate/fr-en", ("en", "fr")),
    translation_task("wmt16_enro_v003", "wmt16_translate/ro-en", ("en", "ro")),
    translation_task(
        "wmt19_ende_v003",
        "wmt19_translate/de-en",
        ("en", "de"),
        splits=("train", "validation"),
    ),
)
"""T5's tasks of the conference on machine translation, from English."""


def _both_directions(corpus: str, *metrics: Metric) -> Iterator[Task]:
    for pair in PAIRS[corpus]:
        for source, target in (pair, pair[::-1]):
            yield translation_task(
                f"{corpus}_{source}_{target}",
                f"{corpus}/{'_'.join(pair)}",
                (source, target),
                metrics=metrics,
            )


TRANSLATION = (
    *WMT,
    *_both_directions("multi30k", bleu),
    *_both_directions("iwslt2016", bleu, bleu_13a, chrf),
    *_both_directions("iwslt2017", bleu, bleu_13a, chrf),
)
