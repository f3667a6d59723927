"""Every route and layer under every transformation, and the page that says so."""

from __future__ import annotations

import functools
import pathlib
import re

import pytest

from synthesizer_jax import MIXERS
from synthesizer_jax.attention.attend import ROUTES
from synthesizer_jax.parameters import ACTIVATION_AXES, LOGICAL_AXES
from tests.composability import COLUMNS, ROWS, SENTENCES, updated
from tests.transformations import Subject

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs/composability.md"


@functools.cache
def subject(row: str) -> Subject:
    return Subject(ROWS[row])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "column"), [(r, c) for r in ROWS for c in COLUMNS if (r, c) not in SENTENCES]
)
def test_composes(row: str, column: str) -> None:
    COLUMNS[column](subject(row))


def test_the_table_has_every_route_and_mixer() -> None:
    assert {f"attend, {route}" for route in ROUTES} | set(MIXERS) <= set(ROWS)
    assert all(row in ROWS and column in COLUMNS for row, column in SENTENCES)


def test_the_page_holds_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert updated(text) == text, "run: python -m tests.composability docs/composability.md"


def test_the_page_names_every_logical_axis() -> None:
    names = re.findall(r"^\| `(\w+)` \| [^|]+ \|$", PAGE.read_text(encoding="utf-8"), flags=re.M)
    assert names == [*LOGICAL_AXES, *ACTIVATION_AXES]


def test_the_pages_snippets_run_in_order() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)
    scope: dict = {}
    for block in blocks:
        exec(block, scope)
    assert blocks
