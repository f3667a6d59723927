"""Reads the tokenizer of a folder as a vocabulary of this package."""

from __future__ import annotations

import base64
import json
import math
import operator
import pathlib
import re
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeVar

from synthesizer_jax.base.files import describing, storage_path
from synthesizer_jax.base.ids import T5_IDS, SpecialIds
from synthesizer_jax.base.registry import format_value, replace
from synthesizer_jax.data.vocabularies import BPE_OF_BYTES, EXTRA_IDS, Bytes, SentencePiece
from synthesizer_jax.pretrained.huggingface.config import read_json

_Path = TypeVar("_Path", bound=pathlib.PurePath)

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
VOCABULARY = "vocab.json"
MERGES = "merges.txt"
ADDED = "added_tokens.json"
GEMMA = "tokenizer.model"
"""The name of Gemma's SentencePiece file."""
SENTENCEPIECE = ("spiece.model", "sentencepiece.model", GEMMA)
"""The names that a SentencePiece file may have in a folder."""
TEXT_ENCODER = "text_encoder"
"""The name of a text encoder's folder in pipelines of diffusers. It may end in a number."""

BYTES = "bytes"
"""The name of the vocabulary of bytes, which needs no file."""

BYTES_EXTRA_IDS = 125
"""The number of sentinels in ByT5's vocabulary."""


MOST_ADDED = 2**16
"""The largest number of tokens that a tokenizer may add to its pieces.

A file that names more added tokens than this is damaged.
"""


CLASSES = ("T5Tokenizer", "MT5Tokenizer", "ByT5Tokenizer", "GemmaTokenizer", "RobertaTokenizer")
"""The tokenizer classes of transformers that can be read.

Up to version 4 of transformers, the name of a tokenizer class may end in ``Fast``.
"""

ANY_CLASS = ("PreTrainedTokenizer", "TokenizersBackend")
"""General tokenizer classes of transformers 4 and 5, whose names do not tell the tokenizer.

If a folder names one of these classes, other files of the folder show which tokenizer the folder
contains.
"""

_REMEDY = "Put the model's spiece.model beside it, or give one with --vocabulary."
"""Tells users in error messages what to do if a tokenizer cannot be read."""

_DO_WITHOUT = (
    "If your texts do not need this token, run 'synthesizer-jax convert' with --vocabulary and the "
    "path of a SentencePiece file."
)
"""Tells users in error messages what to do if tokens were added to a tokenizer.

The message does not suggest to put a SentencePiece file without the added tokens into the folder,
because such a file would only hide the tokens.
"""

_OTHER_MODEL = "Give a model whose tokenizer does so."
"""Tells users in error messages what to do if a tokenizer puts other tokens around a text."""


def read_vocabulary(
    folder: pathlib.Path,
    scratch: pathlib.Path,
    *,
    ids: SpecialIds = T5_IDS,
    rows: int = MOST_ADDED**2,
) -> Bytes | SentencePiece | None:
    """Returns the configuration of a folder's vocabulary, or `None` if no supported file is found.

    In pipelines of diffusers, the tokenizer is in a folder beside the folder of the model, such as
    ``tokenizer_2`` beside ``text_encoder_2``.

    Args:
      folder: the folder of the model.
      scratch: a directory in which the function may write a SentencePiece file that is made from a
        ``tokenizer.json``.
      ids: the ids of the model.
      rows: the number of rows in the model's embedding.

    Raises:
      ValueError: if the class of the tokenizer is not supported, if the tokenizer adds unsupported
        tokens before or after a text, or if tokens were added to the tokenizer.
    """
    path = folder / TOKENIZER_CONFIG
    fields = read_json(path) if path.is_file() else {}
    _check_class(path, fields)
    extra_ids = fields.get("extra_ids")
    if not isinstance(extra_ids, int) or not 0 <= extra_ids < MOST_ADDED:
        extra_ids = None
    if fields.get("tokenizer_class") == "ByT5Tokenizer":
        vocabulary = named_vocabulary(BYTES, extra_ids)
        _refuse_added(folder, fields, vocabulary.vocab_size)
        return vocabulary
    for name in SENTENCEPIECE:
        if (folder / name).is_file():
            return _read_sentencepiece(folder, name, fields, extra_ids=extra_ids, rows=rows)
    for name, other in ((TOKENIZER, TOKENIZER), (VOCABULARY, MERGES)):
        if (folder / name).is_file() and (folder / other).is_file():
            file = scratch / SENTENCEPIECE[0]
            file.write_bytes(sentencepiece_model(folder / name, ids))
            vocabulary = named_vocabulary(str(file), 0)
            _check_bos(path, fields, isinstance(vocabulary, SentencePiece) and vocabulary.bos)
            return vocabulary

    beside = tokenizer_folder(folder)
    if beside == folder:
        return None
    return read_vocabulary(beside, scratch, ids=ids, rows=rows)


