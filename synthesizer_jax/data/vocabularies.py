"""Vocabularies, which convert between text and token ids, and the classes of encoders.

A vocabulary consists of bytes, or is read from a SentencePiece file or from a ``tokenizer.json``
(see `tokenizer_json.Tokenizer`). A vocabulary is also a configuration, so it can be saved as JSON.
Vocabularies encode and decode like SeqIO's, but need neither SeqIO nor TensorFlow.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar, Self

from synthesizer_jax.base.files import absolute, open_atomic, storage_path
from synthesizer_jax.base.ids import SpecialIds
from synthesizer_jax.base.messages import end_sentence
from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import Number

if TYPE_CHECKING:
    import numpy as np
    from sentencepiece import SentencePieceProcessor

    from synthesizer_jax.data.tokenizer_backend import Backend

EXTRA_IDS = 100
"""The number of T5's sentinels.

The sentinels are ``<extra_id_0>`` to ``<extra_id_99>``. All sentinels are at the end of the
vocabulary.
"""

BPE_OF_BYTES = "BPE of bytes"
"""The name of the normalizer in a SentencePiece file that an earlier version made for CodeT5.

Such a file contains CodeT5's ``tokenizer.json``, which is used to encode and decode. No piece
contains the name of this normalizer, because pieces are written with ``▁`` instead of a space.
"""

PAD, EOS, UNKNOWN = 0, 1, 2
"""T5's ids for padding, for the end of a text, and for unknown text."""

LONGEST_TARGET = 1024
"""The maximum number of tokens of a target, including EOS, that are compared with the classes."""


