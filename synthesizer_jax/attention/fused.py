"""The fused route: no array of ``[batch, heads, q, k]``, forward or backward.

The backward pass recomputes the weights from the saved maximum and sum of every row (Dao et al. 2022,
FlashAttention, section 3.1; not from ``log Σ exp``, whose float32 rounding costs digits as soon as
logits are in the hundreds). Every kind of device has its own way to go about it; they give the same
answer.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from synthesizer_jax.attention import blocked, fused_tpu
from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.parts import Inputs, Rows, inner
from synthesizer_jax.attention.terms import LowRank, Outer, Relative, Static, Terms, diagonals

GPUS = ("cuda", "rocm")

KEPT = "attention"
"""Name of what a rematerialised layer keeps of this route, for `jax.checkpoint_policies`."""


def attend_fused(terms: Terms, values: jax.Array, *, mask: Mask, q_length: int) -> jax.Array:
    """``softmax(Σ terms) · values`` in blocks.

    Args:
      terms: terms for q queries and k keys; in packed rows, none that looks up positions.
      values: ``[b, k, h, e]``.
      mask: which keys a query may see.
      q_length: number of queries.

    Returns:
      ``[b, q, h, e]`` in the values' dtype. Forward-mode differentiation raises a `TypeError`.
    """
    inputs, offset = inputs_of(terms, values, mask, q_length)
    return _attend(q_length, offset, inputs)


def inputs_of(
    terms: Terms, values: jax.Array, mask: Mask, q_length: int
) -> tuple[Inputs, int | None]:
    """The inputs in parts, and the position of the first query; None: only the loop takes them."""
    products = tuple(t for t in terms if isinstance(t, (LowRank, Outer)))
    biases = tuple(t for t in terms if isinstance(t, Static)) + tuple(
        Relative(diagonals(t, q_length, values.shape[1], mask.query_offset), 1 - q_length)
        for t in terms
        if isinstance(t, Relative)
    )
    inputs, offset = Inputs(products, biases, values, mask), mask.query_offset
    kernels = isinstance(offset, int) and fused_tpu.supported(inputs)
    return inputs, offset if kernels else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(q_length: int, offset: int | None, inputs: Inputs) -> jax.Array:
    return _forward(q_length, offset, inputs)[0]


def _attend_fwd(q_length: int, offset: int | None, inputs: Inputs):
    out, rows = checkpoint_name(_forward(q_length, offset, inputs), KEPT)
    return out, (inputs, out, rows)


def _attend_bwd(_: int, offset: int | None, residuals: Any, g: jax.Array):
    inputs, out, rows = residuals
    return (_backward(offset, inputs, rows, inner(out, g, rows.top.dtype), g),)


_attend.defvjp(_attend_fwd, _attend_bwd)


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
