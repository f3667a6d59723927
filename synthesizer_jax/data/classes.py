"""Label words as classes: the targets of an encoder with one output for each of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from synthesizer_jax.data.vocabularies import EOS, Vocabulary

LONGEST_TARGET = 1024
"""Targets are read up to this many tokens, EOS included, before they become classes of one number each."""


def index_by_tokens(
    words: Sequence[str], vocabulary: Vocabulary, *, owner: str, length: int | None = None
) -> dict[tuple[int, ...], int]:
    """Returns the indices of label words by their token ids with EOS, which `length` cuts if it is given.

    Raises:
      ValueError: two of the words, which `owner` has, have the same token ids.
    """
    indices: dict[tuple[int, ...], int] = {}
    for index, word in enumerate(words):
        ids = vocabulary.encode(word)[: None if length is None else length - 1]
        first = indices.setdefault((*ids, EOS), index)
        if first != index:
            cut = "" if length is None else f" in {length} tokens"
            raise ValueError(
                f"{owner} has {words[first]!r} and {word!r}, which are the same to the vocabulary{cut}; "
                "take other label words, longer targets, or a vocabulary that knows them"
            )
    return indices


class Classes:
    """The classes of an encoder, by their label words and the token ids of these.

    Args:
      words: the label words in the order of the encoder's outputs.
      vocabulary: encodes them.

    Raises:
      ValueError: see `index_by_tokens`.
    """

    def __init__(self, words: Sequence[str], vocabulary: Vocabulary):
        self.words, self._vocabulary = tuple(words), vocabulary
        self._indices = index_by_tokens(words, vocabulary, owner="data.classes")

    def index(self, target: np.ndarray, *, owner: str) -> int:
        """Returns the class of a target.

        Args:
          target: token ids with EOS.
          owner: what has the target, such as its task, for the error.

        Raises:
          ValueError: it is none of the classes, such as that of an example whose label is hidden.
        """
        found = self._indices.get(tuple(target.tolist()))
        if found is None:
            text = self._vocabulary.decode(target.tolist())
            raise ValueError(
                f"{owner} has the target {text!r}, which is none of data.classes "
                f"({', '.join(self.words)}); add it, or choose a data.split whose labels are known"
            )
        return found

    def columns(self, words: Sequence[str]) -> list[int]:
        """Returns the classes of label words; raises a `ValueError` if one of them is no class."""
        unknown = [word for word in words if word not in self.words]
        if unknown:
            raise ValueError(
                f"the label word {unknown[0]!r} is none of data.classes ({', '.join(self.words)}); "
                "evaluate other tasks with --task"
            )
        return [self.words.index(word) for word in words]
