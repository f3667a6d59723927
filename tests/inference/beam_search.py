"""Implements T5X's beam search in plain Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

EOS = 1

Model: TypeAlias = Callable[[list[tuple[int, ...]]], Sequence[np.ndarray]]
"""A function that returns the log-probabilities of the next tokens for several prefixes."""


def t5x_beams(
    log_p: Model,
    length: int,
    beams: int,
    alpha: float,
    shortest: int = 1,
    ends: Callable[[tuple[int, ...]], bool] = lambda tokens: tokens[-1] == EOS,
    num_ends: int = 1,
) -> list[tuple[tuple[int, ...], float]]:
    """Returns the best sequences of an example and their scores by T5X's beam search.

    In each step, the search considers the 2n best continuations, for n beams. Continuations that
    end compete by their penalized scores with the sequences that ended in earlier steps. The n best
    continuations that do not end stay alive. If `num_ends` different tokens end a sequence, the
    search considers (1 + `num_ends`) · n continuations, as in transformers. In the result, the
    ended sequences come before the live ones.
    """
    live = [(0.0, ())]
    ended = []
    penalty = 1.0
    for at in range(length):
        found = log_p([tokens for _, tokens in live])
        every = [
            (score + row[token], (*tokens, token))
            for (score, tokens), row in zip(live, found, strict=True)
            for token in range(len(row))
            if token != EOS or at + 1 >= shortest
        ]
        every = sorted(every, reverse=True)
        best = every[: (1 + num_ends) * beams]
        penalty = ((5 + at + 1) / 6) ** alpha
        ended += [(score / penalty, tokens) for score, tokens in best if ends(tokens)]
        ended = sorted(ended, reverse=True)[:beams]
        live = [x for x in every if not ends(x[1])][:beams]
    live = [(score / penalty, tokens) for score, tokens in live]
    return [(tokens, score) for score, tokens in (ended + live)[:beams]]
