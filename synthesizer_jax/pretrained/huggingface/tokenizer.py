"""The tokenizer of a folder, as a vocabulary here."""

from __future__ import annotations

import base64
import itertools
import math
import operator
import pathlib
import re
from types import ModuleType
from typing import TYPE_CHECKING, Any

from synthesizer_jax.base.files import describing, storage_path
from synthesizer_jax.base.ids import T5_IDS, SpecialIds
from synthesizer_jax.base.registry import replace
from synthesizer_jax.data import byte_level
from synthesizer_jax.data.vocabularies import EXTRA_IDS, Bytes, SentencePiece
from synthesizer_jax.pretrained.huggingface.config import read_json

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
VOCABULARY = "vocab.json"
GEMMA = "tokenizer.model"
SENTENCEPIECE = ("spiece.model", "sentencepiece.model", GEMMA)
TEXT_ENCODER = "text_encoder"
BYTES = "bytes"
"""The name of the vocabulary that needs no file."""

BYTES_EXTRA_IDS = 125
"""ByT5's number of sentinels."""


MOST_ADDED = 2**16
"""Tokens that a tokenizer adds to its pieces; a file that names more is damaged."""


def read_vocabulary(
    folder: pathlib.Path, scratch: pathlib.Path, *, ids: SpecialIds = T5_IDS, rows: int = MOST_ADDED**2
) -> Bytes | SentencePiece | None:
    """Returns the configuration of a folder's vocabulary; None where there is none that is known.

    Pipelines of diffusers have it in ``tokenizer_2``, say, beside ``text_encoder_2``. A SentencePiece model
    that is made of a ``tokenizer.json`` is put into the directory `scratch`. The model has `ids`, and an
    embedding of so many `rows`.
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
            vocabulary = named_vocabulary(str(folder / name), extra_ids)
            if extra_ids is None and vocabulary.build().vocab_size > rows:
                return replace(vocabulary, extra_ids=0)  # MADLAD has no sentinels
            return vocabulary
    for name in (TOKENIZER, VOCABULARY):
        if (folder / name).is_file():
            file = scratch / SENTENCEPIECE[0]
            file.write_bytes(sentencepiece_model(folder / name, ids))
            return named_vocabulary(str(file), 0)
    if folder.name.startswith(TEXT_ENCODER):
        beside = folder.with_name(folder.name.replace(TEXT_ENCODER, "tokenizer"))
        return read_vocabulary(beside, scratch, ids=ids, rows=rows)
    return None


def named_vocabulary(name: str, extra_ids: int | None = None) -> Bytes | SentencePiece:
    """Returns the configuration of a vocabulary, a SentencePiece file or ``bytes``.

    `extra_ids` is the number of sentinels after the pieces of the file; None: ByT5's 125, none for a file
    that contains them, as mT5's does, or has no place for them, as Gemma's, and otherwise T5's 100. Inputs
    begin with BOS in the vocabularies of Gemma and CodeT5.
    """
    if name == BYTES:
        return Bytes(BYTES_EXTRA_IDS if extra_ids is None else extra_ids)
    path = storage_path(name).expanduser()
    data = path.read_bytes() if path.is_file() else b""
    bos = any(mark in data for mark in _WITH_BOS)
    if extra_ids is None:
        extra_ids = 0 if bos or b"<extra_id_0>" in data else EXTRA_IDS
    return SentencePiece(name, extra_ids, bos)


_WITH_BOS = b"<bos>", byte_level.NAME.encode()
"""What the SentencePiece models of Gemma, and those made of CodeT5's tokenizer, contain."""


def sentencepiece_model(path: pathlib.Path, ids: SpecialIds = T5_IDS) -> bytes:
    """Returns the SentencePiece model that a ``tokenizer.json`` describes, sentinels included.

    Or a ``vocab.json``, with ``merges.txt`` and perhaps ``added_tokens.json`` beside it.
    """
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    messages: ModuleType = sentencepiece_model_pb2
    data = read_json(path)
    remedy = "put the model's spiece.model beside it, or name one with --vocabulary"
    with describing(path, remedy):
        if path.name == VOCABULARY:
            data = _join_files(data, path.parent)
        model = _to_sentencepiece(data, messages, ids)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        if (processor.pad_id(), processor.eos_id()) != (ids.padding, ids.end):
            raise ValueError("its ids of padding and EOS are not the model's")
    return model


def _join_files(vocabulary: dict[str, Any], folder: pathlib.Path) -> dict[str, Any]:
    """Returns what the ``tokenizer.json`` of GPT-2's older files would hold."""
    merges = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()  # after the version
    beside = folder / "added_tokens.json"
    added = read_json(beside) if beside.is_file() else {}
    added |= {name: vocabulary[name] for name in ("<pad>", "<s>", "</s>", "<unk>", "<mask>")}
    return {
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges[1:]},
        "added_tokens": [{"id": i, "content": name} for name, i in added.items()],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
    }


