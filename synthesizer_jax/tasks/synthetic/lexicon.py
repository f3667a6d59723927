"""Words that several tasks share, and the little English grammar they need."""

from __future__ import annotations

WOMEN = ("Anna", "Clara", "Emma", "Julia", "Mary", "Sarah")
MEN = ("David", "Jack", "Paul", "Peter", "Simon", "Tom")

PLACES = ("garden", "kitchen", "market", "station", "park", "library", "harbor", "square")

KINDS = {
    "animal": ("dog", "cat", "horse", "bird"),
    "vehicle": ("car", "truck", "bus", "train"),
    "building": ("house", "church", "school", "hotel"),
    "instrument": ("guitar", "piano", "drum", "flute"),
}
"""Nouns by what they are; every state fits every noun."""

STATES = (
    ("clean", "dirty"),
    ("wet", "dry"),
    ("warm", "cold"),
    ("safe", "unsafe"),
    ("big", "small"),
    ("quiet", "noisy"),
    ("hidden", "visible"),
    ("famous", "unknown"),
)
"""States and their opposites."""


def pair_of(state: str) -> tuple[str, str]:
    """A state with its opposite."""
    return next(pair for pair in STATES if state in pair)


def opposite(state: str) -> str:
    """``clean`` of ``dirty``, ``dirty`` of ``clean``."""
    pair = pair_of(state)
    return pair[1 - pair.index(state)]


def kind_of(noun: str) -> str:
    """``animal`` of ``dog``."""
    return next(kind for kind, nouns in KINDS.items() if noun in nouns)


def article(phrase: str) -> str:
    """``a dog``, ``an onion``."""
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


def sentence(text: str) -> str:
    """A capital at the front, a full stop at the end."""
    return f"{text[0].upper()}{text[1:]}."
