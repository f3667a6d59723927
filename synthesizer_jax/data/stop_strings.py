"""Finds strings that end a generated text, with an automaton over tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from synthesizer_jax.data.vocabularies import Vocabulary


def stop_table(vocabulary: Vocabulary, strings: Sequence[str], size: int) -> np.ndarray:
    """Returns the automaton that finds stop strings in the text of tokens.

    This is the automaton of Aho and Corasick (1975). It reads the bytes of each token, so a string
    may begin and end inside a token. State 0 is the beginning of the text. The last state means
    that a string was found, and no token leaves it. Every other state stands for a prefix of a
    string that the text ends with.

    Args:
      vocabulary: the vocabulary, which gives the bytes of each token.
      strings: one or more strings. None of them is empty.
      size: the number of token ids.

    Returns:
      The next state by current state and token id, unsigned integers ``[states, size]``.
    """
    patterns = tuple(string.encode() for string in strings)

    # The states between the first and the last one are the proper prefixes, including the empty
    # one.
    prefixes = sorted({p[:i] for p in patterns for i in range(len(p))}, key=len)
    states = {prefix: i for i, prefix in enumerate(prefixes, 1)}
    found = len(prefixes) + 1
    # The next state by state and byte. What the loop does not set means that a string was found.
    after_byte = np.full((found + 1, 256), found)
    for prefix, state in states.items():
        for byte in range(256):
            text = prefix + bytes([byte])
            if not text.endswith(patterns):
                # The longest suffix of the text that is a prefix of a string. Suffixes come longest
                # first.
                suffixes = (text[i:] for i in range(len(text) + 1))
                after_byte[state, byte] = next(states[x] for x in suffixes if x in states)

    # A token without bytes leaves every state as it is, so the table begins as the identity.
    table = np.repeat(np.arange(found + 1)[:, None], size, axis=1)
    # The first token of a text may spell other bytes than the same token later in the text.
    for rows, first in ((slice(1), True), (slice(1, None), False)):
        pieces = vocabulary.token_bytes(size, first=first)
        lengths = np.array([len(piece) for piece in pieces])
        if first:
            table[0, lengths > 0] = states[b""]
        # Read byte i of all tokens that are long enough, from all states at once.
        for i in range(lengths.max()):
            longer = np.flatnonzero(lengths > i)
            byte_values = np.array([pieces[token][i] for token in longer])
            table[rows, longer] = after_byte[table[rows, longer], byte_values]
    return table.astype(np.min_scalar_type(found))