def _to_sentencepiece(data: dict[str, Any], messages: ModuleType, special: SpecialIds) -> bytes:
    """Returns the SentencePiece model of the JSON data; wrong data raise errors of several types."""
    model, start = data["model"], special.start
    is_bpe, is_byte_level = model["type"] == "BPE", _is_byte_level(data.get("pre_tokenizer"))
    if is_bpe and is_byte_level:
        pieces, unknown, start = _scored(model), model["vocab"]["<unk>"], model["vocab"]["<s>"]
    elif is_bpe and model.get("byte_fallback"):
        pieces, unknown = _scored(model), model["vocab"][model["unk_token"]]
    elif model["type"] == "Unigram":
        pieces = [(str(piece), float(score)) for piece, score in model["vocab"]]
        unknown = operator.index(model["unk_id"])
    else:
        raise ValueError("it is no tokenizer such as those of T5, Gemma and CodeT5")
    tokens = data.get("added_tokens") or ()
    added = {operator.index(token["id"]): str(token["content"]) for token in tokens}
    last_control = max(special.padding, special.end, special.start, unknown)
    symbols = {i for i in added if is_bpe and not is_byte_level and i > last_control}
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
        elif i in symbols:
            kind = kinds.USER_DEFINED
        elif i in added:
            kind = kinds.CONTROL
        elif is_bpe and _BYTE.fullmatch(piece):
            kind = kinds.BYTE
        elif score == -math.inf:
            kind, score = kinds.UNUSED, -1e9
        proto.pieces.add(piece=piece, score=score, type=kind)
    spec = proto.trainer_spec
    spec.model_type = messages.TrainerSpec.BPE if is_bpe else messages.TrainerSpec.UNIGRAM
    spec.vocab_size, spec.byte_fallback = count, is_bpe and not is_byte_level
    spec.pad_id, spec.eos_id, spec.unk_id, spec.bos_id = special.padding, special.end, unknown, -1
    spec.unk_piece = pieces[unknown][0]
    spec.pad_piece, spec.eos_piece = pieces[special.padding][0], pieces[special.end][0]
    if is_bpe:
        spec.bos_id, spec.bos_piece = start, pieces[start][0]
        proto.normalizer_spec.add_dummy_prefix = False
        proto.normalizer_spec.remove_extra_whitespaces = False
        proto.normalizer_spec.escape_whitespaces = not is_byte_level
    table = "nmt_nfkc" if charsmap else "identity"
    proto.normalizer_spec.name = byte_level.NAME if is_byte_level else table
    proto.normalizer_spec.precompiled_charsmap = charsmap
    serialized: bytes = proto.SerializeToString()
    return serialized


def _is_byte_level(pre_tokenizer: object) -> bool:
    """Whether words are split as GPT-2 does it, and their bytes are spelled by characters."""
    wanted = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    fields = pre_tokenizer if isinstance(pre_tokenizer, dict) else {}
    return wanted.items() <= ({"use_regex": True} | fields).items()


_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def _scored(model: dict[str, Any]) -> list[tuple[str, float]]:
    """Returns the pieces of a BPE with scores in whose order they are merged, −∞ for those that are not."""
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    ranks: dict[str, int] = {}
    for rank, (first, second) in enumerate(merges):
        ranks.setdefault(first + second, rank)
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    unmerged = lambda piece: 0.0 if len(piece) == 1 else -math.inf
    return [(piece, -float(ranks[piece]) if piece in ranks else unmerged(piece)) for piece in pieces]


def _charsmap(normalizer: object) -> bytes:
    """Returns the table of a ``Precompiled`` normalizer, alone or in a sequence; empty without one."""
    if isinstance(normalizer, dict):
        if normalizer.get("type") == "Precompiled":
            return base64.b64decode(normalizer["precompiled_charsmap"], validate=True)
        for part in normalizer.get("normalizers") or ():
            if table := _charsmap(part):
                return table
    return b""


def write_byte_level(processor: SentencePieceProcessor) -> dict[str, Any]:
    """Returns the ``tokenizer.json`` of a BPE of bytes, as RoBERTa's.

    The file has ranks of pieces, not pairs: a piece's pair is what its bytes become by lower ranks.
    """
    pieces = [processor.IdToPiece(i) for i in range(processor.GetPieceSize())]
    ranks = {x: -processor.GetScore(i) for i, x in enumerate(pieces) if not processor.IsUnused(i)}
    added, merges = [], []
    for i, piece in enumerate(pieces):
        is_special = processor.IsControl(i) or processor.IsUnknown(i)
        if is_special or piece.startswith("▁"):
            token = {"id": i, "content": piece.removeprefix("▁"), "special": is_special}
            token |= {"single_word": False, "lstrip": not is_special, "rstrip": False, "normalized": False}
            added.append(token)
        elif piece in ranks and len(piece) > 1:
            parts = list(piece)
            while len(parts) > 2:
                joined = [ranks.get(a + b, math.inf) for a, b in itertools.pairwise(parts)]
                first = joined.index(min(joined))
                parts[first : first + 2] = ["".join(parts[first : first + 2])]
            merges.append(parts)
    words = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    around = {"sep": ["</s>", processor.eos_id()], "cls": ["<s>", processor.bos_id()], "trim_offsets": True}
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": words,
        "post_processor": {"type": "RobertaProcessing", "add_prefix_space": False} | around,
        "decoder": words,
        "model": {
            "type": "BPE",
            "vocab": {piece: i for i, piece in enumerate(pieces) if not piece.startswith("▁")},
            "merges": sorted(merges, key=lambda parts: ranks["".join(parts)]),
        },
    }
