"""T5X's beam search in Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

EOS = 1


def t5x_beam_search(
    log_p: Callable[[list[tuple[int, ...]]], Sequence[np.ndarray]],
    length: int,
    beams: int,
    alpha: float,
) -> tuple[tuple[int, ...], float]:
    """T5X's beam search of one example, as it is described there.

    Each step takes the 2n best continuations; those that end compete with the ended ones by penalised
    score, the n best others live on. Ended ones are returned where there is one, live ones otherwise.

    Args:
      log_p: the log-probabilities of the tokens after each of several prefixes.
      length: maximum number of tokens.
      beams: n.
      alpha: exponent of the length penalty.

    Returns:
      The best sequence and its score.
    """
    live, ended, penalty = [(0.0, ())], [], 1.0
    for at in range(length):
        found = log_p([tokens for _, tokens in live])
        every = [
            (score + row[token], (*tokens, token))
            for (score, tokens), row in zip(live, found, strict=True)
            for token in range(len(row))
        ]
        every = sorted(every, reverse=True)[: 2 * beams]
        penalty = ((5 + at + 1) / 6) ** alpha
        ended += [(score / penalty, tokens) for score, tokens in every if tokens[-1] == EOS]
        ended = sorted(ended, reverse=True)[:beams]
        live = [x for x in every if x[1][-1] != EOS][:beams]
    if ended:
        return ended[0][1], ended[0][0]
    return live[0][1], live[0][0] / penalty
