"""Makes the table of variants in `docs/variants.md`, with all registered alignments and mixers."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from synthesizer_jax.alignments import ALIGNMENTS, Bilinear, DotProduct, Random
from synthesizer_jax.attention import Mask
from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.costs.summary import flops, num_elements
from synthesizer_jax.mixers import MIXERS, Attention, Mixer
from synthesizer_jax.mixers.base import MixerCache
from synthesizer_jax.primitives.parameters import apply_method

Layer = TypeVar("Layer", bound=nn.Module)

D_MODEL, HEADS, HEAD_DIM, LENGTH = 512, 8, 64, 512
FIELDS: dict[str, Any] = {
    "max_length": LENGTH,
    "num_heads": HEADS,
    "head_dim": HEAD_DIM,
    "hidden_dim": 50,
    "parts": (DotProduct(), Random(max_length=LENGTH)),
}
"""The values of the fields that variants require."""


def variants_table() -> str:
    """Returns the table in Markdown, with a row for every alignment and mixer."""
    lines = [
        f"The table shows the costs of one layer with d_model {D_MODEL}, {HEADS} heads of "
        f"{HEAD_DIM} and {LENGTH} tokens in float32. For an alignment, the layer is an `Attention` "
        "with this alignment. FLOPs include only matrix products. *Cache* is the size of the cache "
        f"that a decoder keeps per example after {LENGTH} tokens. The costs of `MergedAttention` "
        f"include a memory of {LENGTH} tokens.",
        "",
        "| | what it is | parameters | MFLOPs a token | cache, KB | not for |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for name, cls in ALIGNMENTS.items():
        layer = Attention(
            HEADS, HEAD_DIM, alignment=_make_instance(cls), project_values=cls is not Bilinear
        )
        lines.append(_table_row(name, cls, layer))
    lines += [
        _table_row(name, cls, _make_instance(cls))
        for name, cls in MIXERS.items()
        if cls is not Attention
    ]
    return "\n".join(lines) + "\n"


def _make_instance(cls: type[Layer]) -> Layer:
    """Returns an instance of a layer class.

    Fields without defaults get their values from `FIELDS`.
    """
    required = [
        field.name
        for field in dataclasses.fields(cls)
        if field.init and field.default is dataclasses.MISSING and field.name in FIELDS
    ]
    if "num_heads" in {field.name for field in dataclasses.fields(cls)}:
        required = [*dict.fromkeys([*required, "num_heads", "head_dim"])]
    return cls(**{name: FIELDS[name] for name in required})


def _table_row(name: str, cls: type[nn.Module], layer: Mixer) -> str:
    """Returns a row of the table."""
    summary = " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())
    summary = summary.split(", ``")[0].split(" (")[0].rstrip(".,")
    layers = {"encoder": layer, "decoder": _make_causal(layer), "cross-attention": layer}
    costs = {use: _parameters_and_flops(layers[use], use) for use in layers}
    parameters_and_flops = costs["encoder"] or costs["decoder"]
    assert parameters_and_flops is not None
    parameters, num_flops = parameters_and_flops
    unsupported = ", ".join(use for use in layers if costs[use] is None)
    cache = "" if costs["decoder"] is None else f"{_cache_bytes(layers['decoder']) / 1024:,.0f}"
    mflops = num_flops / LENGTH / 1e6
    return f"| `{name}` | {summary} | {parameters:,} | {mflops:.2f} | {cache} | {unsupported} |"


def _make_causal(layer: Mixer) -> Mixer:
    """Returns the causal form of a layer, for decoders.

    Some mixers have a field that makes them causal.
    """
    is_field = "causal" in {field.name for field in dataclasses.fields(layer)}
    return layer.copy(causal=True) if is_field else layer


def _parameters_and_flops(layer: Mixer, use: str) -> tuple[int, int] | None:
    """Returns a layer's number of parameters, and the number of FLOPs of its forward pass.

    Returns None if the layer does not support this use.
    """
    if layer.reads_memory and use != "decoder":
        return None
    x = jax.ShapeDtypeStruct((1, LENGTH, D_MODEL), jnp.float32)
    inputs = (x, x) if layer.reads_memory or use == "cross-attention" else (x,)
    mask = Mask(causal=use == "decoder")

    def init(*inputs: jax.Array) -> PyTree:
        return layer.init(jax.random.key(0), *inputs, mask=mask)

    try:
        variables = jax.eval_shape(init, *inputs)
    except ValueError:  # the layer does not support this use
        return None
    forward = jax.make_jaxpr(lambda v, *xs: layer.apply(v, *xs, mask=mask))(variables, *inputs)
    return num_elements(variables.get("params", {})), flops(forward.jaxpr)


def _cache_bytes(layer: Mixer) -> int:
    """Returns the size in bytes of the decoding cache for one example. Scalars do not count."""
    x = jax.ShapeDtypeStruct((1, 1, D_MODEL), jnp.float32)
    memory = [jax.ShapeDtypeStruct((1, LENGTH, D_MODEL), jnp.float32)] if layer.reads_memory else []

    def init_cache(x: jax.Array, *memory: jax.Array) -> MixerCache:
        variables = layer.init(jax.random.key(0), x, *memory, mask=Mask(causal=True))
        return apply_method(layer.init_cache, variables, x, *memory, max_length=LENGTH)

    cache = jax.eval_shape(init_cache, x, *memory)
    arrays = [array for array in jax.tree.leaves(cache) if array.ndim]
    return sum(array.size * array.dtype.itemsize for array in arrays)
