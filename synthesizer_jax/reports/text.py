"""Conversion of arbitrary text to text that HTML pages and charts can show."""

from __future__ import annotations

import unicodedata

DIRECTIONS = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}
"""Bidirectional classes of characters that change the direction of the following text (Unicode, UAX 9)."""


def printable(text: object) -> str:
    """Replaces characters that are invisible or invalid in UTF-8.

    Control characters, surrogates and characters that change the direction of writing become Python's
    escape sequences; line breaks and tabs become spaces.
    """
    return "".join(
        " " if c in "\n\r\t" else c if _is_visible(c) else ascii(c)[1:-1] for c in str(text)
    )


def _is_visible(character: str) -> bool:
    return (
        unicodedata.category(character) not in ("Cc", "Cs")
        and unicodedata.bidirectional(character) not in DIRECTIONS
        and character not in "\u200e\u200f\u061c\ufffe\uffff"
    )


def shorten_label(text: object, max_length: int = 40) -> str:
    """Returns `printable` text in which the middle of longer text is replaced by an ellipsis."""
    label = printable(text)
    half = (max_length - 1) // 2
    return label if len(label) <= max_length else f"{label[:half]}…{label[half + 1 - max_length :]}"
