"""Text from outside, made fit for a page and for charts."""

from __future__ import annotations

import html
import unicodedata

DIRECTIONS = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}
"""Bidirectional classes of characters that turn the direction of the text that follows (Unicode, UAX 9)."""


def printable(text: object) -> str:
    """Text whose every character can be written and seen where it stands.

    Control characters, halves of surrogate pairs and characters that turn the direction of writing are
    shown as Python escapes them; line breaks and tabs become blanks.
    """
    return "".join(
        " " if c in "\n\r\t" else c if _visible(c) else ascii(c)[1:-1] for c in str(text)
    )


def _visible(character: str) -> bool:
    """Whether a character stays as it is."""
    return (
        unicodedata.category(character) not in ("Cc", "Cs")
        and unicodedata.bidirectional(character) not in DIRECTIONS
        and character not in "\u200e\u200f\u061c\ufffe\uffff"
    )


def label(text: object, most: int = 40) -> str:
    """Printable text for a chart, where what is longer than so many characters loses its middle."""
    whole = printable(text)
    half = (most - 1) // 2
    return whole if len(whole) <= most else f"{whole[:half]}…{whole[half + 1 - most :]}"


def escape(text: object) -> str:
    """Text for HTML."""
    return html.escape(printable(text), quote=True)
