"""The loss of texts, and of what objectives make of them: nothing is decoded, every token is scored."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from synthesizer_jax.evaluation.prediction import Predictor

LOWER_IS_BETTER = ("loss", "perplexity", "word_perplexity", "bits_per_byte")
"""The measures of texts, and the loss of every task; all others are metrics, in percent."""


@dataclasses.dataclass(frozen=True)
class TextLoss:
    """The teacher-forced loss of whole texts.

    Attributes:
      nats: ``[n]`` negative log-probability of every text, its EOS included.
      tokens: ``[n]`` number of its tokens, its EOS included.
      words: number of words of all texts, and an end for each of them; None: not counted.
      bytes: number of bytes of all texts in UTF-8; None: not counted.
    """

    nats: np.ndarray
    tokens: np.ndarray
    words: int | None = None
    bytes: int | None = None

    def metrics(self) -> dict[str, float]:
        """Returns the measures of texts, of which lower is better.

        ``perplexity`` is exp(nats / tokens). ``word_perplexity`` is exp(nats / (words + texts)), words
        being what white space separates, and ``bits_per_byte`` nats / ln 2 / bytes; these two can be
        compared between vocabularies.
        """
        nats = float(self.nats.sum(dtype=np.float64))
        found = {"perplexity": _exp(nats / float(self.tokens.sum()))}
        if self.words:
            found["word_perplexity"] = _exp(nats / self.words)
        if self.bytes:
            found["bits_per_byte"] = nats / math.log(2) / self.bytes
        return found


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf


def text_loss(
    predictor: Predictor,
    inputs: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    texts: Sequence[str] | None = None,
) -> TextLoss:
    """Returns the loss of texts of any length.

    A text that is longer than the targets of a training row (`Predictor.decoding`'s ``max_length``) is
    evaluated in consecutive windows of that length. No token is left out and none counts twice; every
    window starts without context, so the first tokens of a window have a higher loss than with the whole
    text before them.

    Args:
      predictor: the model.
      inputs: token ids that the model reads before each text; empty arrays for texts alone.
      targets: token ids of each text with EOS; 0 at tokens that an objective leaves out.
      texts: the texts themselves, whose words and bytes are counted; None: they are not.
    """
    length = predictor.decoding.max_length
    starts = [(i, s) for i, t in enumerate(targets) for s in range(0, len(t), length)]
    scores = predictor.log_probabilities(
        [inputs[i] for i, _ in starts], [targets[i][s : s + length] for i, s in starts]
    )
    nats = np.zeros(len(targets))
    np.subtract.at(nats, [i for i, _ in starts], scores)
    tokens = np.array([np.count_nonzero(target) for target in targets])
    if texts is None:
        return TextLoss(nats, tokens)
    words = sum(len(text.split()) + 1 for text in texts)
    return TextLoss(nats, tokens, words, sum(len(text.encode()) for text in texts))
