"""A BPE of bytes (GPT-2, RoBERTa, CodeT5) as a SentencePiece model, whose pieces spell bytes."""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

_PRINTABLE = [byte for byte in range(256) if chr(byte).isprintable() and byte != ord(" ")]
_others = itertools.count(256)
CHARACTERS = "".join(chr(byte if byte in _PRINTABLE else next(_others)) for byte in range(256))
"""The character that spells each byte in a piece: a printable one spells itself."""

_BYTES = {character: bytes([byte]) for byte, character in enumerate(CHARACTERS)}

_WORDS = re.compile(r"'(?:[stmd]|re|ve|ll)| ?[Lstrevmld]+| ?N+| ?[P']+|[S ]+(?![^S ])|[S ]+")
"""GPT-2's words in a text whose characters are replaced by `_kind`: no piece is longer than one of them."""


@functools.lru_cache(maxsize=2**16)
def _kind(character: str) -> str:
    """Returns L of a letter, N of a number, S of a space, P of others; `_WORDS` spells some themselves."""
    if character in " 'strevmld":
        return character
    if character.isspace() and not "\x1c" <= character <= "\x1f":
        return "S"
    category = unicodedata.category(character)[0]
    return category if category in "LN" else "P"


class ByteLevel:
    """Encodes and decodes by a model whose pieces are written in `CHARACTERS`.

    Sentinels are found as they are; spaces before those whose pieces begin with ``▁`` are dropped.
    """

    def __init__(self, processor: SentencePieceProcessor):
        self._processor = processor
        pieces = map(processor.IdToPiece, range(processor.GetPieceSize()))
        sentinels = [piece for piece in pieces if re.fullmatch(r"▁?<extra_id_\d+>", piece)]
        self._before = "▁" if sentinels and sentinels[0].startswith("▁") else ""
        names = "|".join(piece.removeprefix("▁") for piece in sentinels) or "(?!)"
        self._sentinels = re.compile(rf"[^\S\x1c-\x1f]*({names})" if self._before else f"({names})")

    def encode(self, text: str) -> list[int]:
        """Returns the ids of the pieces of a text."""
        words = []
        for i, part in enumerate(self._sentinels.split(text)):
            if i % 2:
                words.append(self._before + part)
                continue
            for word in _WORDS.finditer("".join(map(_kind, part))):
                data = part[word.start() : word.end()].encode("utf-8", "replace")
                words.append("".join(CHARACTERS[byte] for byte in data))
        return [i for ids in self._processor.EncodeAsIds(words) for i in ids]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids; bytes that are not UTF-8 give U+FFFD."""
        return b"".join(map(self.bytes_of, ids)).decode("utf-8", "replace")

    def bytes_of(self, i: int) -> bytes:
        """Returns the bytes that a piece spells, none of a control symbol."""
        if self._processor.IsControl(i) or self._processor.IsUnknown(i):
            return b""
        piece = self._processor.IdToPiece(i)
        return piece[1:].encode() if piece.startswith("▁") else b"".join(_BYTES[c] for c in piece)
