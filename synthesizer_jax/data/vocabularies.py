"""Vocabularies, which are configurations too: bytes, or a SentencePiece file; label words as classes.

They encode and decode like SeqIO's, without SeqIO or TensorFlow.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Self

from synthesizer_jax.base.files import absolute, open_atomic, storage_path
from synthesizer_jax.base.ids import SpecialIds
from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import Number

if TYPE_CHECKING:
    import numpy as np
    from sentencepiece import SentencePieceProcessor

    from synthesizer_jax.data.byte_level import ByteLevel

EXTRA_IDS = 100
"""Number of T5's sentinels, ``<extra_id_0>`` … ``<extra_id_99>``, at the end of the vocabulary."""

BPE_OF_BYTES = "BPE of bytes"
"""The name of such a model's normalizer, which no piece is called: their spaces are ``▁``."""

PAD, EOS, UNKNOWN = 0, 1, 2
"""T5's ids of padding, of the end of a text, and of unknown text."""

LONGEST_TARGET = 1024
"""Targets are read up to this many tokens, EOS included, before they become classes of one number each."""


def utf8(text: str) -> bytes:
    """Returns a text as UTF-8.

    Raises:
      ValueError: it has a lone surrogate, half of a character, as broken escapes in JSON leave it.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text {text[:40]!r} has a lone surrogate, {text[error.start]!r} at {error.start}, which "
            "is no character; replace it, for example by text.encode('utf-8', 'replace').decode()"
        ) from error


class Vocabulary(abc.ABC):
    """Conversion between text and ids (Raffel et al. 2020, section 2.1).

    Attributes:
      unk_id: id of text that no piece covers.
      eos_id: id of the end of a text.
    """

    unk_id: int = UNKNOWN
    eos_id: int = EOS

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Number of ids, including sentinels."""

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without EOS."""

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of the ids before the first EOS; ids out of range are unknown."""

    def token_bytes(self, size: int, *, first: bool) -> list[bytes]:
        """Returns what each of the ids below `size` adds to a text, as its first token or a later one."""
        return [self.decode([i]).encode() for i in range(size)]

    @abc.abstractmethod
    def contents(self) -> bytes:
        """Returns all that it depends on."""

    def is_text(self, id: int) -> bool:
        """Whether a text can have this id."""
        return id > EOS

    def check_ids(self, ids: SpecialIds) -> None:
        """Raises a `ValueError` if a model has another id of EOS, or pads with what a text can have."""
        if ids.end != self.eos_id:
            raise ValueError(
                f"the vocabulary has EOS {self.eos_id} but model.ids.end={ids.end}; set model.ids.end, "
                "or take the model's own vocabulary"
            )
        if self.is_text(ids.padding):
            raise ValueError(
                f"model.ids.padding={ids.padding} is text in the vocabulary; set it to the id of a control "
                "symbol, or take the model's own vocabulary"
            )

    @property
    def around_inputs(self) -> tuple[list[int], list[int]]:
        """The ids before and after those of an input: EOS is after them."""
        return [], [self.eos_id]

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that depend on what it encodes, not on the path of its file."""
        return hashlib.sha256(self.contents()).hexdigest()[:16]

    def build(self) -> Self:
        """Returns the vocabulary, whose file is read now if it has one."""
        return self


@register
@dataclasses.dataclass(frozen=True)
class Bytes(Vocabulary):
    """UTF-8 bytes (ByT5): padding 0, EOS 1, unknown 2, then 256 bytes, then sentinels.

    It needs no file. Sentinels and invalid UTF-8 are omitted when decoding.
    """

    extra_ids: Number = EXTRA_IDS

    @property
    def vocab_size(self) -> int:
        return _FIRST_BYTE + 256 + self.extra_ids

    def encode(self, text: str) -> list[int]:
        """Returns the bytes of a text, each plus 3; for errors see `utf8`."""
        return [_FIRST_BYTE + byte for byte in utf8(text)]

    def decode(self, ids: Iterable[int]) -> str:
        byte_values = (i - _FIRST_BYTE for i in _until(ids, self.eos_id))
        return bytes(byte for byte in byte_values if 0 <= byte < 256).decode("utf-8", "ignore")

    def token_bytes(self, size: int, *, first: bool) -> list[bytes]:
        return [bytes([i - _FIRST_BYTE]) if 0 <= i - _FIRST_BYTE < 256 else b"" for i in range(size)]

    def contents(self) -> bytes:
        return f"ByteVocabulary(extra_ids={self.extra_ids})".encode()


_FIRST_BYTE = 3


@register
@dataclasses.dataclass(frozen=True)
class SentencePiece(Vocabulary):
    """A SentencePiece model file, such as T5's ``spiece.model`` (padding 0, EOS 1, unknown 2).

    The file is read when it is needed, or by `build`.

    Attributes:
      path: a file, on a disk or in a bucket (``gs://…``).
      extra_ids: number of sentinels to add after the pieces of the file: 100 for T5's file of
        32,000 pieces, 0 for files that contain sentinels.
      bos: whether inputs begin with the file's BOS, and, but for a BPE of bytes, do not end with EOS: as
        Gemma's do.
    """

    path: str
    extra_ids: Number = EXTRA_IDS
    bos: bool = False

    @functools.cached_property
    def processor(self) -> SentencePieceProcessor:
        """The `SentencePieceProcessor`, including the sentinels.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: the file is not a SentencePiece model, or has no EOS or BOS.
        """
        path = self.file
        if not path.is_file():
            raise FileNotFoundError(
                f"there is no SentencePiece model {self.path}; {_REMEDY}, or train one with "
                "'synthesizer-jax data vocabulary'"
            )
        processor = _load_processor(path, path.read_bytes(), self.extra_ids)
        if processor.eos_id() < 0:
            raise ValueError(
                f"{path} has no EOS; {_REMEDY}, or train one with 'synthesizer-jax data vocabulary'"
            )
        if self.bos and processor.bos_id() < 0:
            raise ValueError(f"{path} has no BOS; set vocabulary.bos=false")
        return processor

    @property
    def file(self) -> pathlib.Path:
        """The absolute path of the file."""
        return absolute(storage_path(self.path).expanduser())

    def build(self) -> Self:
        """Reads the file, see `processor`, and returns the vocabulary."""
        _ = self.processor
        return self

    @property
    def unk_id(self) -> int:  # type: ignore[override]
        return self.processor.unk_id()

    @property
    def eos_id(self) -> int:  # type: ignore[override]
        return self.processor.eos_id()

    @property
    def around_inputs(self) -> tuple[list[int], list[int]]:
        """The ids before and after those of an input."""
        if not self.bos:
            return super().around_inputs
        return [self.processor.bos_id()], [self.eos_id] if self.byte_level else []

    @functools.cached_property
    def byte_level(self) -> ByteLevel | None:
        """What encodes and decodes if it is a BPE of bytes, such as CodeT5's."""
        if BPE_OF_BYTES.encode() not in self.contents():
            return None
        from synthesizer_jax.data.byte_level import ByteLevel

        return ByteLevel(self.processor)

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that depend on what it encodes, not on the path of its file."""
        return super().digest + ("b" if self.bos else "")

    @property
    def vocab_size(self) -> int:
        return self.processor.GetPieceSize()

    def is_text(self, id: int) -> bool:
        return not (self.processor.IsControl(id) or self.processor.IsUnused(id))

    def encode(self, text: str) -> list[int]:
        """Returns the ids of the pieces of a text.

        A sentinel in the text is recognized at the beginning of a word.

        Raises:
          ValueError: see `utf8`.
        """
        utf8(text)
        return self.byte_level.encode(text) if self.byte_level else self.processor.EncodeAsIds(text)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of the pieces before the first EOS; unknown pieces give ``⁇``."""
        size, unknown = self.vocab_size, self.unk_id
        known = [unknown if i >= size else i for i in _until(ids, self.eos_id)]
        return self.byte_level.decode(known) if self.byte_level else self.processor.DecodeIds(known)

    def token_bytes(self, size: int, *, first: bool) -> list[bytes]:
        processor = self.processor

        def convert(i: int) -> bytes:
            i = i if i < self.vocab_size else self.unk_id
            piece = processor.IdToPiece(i)
            if self.byte_level:
                return self.byte_level.bytes_of(i)
            if processor.IsByte(i):  # <0x41>
                return bytes([int(piece[3:5], 16)])
            if first or processor.IsUnknown(i) or processor.IsControl(i):
                return self.decode([i]).encode()  # at the beginning without a space
            return piece.replace("▁", " ").encode()

        return [convert(i) for i in range(size)]

    def contents(self) -> bytes:
        return self.processor.serialized_model_proto()


_REMEDY = "name another file (--vocabulary, vocabulary.path)"


def _until(ids: Iterable[int], eos: int) -> list[int]:
    """Returns the ids before the first EOS, as Python integers."""
    values = [int(i) for i in ids]
    return values[: values.index(eos)] if eos in values else values


@functools.lru_cache(maxsize=8)
def _load_processor(path: pathlib.Path, data: bytes, extra_ids: int) -> SentencePieceProcessor:
    """Returns the processor of a model file with sentinels, ``<extra_id_0>`` last, after its pieces."""
    import sentencepiece
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    messages: ModuleType = sentencepiece_model_pb2
    processor = sentencepiece.SentencePieceProcessor()
    try:
        model = messages.ModelProto.FromString(data)
        if extra_ids and any("<extra_id_0>" in x.piece for x in model.pieces):
            raise ValueError(f"{path} has sentinels; set vocabulary.extra_ids=0, or --extra-ids 0")
        for i in reversed(range(extra_ids)):
            kind = model.SentencePiece.USER_DEFINED
            model.pieces.add(piece=f"▁<extra_id_{i}>", score=0.0, type=kind)
        processor.LoadFromSerializedProto(model.SerializeToString())
    except (DecodeError, RuntimeError) as error:
        raise ValueError(
            f"{path} is damaged or no SentencePiece model ({error}); restore it, or {_REMEDY}"
        ) from error
    return processor


def train_sentencepiece(
    texts: Iterable[str], path: pathlib.Path, *, vocab_size: int, model_type: str = "unigram"
) -> None:
    """Trains a SentencePiece model with T5's special ids and writes it atomically.

    Args:
      texts: sentences.
      path: the file to write; an existing one is replaced when the new one is complete.
      vocab_size: number of pieces, including special ones.
      model_type: ``unigram`` (T5) or ``bpe``.

    Raises:
      ValueError: there is not enough text for that many pieces.
    """
    import sentencepiece

    with open_atomic(path) as file:
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(texts),
                model_writer=file,
                vocab_size=vocab_size,
                model_type=model_type,
                pad_id=PAD,
                eos_id=EOS,
                unk_id=UNKNOWN,
                bos_id=-1,
                character_coverage=1.0,
                num_threads=1,  # the result does not depend on the machine
                minloglevel=2,
                max_sentence_length=2**30,  # in bytes; longer texts would be left out
            )
        except RuntimeError as error:
            raise ValueError(f"vocab_size={vocab_size} cannot be trained: {error}") from None


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
        first = indices.setdefault((*ids, vocabulary.eos_id), index)
        if first != index:
            cut = "" if length is None else f" in {length} tokens"
            raise ValueError(
                f"{owner} has {words[first]!r} and {word!r}, which are the same to the vocabulary{cut}; "
                "take other label words, longer targets, or a vocabulary that knows them"
            )
    return indices