def _read_sentencepiece(
    folder: pathlib.Path,
    name: str,
    fields: Mapping[str, Any],
    *,
    extra_ids: int | None,
    rows: int,
) -> Bytes | SentencePiece:
    """Returns the configuration of the vocabulary in a folder with a SentencePiece file.

    Args:
      folder: the folder of the tokenizer.
      name: the name of the SentencePiece file.
      fields: the content of ``tokenizer_config.json``.
      extra_ids: the number of sentinels in `fields`, or `None` if `fields` does not contain this
        number.
      rows: the number of rows in the model's embedding.

    Raises:
      ValueError: if tokens were added to the tokenizer, or if the tokenizer adds unsupported tokens
        before or after a text.
    """
    vocabulary = named_vocabulary(str(folder / name), extra_ids)
    if extra_ids is None and vocabulary.build().vocab_size > rows:
        # The embedding has no rows for sentinels, as in MADLAD.
        vocabulary = replace(vocabulary, extra_ids=0)
    _refuse_added(folder, fields, vocabulary.build().vocab_size)

    bos = isinstance(vocabulary, SentencePiece) and vocabulary.bos
    _check_bos(folder / TOKENIZER_CONFIG, fields, bos)
    # If a folder contains both a SentencePiece file and a `tokenizer.json`, transformers reads the
    # `tokenizer.json`.
    if (folder / TOKENIZER).is_file():
        _check_template(folder / TOKENIZER, read_json(folder / TOKENIZER), bos=bos)
    return vocabulary


def _check_class(path: pathlib.Path, fields: Mapping[str, Any]) -> None:
    """Raises a `ValueError` if ``tokenizer_config.json`` names a class that is not supported."""
    name = fields.get("tokenizer_class")
    if name is not None and str(name).removesuffix("Fast") not in (*CLASSES, *ANY_CLASS):
        raise ValueError(
            f"The tokenizer_class in {path} is {format_value(name)}, but only the classes "
            f"{', '.join(CLASSES)} can be read. If the model was trained with the SentencePiece "
            "file of T5 or Gemma, run 'synthesizer-jax convert' with --vocabulary and the path of "
            "this file."
        )


def _check_bos(path: pathlib.Path, fields: Mapping[str, Any], bos: bool) -> None:
    """Raises a `ValueError` if ``tokenizer_config.json`` adds unsupported tokens around a text.

    In this package, a byte-level BPE puts BOS before a text and EOS after it. All other
    vocabularies add only one of the two tokens. The tokenizers of T5 and RoBERTa ignore the
    settings for BOS and EOS, so this function does not check the settings of these tokenizers.
    """
    name = str(fields.get("tokenizer_class")).removesuffix("Fast")
    if name in CLASSES and name != "GemmaTokenizer":
        return
    for field, expected in (("add_bos_token", bos), ("add_eos_token", not bos)):
        if fields.get(field) not in (None, expected):
            raise ValueError(
                f"{field} in {path} is {format_value(fields[field])}, but a model of this package "
                f"reads texts with {'BOS and no EOS' if bos else 'EOS and no BOS'}. {_OTHER_MODEL}"
            )


