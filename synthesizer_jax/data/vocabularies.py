"""Vocabularies as configurations: bytes, or a SentencePiece file.

What they build encodes and decodes as SeqIO's vocabularies do, without SeqIO or TensorFlow. Training
reads through SeqIO, with the vocabulary that `Vocabulary.to_seqio` gives.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import pathlib
from collections.abc import Iterable
from typing import Any

from synthesizer_jax.files import absolute, storage_path, written_aside

EXTRA_IDS = 100
"""T5's sentinels ``<extra_id_0>`` … ``<extra_id_99>``, at the end of the vocabulary."""

PAD, EOS, UNKNOWN = 0, 1, 2
"""T5's ids of padding, the end of a text, and what no piece covers."""


class Vocabulary(abc.ABC):
    """Text to ids and back (Raffel et al. 2020, section 2.1).

    Attributes:
      vocab_size: number of ids, sentinels included.
      pad_id: id of padding.
      eos_id: id of the end of a text.
      unk_id: id of what no piece covers.
    """

    pad_id: int = PAD
    eos_id: int = EOS
    unk_id: int = UNKNOWN

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Number of ids, sentinels included."""

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of a text, without EOS."""

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids up to the first EOS; ids beyond the vocabulary count as unknown."""

    @abc.abstractmethod
    def to_seqio(self) -> Any:
        """The `seqio.Vocabulary` with the same ids (loads TensorFlow)."""


@dataclasses.dataclass(frozen=True)
class ByteVocabulary(Vocabulary):
    """UTF-8 bytes, ids 3 to 258; what `Bytes` builds. Sentinels are not written when decoding."""

    extra_ids: int

    @property
    def vocab_size(self) -> int:
        """Special ids, 256 bytes, sentinels."""
        return _FIRST_BYTE + 256 + self.extra_ids

    def encode(self, text: str) -> list[int]:
        """The bytes of a text, each moved up by 3."""
        return [_FIRST_BYTE + byte for byte in text.encode("utf-8")]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the bytes up to the first EOS; what is not UTF-8 is left out."""
        found = (i - _FIRST_BYTE for i in until_eos(ids))
        return bytes(byte for byte in found if 0 <= byte < 256).decode("utf-8", errors="ignore")

    def to_seqio(self) -> Any:
        """The `seqio.ByteVocabulary`."""
        import seqio

        return seqio.ByteVocabulary(extra_ids=self.extra_ids)


_FIRST_BYTE = 3


@dataclasses.dataclass(frozen=True)
class SentencePieceVocabulary(Vocabulary):
    """The pieces of a SentencePiece model and sentinels; what `SentencePiece` builds.

    Attributes:
      path: the model file.
      extra_ids: sentinels that were added.
      processor: SentencePiece's, sentinels included.
    """

    path: str
    extra_ids: int
    processor: Any = dataclasses.field(repr=False)

    @property
    def unk_id(self) -> int:  # type: ignore[override]
        """The model's own."""
        return self.processor.unk_id()

    @property
    def vocab_size(self) -> int:
        """Pieces and sentinels."""
        return self.processor.GetPieceSize()

    def encode(self, text: str) -> list[int]:
        """The ids of the pieces of a text; a sentinel is recognised where a word begins."""
        return self.processor.EncodeAsIds(text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the pieces up to the first EOS; unknown ones are SentencePiece's ``⁇``."""
        size, unknown = self.vocab_size, self.unk_id
        return self.processor.DecodeIds([unknown if i >= size else i for i in until_eos(ids)])

    def to_seqio(self) -> Any:
        """The `seqio.SentencePieceVocabulary`."""
        return _seqio_sentencepiece(self.path, self.extra_ids)


def until_eos(ids: Iterable[int]) -> list[int]:
    """The ids before the first EOS, as Python's integers."""
    found = [int(i) for i in ids]
    return found[: found.index(EOS)] if EOS in found else found


@functools.cache
def _seqio_sentencepiece(path: str, extra_ids: int) -> Any:
    import seqio

    return seqio.SentencePieceVocabulary(path, extra_ids=extra_ids)


@dataclasses.dataclass(frozen=True)
class Bytes:
    """UTF-8 bytes (ByT5): ids 0 padding, 1 EOS, 2 unknown, then 256 bytes, then sentinels.

    Needs no file.
    """

    extra_ids: int = EXTRA_IDS

    def build(self) -> ByteVocabulary:
        """The vocabulary."""
        return ByteVocabulary(self.extra_ids)


@dataclasses.dataclass(frozen=True)
class SentencePiece:
    """A SentencePiece model file, such as T5's ``spiece.model`` (pad 0, EOS 1, unknown 2).

    Attributes:
      path: a file, on a disk or in a bucket (``gs://…``).
      extra_ids: sentinels to add after the file's pieces; 100 for T5's 32,000 pieces, 0 for files
        that hold them already.
    """

    path: str
    extra_ids: int = EXTRA_IDS

    def build(self) -> SentencePieceVocabulary:
        """Reads the file.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: it is no SentencePiece model, or one with other ids for padding and EOS.
        """
        path = absolute(storage_path(self.path).expanduser())
        if not path.is_file():
            raise FileNotFoundError(
                f"there is no SentencePiece model {self.path}; {_REMEDY}, or train one with "
                "'synthesizer-jax data vocabulary'"
            )
        processor = _processor(path, path.read_bytes(), self.extra_ids)
        found = processor.pad_id(), processor.eos_id()
        if found != (PAD, EOS):
            raise ValueError(
                f"{path} has padding {found[0]} and EOS {found[1]} where T5's models have {PAD} and "
                f"{EOS}; {_REMEDY}, or train one with 'synthesizer-jax data vocabulary'"
            )
        return SentencePieceVocabulary(str(path), self.extra_ids, processor)


_REMEDY = "give a file with --set vocabulary.path=FILE"


@functools.lru_cache(maxsize=8)
def _processor(path: pathlib.Path, data: bytes, extra_ids: int) -> Any:
    """SentencePiece's processor of a model file with sentinels behind its pieces, the last first."""
    import sentencepiece
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    messages: Any = sentencepiece_model_pb2
    processor = sentencepiece.SentencePieceProcessor()
    try:
        model = messages.ModelProto.FromString(data)
        for i in reversed(range(extra_ids)):
            kind = model.SentencePiece.USER_DEFINED
            model.pieces.add(piece=f"▁<extra_id_{i}>", score=0.0, type=kind)
        processor.LoadFromSerializedProto(model.SerializeToString())
    except (DecodeError, RuntimeError) as error:
        raise ValueError(
            f"{path} is damaged or no SentencePiece model ({error}); restore it, or {_REMEDY}"
        ) from error
    return processor


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

    with written_aside(path) as file:
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
            raise ValueError(f"vocab_size={vocab_size} cannot be trained: {error}") from None
