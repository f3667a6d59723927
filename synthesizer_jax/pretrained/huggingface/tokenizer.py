"""Reads the tokenizer of a folder as a vocabulary of this package."""

from __future__ import annotations

import base64
import json
import math
import operator
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, TypeVar

from synthesizer_jax.base.files import describing, storage_path
from synthesizer_jax.base.ids import T5_IDS, SpecialIds
from synthesizer_jax.base.registry import format_value, replace
from synthesizer_jax.data.tokenizer_backend import (
    ADDED,
    SPECIAL_TOKENS,
    TOKENIZER,
    TOKENIZER_CONFIG,
)
from synthesizer_jax.data.tokenizer_json import AnyVocabulary, Tokenizer, is_tokenizer
from synthesizer_jax.data.vocabularies import BPE_OF_BYTES, EXTRA_IDS, Bytes, SentencePiece
from synthesizer_jax.pretrained.huggingface.config import read_json

_Path = TypeVar("_Path", bound=pathlib.PurePath)

VOCABULARY = "vocab.json"
MERGES = "merges.txt"
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


CLASSES = ("T5Tokenizer", "MT5Tokenizer", "ByT5Tokenizer", "GemmaTokenizer")
"""The tokenizer classes of transformers whose SentencePiece file defines the ids of every text.

Up to version 4 of transformers, the name of a tokenizer class may end in ``Fast``.
"""

ANY_CLASS = ("PreTrainedTokenizer", "TokenizersBackend")
"""General tokenizer classes of transformers 4 and 5, which can contain any kind of tokenizer."""

_REMEDY = "Put the model's spiece.model beside it, or give one with --vocabulary."
"""Tells users in error messages what to do if a tokenizer cannot be read."""

_WRITE_TOKENIZER = (
    f"Write a {TOKENIZER} into the folder with transformers, by "
    "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)."
)
"""Tells users in error messages what to do if only a ``tokenizer.json`` defines all ids."""


def read_vocabulary(
    folder: pathlib.Path,
    scratch: pathlib.Path,
    *,
    ids: SpecialIds = T5_IDS,
    rows: int | None = None,
) -> AnyVocabulary | None:
    """Returns the configuration of a folder's vocabulary, or `None` if no supported file is found.

    A SentencePiece file is read by SentencePiece if it defines the ids of every text. Otherwise,
    the ``tokenizer.json`` is read. If it was made from a SentencePiece model like T5's, it is
    converted to a SentencePiece file. All other files are read by the library ``tokenizers``.

    In pipelines of diffusers, the tokenizer is in a folder beside the folder of the model, such as
    ``tokenizer_2`` beside ``text_encoder_2``.

    Args:
      folder: the folder of the model.
      scratch: a directory in which the function may write the files of the vocabulary. The returned
        vocabulary has read these files.
      ids: the ids of the model.
      rows: the number of rows in the model's embedding. `None` means that the vocabulary may have
        any number of ids.

    Raises:
      ModuleNotFoundError: if the library ``tokenizers`` is needed, but is not installed.
      ValueError: if the tokenizer cannot be read, or if tokens were added to a SentencePiece file
        or to bytes but the folder has no ``tokenizer.json``.
    """
    path = folder / TOKENIZER_CONFIG
    fields = read_json(path) if path.is_file() else {}
    extra_ids = fields.get("extra_ids")
    if not isinstance(extra_ids, int) or not 0 <= extra_ids < MOST_ADDED:
        extra_ids = None
    if fields.get("tokenizer_class") == "ByT5Tokenizer":
        return _read_bytes(folder, fields, extra_ids)

    obstacle = None
    for name in SENTENCEPIECE:
        if (folder / name).is_file():
            vocabulary = _read_sentencepiece(folder, name, extra_ids=extra_ids, rows=rows)
            obstacle = _obstacle(folder, fields, vocabulary)
            if obstacle is None:
                return vocabulary
            break
    if (folder / TOKENIZER).is_file():
        if obstacle is None and _is_like_t5(folder / TOKENIZER):
            file = scratch / SENTENCEPIECE[0]
            file.write_bytes(sentencepiece_model(folder / TOKENIZER, ids))
            return named_vocabulary(str(file), 0).build()
        tokenizer = Tokenizer(str(folder / TOKENIZER)).build()
        return tokenizer if rows is None else tokenizer.for_rows(rows)
    if obstacle is not None:
        raise ValueError(f"{obstacle} {_WRITE_TOKENIZER}")
    if (folder / VOCABULARY).is_file() and (folder / MERGES).is_file():
        return _read_merges(folder, scratch, fields)

    beside = tokenizer_folder(folder)
    if beside != folder:
        return read_vocabulary(beside, scratch, ids=ids, rows=rows)
    name = str(fields.get("tokenizer_class")).removesuffix("Fast")
    if "tokenizer_class" in fields and name not in (*CLASSES, *ANY_CLASS):
        raise ValueError(
            f"The tokenizer_class in {path} is {format_value(name)}, but the folder has no "
            f"{TOKENIZER}. {_WRITE_TOKENIZER}"
        )
    return None