def _check_template(path: pathlib.Path, data: Mapping[str, Any], *, bos: bool) -> None:
    """Raises a `ValueError` if a ``tokenizer.json`` adds unsupported tokens around a text.

    A vocabulary of this package either puts BOS before a text, or EOS after it.
    """
    with describing(path, _OTHER_MODEL):
        processor = data.get("post_processor") or {}
        if processor.get("type") != "TemplateProcessing":
            return
        found = [next(iter(step)) for step in processor["single"]]
        if bos and found != ["SpecialToken", "Sequence"]:
            raise ValueError("its post_processor must put only BOS before a text")
        if not bos and found != ["Sequence", "SpecialToken"]:
            raise ValueError("its post_processor must put only EOS after a text")


def _refuse_added(folder: pathlib.Path, fields: Mapping[str, Any], size: int) -> None:
    """Raises a `ValueError` if tokens were added to a vocabulary of `size` ids.

    Version 4 of transformers writes added tokens to ``tokenizer_config.json`` and to
    ``added_tokens.json``. The argument `fields` is the content of ``tokenizer_config.json``.
    Version 5 writes added tokens only to ``tokenizer.json``.
    """
    with describing(folder, _REMEDY):
        decoder = fields.get("added_tokens_decoder") or {}
        added = {int(i): str(token["content"]) for i, token in decoder.items()}
        if (folder / ADDED).is_file():
            for token, i in read_json(folder / ADDED).items():
                added[i] = str(token)
        if (folder / TOKENIZER).is_file():
            added.update(_added_tokens(read_json(folder / TOKENIZER)))
    with describing(folder, _DO_WITHOUT):
        _refuse_others(added, size)


def _added_tokens(data: Mapping[str, Any]) -> dict[int, str]:
    """Returns the tokens that a ``tokenizer.json`` adds to the pieces of its model, by id."""
    tokens = data.get("added_tokens") or ()
    return {operator.index(token["id"]): str(token["content"]) for token in tokens}


def tokenizer_folder(folder: _Path) -> _Path:
    """Returns the folder that holds the tokenizer of a model in a pipeline of diffusers.

    For example, the result for ``text_encoder_2`` is ``tokenizer_2`` in the same pipeline. If the
    folder does not have the name of a text encoder, the result is the folder itself.
    """
    if not folder.name.startswith(TEXT_ENCODER):
        return folder
    return folder.with_name(folder.name.replace(TEXT_ENCODER, "tokenizer"))


def named_vocabulary(name: str, extra_ids: int | None = None) -> Bytes | SentencePiece:
    """Returns the configuration of a vocabulary, given its file or the word ``bytes``.

    Inputs begin with BOS in the vocabularies of Gemma and CodeT5.

    Args:
      name: the path of a SentencePiece file, or ``bytes``.
      extra_ids: the number of sentinels to add after the pieces of the file. By default (`None`),
        the number depends on the vocabulary. For bytes, the number is 125, as in ByT5. If a file
        already contains sentinels, as mT5's file does, or if it has no room for sentinels, like
        Gemma's file, no sentinels are added. For all other files, the number is 100, as in T5.
    """
    if name == BYTES:
        return Bytes(BYTES_EXTRA_IDS if extra_ids is None else extra_ids)
    path = storage_path(name).expanduser()
    data = path.read_bytes() if path.is_file() else b""
    bos = _has_bos(data)
    if extra_ids is None:
        extra_ids = 0 if bos or b"<extra_id_0>" in data else EXTRA_IDS
    return SentencePiece(name, extra_ids, bos)


def _has_bos(model: bytes) -> bool:
    """Returns whether inputs begin with BOS, given the contents of a SentencePiece model.

    Inputs begin with BOS for Gemma's SentencePiece model, and for a SentencePiece model that was
    made from CodeT5's files.
    """
    return b"<bos>" in model or BPE_OF_BYTES.encode() in model


