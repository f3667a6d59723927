"""What a user may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggestion(word: str, known: Iterable[str]) -> str:
    """``, did you mean 'x'?`` for the nearest known word, or an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f", did you mean {near[0]!r}?" if near else ""