class Classes:
    """The classes of an encoder, by their label words, which are in the order of its outputs.

    Raises:
      ValueError: see `index_by_tokens`.
    """

    def __init__(self, words: Sequence[str], vocabulary: Vocabulary):
        self.words, self._vocabulary = tuple(words), vocabulary
        self._indices = index_by_tokens(words, vocabulary, owner="data.classes")

    def index(self, target: np.ndarray, *, owner: str) -> int:
        """Returns the class of a target, token ids with EOS; `owner` is what has it, for the error.

        Raises:
          ValueError: it is none of the classes, such as that of an example whose label is hidden.
        """
        index = self._indices.get(tuple(target.tolist()))
        if index is None:
            text = self._vocabulary.decode(target.tolist())
            raise ValueError(
                f"{owner} has the target {text!r}, which is none of data.classes "
                f"({', '.join(self.words)}); add it, or choose a data.split whose labels are known"
            )
        return index

    def columns(self, words: Sequence[str]) -> list[int]:
        """Returns the classes of label words; raises a `ValueError` if one of them is no class."""
        unknown = [word for word in words if word not in self.words]
        if unknown:
            raise ValueError(
                f"the label word {unknown[0]!r} is none of data.classes ({', '.join(self.words)}); "
                "evaluate other tasks with --task"
            )
        return [self.words.index(word) for word in words]