def _read_bytes(
    folder: pathlib.Path, fields: Mapping[str, Any], extra_ids: int | None
) -> AnyVocabulary:
    """Returns the configuration of ByT5's vocabulary.

    Raises:
      ValueError: if tokens were added. They cannot be read from a ``tokenizer.json``, because
        transformers does not write this file for ByT5.
    """
    vocabulary = named_vocabulary(BYTES, extra_ids)
    token = _added_token(folder, fields, vocabulary.vocab_size)
    if token is not None:
        raise ValueError(
            f"{folder} adds the token {token!r} to ByT5's bytes, which is not supported. If your "
            "texts do not need this token, run 'synthesizer-jax convert' with --vocabulary bytes."
        )
    return vocabulary


def _read_sentencepiece(
    folder: pathlib.Path, name: str, *, extra_ids: int | None, rows: int | None
) -> SentencePiece:
    """Returns the configuration of the vocabulary in a folder with a SentencePiece file.

    Args:
      folder: the folder of the tokenizer.
      name: the name of the SentencePiece file.
      extra_ids: the number of sentinels in ``tokenizer_config.json``, or `None` if this file does
        not contain the number.
      rows: the number of rows in the model's embedding, or `None` if it is not known.
    """
    vocabulary = named_vocabulary(str(folder / name), extra_ids)
    assert isinstance(vocabulary, SentencePiece)
    if rows is not None and extra_ids is None and vocabulary.build().vocab_size > rows:
        # The embedding has no rows for sentinels, as in MADLAD.
        vocabulary = replace(vocabulary, extra_ids=0)
    return vocabulary


def _read_merges(
    folder: pathlib.Path, scratch: pathlib.Path, fields: Mapping[str, Any]
) -> Tokenizer:
    """Reads the tokenizer of a folder in RoBERTa's older format, such as CodeT5's.

    The tokenizer is written to `scratch` as a ``tokenizer.json``.
    """
    with describing(folder / VOCABULARY, _WRITE_TOKENIZER):
        data = _join_files(read_json(folder / VOCABULARY), folder, fields)
    (scratch / TOKENIZER).write_text(json.dumps(data), encoding="utf-8")
    for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, scratch / name)
    return Tokenizer(str(scratch / TOKENIZER)).build()


def _obstacle(
    folder: pathlib.Path, fields: Mapping[str, Any], vocabulary: SentencePiece
) -> str | None:
    """Returns a sentence that says why a SentencePiece file does not define the ids of every text.

    Args:
      folder: the folder of the tokenizer.
      fields: the content of ``tokenizer_config.json``.
      vocabulary: the vocabulary in the SentencePiece file.

    Returns:
      The sentence, or `None` if the SentencePiece file defines all ids.
    """
    path = folder / TOKENIZER_CONFIG
    name = fields.get("tokenizer_class")
    if name is not None and str(name).removesuffix("Fast") not in (*CLASSES, *ANY_CLASS):
        return (
            f"The tokenizer_class in {path} is {format_value(name)}, and only the SentencePiece "
            f"files of the classes {', '.join(CLASSES)} can be read."
        )
    token = _added_token(folder, fields, vocabulary.build().vocab_size)
    if token is not None:
        return f"{folder} adds the token {token!r} to the pieces of its SentencePiece file."

    if (folder / TOKENIZER).is_file():
        # Transformers reads this file, and ignores `add_bos_token` and `add_eos_token`.
        data = read_json(folder / TOKENIZER)
        if _adds_only(data, "BOS" if vocabulary.bos else "EOS", folder / TOKENIZER):
            return None
        return f"{folder / TOKENIZER} puts other tokens around a text than its SentencePiece file."
    if str(name).removesuffix("Fast") in CLASSES and "Gemma" not in str(name):
        return None  # T5's tokenizers ignore the settings of BOS and EOS
    for field, expected in (
        ("add_bos_token", vocabulary.bos),
        ("add_eos_token", not vocabulary.bos),
    ):
        if fields.get(field) not in (None, expected):
            value = format_value(fields[field])
            return f"{field} in {path} is {value}, which needs a {TOKENIZER}."
    return None


