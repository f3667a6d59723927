"""Phrases for error messages, and functions that report progress."""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias, TypeVar

_T = TypeVar("_T")

Phase: TypeAlias = Callable[[str, int | None], Callable[[int], object]]
"""A function that reports the progress of long work.

A `Phase` is called at the beginning of each phase of the work, with the title and the number of
items of the phase. The number is `None` if it is not known. The returned function is called
repeatedly, each time with the number of items that were completed since the previous call.
"""


def silent_phase(_: str, __: int | None) -> Callable[[int], None]:
    """Implements `Phase` without reporting anything."""
    return lambda _: None


def report_items(items: Iterable[_T], advance: Callable[[int], object]) -> Iterator[_T]:
    """Yields items, and reports how many of them the caller has processed.

    Only every thousandth item is reported, because reporting may take longer than processing.

    Args:
      items: the items of a phase.
      advance: the function that a `Phase` has returned.
    """
    count = 0
    for item in items:
        yield item
        count += 1
        if count == 1000:
            advance(count)
            count = 0
    advance(count)


@contextlib.contextmanager
def silent_stderr() -> Iterator[None]:
    """Context manager that discards what compiled code prints to the standard error.

    Some libraries print messages that cannot be turned off.
    """
    sys.stderr.flush()
    stderr = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns the question ``, did you mean 'x'?`` about the known word that is most similar.

    If no known word is similar, the result is an empty string. The expression
    ``did_you_mean(word, known) or "."`` ends a sentence with the question, or with a full stop if
    no known word is similar.
    """
    matches = difflib.get_close_matches(word[:60], list(known), n=1, cutoff=0.5)
    return f", did you mean {matches[0]!r}?" if matches else ""


def end_sentence(text: str) -> str:
    """Appends a full stop to a text if necessary, so that another sentence can follow.

    The messages of other libraries often have no full stop at the end.
    """
    return text if text.endswith((".", "!", "?")) else f"{text}."


def escape_controls(text: str) -> str:
    """Returns a text in which control characters are written as escapes such as ``\\x1b``.

    If control characters were printed unchanged, the terminal would execute them.
    """
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def not_divisible(name: str, size: int, *, by: str, divisor: int) -> str:
    """Returns an error message about a size that is not divisible, with the nearest multiples.

    Args:
      name: the name of the size.
      size: the size.
      by: a description of the divisor, such as ``data.shards=8``.
      divisor: the number by which the size is not divisible.
    """
    below = size // divisor * divisor
    above = below + divisor
    if below:
        multiples = f"The nearest multiples are {below} and {above}."
    else:
        multiples = f"The smallest multiple is {above}."
    return f"{name}={size} is not divisible by {by}. {multiples}"


def one_line_error(error: BaseException) -> str:
    """Returns the text of an error as one line with at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
