"""The fused route: neither the forward nor the backward pass has an array ``[batch, heads, q, k]``.

Only the logits of one block exist at a time: of one head and example, or a tile of them in a kernel.
The backward pass recomputes the weights from the saved maximum and sum of every row (Dao et al. 2022,
FlashAttention, section 3.1). They are not recomputed from ``log Σ exp``, as its rounding to float32 loses
digits if logits are in the hundreds. There is one implementation for each kind of device.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from synthesizer_jax.attention import blocked, fused_tpu
from synthesizer_jax.attention.blocked import (
    Biases,
    FusedInputs,
    SoftmaxStats,
    divide_terms,
    softmax_vjp_delta,
)
from synthesizer_jax.attention.derivatives import with_gradient
from synthesizer_jax.attention.packed import with_segment_positions
from synthesizer_jax.attention.terms import Call, Static, cut_diagonals, uses_segment_positions

_GPU_PLATFORMS = ("cuda", "rocm")

CHECKPOINT_NAME = "attention"
"""The name by which `jax.checkpoint` policies can save the residuals of attention."""


def attend_fused(call: Call) -> jax.Array:
    """Returns ``softmax(Σ terms) · values``, ``[b, q, h, e]``, computed in blocks."""
    inputs = fused_inputs(call)
    # None: no Pallas kernels, which cannot take all inputs. Only TPUs use it.
    pallas_offset = None if _kernel_obstacle(call, inputs) else call.mask.query_offset
    options = call.soft_cap, pallas_offset

    def forward(
        args: tuple[FusedInputs, jax.Array | None],
    ) -> tuple[jax.Array, SoftmaxStats]:
        inputs, sinks = args
        out, stats = _attend_fused_fwd(call.q_length, *options, inputs)
        return (out, stats) if sinks is None else _add_sinks(out, stats, sinks)

    def backward(
        args: tuple[FusedInputs, jax.Array | None],
        out: jax.Array,
        stats: SoftmaxStats,
        dout: jax.Array,
    ) -> tuple[FusedInputs, jax.Array | None]:
        inputs, sinks = args
        # delta = Σ_e dO ∘ O
        delta = softmax_vjp_delta(out, dout, stats.row_max.dtype)
        cotangents: FusedInputs = _attend_fused_bwd(*options, inputs, stats, delta, dout)
        return cotangents, None if sinks is None else _sinks_gradient(stats, delta, sinks)

    out: jax.Array = with_gradient(forward, backward, name=CHECKPOINT_NAME)((inputs, call.sinks))
    return out


def fused_inputs(call: Call) -> FusedInputs:
    """Returns the inputs in the form that the implementations of this route take."""
    terms, mask = call.terms, call.mask
    q, k = call.q_length, call.k_length
    positions, offset = None, mask.query_offset
    if uses_segment_positions(terms, mask):
        q, k = mask.segment_lengths(q, k)
        terms, positions = with_segment_positions(terms, mask)
        offset = 0
    divided = divide_terms(terms)
    assert divided is not None
    products, (tables, diagonals) = divided
    biases = Biases(
        tuple(Static(term.logits[:, :q, :k]) for term in tables),
        tuple(cut_diagonals(term, q, k, query_offset=offset) for term in diagonals),
    )
    return FusedInputs(products, biases, call.values, mask, positions)


def obstacle(call: Call) -> str | None:
    """Returns why this route cannot take a call; None if it can."""
    if any(term.is_weights for term in call.terms):
        return "Banded terms are weights without a softmax"
    for term in call.terms:
        if divide_terms((term,)) is None:
            name = type(term).__name__
            return f"it has no {name} terms, only Static, Relative, LowRank and Outer"
    return None


def kernel_obstacle(call: Call) -> str | None:
    """Returns why TPU kernels cannot take a call; None: they can."""
    return _kernel_obstacle(call, fused_inputs(call))


def _kernel_obstacle(call: Call, inputs: FusedInputs) -> str | None:
    return "they have no soft cap" if call.soft_cap is not None else fused_tpu.obstacle(inputs)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _attend_fused_fwd(
    q_length: int, soft_cap: float | None, pallas_offset: int | None, inputs: FusedInputs
) -> tuple[jax.Array, SoftmaxStats]:
    """Returns the output and the residuals.

    It is compiled separately, as the backward pass is, so that equal layers are traced once.
    """
    default = functools.partial(blocked.forward, q_length, soft_cap=soft_cap)
    implementations = dict.fromkeys(_GPU_PLATFORMS, functools.partial(default, parallel=True))
    if pallas_offset is not None:
        implementations["tpu"] = functools.partial(fused_tpu.forward, q_length, pallas_offset)
    results: tuple[jax.Array, SoftmaxStats] = lax.platform_dependent(
        inputs, default=default, **implementations
    )
    return results


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend_fused_bwd(
    soft_cap: float | None,
    pallas_offset: int | None,
    inputs: FusedInputs,
    stats: SoftmaxStats,
    delta: jax.Array,
    dout: jax.Array,
) -> FusedInputs:
    """Returns the cotangents of the inputs."""
    default = functools.partial(blocked.backward, soft_cap=soft_cap)
    implementations = dict.fromkeys(_GPU_PLATFORMS, functools.partial(default, parallel=True))
    if pallas_offset is not None:
        implementations["tpu"] = functools.partial(fused_tpu.backward, pallas_offset)
    cotangents: FusedInputs = lax.platform_dependent(
        inputs, stats, delta, dout, default=default, **implementations
    )
    return cotangents


def _add_sinks(out: jax.Array, stats: SoftmaxStats, sinks: jax.Array) -> tuple[jax.Array, SoftmaxStats]:
    """Returns the results as they are with one more key for each head, whose value is zero.

    It takes a share of every weight: ``Σ exp(S) / (exp(sink) + Σ exp(S))`` of them is left.
    """
    left = jax.nn.sigmoid(stats.row_max - jnp.log(stats.inverse_row_sum) - sinks[:, None])
    return (out * left).astype(out.dtype), stats._replace(inverse_row_sum=stats.inverse_row_sum * left)


def _sinks_gradient(stats: SoftmaxStats, delta: jax.Array, sinks: jax.Array) -> jax.Array:
    """Returns ``-Σ P · delta`` over queries and examples: the value of the key is zero, and so dP is."""
    weights = jnp.exp(sinks[:, None] - stats.row_max + jnp.log(stats.inverse_row_sum))
    return -jnp.sum(weights * delta, axis=(0, 1, 3)).astype(sinks.dtype)
