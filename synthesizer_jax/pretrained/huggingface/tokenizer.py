"""The tokenizer of a folder, as a vocabulary here."""

from __future__ import annotations

import base64
import operator
import pathlib
from types import ModuleType
from typing import Any

from synthesizer_jax.base.files import describing, storage_path
from synthesizer_jax.data.vocabularies import EOS, EXTRA_IDS, PAD, Bytes, SentencePiece
from synthesizer_jax.pretrained.huggingface.config import read_json

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SENTENCEPIECE = ("spiece.model", "sentencepiece.model")
TEXT_ENCODER = "text_encoder"
BYTES = "bytes"
"""The name of the vocabulary that needs no file."""

BYTES_EXTRA_IDS = 125
"""ByT5's number of sentinels."""


MOST_ADDED = 2**16
"""Tokens that a tokenizer adds to its pieces; a file that names more is damaged."""


def read_vocabulary(folder: pathlib.Path, scratch: pathlib.Path) -> Bytes | SentencePiece | None:
    """Returns the configuration of a folder's vocabulary; None where there is none that is known.

    Pipelines of diffusers have it in ``tokenizer_2``, say, beside ``text_encoder_2``. A SentencePiece model
    that is made of a ``tokenizer.json`` is put into the directory `scratch`.
    """
    path = folder / TOKENIZER_CONFIG
    fields = read_json(path) if path.is_file() else {}
    extra_ids = fields.get("extra_ids")
    if not isinstance(extra_ids, int) or not 0 <= extra_ids < MOST_ADDED:
        extra_ids = None
    if fields.get("tokenizer_class") == "ByT5Tokenizer":
        return named_vocabulary(BYTES, extra_ids)
    for name in SENTENCEPIECE:
        if (folder / name).is_file():
            return named_vocabulary(str(folder / name), extra_ids)
    if (folder / TOKENIZER).is_file():
        file = scratch / SENTENCEPIECE[0]
        file.write_bytes(sentencepiece_model(folder / TOKENIZER))
        return SentencePiece(str(file), 0)
    if folder.name.startswith(TEXT_ENCODER):
        return read_vocabulary(folder.with_name(folder.name.replace(TEXT_ENCODER, "tokenizer")), scratch)
    return None


def named_vocabulary(name: str, extra_ids: int | None = None) -> Bytes | SentencePiece:
    """Returns the configuration of a vocabulary, a SentencePiece file or ``bytes``.

    `extra_ids` is the number of sentinels after the pieces of the file; None: ByT5's 125, none for a file
    that contains them, as mT5's does, and otherwise T5's 100.
    """
    if name == BYTES:
        return Bytes(BYTES_EXTRA_IDS if extra_ids is None else extra_ids)
    if extra_ids is None:
        path = storage_path(name).expanduser()
        has_sentinels = path.is_file() and b"<extra_id_0>" in path.read_bytes()
        extra_ids = 0 if has_sentinels else EXTRA_IDS
    return SentencePiece(name, extra_ids)


def sentencepiece_model(path: pathlib.Path) -> bytes:
    """Returns the SentencePiece model that a ``tokenizer.json`` describes, sentinels included."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    messages: ModuleType = sentencepiece_model_pb2
    data = read_json(path)
    remedy = "put the model's spiece.model beside it, or name one with --vocabulary"
    with describing(path, remedy):
        model = _to_sentencepiece(data, messages)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        if (processor.pad_id(), processor.eos_id()) != (PAD, EOS):
            raise ValueError("its ids of padding and EOS are not T5's")
    return model


def _to_sentencepiece(data: dict[str, Any], messages: ModuleType) -> bytes:
    """Returns the SentencePiece model of the JSON data; wrong data raise errors of several types."""
    model = data["model"]
    if model["type"] != "Unigram":
        raise ValueError("it is no SentencePiece unigram model, as T5's tokenizers are")
    pieces = [(str(piece), float(score)) for piece, score in model["vocab"]]
    unknown = operator.index(model["unk_id"])
    tokens = data.get("added_tokens") or ()
    added = {operator.index(token["id"]): str(token["content"]) for token in tokens}
    charsmap = _charsmap(data.get("normalizer"))
    count = max(len(pieces), max(added, default=-1) + 1)
    if count > len(pieces) + MOST_ADDED:
        raise ValueError(f"{count} ids")
    proto = messages.ModelProto()
    kinds = messages.ModelProto.SentencePiece
    for i in range(count):
        piece, score = pieces[i] if i < len(pieces) else (added.get(i, f"<unused_{i}>"), 0.0)
        kind = kinds.NORMAL
        if i == unknown:
            kind = kinds.UNKNOWN
        elif piece.removeprefix("▁").startswith("<extra_id_"):
            piece, kind = f"▁{piece.removeprefix('▁')}", kinds.USER_DEFINED
        elif i in added:
            kind = kinds.CONTROL
        proto.pieces.add(piece=piece, score=score, type=kind)
    proto.trainer_spec.model_type = messages.TrainerSpec.UNIGRAM
    proto.trainer_spec.vocab_size = count
    proto.trainer_spec.pad_id, proto.trainer_spec.eos_id = 0, 1
    proto.trainer_spec.unk_id, proto.trainer_spec.bos_id = unknown, -1
    proto.trainer_spec.unk_piece = pieces[unknown][0]
    proto.trainer_spec.pad_piece, proto.trainer_spec.eos_piece = pieces[0][0], pieces[1][0]
    proto.normalizer_spec.name = "nmt_nfkc" if charsmap else "identity"
    proto.normalizer_spec.precompiled_charsmap = charsmap
    serialized: bytes = proto.SerializeToString()
    return serialized


def _charsmap(normalizer: object) -> bytes:
    """Returns the table of a ``Precompiled`` normalizer, alone or in a sequence; empty without one."""
    if isinstance(normalizer, dict):
        if normalizer.get("type") == "Precompiled":
            return base64.b64decode(normalizer["precompiled_charsmap"], validate=True)
        for part in normalizer.get("normalizers") or ():
            if table := _charsmap(part):
                return table
    return b""
