"""Vocabularies as configurations: bytes, or a SentencePiece file."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterable
from typing import Any

EXTRA_IDS = 100
"""T5's sentinels ``<extra_id_0>`` … ``<extra_id_99>``, at the end of the vocabulary."""


@dataclasses.dataclass(frozen=True)
class Bytes:
    """UTF-8 bytes (ByT5): ids 0 padding, 1 EOS, 2 unknown, then 256 bytes, then sentinels.

    Needs no file.
    """

    extra_ids: int = EXTRA_IDS

    def build(self) -> Any:
        """The `seqio.ByteVocabulary`."""
        import seqio

        return seqio.ByteVocabulary(extra_ids=self.extra_ids)


@dataclasses.dataclass(frozen=True)
class SentencePiece:
    """A SentencePiece model file, such as T5's ``spiece.model`` (pad 0, EOS 1, unknown 2).

    Attributes:
      path: a local file.
      extra_ids: sentinels to add after the file's pieces; 100 for T5's 32,000 pieces, 0 for files
        that hold them already.
    """

    path: str
    extra_ids: int = EXTRA_IDS

    def build(self) -> Any:
        """The `seqio.SentencePieceVocabulary`.

        Raises:
          FileNotFoundError: there is no such file.
        """
        path = pathlib.Path(self.path).expanduser()
        if not path.is_file():
            raise FileNotFoundError(
                f"there is no SentencePiece model {self.path}; give a local file with --set "
                "vocabulary.path=FILE, or train one with 'synthesizer-jax data vocabulary'"
            )
        return _sentencepiece(str(path.resolve()), self.extra_ids)


@functools.cache
def _sentencepiece(path: str, extra_ids: int) -> Any:
    import seqio

    return seqio.SentencePieceVocabulary(path, extra_ids=extra_ids)


def padded_size(size: int, multiple: int = 128) -> int:
    """The next multiple: T5's 32,100 ids make 32,128 rows of the embedding."""
    return -(-size // multiple) * multiple


def train_sentencepiece(
    texts: Iterable[str], path: pathlib.Path, *, vocab_size: int, model_type: str = "unigram"
) -> None:
    """Trains a SentencePiece model with T5's special ids and puts it into place at once.

    Args:
      texts: sentences.
      path: the file to write; an existing one is replaced when the new one is complete.
      vocab_size: number of pieces, special ones included.
      model_type: ``unigram`` (T5) or ``bpe``.

    Raises:
      ValueError: there is not enough text for so many pieces.
    """
    import sentencepiece

    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".tmp")
    with aside.open("wb") as file:
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(texts),
                model_writer=file,
                vocab_size=vocab_size,
                model_type=model_type,
                pad_id=0,
                eos_id=1,
                unk_id=2,
                bos_id=-1,
                character_coverage=1.0,
                num_threads=1,  # the result does not depend on the machine
                minloglevel=2,
            )
        except RuntimeError as error:
            aside.unlink()
            raise ValueError(f"vocab_size={vocab_size} cannot be trained: {error}") from None
    os.replace(aside, path)
