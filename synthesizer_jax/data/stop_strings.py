"""Strings that end a text, as an automaton over tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from synthesizer_jax.data.vocabularies import Vocabulary


def stop_table(vocabulary: Vocabulary, strings: Sequence[str], size: int) -> np.ndarray:
    """Returns the automaton that finds strings in the text of tokens (Aho and Corasick 1975).

    It reads the bytes of the tokens, so that a string may begin and end within tokens. State 0 is the
    beginning of the text, and the last state that a string was found, which no token leaves.

    Args:
      vocabulary: gives the bytes.
      strings: one or more, none empty.
      size: number of token ids.

    Returns:
      ``[states, size]`` unsigned integers, the state after a token in a state.
    """
    patterns = tuple(string.encode() for string in strings)
    prefixes = sorted({p[:i] for p in patterns for i in range(len(p))}, key=len)
    states = {prefix: i for i, prefix in enumerate(prefixes, 1)}
    found = len(prefixes) + 1
    after_byte = np.full((found + 1, 256), found)
    for prefix, state in states.items():
        for byte in range(256):
            text = prefix + bytes([byte])
            if not text.endswith(patterns):
                suffixes = (text[i:] for i in range(len(text) + 1))
                after_byte[state, byte] = next(states[x] for x in suffixes if x in states)
    table = np.repeat(np.arange(found + 1)[:, None], size, axis=1)
    for rows, first in ((slice(1), True), (slice(1, None), False)):
        pieces = vocabulary.token_bytes(size, first=first)
        lengths = np.array([len(piece) for piece in pieces])
        if first:
            table[0, lengths > 0] = states[b""]
        for i in range(lengths.max()):
            longer = np.flatnonzero(lengths > i)
            byte_values = np.array([pieces[token][i] for token in longer])
            table[rows, longer] = after_byte[table[rows, longer], byte_values]
    return table.astype(np.min_scalar_type(found))
