"""The table of variants in the README, from the registries.

    python -m synthesizer_jax.reports.variants README.md

writes it between the lines ``<!-- variants -->`` and ``<!-- /variants -->``.
"""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
import sys
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from synthesizer_jax.alignments import ALIGNMENTS, Bilinear, DotProduct, Random
from synthesizer_jax.attention import Mask
from synthesizer_jax.files import write_aside
from synthesizer_jax.mixers import MIXERS, Attention, NewCache
from synthesizer_jax.models.summary import count, flops

D_MODEL, HEADS, WIDTH, LENGTH = 512, 8, 64, 512
FIELDS: dict[str, Any] = {
    "max_length": LENGTH,
    "num_heads": HEADS,
    "head_dim": WIDTH,
    "hidden_dim": 50,
    "parts": (DotProduct(), Random(max_length=LENGTH)),
}
"""Values of the fields that a variant asks for."""

START, END = "<!-- variants -->", "<!-- /variants -->"


def table() -> str:
    """The table in Markdown: a row for every alignment and mixer."""
    lines = [
        f"One layer, d {D_MODEL}, {HEADS} heads of {WIDTH}, {LENGTH} tokens, float32, FLOPs of matrix "
        "products; the alignments as the logits of an `Attention`. *Cache* is what a decoder keeps per "
        "example after "
        f"{LENGTH} tokens.",
        "",
        "| | what it is | parameters | MFLOPs a token | encoder | decoder | across | cache, KB |",
        "| --- | --- | ---: | ---: | :-: | :-: | :-: | ---: |",
    ]
    for name, cls in ALIGNMENTS.items():
        layer = Attention(HEADS, WIDTH, alignment=example(cls), project_values=cls is not Bilinear)
        lines.append(row(name, cls, layer))
    lines += [row(name, cls, example(cls)) for name, cls in MIXERS.items() if cls is not Attention]
    return "\n".join(lines) + "\n"


def example(cls: type[Any]) -> Any:
    """An instance whose required fields are those of `FIELDS`."""
    required = [
        field.name
        for field in dataclasses.fields(cls)
        if field.init and field.default is dataclasses.MISSING and field.name in FIELDS
    ]
    if "num_heads" in {field.name for field in dataclasses.fields(cls)}:
        required = [*dict.fromkeys([*required, "num_heads", "head_dim"])]
    return cls(**{name: FIELDS[name] for name in required})


def row(name: str, cls: type[nn.Module], layer: nn.Module) -> str:
    """One line of the table."""
    says = " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())
    says = says.split(", ``")[0].split(" (")[0].rstrip(".,")
    forms = {"encoder": layer, "decoder": causal_form(layer), "across": layer}
    can = {where: shapes_of(form, where) for where, form in forms.items()}
    found = can["encoder"] or can["decoder"]
    assert found is not None
    marks = " | ".join("yes" if can[where] else "" for where in forms)
    cache = "" if can["decoder"] is None else f"{cache_bytes(forms['decoder']) / 1024:,.0f}"
    return (
        f"| `{name}` | {says} | {found[0]:,} | {found[1] / LENGTH / 1e6:.2f} | {marks} | {cache} |"
    )


def causal_form(layer: nn.Module) -> nn.Module:
    """The layer as decoders use it."""
    return layer.copy(causal=True) if hasattr(layer, "causal") else layer


def shapes_of(layer: nn.Module, where: str) -> tuple[int, int] | None:
    """Parameters and forward FLOPs; None: the layer's definition does not allow that place."""
    x = jax.ShapeDtypeStruct((1, LENGTH, D_MODEL), jnp.float32)
    arguments = (x, x) if where == "across" else (x,)
    mask = Mask(causal=where == "decoder")

    def init(*tokens: jax.Array) -> Any:
        return layer.init(jax.random.key(0), *tokens, mask=mask)

    try:
        shapes = jax.eval_shape(init, *arguments)
    except ValueError:  # how a layer says that it does not fit here
        return None
    forward = jax.make_jaxpr(lambda v, *a: layer.apply(v, *a, mask=mask))(shapes, *arguments)
    return count(shapes.get("params", {})), flops(forward.jaxpr)


def cache_bytes(layer: nn.Module) -> int:
    """Bytes of one example's decoding cache, without the number that counts its tokens."""
    x = jax.ShapeDtypeStruct((1, 1, D_MODEL), jnp.float32)

    def start(x: jax.Array) -> Any:
        layer_ = layer.init_with_output(
            jax.random.key(0), x, mask=Mask(causal=True), cache=NewCache(LENGTH)
        )
        return layer_[0][1]

    leaves = [leaf for leaf in jax.tree.leaves(jax.eval_shape(start, x)) if leaf.ndim]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def updated(text: str) -> str:
    """A page with the table between its marks."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{table()}{END}{after}"


def main(path: pathlib.Path) -> None:
    """Rewrites a page."""
    text = path.read_text(encoding="utf-8")
    if START not in text or END not in text:
        raise ValueError(f"{path} has no lines {START} and {END}")
    write_aside(path, updated(text))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