def sentencepiece_model(path: pathlib.Path, ids: SpecialIds = T5_IDS) -> bytes:
    """Converts the tokenizer files of a folder to a SentencePiece model with sentinels.

    Args:
      path: a ``tokenizer.json``, or a ``vocab.json`` that has ``merges.txt`` beside it and may have
        ``added_tokens.json``.
      ids: the special ids of the model. The tokenizer must have the same special ids.

    Raises:
      ValueError: if the tokenizer is not supported.
    """
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    messages: ModuleType = sentencepiece_model_pb2
    data = read_json(path)
    with describing(path, _REMEDY):
        if path.name == VOCABULARY:
            data = _join_files(data, path.parent)
        added = _added_tokens(data)
        size = len(data["model"]["vocab"])
    with describing(path, _DO_WITHOUT):
        _refuse_others(added, size)
    with describing(path, _REMEDY):
        model = _to_sentencepiece(data, messages, ids)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        if (processor.pad_id(), processor.eos_id()) != (ids.padding, ids.end):
            raise ValueError("its ids of padding and EOS differ from those of the model")
    if BPE_OF_BYTES.encode() not in model:
        # A byte-level BPE is not checked, because it has RoBERTa's post-processor instead of a
        # template.
        _check_template(path, data, bos=_has_bos(model))
    return model


def _join_files(vocab: dict[str, Any], folder: pathlib.Path) -> dict[str, Any]:
    """Converts tokenizer files in RoBERTa's older format to the content of a ``tokenizer.json``."""
    lines = (folder / MERGES).read_text(encoding="utf-8").splitlines()
    merges = [line for line in lines if line and not line.startswith("#version")]
    added = read_json(folder / ADDED) if (folder / ADDED).is_file() else {}
    for name in ("<pad>", "<s>", "</s>", "<unk>", "<mask>"):
        added[name] = vocab[name]

    added_tokens = [
        {
            "single_word": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
            "id": i,
            "content": name,
            "lstrip": name.startswith("<extra_id_"),
        }
        for name, i in added.items()
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
        "added_tokens": added_tokens,
        "pre_tokenizer": byte_level,
        "post_processor": {
            **byte_level,
            "type": "RobertaProcessing",
            "sep": ["</s>", vocab["</s>"]],
            "cls": ["<s>", vocab["<s>"]],
        },
        "decoder": byte_level,
    }


class _Pieces(NamedTuple):
    """The pieces of a tokenizer.

    Attributes:
      kind: the algorithm: ``unigram`` in T5, ``bpe`` in Gemma, or ``byte-level`` in CodeT5. ``bpe``
        is a BPE that represents a character without a piece by the bytes of the character.
        ``byte-level`` is a BPE whose symbols are bytes.
      scored: the pieces with their scores, in the order of the pieces' ids.
      unknown: the id of the piece for unknown characters.
      start: the id of BOS. Tokenizers of the kind ``unigram`` do not use BOS.
    """

    kind: Literal["unigram", "bpe", "byte-level"]
    scored: list[tuple[str, float]]
    unknown: int
    start: int


def _read_pieces(
    model: dict[str, Any], steps: list[dict[str, Any]], special: SpecialIds
) -> _Pieces:
    """Returns the pieces in a ``tokenizer.json``.

    Args:
      model: the entry ``model`` of the file.
      steps: the steps of the normalizer and the pre-tokenizer.
      special: the ids of the model.

    Raises:
      ValueError: if the kind of the tokenizer is not supported.
    """
    if model["type"] == "BPE" and [step["type"] for step in steps] == ["ByteLevel"]:
        vocab = model["vocab"]
        return _Pieces("byte-level", _scored(model), vocab["<unk>"], vocab["<s>"])
    if model["type"] == "BPE" and model.get("byte_fallback"):
        unknown = model["vocab"][model["unk_token"]]
        return _Pieces("bpe", _scored(model), unknown, special.start)
    if model["type"] == "Unigram":
        scored = [(str(piece), float(score)) for piece, score in model["vocab"]]
        return _Pieces("unigram", scored, operator.index(model["unk_id"]), special.start)
    raise ValueError("it is not a tokenizer like those of T5, Gemma or CodeT5")


