"""Defines a model that looks up its logits in a table, and its predictions in NumPy."""

import functools

import jax.numpy as jnp
import numpy as np

from synthesizer_jax.base.ids import T5_IDS
from synthesizer_jax.models import DecodingCache, LayerCache


class Table:
    """A decoding step that looks up logits by the position and a code of all earlier tokens."""

    CODES = 7
    ids = T5_IDS

    def __init__(self, logits):
        self.table = jnp.asarray(logits)  # [examples, positions, codes, vocab]
        self.batch, self.max_length = logits.shape[:2]

    def begin(self):
        codes = jnp.zeros(self.batch, jnp.int32)
        position = jnp.asarray(0)
        return codes, DecodingCache((LayerCache((codes, position)),))

    def next(self, tokens, cache):
        codes, position = cache.layers[0].self_attention
        codes = (codes * 3 + tokens) % self.CODES
        examples = jnp.arange(len(tokens)) // (len(tokens) // self.batch)
        logits = self.table[examples, position, codes]
        return logits, DecodingCache((LayerCache((codes, position + 1)),))


def look_up(table):
    """Returns a function that looks up what follows a prefix in a table.

    The table has the shape ``[positions, codes, vocab]``.
    """

    def code(tokens):
        return functools.reduce(lambda code, token: (code * 3 + token) % Table.CODES, tokens, 0)

    return lambda prefixes: [table[len(p), code(p)].copy() for p in prefixes]


def table_log_p(logits):
    """Returns a function for the log-probabilities of continuations, from a table of logits."""
    return look_up(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))


def constrain(scores, tokens, penalty, n):
    """Applies transformers' RepetitionPenaltyLogitsProcessor and NoRepeatNGramLogitsProcessor."""
    for token in set(tokens):
        scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
    for i in range(len(tokens) - n + 1):
        if tokens[i : i + n - 1] == tokens[len(tokens) - n + 1 :]:
            scores[tokens[i + n - 1]] = -np.inf
    return scores
