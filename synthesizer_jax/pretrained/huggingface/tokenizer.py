"""The tokenizer of a folder, as a vocabulary here."""

from __future__ import annotations

import base64
import json
import math
import operator
import pathlib
import re
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, TypeVar

from synthesizer_jax.base.files import describing, storage_path
from synthesizer_jax.base.ids import T5_IDS, SpecialIds
from synthesizer_jax.base.registry import format_value, replace
from synthesizer_jax.data.vocabularies import BPE_OF_BYTES, EXTRA_IDS, Bytes, SentencePiece
from synthesizer_jax.pretrained.huggingface.config import read_json

_Path = TypeVar("_Path", bound=pathlib.PurePath)

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
VOCABULARY, MERGES, ADDED = "vocab.json", "merges.txt", "added_tokens.json"
GEMMA = "tokenizer.model"
SENTENCEPIECE = ("spiece.model", "sentencepiece.model", GEMMA)
TEXT_ENCODER = "text_encoder"
"""How pipelines of diffusers call the folders of text encoders, perhaps with a number behind it."""

BYTES = "bytes"
"""The name of the vocabulary that needs no file."""

BYTES_EXTRA_IDS = 125
"""ByT5's number of sentinels."""


MOST_ADDED = 2**16
"""Tokens that a tokenizer adds to its pieces; a file that names more is damaged."""


CLASSES = ("T5Tokenizer", "MT5Tokenizer", "ByT5Tokenizer", "GemmaTokenizer", "RobertaTokenizer")
"""Tokenizers of transformers that are read; up to version 4 the names may end in ``Fast``."""

ANY_CLASS = ("PreTrainedTokenizer", "TokenizersBackend")
"""Classes of transformers 4 and 5 that say nothing about the tokenizer. It is known by its files."""

_REMEDY = "put the model's spiece.model beside it, or name one with --vocabulary"

_DO_WITHOUT = (
    "if your texts do without this token, run 'synthesizer-jax convert' with --vocabulary and the path of "
    "a SentencePiece file"
)
"""What to do about tokens that were added. A file without them that lies beside would only hide them."""

_OTHER_MODEL = "give a model whose tokenizer does so"