def _to_sentencepiece(data: dict[str, Any], messages: ModuleType, special: SpecialIds) -> bytes:
    """Returns the SentencePiece model for the content of a ``tokenizer.json``.

    If the content is invalid, the function raises errors of various types, which the caller
    catches.

    Args:
      data: the content of the file.
      messages: the Python module of SentencePiece's protocol buffers.
      special: the ids of the model.
    """
    steps = [*_steps(data.get("normalizer")), *_steps(data.get("pre_tokenizer"))]
    pieces = _read_pieces(data["model"], steps, special)
    proto = messages.ModelProto()
    _add_pieces(proto, pieces, data, messages, special)
    _describe_training(proto.trainer_spec, pieces, messages, special)
    proto.trainer_spec.vocab_size = len(proto.pieces)
    if pieces.kind == "byte-level":
        # Store the original JSON, so that `tokenizer_json` can return it when the model is
        # exported.
        proto.trainer_spec.input.append(json.dumps(data))
    _describe_normalizer(proto.normalizer_spec, pieces, steps)
    serialized: bytes = proto.SerializeToString()
    return serialized


def _add_pieces(
    proto: Any, pieces: _Pieces, data: dict[str, Any], messages: ModuleType, special: SpecialIds
) -> None:
    """Adds the pieces and the added tokens of a ``tokenizer.json`` to a SentencePiece model.

    If the text of a user-defined piece occurs in an input, it is encoded as this piece. The text of
    a control piece is never encoded as the control piece.
    """
    kinds = messages.ModelProto.SentencePiece
    added = _added_tokens(data)
    # Find out whether a sentinel includes the space before it. SentencePiece's own sentinels always
    # include the space. The character ``▁`` of a piece stands for a space.
    with_space = pieces.kind != "byte-level" or all(
        token.get("lstrip", True)
        for token in data.get("added_tokens") or ()
        if token["content"] == "<extra_id_0>"
    )
    # In a BPE with byte fallback, added tokens are control pieces only if their ids are at most
    # `last_control`.
    last_control = max(special.padding, special.end, special.start, pieces.unknown)

    for i, (piece, score) in enumerate(_with_added(pieces.scored, added)):
        kind = kinds.NORMAL
        if i == pieces.unknown:
            kind = kinds.UNKNOWN
        elif piece.removeprefix("▁").startswith("<extra_id_"):
            kind = kinds.USER_DEFINED
            piece = piece.removeprefix("▁")
            if with_space:
                piece = f"▁{piece}"
        elif i in added and pieces.kind == "bpe" and i > last_control:
            kind = kinds.USER_DEFINED
        elif i in added:
            kind = kinds.CONTROL
        elif pieces.kind == "bpe" and _BYTE.fullmatch(piece):
            kind = kinds.BYTE
        elif score == -math.inf:
            kind = kinds.UNUSED
            score = -1e9
        proto.pieces.add(piece=piece, score=score, type=kind)


def _describe_training(
    spec: Any, pieces: _Pieces, messages: ModuleType, special: SpecialIds
) -> None:
    """Sets the algorithm and the special ids in the specification of a SentencePiece model."""
    names = [piece for piece, _ in pieces.scored]
    spec.pad_id = special.padding
    spec.pad_piece = names[special.padding]
    spec.eos_id = special.end
    spec.eos_piece = names[special.end]
    spec.unk_id = pieces.unknown
    spec.unk_piece = names[pieces.unknown]
    if pieces.kind == "unigram":
        spec.model_type = messages.TrainerSpec.UNIGRAM
        spec.bos_id = -1  # T5 has no BOS
    else:
        spec.model_type = messages.TrainerSpec.BPE
        spec.bos_id = pieces.start
        spec.bos_piece = names[pieces.start]
    spec.byte_fallback = pieces.kind == "bpe"