def utf8(text: str) -> bytes:
    """Returns a text as UTF-8.

    Raises:
      ValueError: if the text has a lone surrogate, which is half of a character. Broken escapes in
        JSON produce lone surrogates.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"The text {text[:40]!r} has a lone surrogate, {text[error.start]!r} at index "
            f"{error.start}, which is not a character. Replace it, for example with "
            "text.encode('utf-8', 'replace').decode()."
        ) from error


class Vocabulary(abc.ABC):
    """Converts between text and token ids (Raffel et al. 2020, section 2.1).

    Attributes:
      unk_id: the id for text that no piece of the vocabulary covers.
      eos_id: the id of the end of a text (EOS).
    """

    unk_id: int = UNKNOWN
    eos_id: int = EOS

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """The number of token ids, including sentinels."""

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without EOS."""

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of the ids before the first EOS.

        Ids outside the vocabulary are decoded as unknown text.
        """

    def token_bytes(self, size: int, *, first: bool) -> list[bytes]:
        """Returns the bytes that each token id adds to the decoded text.

        Args:
          size: the number of token ids. The ids are 0 to ``size - 1``.
          first: whether the id is the first token of the text. Most SentencePiece vocabularies drop
            the space before a first token.

        Returns:
          One string of bytes for each of the ids below `size`.
        """
        return [self.decode([i]).encode() for i in range(size)]

    @abc.abstractmethod
    def contents(self) -> bytes:
        """Returns bytes that identify how the vocabulary encodes and decodes texts."""

    def is_text(self, id: int) -> bool:
        """Returns whether a token of a text can have this id."""
        return id > EOS

    def check_ids(self, ids: SpecialIds, source: pathlib.Path | None = None) -> None:
        """Raises a `ValueError` if the special ids of a model do not fit this vocabulary.

        The model and the vocabulary must have the same EOS id. The model's padding id must not
        stand for text.

        Args:
          ids: the special ids of the model.
          source: the folder from which the ids of the model were read, for the error message. None
            means that the ids are settings of a recipe or of a run.
        """
        place = "" if source is None else f" in {source}"
        if ids.end != self.eos_id:
            raise ValueError(
                f"The vocabulary has the EOS id {self.eos_id}, but model.ids.end is "
                f"{ids.end}{place}. Set model.ids.end, or use the model's own vocabulary."
            )
        if self.is_text(ids.padding):
            raise ValueError(
                f"model.ids.padding is {ids.padding}{place}, which stands for text in the "
                "vocabulary. Set it to the id of a control symbol, or use the model's own "
                "vocabulary."
            )

    @property
    def around_inputs(self) -> tuple[list[int], list[int]]:
        """The ids to put before and after the ids of an input.

        By default, EOS comes after the ids of an input.
        """
        return [], [self.eos_id]

    @property
    def first_sentinel(self) -> int:
        """The id of the first sentinel, ``<extra_id_0>``. The next sentinels have the ids below it.

        In T5's vocabulary, the first sentinel has the last id.
        """
        return self.vocab_size - 1

    @property
    def backend(self) -> Backend | None:
        """The tokenizer of the library ``tokenizers``, or `None` if the library is not used."""
        return None

    @property
    def digest(self) -> str:
        """A digest of the vocabulary's contents, as 16 hexadecimal digits.

        The digits do not depend on the path of the file.
        """
        return hashlib.sha256(self.contents()).hexdigest()[:16]

    def build(self) -> Self:
        """Returns the vocabulary, after reading its file if it has one."""
        return self


@register
@dataclasses.dataclass(frozen=True)
class Bytes(Vocabulary):
    """A vocabulary of UTF-8 bytes, as in ByT5, which needs no file.

    Padding has the id 0, EOS has the id 1, and unknown text has the id 2. The next 256 ids stand
    for bytes, and the last ids are sentinels. Decoding omits sentinels and invalid UTF-8.

    Attributes:
      extra_ids: the number of sentinels.
    """

    extra_ids: Number = EXTRA_IDS

    @property
    def vocab_size(self) -> int:
        return _FIRST_BYTE + 256 + self.extra_ids

    def encode(self, text: str) -> list[int]:
        """Returns the bytes of a text, each increased by 3.

        Raises:
          ValueError: see `utf8`.
        """
        return [_FIRST_BYTE + byte for byte in utf8(text)]

    def decode(self, ids: Iterable[int]) -> str:
        byte_values = (i - _FIRST_BYTE for i in until(ids, self.eos_id))
        return bytes(byte for byte in byte_values if 0 <= byte < 256).decode("utf-8", "ignore")

    def token_bytes(self, size: int, *, first: bool) -> list[bytes]:
        return [
            bytes([i - _FIRST_BYTE]) if 0 <= i - _FIRST_BYTE < 256 else b"" for i in range(size)
        ]

    def contents(self) -> bytes:
        return f"ByteVocabulary(extra_ids={self.extra_ids})".encode()


_FIRST_BYTE = 3
"""The id of byte 0."""


class FileVocabulary(Vocabulary):
    """A vocabulary that is read from one or more files.

    Attributes:
      path: the path of the first file, on a disk or in a bucket (``gs://…``).
      saved_names: the names that the files have in the directory of a run. Only the first file must
        exist.
    """

    path: str
    saved_names: ClassVar[tuple[str, ...]]

    @property
    def file(self) -> pathlib.Path:
        """The absolute path of the first file."""
        return absolute(storage_path(self.path).expanduser())

    def find_file(self, kind: str, remedy: str) -> pathlib.Path:
        """Returns the path of the first file, which exists.

        Args:
          kind: a description of the file, for the error message.
          remedy: a sentence that says what the user can do if nothing exists at the path.

        Raises:
          FileNotFoundError: if the file does not exist, or if its path is the path of a folder.
        """
        path = self.file
        if path.is_dir():
            raise FileNotFoundError(
                f"{self.path} is a folder. Give a file in it as --vocabulary or vocabulary.path, "
                "such as its spiece.model or tokenizer.json."
            )
        if not path.is_file():
            raise FileNotFoundError(f"There is no {kind} {self.path}. {remedy}")
        return path

    @abc.abstractmethod
    def files(self) -> dict[str, bytes]:
        """Returns the contents of the files that exist, by their `saved_names`."""


@register
@dataclasses.dataclass(frozen=True)
class SentencePiece(FileVocabulary):
    """A vocabulary in a SentencePiece model file, such as T5's ``spiece.model``.

    The file is read when the vocabulary is used for the first time, or by `build`. In T5's file,
    padding has the id 0, EOS has the id 1, and unknown text has the id 2.

    Attributes:
      path: the path of the file, on a disk or in a bucket (``gs://…``).
      extra_ids: the number of sentinels to add after the pieces of the file. Use 100 for T5's file
        of 32,000 pieces, and 0 for a file that contains its sentinels.
      bos: whether inputs begin with the file's BOS, as in Gemma. If `bos` is set, inputs do not end
        with EOS, unless the file is a byte-level BPE.
    """

    path: str
    extra_ids: Number = EXTRA_IDS
    bos: bool = False
    saved_names = ("vocabulary.model",)

    @functools.cached_property
    def processor(self) -> SentencePieceProcessor:
        """The `SentencePieceProcessor`, including the sentinels.

        Raises:
          FileNotFoundError: if the file does not exist.
          ValueError: if the file is not a SentencePiece model, or has no EOS, or has no BOS
            although `bos` is set.
        """
        path = self.find_file("SentencePiece model", _REMEDY)
        processor = _load_processor(path, path.read_bytes(), self.extra_ids)
        if processor.eos_id() < 0:
            raise ValueError(f"{path} has no EOS. {_REMEDY}")
        if self.bos and processor.bos_id() < 0:
            raise ValueError(f"{path} has no BOS. Set vocabulary.bos=false.")
        return processor

    def files(self) -> dict[str, bytes]:
        return {self.saved_names[0]: self.file.read_bytes()}

    def build(self) -> Self:
        """Reads the file (see `processor`), and returns the vocabulary."""
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
        """The ids to put before and after the ids of an input."""
        if not self.bos:
            return super().around_inputs
        return [self.processor.bos_id()], [self.eos_id] if self.backend else []

    @functools.cached_property
    def backend(self) -> Backend | None:
        """The tokenizer of a file that an earlier version made for CodeT5; see `BPE_OF_BYTES`."""
        contents = self.contents()
        if BPE_OF_BYTES.encode() not in contents:
            return None
        from sentencepiece import sentencepiece_model_pb2

        from synthesizer_jax.data.tokenizer_backend import TOKENIZER, Backend

        messages: ModuleType = sentencepiece_model_pb2
        source = messages.ModelProto.FromString(contents).trainer_spec.input[0]
        return Backend(self.file, {TOKENIZER: source.encode()})

    @property
    def digest(self) -> str:
        """A digest of the vocabulary's contents, as 16 hexadecimal digits.

        The digits do not depend on the path of the file. If `bos` is set, ``b`` is appended.
        """
        return super().digest + ("b" if self.bos else "")

    @property
    def vocab_size(self) -> int:
        return self.processor.GetPieceSize()

    def is_text(self, id: int) -> bool:
        return not (self.processor.IsControl(id) or self.processor.IsUnused(id))

    def encode(self, text: str) -> list[int]:
        """Returns the ids of the pieces of a text, without EOS.

        A sentinel in the text is recognized only at the beginning of a word.

        Raises:
          ValueError: see `utf8`.
        """
        utf8(text)
        if self.backend:
            return self.backend.encode(text)
        return self.processor.EncodeAsIds(text)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of the pieces before the first EOS. Unknown pieces become ``⁇``."""
        size, unknown = self.vocab_size, self.unk_id
        known = [unknown if i >= size else i for i in until(ids, self.eos_id)]
        if self.backend:
            return self.backend.decode(known)
        return self.processor.DecodeIds(known)

    def token_bytes(self, size: int, *, first: bool) -> list[bytes]:
        if self.backend:
            return self.backend.token_bytes(size, first=first)
        processor = self.processor

        def convert(i: int) -> bytes:
            """Returns the bytes that a token id stands for."""
            if i >= self.vocab_size:
                i = self.unk_id
            piece = processor.IdToPiece(i)
            # The piece of a single byte is written in hexadecimal, for example `<0x41>`.
            if processor.IsByte(i):
                return bytes([int(piece[3:5], 16)])
            if first or processor.IsUnknown(i) or processor.IsControl(i):
                # Decoding a single id drops the space at the beginning.
                return self.decode([i]).encode()
            return piece.replace("▁", " ").encode()

        return [convert(i) for i in range(size)]

    def contents(self) -> bytes:
        return self.processor.serialized_model_proto()


_REMEDY = (
    "Give another file as --vocabulary or vocabulary.path, or train one with 'synthesizer-jax data "
    "vocabulary'."
)
"""The last sentence of errors about the file of a vocabulary."""


def until(ids: Iterable[int], eos: int) -> list[int]:
    """Returns the ids before the first EOS, as Python integers."""
    values = [int(i) for i in ids]
    return values[: values.index(eos)] if eos in values else values


@functools.lru_cache(maxsize=8)
def _load_processor(path: pathlib.Path, data: bytes, extra_ids: int) -> SentencePieceProcessor:
    """Returns the processor of a model file, with sentinels after the pieces of the file.

    Args:
      path: the path of the file, for messages.
      data: the contents of the file.
      extra_ids: the number of sentinels to add.

    Raises:
      ValueError: if the file is damaged, if it is not a SentencePiece model, or if sentinels are to
        be added but the file already contains sentinels.
    """
    import sentencepiece
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    messages: ModuleType = sentencepiece_model_pb2
    processor = sentencepiece.SentencePieceProcessor()
    try:
        model = messages.ModelProto.FromString(data)
        if extra_ids and any("<extra_id_0>" in x.piece for x in model.pieces):
            raise ValueError(
                f"{path} contains sentinels already. Set vocabulary.extra_ids=0, or --extra-ids 0."
            )
        # Add the sentinels in descending order, so that `<extra_id_0>` has the last id.
        for i in reversed(range(extra_ids)):
            kind = model.SentencePiece.USER_DEFINED
            model.pieces.add(piece=f"▁<extra_id_{i}>", score=0.0, type=kind)
        processor.LoadFromSerializedProto(model.SerializeToString())
    except (DecodeError, RuntimeError) as error:
        if path.suffix == ".json":
            raise ValueError(
                f"{path} is not a SentencePiece model. For a tokenizer.json, set vocabulary="
                f'{{"type": "Tokenizer", "path": "{path}"}}.'
            ) from error
        raise ValueError(
            f"{path} is damaged, or it is not a SentencePiece model ({error}). {_REMEDY}"
        ) from error
    return processor


def train_sentencepiece(
    texts: Iterable[str], path: pathlib.Path, *, vocab_size: int, model_type: str = "unigram"
) -> None:
    """Trains a SentencePiece model with T5's special ids, and writes it atomically.

    Args:
      texts: the sentences to train on.
      path: the file to write. An existing file is replaced when the new one is complete.
      vocab_size: the number of pieces, including special ones.
      model_type: ``unigram`` (T5) or ``bpe``.

    Raises:
      ValueError: if there is not enough text for this number of pieces.
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
                num_threads=1,  # the result would depend on the number of threads
                minloglevel=2,
                max_sentence_length=2**30,  # in bytes; longer texts would be ignored
            )
        except RuntimeError as error:
            raise ValueError(
                f"A vocabulary of {vocab_size} pieces cannot be trained: {end_sentence(str(error))}"
            ) from None


def index_by_tokens(
    words: Sequence[str], vocabulary: Vocabulary, *, owner: str, length: int | None = None
) -> dict[tuple[int, ...], int]:
    """Returns a dictionary that maps the token ids of every label word, with EOS, to its index.

    Args:
      words: the label words.
      vocabulary: the vocabulary that encodes them.
      owner: the name of what the words belong to, for error messages.
      length: the maximum number of tokens, including EOS. Longer words are truncated before EOS.
        `None` means that there is no limit.

    Raises:
      ValueError: if two of the words have the same token ids.
    """
    indices: dict[tuple[int, ...], int] = {}
    for index, word in enumerate(words):
        ids = vocabulary.encode(word)[: None if length is None else length - 1]
        first = indices.setdefault((*ids, vocabulary.eos_id), index)
        if first != index:
            limit = "" if length is None else f" if targets are cut at {length} tokens"
            raise ValueError(
                f"{owner} has the label words {words[first]!r} and {word!r}, which have the same "
                f"tokens{limit}. Choose other label words, longer targets, or a vocabulary that "
                "knows the words."
            )
    return indices


class Classes:
    """The classes of an encoder, which are identified by their label words.

    Args:
      words: the label words, in the order of the encoder's outputs.
      vocabulary: the vocabulary that encodes the targets.

    Raises:
      ValueError: see `index_by_tokens`.
    """

    def __init__(self, words: Sequence[str], vocabulary: Vocabulary):
        self.words, self._vocabulary = tuple(words), vocabulary
        self._indices = index_by_tokens(words, vocabulary, owner="data.classes")

    def index(self, target: np.ndarray, *, owner: str) -> int:
        """Returns the class of a target.

        Args:
          target: the token ids of the target, with EOS.
          owner: the name of the task and split of the target, for messages.

        Raises:
          ValueError: if the target is not one of the classes, for example because the label of the
            example is hidden.
        """
        index = self._indices.get(tuple(target.tolist()))
        if index is None:
            text = self._vocabulary.decode(target.tolist())
            raise ValueError(
                f"{owner} has the target {text!r}, which is none of data.classes "
                f"({', '.join(self.words)}). Add it, or choose a data.split whose labels are known."
            )
        return index

    def columns(self, words: Sequence[str]) -> list[int]:
        """Returns the classes of some label words.

        Raises:
          ValueError: if a label word is not one of the classes.
        """
        unknown = [word for word in words if word not in self.words]
        if unknown:
            raise ValueError(
                f"The label word {unknown[0]!r} is none of data.classes ({', '.join(self.words)}). "
                "Evaluate other tasks with --task."
            )
        return [self.words.index(word) for word in words]