def _adds_only(data: Mapping[str, Any], token: str, path: pathlib.Path) -> bool:
    """Returns whether the template of a ``tokenizer.json`` adds only BOS, or only EOS, to a text.

    The result is also true if the tokenizer has no template.

    Args:
      data: the content of the file.
      token: ``BOS`` or ``EOS``.
      path: the path of the file.
    """
    with describing(path, _REMEDY):
        processor = data.get("post_processor") or {}
        if processor.get("type") != "TemplateProcessing":
            return True
        found = [next(iter(step)) for step in processor["single"]]
    text, special = "Sequence", "SpecialToken"
    return found == ([special, text] if token == "BOS" else [text, special])


def _added_token(folder: pathlib.Path, fields: Mapping[str, Any], size: int) -> str | None:
    """Returns a token that was added to a vocabulary of `size` ids, or `None`.

    Sentinels are not counted as added tokens.

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
    others = (name for i, name in added.items() if i >= size and not _is_sentinel(name))
    return next(others, None)


def _is_sentinel(token: str) -> bool:
    """Returns whether a token is a sentinel."""
    return token.startswith("<extra_id_")


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


def named_vocabulary(name: str, extra_ids: int | None = None) -> AnyVocabulary:
    """Returns the configuration of a vocabulary, given its file or the word ``bytes``.

    The contents of a SentencePiece file determine whether inputs begin with BOS, as for Gemma.

    Args:
      name: the path of a SentencePiece file or of a ``tokenizer.json``, or ``bytes``.
      extra_ids: the number of sentinels to add after the pieces of the file. By default (`None`),
        the number depends on the vocabulary. For bytes, the number is 125, as in ByT5. If a file
        already contains sentinels, as mT5's file does, or if it has no room for sentinels, like
        Gemma's file, no sentinels are added. For all other files, the number is 100, as in T5.

    Raises:
      ValueError: if `extra_ids` is given for a ``tokenizer.json``, which contains its sentinels.
    """
    if name == BYTES:
        return Bytes(BYTES_EXTRA_IDS if extra_ids is None else extra_ids)
    if is_tokenizer(name):
        if extra_ids is not None:
            raise ValueError(
                f"--extra-ids is {extra_ids}, but {name} already contains its sentinels. Leave "
                "--extra-ids out."
            )
        return Tokenizer(name)
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


def _is_like_t5(path: pathlib.Path) -> bool:
    """Returns whether a ``tokenizer.json`` can be converted to a SentencePiece file.

    The file must contain a Unigram model and steps like those of T5, and must add only EOS to a
    text. Added tokens must be sentinels.
    """
    data = read_json(path)
    with describing(path, _REMEDY):
        model = data["model"]
        if model.get("type") != "Unigram" or model.get("byte_fallback"):
            return False
        size = len(model["vocab"])
        others = [i for i, name in _added_tokens(data).items() if not _is_sentinel(name)]
        steps = [*_steps(data.get("normalizer")), *_steps(data.get("pre_tokenizer"))]
    return (
        all(i < size for i in others)
        and all(map(_is_step_of_t5, steps))
        and _adds_only(data, "EOS", path)
    )


def sentencepiece_model(path: pathlib.Path, ids: SpecialIds = T5_IDS) -> bytes:
    """Converts a ``tokenizer.json`` like T5's to a SentencePiece model with sentinels.

    Args:
      path: the file, for which `_is_like_t5` is true.
      ids: the special ids of the model. The tokenizer must have the same special ids.

    Raises:
      ValueError: if the file is damaged, or has other special ids.
    """
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    messages: ModuleType = sentencepiece_model_pb2
    data = read_json(path)
    with describing(path, _REMEDY):
        model = _to_sentencepiece(data, messages, ids)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        if (processor.pad_id(), processor.eos_id()) != (ids.padding, ids.end):
            raise ValueError("its ids of padding and EOS differ from those of the model")
    return model


def _join_files(
    vocab: dict[str, Any], folder: pathlib.Path, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Converts tokenizer files in RoBERTa's older format to the content of a ``tokenizer.json``."""
    lines = (folder / MERGES).read_text(encoding="utf-8").splitlines()
    merges = [line for line in lines if line and not line.startswith("#version")]
    added = read_json(folder / ADDED) if (folder / ADDED).is_file() else {}
    special = {name: vocab[name] for name in ("<pad>", "<s>", "</s>", "<unk>", "<mask>")}

    added_tokens = [
        {
            "single_word": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
            "id": i,
            "content": name,
            "lstrip": _is_sentinel(name),
        }
        for name, i in sorted((special | added).items(), key=operator.itemgetter(1))
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": bool(fields.get("add_prefix_space")),
        "trim_offsets": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "unk_token": "<unk>"},
        "added_tokens": added_tokens,
        "pre_tokenizer": byte_level,
        "post_processor": {
            **byte_level,
            "type": "RobertaProcessing",
            "sep": ["</s>", special["</s>"]],
            "cls": ["<s>", special["<s>"]],
        },
        "decoder": byte_level,
    }


