"""Encodes and decodes text with a byte-level BPE (GPT-2, RoBERTa, CodeT5) in a SentencePiece model.

The pieces of a byte-level BPE spell bytes instead of characters.
"""

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
# Bytes that are not printable characters are spelled by the characters U+0100, U+0101 and so on.
_others = itertools.count(256)
CHARACTERS = "".join(chr(byte if byte in _PRINTABLE else next(_others)) for byte in range(256))
"""The character that spells each byte in a piece. The character at index i spells byte i.

Printable bytes except the space spell themselves.
"""

_BYTES = {character: bytes([byte]) for byte, character in enumerate(CHARACTERS)}
"""The byte that each character of a piece spells."""

_WORDS = re.compile(r"'(?:[stmd]|re|ve|ll)| ?[Lstrevmld]+| ?N+| ?[P']+|[S ]+(?![^S ])|[S ]+")
"""A pattern for GPT-2's words. No piece contains parts of two words.

The pattern is applied to a text in which `_kind` has replaced every character.
"""


@functools.lru_cache(maxsize=2**16)
def _kind(character: str) -> str:
    """Returns the letter that stands for a character's kind in the pattern `_WORDS`.

    The result is ``L`` for a letter, ``N`` for a number, ``S`` for white space and ``P`` for
    anything else. The space is returned unchanged. The characters that the pattern names literally,
    such as those of ``'ll``, are returned unchanged too.
    """
    if character in " 'strevmld":
        return character
    # Python counts U+001C to U+001F as white space, but GPT-2's regular expression does not.
    if character.isspace() and not "\x1c" <= character <= "\x1f":
        return "S"
    category = unicodedata.category(character)[0]
    return category if category in "LN" else "P"


class ByteLevel:
    """Encodes and decodes with a SentencePiece model whose pieces are spelled in `CHARACTERS`.

    Sentinels in a text are recognized before it is split into words. If the piece of a sentinel
    begins with ``▁``, the white space before the sentinel is dropped.
    """

    def __init__(self, processor: SentencePieceProcessor):
        self._processor = processor
        pieces = map(processor.IdToPiece, range(processor.GetPieceSize()))
        sentinels = [piece for piece in pieces if re.fullmatch(r"▁?<extra_id_\d+>", piece)]
        self._before = "▁" if sentinels and sentinels[0].startswith("▁") else ""
        # If the model has no sentinels, use the pattern `(?!)`, which never matches.
        names = "|".join(piece.removeprefix("▁") for piece in sentinels) or "(?!)"
        self._sentinels = re.compile(rf"[^\S\x1c-\x1f]*({names})" if self._before else f"({names})")

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text, without EOS."""
        # The pattern has a group, so `split` also returns the sentinels that it matches. The
        # sentinels are the parts with odd indices.
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
        """Returns the text of token ids. Bytes that are not valid UTF-8 become U+FFFD."""
        return b"".join(map(self.bytes_of, ids)).decode("utf-8", "replace")

    def bytes_of(self, i: int) -> bytes:
        """Returns the bytes that a piece spells. Unknown and control pieces spell no bytes."""
        if self._processor.IsControl(i) or self._processor.IsUnknown(i):
            return b""
        piece = self._processor.IdToPiece(i)
        # Sentinels and other pieces that begin with `▁` do not spell bytes, because `CHARACTERS`
        # does not contain `▁`. A piece that begins with `▁` is decoded to its own text.
        return piece[1:].encode() if piece.startswith("▁") else b"".join(_BYTES[c] for c in piece)
