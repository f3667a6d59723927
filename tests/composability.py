"""The table of docs/composability.md: what composes with which transformation.

    python -m tests.composability docs/composability.md

writes it between the lines ``<!-- table -->`` and ``<!-- /table -->``. The rows are the routes of
`attend`, `dot_product_attention` and all layers; the columns are checks of
`tests/transformations.py`, which `tests/test_composability.py` runs.
"""

from __future__ import annotations

import inspect
import pathlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

import flax.linen as nn
import jax

import synthesizer_jax as sj
from synthesizer_jax.attention import Terms, attend, banded, low_rank, static
from tests import transformations
from tests.transformations import BATCH, Row

LENGTH, HEADS, WIDTH = 6, 2, 3


def route(name: str, terms: Callable[[jax.Array, jax.Array], Terms], *shape: int) -> Row:
    """`attend` by one route, its terms made from parameters of a shape and from the values."""

    def call(parameters: jax.Array, x: jax.Array, mask: sj.Mask) -> jax.Array:
        made = terms(parameters, x)
        return attend(made, x, mask=mask, q_length=LENGTH, implementation=name)

    return Row(call, (BATCH, LENGTH, HEADS, WIDTH), shape)


def product_and_bias(bias: jax.Array, x: jax.Array) -> Terms:
    return low_rank(x, x, token_keys=True), static(bias)


def with_bias(bias: jax.Array, x: jax.Array, mask: sj.Mask) -> jax.Array:
    return sj.dot_product_attention(x, x, x, bias, mask)


def layer(module: nn.Module) -> Row:
    def call(parameters: Any, x: jax.Array, mask: sj.Mask) -> jax.Array:
        return module.apply({"params": parameters}, x, mask=mask)

    return Row(call, (BATCH, LENGTH, HEADS * WIDTH), layer=module)


SQUARE = HEADS, LENGTH, LENGTH
ROWS: dict[str, Row] = {
    "attend, static": route("static", lambda table, _: (static(table),), *SQUARE),
    "attend, fused": route("fused", product_and_bias, *SQUARE),
    "attend, banded": route("banded", lambda w, _: (banded(w, first=-1),), 1, 1, HEADS, 3),
    "attend, reference": route("reference", product_and_bias, *SQUARE),
    "dot_product_attention": Row(with_bias, (BATCH, LENGTH, HEADS, WIDTH), SQUARE),
    "Attention": layer(
        sj.Attention(HEADS, WIDTH, sj.Mixture((sj.DotProduct(), sj.Random(LENGTH))))
    ),
    "DynamicConvolution": layer(sj.DynamicConvolution(width=3, groups=2)),
    "LightweightConvolution": layer(sj.LightweightConvolution(width=3, groups=2)),
    "Linformer": layer(sj.Linformer(HEADS, WIDTH, max_length=LENGTH, projected_length=2)),
    "SentenceFeedForward": layer(sj.SentenceFeedForward(LENGTH, 5, HEADS, WIDTH)),
    "TalkingHeads": layer(sj.TalkingHeads(HEADS, WIDTH)),
    "TokenFeedForward": layer(sj.TokenFeedForward(5, HEADS, WIDTH)),
    "MultiHeadAttention": layer(sj.MultiHeadAttention(HEADS)),
    "MultiHeadAttention, alignment": layer(
        sj.MultiHeadAttention(HEADS, alignment=sj.Dense(LENGTH))
    ),
}


COLUMNS: dict[str, Callable[[transformations.Subject], None]] = {
    "jit": transformations.jit,
    "vmap": transformations.vmap,
    "grad": transformations.grad,
    "jvp": transformations.jvp,
    "hessian": transformations.hessian,
    "checkpoint": transformations.checkpoint,
    "scan": transformations.scan,
    "pmap": transformations.pmap,
    "shard_map": transformations.shard_map,
    "explicit mesh": transformations.explicit_mesh,
    "auto mesh": transformations.auto_mesh,
    "x64": transformations.x64,
    "bfloat16, batch 1": transformations.bfloat16,
    "NNX": transformations.nnx_module,
}
"""The checks, by the names of their columns."""

FAST = ("attend, static", "attend, fused", "attend, banded")
FUNCTION = "they are functions of arrays, which NNX modules call as they are."
FIRST_ORDER = 'they raise an error that names `implementation="reference"`, which has them.'
SENTENCES: dict[tuple[str, str], str] = {
    (name, "NNX"): FUNCTION for name, row in ROWS.items() if row.layer is None
} | {
    (row, column): FIRST_ORDER
    for row in (*FAST, "DynamicConvolution", "LightweightConvolution")
    for column in ("jvp", "hessian")
}
"""What the page says of what does not compose, by row and column."""

START, END = "<!-- table -->", "<!-- /table -->"


def table() -> str:
    """Rows, columns with what they check, and exceptions, as lists in Markdown."""

    def names(items: Iterable[str]) -> str:
        return ", ".join(f"`{item}`" for item in items)

    lines = [f"Each of {names(ROWS)} composes with", ""]
    for name, check in COLUMNS.items():
        lines.append(f"- **{name}**: {' '.join((inspect.getdoc(check) or '').split())}")
    lines += ["", "except for", ""]
    for sentence in dict.fromkeys(SENTENCES.values()):
        cells = [cell for cell, said in SENTENCES.items() if said == sentence]
        rows, columns = (dict.fromkeys(parts) for parts in zip(*cells, strict=True))
        lines.append(f"- {', '.join(columns)} of {names(rows)}: {sentence}")
    return "\n".join(lines) + "\n"


def updated(text: str) -> str:
    """A page with the table between its marks."""
    if START not in text or END not in text:
        raise ValueError(f"the page has no lines {START} and {END}")
    before, _, rest = text.partition(START)
    return f"{before}{START}\n{table()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    page = pathlib.Path(sys.argv[1])
    page.write_text(updated(page.read_text(encoding="utf-8")), encoding="utf-8")
