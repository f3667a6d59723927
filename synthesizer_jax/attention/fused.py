"""The fused route: no array of ``[batch, heads, q, k]``, forward or backward.

The backward pass recomputes the weights from the saved maximum and sum of every row (Dao et al. 2022,
FlashAttention, section 3.1; not from ``log Σ exp``, whose float32 rounding costs digits as soon as
logits are in the hundreds). Every kind of device has its own way to go about it; they give the same
answer.
"""

from __future__ import annotations

import functools

import jax
from jax import lax

from synthesizer_jax.attention import blocked, fused_tpu
from synthesizer_jax.attention.derivatives import with_gradient
from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.packed import by_position, segment_lengths, with_places
from synthesizer_jax.attention.parts import Inputs, Rows, inner
from synthesizer_jax.attention.terms import LowRank, Outer, Relative, Static, Terms, diagonals

GPUS = ("cuda", "rocm")

KEPT = "attention"
"""Checkpoint name of the residuals that `jax.checkpoint` policies can save."""


def attend_fused(terms: Terms, values: jax.Array, *, mask: Mask, q_length: int) -> jax.Array:
    """``softmax(Σ terms) · values`` in blocks.

    Args:
      terms: terms for q queries and k keys.
      values: ``[b, k, h, e]``.
      mask: which keys a query may see.
      q_length: number of queries.

    Returns:
      ``[b, q, h, e]`` in the values' dtype.
    """
    inputs, offset = inputs_of(terms, values, mask, q_length)

    def backward(inputs: Inputs, out: jax.Array, rows: Rows, g: jax.Array) -> Inputs:
        return _backward(offset, inputs, rows, inner(out, g, rows.top.dtype), g)

    return with_gradient(
        functools.partial(_forward, q_length, offset),
        backward,
        functools.partial(blocked.plain, q_length),
        name=KEPT,
    )(inputs)


def inputs_of(
    terms: Terms, values: jax.Array, mask: Mask, q_length: int
) -> tuple[Inputs, int | None]:
    """The inputs in parts, and the position of the first query; None: only the loop takes them."""
    places, lengths = None, (q_length, values.shape[1])
    if mask.query_segments is not None and any(any(by_position(t, mask)) for t in terms):
        lengths = segment_lengths(mask, *lengths)
        terms, places = with_places(terms, mask)
    offset = 0 if places is not None else mask.query_offset
    q, k = lengths
    biases = tuple(Static(t.logits[:, :q, :k]) for t in terms if isinstance(t, Static)) + tuple(
        Relative(diagonals(t, q, k, offset), 1 - q) for t in terms if isinstance(t, Relative)
    )
    products = tuple(t for t in terms if isinstance(t, LowRank | Outer))
    inputs = Inputs(products, biases, values, mask, places)
    return inputs, None if fused_tpu.obstacle(inputs) else mask.query_offset


def kernel_of(
    terms: Terms, values: jax.Array, mask: Mask, q_length: int, platform: str
) -> tuple[str, str]:
    """What runs this route on a platform, and why not the platform's kernels, if so."""
    if platform == "gpu":
        return "a loop over examples, all heads at once", ""
    if platform != "tpu":
        return "a loop over heads and examples", ""
    why = fused_tpu.obstacle(inputs_of(terms, values, mask, q_length)[0])
    return ("a loop over heads and examples" if why else "Pallas kernels"), why


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(q_length: int, offset: int | None, inputs: Inputs) -> tuple[jax.Array, Rows]:
    """The output and what the backward pass needs; see `inputs_of`."""
    ways = dict.fromkeys(GPUS, functools.partial(blocked.forward_at_once, q_length))
    if offset is not None:
        ways["tpu"] = functools.partial(fused_tpu.forward, q_length, offset)
    default = functools.partial(blocked.forward, q_length)
    return lax.platform_dependent(inputs, default=default, **ways)


@functools.partial(jax.jit, static_argnums=0)
def _backward(
    offset: int | None, inputs: Inputs, rows: Rows, delta: jax.Array, g: jax.Array
) -> Inputs:
    """The cotangents of the inputs; compiled apart like `_forward`, so that layers share a trace."""
    ways = dict.fromkeys(GPUS, blocked.backward_at_once)
    if offset is not None:
        ways["tpu"] = functools.partial(fused_tpu.backward, offset)
    return lax.platform_dependent(inputs, rows, delta, g, default=blocked.backward, **ways)
