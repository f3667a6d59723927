"""Finds strings that end a generated text, with an automaton over tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from synthesizer_jax.data.vocabularies import Vocabulary


def stop_table(vocabulary: Vocabulary, strings: Sequence[str], size: int) -> np.ndarray:
    """Returns an automaton that reads token ids and finds stop strings in their text.

    The automaton was described by Aho and Corasick (1975). The automaton reads the bytes of each
    token, so a string may begin and end inside a token. State 0 is the beginning of the text. The
    last state means that a string was found, and the automaton never leaves this state. Each of the
    other states stands for a prefix of a string: the longest prefix with which the text so far
    ends.

    Args:
      vocabulary: the vocabulary, which gives the bytes of each token.
      strings: one or more strings. No string may be empty.
      size: the number of token ids.

    Returns:
      An array of unsigned integers ``[states, size]``, which gives the next state for every current
      state and token id.
    """
    patterns = tuple(string.encode() for string in strings)

    # Every state between the first and the last one stands for a proper prefix of a string. The
    # empty prefix is included.
    prefixes = sorted({p[:i] for p in patterns for i in range(len(p))}, key=len)
    states = {prefix: i for i, prefix in enumerate(prefixes, 1)}
    found = len(prefixes) + 1
    # This array gives the next state for every state and byte. The loop sets the entries that do
    # not complete a string. All other entries keep the state `found`.
    after_byte = np.full((found + 1, 256), found)
    for prefix, state in states.items():
        for byte in range(256):
            text = prefix + bytes([byte])
            if not text.endswith(patterns):
                # The next state stands for the longest suffix of the text that is a prefix of a
                # string, so the suffixes are tried from the longest to the shortest.
                suffixes = (text[i:] for i in range(len(text) + 1))
                after_byte[state, byte] = next(states[x] for x in suffixes if x in states)

    # A token without bytes does not change the state, so the table initially maps every state to
    # itself.
    table = np.repeat(np.arange(found + 1)[:, None], size, axis=1)
    # A token may spell different bytes at the beginning of a text than later in the text.
    for rows, first in ((slice(1), True), (slice(1, None), False)):
        pieces = vocabulary.token_bytes(size, first=first)
        lengths = np.array([len(piece) for piece in pieces])
        if first:
            table[0, lengths > 0] = states[b""]
        # For all states at once, read byte i of every token that has more than i bytes.
        for i in range(lengths.max()):
            longer = np.flatnonzero(lengths > i)
            byte_values = np.array([pieces[token][i] for token in longer])
            table[rows, longer] = after_byte[table[rows, longer], byte_values]
    return table.astype(np.min_scalar_type(found))