def read_vocabulary(
    folder: pathlib.Path, scratch: pathlib.Path, *, ids: SpecialIds = T5_IDS, rows: int = MOST_ADDED**2
) -> Bytes | SentencePiece | None:
    """Returns the configuration of a folder's vocabulary; None where there is none that is known.

    Pipelines of diffusers have it in ``tokenizer_2``, say, beside ``text_encoder_2``. A SentencePiece model
    that is made of a ``tokenizer.json`` is put into the directory `scratch`. The model has `ids`, and an
    embedding of so many `rows`.

    Raises:
      ValueError: it is another class of tokenizer, a text has other tokens around it, or tokens were added.
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
            vocabulary = named_vocabulary(str(folder / name), extra_ids)
            if extra_ids is None and vocabulary.build().vocab_size > rows:
                vocabulary = replace(vocabulary, extra_ids=0)  # MADLAD has no sentinels
            bos = isinstance(vocabulary, SentencePiece) and vocabulary.bos
            _refuse_added(folder, fields, vocabulary.build().vocab_size)
            _check_bos(path, fields, bos)
            if (folder / TOKENIZER).is_file():  # which transformers reads, and not the other file
                _check_template(folder / TOKENIZER, read_json(folder / TOKENIZER), bos=bos)
            return vocabulary
    for name, other in ((TOKENIZER, TOKENIZER), (VOCABULARY, MERGES)):
        if (folder / name).is_file() and (folder / other).is_file():
            file = scratch / SENTENCEPIECE[0]
            file.write_bytes(sentencepiece_model(folder / name, ids))
            vocabulary = named_vocabulary(str(file), 0)
            _check_bos(path, fields, isinstance(vocabulary, SentencePiece) and vocabulary.bos)
            return vocabulary
    beside = tokenizer_folder(folder)
    return None if beside == folder else read_vocabulary(beside, scratch, ids=ids, rows=rows)


def _check_class(path: pathlib.Path, fields: Mapping[str, Any]) -> None:
    """Raises a `ValueError` if ``tokenizer_config.json`` names a class that is not read."""
    name = fields.get("tokenizer_class")
    if name is not None and str(name).removesuffix("Fast") not in (*CLASSES, *ANY_CLASS):
        raise ValueError(
            f"{path}: tokenizer_class is {format_value(name)}, and the classes that are read are "
            f"{', '.join(CLASSES)}; run 'synthesizer-jax convert' with --vocabulary and the path of a "
            "SentencePiece file if the model was trained with T5's or Gemma's"
        )


def _check_bos(path: pathlib.Path, fields: Mapping[str, Any], bos: bool) -> None:
    """Raises a `ValueError` if ``tokenizer_config.json`` puts other tokens around a text than are put here.

    The tokenizers of T5 and RoBERTa have no such settings, and ignore them.
    """
    name = str(fields.get("tokenizer_class")).removesuffix("Fast")
    if name in CLASSES and name != "GemmaTokenizer":
        return
    for field, expected in (("add_bos_token", bos), ("add_eos_token", not bos)):
        if fields.get(field) not in (None, expected):
            raise ValueError(
                f"{path}: {field} is {format_value(fields[field])}, but models here read texts with "
                f"{'BOS and no EOS' if bos else 'EOS and no BOS'}; {_OTHER_MODEL}"
            )


def _check_template(path: pathlib.Path, data: Mapping[str, Any], *, bos: bool) -> None:
    """Raises a `ValueError` if a ``tokenizer.json`` puts other tokens around a text than are put here."""
    with describing(path, _OTHER_MODEL):
        processor = data.get("post_processor") or {}
        if processor.get("type") != "TemplateProcessing":
            return
        found = [next(iter(step)) for step in processor["single"]]
        if found != (["SpecialToken", "Sequence"] if bos else ["Sequence", "SpecialToken"]):
            where = "BOS, and nothing else, before" if bos else "EOS, and nothing else, behind"
            raise ValueError(f"its post_processor does not put {where} a text")


def _refuse_added(folder: pathlib.Path, fields: Mapping[str, Any], size: int) -> None:
    """Raises a `ValueError` for tokens that transformers adds to a vocabulary of `size` ids.

    Version 4 names them in ``tokenizer_config.json``, whose `fields` are given, and in
    ``added_tokens.json``, version 5 in ``tokenizer.json`` alone.
    """
    with describing(folder, _REMEDY):
        decoder = fields.get("added_tokens_decoder") or {}
        added = {int(i): str(token["content"]) for i, token in decoder.items()}
        if (folder / ADDED).is_file():
            added |= {i: str(token) for token, i in read_json(folder / ADDED).items()}
        if (folder / TOKENIZER).is_file():
            added |= _added_tokens(read_json(folder / TOKENIZER))
    with describing(folder, _DO_WITHOUT):
        _refuse_others(added, size)


def _added_tokens(data: Mapping[str, Any]) -> dict[int, str]:
    """Returns the tokens that a ``tokenizer.json`` adds to its pieces, by their ids."""
    tokens = data.get("added_tokens") or ()
    return {operator.index(token["id"]): str(token["content"]) for token in tokens}


def tokenizer_folder(folder: _Path) -> _Path:
    """Returns the folder in which a pipeline of diffusers has the tokenizer of a model.

    That is ``tokenizer_2`` beside ``text_encoder_2``. For folders with other names it is the folder itself.
    """
    if not folder.name.startswith(TEXT_ENCODER):
        return folder
    return folder.with_name(folder.name.replace(TEXT_ENCODER, "tokenizer"))


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
    bos = _has_bos(data)
    if extra_ids is None:
        extra_ids = 0 if bos or b"<extra_id_0>" in data else EXTRA_IDS
    return SentencePiece(name, extra_ids, bos)


def _has_bos(model: bytes) -> bool:
    """Returns whether inputs begin with BOS: a SentencePiece model is Gemma's, or made of CodeT5's."""
    return b"<bos>" in model or BPE_OF_BYTES.encode() in model


def sentencepiece_model(path: pathlib.Path, ids: SpecialIds = T5_IDS) -> bytes:
    """Returns the SentencePiece model that a ``tokenizer.json`` describes, sentinels included.

    Or a ``vocab.json``, with ``merges.txt`` and perhaps ``added_tokens.json`` beside it.
    """
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    messages: ModuleType = sentencepiece_model_pb2
    data = read_json(path)
    with describing(path, _REMEDY):
        if path.name == VOCABULARY:
            data = _join_files(data, path.parent)
        added, size = _added_tokens(data), len(data["model"]["vocab"])
    with describing(path, _DO_WITHOUT):
        _refuse_others(added, size)
    with describing(path, _REMEDY):
        model = _to_sentencepiece(data, messages, ids)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        if (processor.pad_id(), processor.eos_id()) != (ids.padding, ids.end):
            raise ValueError("its ids of padding and EOS are not the model's")
    if BPE_OF_BYTES.encode() not in model:
        _check_template(path, data, bos=_has_bos(model))
    return model


def _join_files(vocab: dict[str, Any], folder: pathlib.Path) -> dict[str, Any]:
    """Returns what the ``tokenizer.json`` of RoBERTa's older files would hold."""
    lines = (folder / MERGES).read_text(encoding="utf-8").splitlines()
    merges = [line for line in lines if line and not line.startswith("#version")]
    added = read_json(folder / ADDED) if (folder / ADDED).is_file() else {}
    added |= {name: vocab[name] for name in ("<pad>", "<s>", "</s>", "<unk>", "<mask>")}
    token = {"single_word": False, "rstrip": False, "normalized": False, "special": True}
    words = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    around = {"sep": ["</s>", vocab["</s>"]], "cls": ["<s>", vocab["<s>"]]}
    return {
        "version": "1.0",
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
        "added_tokens": [
            token | {"id": i, "content": name, "lstrip": name.startswith("<extra_id_")}
            for name, i in added.items()
        ],
        "pre_tokenizer": words,
        "post_processor": words | {"type": "RobertaProcessing"} | around,
        "decoder": words,
    }


