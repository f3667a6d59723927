"""Metrics of generated text, in percent: BLEU, chrF, ROUGE and diversity.

A target is a string, or a list of reference texts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from synthesizer_jax.tasks.metrics.values import zip_equal

References: TypeAlias = str | Sequence[str]
"""The reference text of an example, or several."""

T5_ROUGE = ("rouge1", "rouge2", "rougeLsum")


def bleu(
    targets: Sequence[References], predictions: Sequence[str], *, tokenize: str = "intl"
) -> dict[str, float]:
    """Returns sacreBLEU's corpus BLEU-4 as T5 computes it: case-sensitive, smoothed (Post 2018).

    Args:
      targets: the references of each prediction.
      predictions: answers.
      tokenize: sacreBLEU's tokenizer: ``intl`` (T5; splits off all Unicode punctuation), ``13a``
        (sacreBLEU's default, WMT's) or ``none``. Scores of different tokenizers cannot be compared.

    Returns:
      The score as ``bleu``, or as ``bleu_13a`` and so on with another tokenizer than T5's.
    """
    score = _corpus_bleu(targets, predictions, tokenize=tokenize, order=4)
    return {"bleu" if tokenize == "intl" else f"bleu_{tokenize}": score}


def bleu_13a(targets: Sequence[References], predictions: Sequence[str]) -> dict[str, float]:
    """Returns `bleu` with WMT's tokenizer, as most papers report it."""
    return bleu(targets, predictions, tokenize="13a")


def dialogue_bleu(targets: Sequence[References], predictions: Sequence[str]) -> dict[str, float]:
    """Returns corpus BLEU of words ``bleu1``, and of one to four words ``bleu4``.

    They are those of papers on dialogue for text that is tokenized and in lower case already, such as
    Persona-Chat: words are what spaces separate.
    """
    return {
        f"bleu{order}": _corpus_bleu(targets, predictions, tokenize="none", order=order)
        for order in (1, 4)
    }


def chrf(targets: Sequence[References], predictions: Sequence[str]) -> dict[str, float]:
    """Returns sacreBLEU's corpus chrF2, the F2 of character n-grams up to six (Popović 2015)."""
    import sacrebleu

    score = sacrebleu.corpus_chrf(list(predictions), _reference_streams(targets, predictions))
    return {"chrf": float(score.score)}


def rouge(
    targets: Sequence[References],
    predictions: Sequence[str],
    *,
    kinds: Sequence[str] = T5_ROUGE,
    bootstrap: bool = False,
) -> dict[str, float]:
    """Returns the F1 of ROUGE (Lin 2004) by the package rouge-score, without stemming.

    As in T5, `` . `` ends a sentence, which ``rougeLsum`` needs to know. Of several references the
    best one counts, for each kind of ROUGE.

    Args:
      targets: the references of each prediction.
      predictions: answers.
      kinds: ``rouge1`` and so on for n-grams, ``rougeL`` for the longest common subsequence of the
        whole texts, ``rougeLsum`` for that of their sentences.
      bootstrap: whether to return the median of the means of 1,000 random resamples, as T5 does,
        instead of the mean. It draws from NumPy's global random state.
    """
    from rouge_score import rouge_scorer, scoring

    scorer = rouge_scorer.RougeScorer(list(kinds))
    aggregator, values = scoring.BootstrapAggregator(), []
    for references, prediction in zip_equal(targets, predictions):
        texts = [_split_sentences(text) for text in _as_list(references)]
        scores = scorer.score_multi(texts, _split_sentences(prediction))
        aggregator.add_scores(scores)
        values.append([scores[kind].fmeasure for kind in kinds])
    if bootstrap:
        found = aggregator.aggregate()
        means = [found[kind].mid.fmeasure for kind in kinds]
    else:
        means = np.mean(values, axis=0).tolist()
    return {kind: 100 * float(mean) for kind, mean in zip(kinds, means, strict=True)}


def rouge_all(targets: Sequence[References], predictions: Sequence[str]) -> dict[str, float]:
    """Returns `rouge` of words, pairs of words, whole texts (``rougeL``) and sentences."""
    return rouge(targets, predictions, kinds=("rouge1", "rouge2", "rougeL", "rougeLsum"))


def rouge_l(targets: Sequence[References], predictions: Sequence[str]) -> dict[str, float]:
    """Returns `rouge` of the longest common subsequence of the whole texts, ``rougeL``."""
    return rouge(targets, predictions, kinds=("rougeL",))


def distinct(targets: Sequence[object], predictions: Sequence[str]) -> dict[str, float]:
    """Returns the shares of different words ``distinct1`` and pairs of words ``distinct2``.

    They are counted over all predictions together (Li et al. 2016); 0 if there is none.
    """
    del targets
    texts = [prediction.split() for prediction in predictions]
    pairs = [pair for words in texts for pair in itertools.pairwise(words)]
    words = [word for words in texts for word in words]
    return {
        "distinct1": 100 * len(set(words)) / max(len(words), 1),
        "distinct2": 100 * len(set(pairs)) / max(len(pairs), 1),
    }


def _corpus_bleu(
    targets: Sequence[References], predictions: Sequence[str], *, tokenize: str, order: int
) -> float:
    from sacrebleu.metrics import BLEU

    metric = BLEU(tokenize=tokenize, smooth_method="exp", max_ngram_order=order, force=True)
    streams = _reference_streams(targets, predictions)
    return float(metric.corpus_score(list(predictions), streams).score)


def _reference_streams(
    targets: Sequence[References], predictions: Sequence[str]
) -> list[list[Any]]:
    """Returns the n-th references of all examples, for every n; None where there are fewer.

    T5 passes lists of references on untransposed, which sacreBLEU reads as streams.
    """
    references = [_as_list(target) for target, _ in zip_equal(targets, predictions)]
    return [list(stream) for stream in itertools.zip_longest(*references)]


def _as_list(references: References) -> list[str]:
    return [references] if isinstance(references, str) else list(references)


def _split_sentences(text: str) -> str:
    return text.replace(" . ", " .\n")