def _to_sentencepiece(data: dict[str, Any], messages: ModuleType, special: SpecialIds) -> bytes:
    """Returns the SentencePiece model for the content of a ``tokenizer.json``.

    If the content is invalid, the function raises errors of various types, which the caller
    catches.

    Args:
      data: the content of the file.
      messages: the Python module of SentencePiece's protocol buffers.
      special: the ids of the model.
    """
    unknown = operator.index(data["model"]["unk_id"])
    proto = messages.ModelProto()
    _add_pieces(proto, data, messages, unknown)
    spec = proto.trainer_spec
    spec.model_type = messages.TrainerSpec.UNIGRAM
    spec.vocab_size = len(proto.pieces)
    spec.bos_id = -1  # T5 has no BOS
    spec.pad_id = special.padding
    spec.pad_piece = proto.pieces[special.padding].piece
    spec.eos_id = special.end
    spec.eos_piece = proto.pieces[special.end].piece
    spec.unk_id = unknown
    spec.unk_piece = proto.pieces[unknown].piece

    # If the tokenizer has a table for normalizing characters, use this table.
    steps = [*_steps(data.get("normalizer")), *_steps(data.get("pre_tokenizer"))]
    tables = (step["precompiled_charsmap"] for step in steps if step["type"] == "Precompiled")
    proto.normalizer_spec.precompiled_charsmap = base64.b64decode(next(tables, ""), validate=True)
    has_table = bool(proto.normalizer_spec.precompiled_charsmap)
    proto.normalizer_spec.name = "nmt_nfkc" if has_table else "identity"
    serialized: bytes = proto.SerializeToString()
    return serialized


def _add_pieces(proto: Any, data: dict[str, Any], messages: ModuleType, unknown: int) -> None:
    """Adds the pieces and the added tokens of a ``tokenizer.json`` to a SentencePiece model.

    If the text of a user-defined piece occurs in an input, it is encoded as this piece. The text of
    a control piece is never encoded as the control piece. The argument `unknown` is the id of the
    piece for unknown characters.
    """
    kinds = messages.ModelProto.SentencePiece
    added = _added_tokens(data)
    scored = [(str(piece), float(score)) for piece, score in data["model"]["vocab"]]
    for i, (piece, score) in enumerate(_with_added(scored, added)):
        kind = kinds.NORMAL
        if i == unknown:
            kind = kinds.UNKNOWN
        elif _is_sentinel(piece.removeprefix("▁")):
            kind = kinds.USER_DEFINED
            # The sentinels of SentencePiece include the space before them, which `▁` stands for.
            piece = f"▁{piece.removeprefix('▁')}"
        elif i in added:
            kind = kinds.CONTROL
        elif score == -math.inf:
            kind = kinds.UNUSED
            score = -1e9
        proto.pieces.add(piece=piece, score=score, type=kind)


def _steps(component: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yields the steps of a normalizer or pre-tokenizer."""
    if component is None:
        return
    if component["type"] == "Sequence":
        for step in component.get("normalizers") or component["pretokenizers"]:
            yield from _steps(step)
    else:
        yield component


def _is_step_of_t5(step: Mapping[str, Any]) -> bool:
    """Returns whether SentencePiece does the same as a step of a normalizer or pre-tokenizer.

    These steps occur in the tokenizers of T5, which were made from SentencePiece models.
    """
    if step["type"] == "Metaspace":
        return step.get("prepend_scheme") != "never" and step.get("add_prefix_space") is not False
    if step["type"] == "Replace":
        return step.get("content") in ("▁", " ")
    return step["type"] in ("Precompiled", "Strip", "WhitespaceSplit")


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