def _to_sentencepiece(data: dict[str, Any], messages: ModuleType, special: SpecialIds) -> bytes:
    """Returns the SentencePiece model of the JSON data; wrong data raise errors of several types."""
    model, start = data["model"], special.start
    steps = [*_steps(data.get("normalizer")), *_steps(data.get("pre_tokenizer"))]
    is_bpe = model["type"] == "BPE"
    is_byte_level = is_bpe and [step["type"] for step in steps] == ["ByteLevel"]
    falls_back = is_bpe and not is_byte_level  # to bytes, for characters without a piece
    if is_byte_level:
        pieces, unknown, start = _scored(model), model["vocab"]["<unk>"], model["vocab"]["<s>"]
    elif falls_back and model.get("byte_fallback"):
        pieces, unknown = _scored(model), model["vocab"][model["unk_token"]]
    elif model["type"] == "Unigram":
        pieces = [(str(piece), float(score)) for piece, score in model["vocab"]]
        unknown = operator.index(model["unk_id"])
    else:
        raise ValueError("it is no tokenizer such as those of T5, Gemma and CodeT5")
    tokens = data.get("added_tokens") or ()
    added = _added_tokens(data)
    strips = all(t.get("lstrip", True) for t in tokens if t["content"] == "<extra_id_0>")
    last_control = max(special.padding, special.end, special.start, unknown)
    proto, kinds = messages.ModelProto(), messages.ModelProto.SentencePiece
    for i, (piece, score) in enumerate(_with_added(pieces, added)):
        kind = kinds.NORMAL
        if i == unknown:
            kind = kinds.UNKNOWN
        elif piece.removeprefix("▁").startswith("<extra_id_"):
            kind = kinds.USER_DEFINED
            piece = ("▁" if strips or not is_byte_level else "") + piece.removeprefix("▁")
        elif i in added:
            kind = kinds.USER_DEFINED if falls_back and i > last_control else kinds.CONTROL
        elif falls_back and _BYTE.fullmatch(piece):
            kind = kinds.BYTE
        elif score == -math.inf:
            kind, score = kinds.UNUSED, -1e9
        proto.pieces.add(piece=piece, score=score, type=kind)
    spec = proto.trainer_spec
    spec.model_type = messages.TrainerSpec.BPE if is_bpe else messages.TrainerSpec.UNIGRAM
    spec.vocab_size, spec.byte_fallback = len(proto.pieces), falls_back
    spec.pad_id, spec.eos_id, spec.unk_id, spec.bos_id = special.padding, special.end, unknown, -1
    spec.unk_piece = pieces[unknown][0]
    spec.pad_piece, spec.eos_piece = pieces[special.padding][0], pieces[special.end][0]
    if is_byte_level:
        spec.input.append(json.dumps(data))  # for `tokenizer_json`
    if is_bpe:
        spec.bos_id, spec.bos_piece = start, pieces[start][0]
        proto.normalizer_spec.add_dummy_prefix = False
        proto.normalizer_spec.remove_extra_whitespaces = False
        proto.normalizer_spec.escape_whitespaces = not is_byte_level
    tables = (step["precompiled_charsmap"] for step in steps if step["type"] == "Precompiled")
    charsmap = base64.b64decode(next(tables, ""), validate=True)
    table = "nmt_nfkc" if charsmap else "identity"
    proto.normalizer_spec.name = BPE_OF_BYTES if is_byte_level else table
    proto.normalizer_spec.precompiled_charsmap = charsmap
    serialized: bytes = proto.SerializeToString()
    return serialized


