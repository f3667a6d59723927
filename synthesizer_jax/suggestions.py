"""What a user may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggestion(word: str, known: Iterable[str]) -> str:
    """``, did you mean 'x'?`` for the nearest known word, or an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f", did you mean {near[0]!r}?" if near else ""


def nearest_multiples(size: int, ways: int) -> str:
    """A phrase that names the sizes next to one that does not divide, which do."""
    below, above = size // ways * ways, (size // ways + 1) * ways
    if not below:
        return f"the least that does is {above}"
    return f"the nearest sizes that do are {below} and {above}"