def _describe_normalizer(spec: Any, pieces: _Pieces, steps: list[dict[str, Any]]) -> None:
    """Sets how a SentencePiece model normalizes texts before dividing the texts into pieces.

    The function changes `spec` in place. The argument `steps` contains the steps of the normalizer
    and the pre-tokenizer.
    """
    if pieces.kind != "unigram":
        # BPE tokenizers do not put a space before a text, and do not remove spaces. A byte-level
        # BPE replaces every byte, including spaces, by a character, so spaces are not escaped.
        spec.add_dummy_prefix = False
        spec.remove_extra_whitespaces = False
        spec.escape_whitespaces = pieces.kind != "byte-level"

    # If the tokenizer has a table for normalizing characters, use this table.
    tables = (step["precompiled_charsmap"] for step in steps if step["type"] == "Precompiled")
    spec.precompiled_charsmap = base64.b64decode(next(tables, ""), validate=True)
    if pieces.kind == "byte-level":
        spec.name = BPE_OF_BYTES
    elif spec.precompiled_charsmap:
        spec.name = "nmt_nfkc"
    else:
        spec.name = "identity"


_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""Matches the pieces that stand for single bytes."""


def _scored(model: dict[str, Any]) -> list[tuple[str, float]]:
    """Returns the pieces of a BPE with scores.

    SentencePiece merges the pair whose piece has the highest score first, so the scores are the
    negative ranks of the merges. A piece that no merge produces has the score −∞, unless it is a
    single character.
    """
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(model["merges"]):
        # A merge is a string "first second" in old files, and a list ["first", "second"] in new
        # files.
        first, second = merge.split(" ") if isinstance(merge, str) else merge
        ranks.setdefault(first + second, rank)

    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    if sorted(model["vocab"].values()) != list(range(len(pieces))):
        raise ValueError("the ids of its pieces are not consecutive numbers from 0")

    def score(piece: str) -> float:
        """Returns the score of a piece."""
        if piece in ranks:
            return -float(ranks[piece])
        return 0.0 if len(piece) == 1 else -math.inf

    return [(piece, score(piece)) for piece in pieces]


def _steps(component: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yields the steps of a normalizer or pre-tokenizer.

    Raises:
      ValueError: if a step, or a setting of a step, is not supported.
    """
    if component is None:
        return
    kind = component["type"]
    if kind == "Sequence":
        for step in component.get("normalizers") or component["pretokenizers"]:
            yield from _steps(step)
        return
    is_supported = kind in _STEPS
    if kind != "Metaspace":
        # If a step has one of these settings, the setting must have the value in this dictionary,
        # or be a space.
        for name, value in {"content": "▁", "add_prefix_space": False, "use_regex": True}.items():
            if component.get(name, value) not in (value, " "):
                is_supported = False
    if not is_supported:
        raise ValueError(f"its step {kind}, or a setting of this step, is not supported")
    yield component


_STEPS = ("Precompiled", "Strip", "Replace", "WhitespaceSplit", "Metaspace", "Split", "ByteLevel")
"""The supported steps of tokenizers.

The supported steps occur in the tokenizers of T5, Gemma and CodeT5. T5's tokenizers were made from
SentencePiece models.
"""


def _refuse_others(added: Mapping[int, str], size: int) -> None:
    """Raises a `ValueError` if tokens that are not sentinels were added to `size` pieces."""
    for i, name in added.items():
        if i >= size and not name.startswith("<extra_id_"):
            raise ValueError(f"it adds the token {name!r} to its pieces, which is not supported")


def _with_added(
    pieces: list[tuple[str, float]], added: Mapping[int, str]
) -> list[tuple[str, float]]:
    """Returns the pieces, followed by the sentinels that were added to the pieces.

    An id that has neither a piece nor an added token gets an unused piece.
    """
    count = max(len(pieces), max(added, default=-1) + 1)
    if count > len(pieces) + MOST_ADDED:
        raise ValueError(f"it has {count} ids, but only {len(pieces)} pieces")
    more = [(added.get(i, f"<unused_{i}>"), 0.0) for i in range(len(pieces), count)]
    return pieces + more


def tokenizer_json(vocabulary: SentencePiece) -> str:
    """Returns the ``tokenizer.json`` from which the vocabulary of a byte-level BPE was made."""
    from sentencepiece import sentencepiece_model_pb2

    messages: ModuleType = sentencepiece_model_pb2
    source: str = messages.ModelProto.FromString(vocabulary.contents()).trainer_spec.input[0]
    return source
