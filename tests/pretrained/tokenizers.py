"""Makes folders with tokenizers of the library ``tokenizers``, like those of published models."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import pathlib
import random
from collections.abc import Iterator
from typing import Any

import tokenizers
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

ROOT = pathlib.Path(__file__).resolve().parents[2]

SENTINELS = [f"<extra_id_{i}>" for i in reversed(range(4))]
"""The sentinels that every tokenizer has, in the order of their ids."""
ADDED = [
    AddedToken("<sep>", special=True),
    AddedToken("[NEW]", normalized=True),
    AddedToken("naïve", single_word=True),
    AddedToken("<l>", lstrip=True),
    AddedToken("<r>", rstrip=True),
]
"""The tokens that a user has added to every tokenizer."""

KINDS = ("LLaMA", "LLaMA, legacy", "T5", "CodeT5", "Gemma", "WordPiece")


def training_texts() -> list[str]:
    """Returns the lines of a page of the documentation."""
    return (ROOT / "docs" / "training.md").read_text(encoding="utf-8").splitlines()


def write_tokenizer(
    folder: pathlib.Path, kind: str, *, size: int = 600, added: bool = True
) -> dict[str, int]:
    """Writes the files of a tokenizer of the given kind, and returns the ids of its special tokens.

    Args:
      folder: the folder, which is created if necessary.
      kind: one of `KINDS`. The kind ``LLaMA, legacy`` has the steps of LLaMA's original file.
      size: the number of tokens before the added tokens.
      added: whether to add the tokens in `ADDED`.
    """
    tokenizer, settings = _MAKERS[kind](size - len(SENTINELS))
    sentinels = [AddedToken(name, lstrip=kind == "CodeT5", special=True) for name in SENTINELS]
    tokenizer.add_tokens(sentinels)
    if added:
        tokenizer.add_tokens(ADDED)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    names = {name: token for name, token in settings.items() if name.endswith("_token")}
    return {name: tokenizer.token_to_id(token) for name, token in names.items()}


def _train(model: Any, trainer: Any, **parts: Any) -> tokenizers.Tokenizer:
    """Returns a tokenizer with the given steps that is trained on the `training_texts`."""
    tokenizer = tokenizers.Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(training_texts(), trainer)
    return tokenizer


def _around(tokenizer: tokenizers.Tokenizer, single: str) -> None:
    """Sets the special tokens around a text, for example to ``<s> $A </s>``."""
    names = [name for name in single.split() if name != "$A"]
    tokens = [(name, tokenizer.token_to_id(name)) for name in names]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)


def _bytes_with_fallback(special: list[str]) -> list[str]:
    """Returns the special tokens and the pieces of single bytes."""
    return special + [f"<0x{byte:02X}>" for byte in range(256)]


def _fallback_bpe(size: int, special: list[str], normalizer: Any) -> tokenizers.Tokenizer:
    """Returns a BPE that represents characters without a piece by their bytes."""
    # Words are split while the merges are trained, but the tokenizers of LLaMA and Gemma do not
    # split texts.
    words = pre_tokenizers.Split("▁", "merged_with_next")
    names = _bytes_with_fallback(special)
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=names, show_progress=False, limit_alphabet=80
    )
    trained = _train(models.BPE(), trainer, normalizer=normalizer, pre_tokenizer=words)
    data = json.loads(trained.to_str())["model"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            data["vocab"],
            [tuple(merge) for merge in data["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.add_special_tokens(special)
    return tokenizer


def _make_llama(size: int, *, legacy: bool = False) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer = _fallback_bpe(size, ["<unk>", "<s>", "</s>"], normalizers.Sequence(steps))
    if legacy:
        tokenizer.normalizer = normalizers.Sequence(steps)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    # Pile-T5 puts EOS after a text. LLaMA puts BOS before it.
    _around(tokenizer, "<s> $A" if legacy else "$A </s>")
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    return tokenizer, settings | {"unk_token": "<unk>", "pad_token": "<unk>", "legacy": legacy}


def _make_t5(size: int) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=size, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    space = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer = _train(
        models.Unigram(),
        trainer,
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), space]),
        decoder=decoders.Metaspace(prepend_scheme="always"),
    )
    _around(tokenizer, "$A </s>")
    settings = {"tokenizer_class": "T5Tokenizer", "eos_token": "</s>", "pad_token": "<pad>"}
    return tokenizer, settings | {"unk_token": "<unk>", "extra_ids": len(SENTINELS)}


def _make_codet5(size: int) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    special = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer = _train(
        models.BPE(unk_token="<unk>"),
        trainer,
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoder=decoders.ByteLevel(),
    )
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 1), True, False)
    settings = {"tokenizer_class": "RobertaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    settings |= {"cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"}
    return tokenizer, settings | {"unk_token": "<unk>", "pad_token": "<pad>"}


def _make_gemma(size: int) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    tokenizer = _fallback_bpe(size, special, normalizers.Replace(" ", "▁"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    _around(tokenizer, "<bos> $A")
    settings = {"tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "eos_token": "<eos>"}
    settings |= {"unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"}
    return tokenizer, settings


def _make_wordpiece(size: int) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=special, show_progress=False
    )
    tokenizer = _train(
        models.WordPiece(unk_token="[UNK]"),
        trainer,
        normalizer=normalizers.BertNormalizer(),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        decoder=decoders.WordPiece(),
    )
    _around(tokenizer, "[CLS] $A [SEP]")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "[SEP]"}
    return tokenizer, settings | {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]"}


_MAKERS: dict[str, Any] = {
    "LLaMA": _make_llama,
    "LLaMA, legacy": lambda size: _make_llama(size, legacy=True),
    "T5": _make_t5,
    "CodeT5": _make_codet5,
    "Gemma": _make_gemma,
    "WordPiece": _make_wordpiece,
}


def random_texts(count: int) -> Iterator[str]:
    """Yields random texts in many scripts, with added tokens, special tokens and white space."""
    draws = random.Random(0)
    tokens = [token.content for token in ADDED] + SENTINELS
    tokens += ["<s>", "</s>", "<unk>", "<pad>", "<eos>", "<bos>", "<mask>", "[CLS]", "[SEP]", "▁"]
    scripts = [(0x20, 0x7F), (0xA0, 0x250), (0x300, 0x370), (0x370, 0x590), (0x590, 0x780)]
    scripts += [(0x900, 0xE80), (0x1100, 0x1200), (0x2000, 0x2070), (0x2100, 0x2600)]
    scripts += [(0x3040, 0x3100), (0x4E00, 0xA000), (0xAC00, 0xD7A4), (0xF900, 0xFFFE)]
    scripts += [(0x1D400, 0x1D800), (0x1F300, 0x1FB00), (0x20000, 0x2A6E0)]
    for _ in range(count):
        parts = []
        for _ in range(draws.randint(0, 12)):
            low, high = draws.choice(scripts)
            word = "".join(chr(draws.randrange(low, high)) for _ in range(draws.randint(1, 6)))
            space = draws.choice(["", " ", " ", " ", "  ", "\t", "\n", "\u00a0", "\u3000"])
            parts += [draws.choice([word, word, draws.choice(tokens)]), space]
        yield "".join(parts)


def code_texts() -> list[str]:
    """Returns the lines of the source code of this package, and the longest texts of two files."""
    files = sorted((ROOT / "synthesizer_jax").rglob("*.py"))
    lines = [line for file in files[:60] for line in file.read_text("utf-8").splitlines()]
    return [*lines[:3000], *(file.read_text("utf-8") for file in files[:2])]


def real_texts() -> Iterator[str]:
    """Yields lines of GLUE, Multi30k and WikiText-2 if these data sets are on this machine."""
    data = pathlib.Path(os.environ.get("SYNTHESIZER_REAL_DATA", ROOT.parent / "shared" / "data"))
    for pattern in ("glue/*/dev*.tsv.gz", "multi30k/*.gz", "wikitext-2/*.txt.gz"):
        for file in sorted(data.glob(pattern)):
            with gzip.open(file, "rt", encoding="utf-8", errors="replace") as lines:
                yield from (line.rstrip("\n") for line in itertools.islice(lines, 400))