_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def _scored(model: dict[str, Any]) -> list[tuple[str, float]]:
    """Returns the pieces of a BPE with scores in whose order they are merged, −∞ for those that are not."""
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    ranks: dict[str, int] = {}
    for rank, (first, second) in enumerate(merges):
        ranks.setdefault(first + second, rank)
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    if sorted(model["vocab"].values()) != list(range(len(pieces))):
        raise ValueError("its ids do not count its pieces")
    unmerged = lambda piece: 0.0 if len(piece) == 1 else -math.inf
    return [(piece, -float(ranks[piece]) if piece in ranks else unmerged(piece)) for piece in pieces]


def _steps(component: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yields the steps of a normalizer or pre-tokenizer; raises a `ValueError` for others' steps."""
    if component is None:
        return
    kind = component["type"]
    if kind == "Sequence":
        for step in component.get("normalizers") or component["pretokenizers"]:
            yield from _steps(step)
        return
    others = {"content": "▁", "add_prefix_space": False, "use_regex": True} if kind != "Metaspace" else {}
    if kind not in _STEPS or any(component.get(name, x) not in (x, " ") for name, x in others.items()):
        raise ValueError(f"its step {kind} is not read, or not with these settings")
    yield component


_STEPS = ("Precompiled", "Strip", "Replace", "WhitespaceSplit", "Metaspace", "Split", "ByteLevel")
"""The steps of T5's tokenizers, which are SentencePiece's, of Gemma's, and of CodeT5's."""


def _refuse_others(added: Mapping[int, str], size: int) -> None:
    """Raises a `ValueError` for tokens added to `size` pieces that are no sentinels."""
    for i, name in added.items():
        if i >= size and not name.startswith("<extra_id_"):
            raise ValueError(f"it adds {name!r} to the pieces, which is not read")


def _with_added(pieces: list[tuple[str, float]], added: Mapping[int, str]) -> list[tuple[str, float]]:
    """Returns the pieces, and after them the sentinels that are added."""
    count = max(len(pieces), max(added, default=-1) + 1)
    if count > len(pieces) + MOST_ADDED:
        raise ValueError(f"{count} ids")
    return pieces + [(added.get(i, f"<unused_{i}>"), 0.0) for i in range(len(pieces), count)]


def tokenizer_json(vocabulary: SentencePiece) -> str:
    """Returns the ``tokenizer.json`` of which the model of a BPE of bytes was made."""
    from sentencepiece import sentencepiece_model_pb2

    messages: ModuleType = sentencepiece_model_pb2
    source: str = messages.ModelProto.FromString(vocabulary.contents()).trainer_spec.input[0]
    return source
