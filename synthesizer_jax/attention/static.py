"""The static route: logits that examples share are exponentiated once, not once per example.

Let ``E = exp(S - c)``, where c is the row maximum over the keys that are not masked in all examples, and
let m be 1 for an example's real keys and 0 for padding. Then ``O = E (m ∘ V) / E m``. E has no batch
axis, and both products are matrix products over the whole batch. The division cancels any factor of E,
but not an underflow. If the denominator of a real query is below `MIN_ROW_SUM`, the fused
route computes the step instead. It is exact for logits of any range.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from synthesizer_jax.attention.derivatives import platform_dependent, with_gradient
from synthesizer_jax.attention.fused import (
    CHECKPOINT_NAME,
    Options,
    fused_backward,
    fused_forward,
    fused_inputs,
    fused_options,
    map_heads,
    softmax_vjp_delta,
)
from synthesizer_jax.attention.fused_arrays import Biases, FusedInputs, Products, SoftmaxStats
from synthesizer_jax.attention.masks import Mask, zero_padding
from synthesizer_jax.attention.reference import softmax
from synthesizer_jax.attention.static_conditions import MIN_ROW_SUM, is_separable
from synthesizer_jax.attention.terms import Call, LowRank, Relative, Static, logits_dtype, materialize
from synthesizer_jax.base.typing import PyTree


def attend_static(call: Call) -> jax.Array:
    """Returns ``softmax(Σ terms) · values``, ``[b, q, h, e]``, for terms without a batch axis."""
    call = call.cleared()
    dtype, q_length = call.values.dtype, call.q_length
    if dtype == jnp.float16 and not is_separable(call.mask):
        # E would underflow in float16
        call = dataclasses.replace(call, values=call.values.astype(jnp.float32))
    inputs = static_inputs(call)
    options = fused_options(call, inputs)
    # For what the matrix products cannot do, which is rare; another kernel would be compiled for nothing.
    options = options._replace(kernels=tuple(name for name in options.kernels if name != "tpu"))
    on_tpu = _kernel_obstacle(q_length, inputs) is None
    attend = with_gradient(
        functools.partial(_attend_static_fwd, q_length, options, on_tpu),
        functools.partial(_attend_static_bwd, options, on_tpu),
        name=CHECKPOINT_NAME,
    )
    out: jax.Array = attend(inputs)
    return out.astype(dtype)


def static_inputs(call: Call) -> FusedInputs:
    """Returns the inputs in the form of the fused route, with products of parameters multiplied out."""
    products = tuple(term for term in call.terms if isinstance(term, LowRank))
    if products:
        tables = tuple(term for term in call.terms if isinstance(term, Static))
        rest = tuple(term for term in call.terms if isinstance(term, Relative))
        logits = materialize((*tables, *products), q_length=call.q_length, k_length=call.k_length)
        call = dataclasses.replace(call, terms=(Static(logits[0]), *rest))
    return fused_inputs(call)


def obstacle(call: Call) -> str | None:
    """Returns why this route cannot take a call; None if it can."""
    if any(term.is_weights for term in call.terms):
        return "Banded terms are weights without a softmax"
    if call.soft_cap is not None:
        return "it has no soft cap"
    if call.sinks is not None:
        return "it has no sinks"
    for term in call.terms:
        name = type(term).__name__
        if any(a.from_tokens for a in term.arrays()):
            return f"a {name} term is made from tokens"
        if type(term) not in (Static, Relative, LowRank):
            return f"it has no {name} terms, only Static, Relative and LowRank"
    if call.mask.allowed is not None:
        return "Mask.allowed may differ between examples"
    return None


def kernel_obstacle(call: Call) -> str | None:
    """Returns why the TPU kernels cannot take a call; None: they can."""
    return _kernel_obstacle(call.q_length, static_inputs(call))


def _kernel_obstacle(q_length: int, inputs: FusedInputs) -> str | None:
    from synthesizer_jax.attention import static_tpu  # imports Pallas, which short rows do not need

    return static_tpu.obstacle(q_length, inputs)


_ACCELERATORS = ("cuda", "rocm", "tpu")


class _Residuals(NamedTuple):
    """The residuals where examples differ in the keys that they see.

    Attributes:
      inverse_row_sum: 1 over the denominators, ``[h, q, b]``; 0 for padding and rows without keys.
      row_max: what the loop subtracted from the logits, ``[h, q, b]``; not read if `is_exact`.
      is_exact: a scalar bool: whether no denominator of a real query was below `MIN_ROW_SUM`.
    """

    inverse_row_sum: jax.Array
    row_max: jax.Array
    is_exact: jax.Array


_OptionalResiduals: TypeAlias = _Residuals | tuple[()]
_Region: TypeAlias = tuple[jax.Array, jax.Array]
"""Pairs ``[q or 1, k]`` and keys ``[b, k]``, bool: a mask that is the product of both."""


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _attend_static_fwd(
    q_length: int, options: Options, on_tpu: bool, inputs: FusedInputs
) -> tuple[jax.Array, _OptionalResiduals]:
    """Returns the output ``[b, q, h, e]`` and the residuals.

    By matrix products, or by the fused route if these would lose digits; on TPUs by kernels if `on_tpu`.
    """
    same_keys = is_separable(inputs.mask)
    matmuls = functools.partial(_matmul_fwd, q_length)
    parallel = dict.fromkeys(_ACCELERATORS, matmuls)
    kernels: dict[str, Callable[..., PyTree]] = {}
    if on_tpu:
        from synthesizer_jax.attention import static_tpu

        kernels["tpu"] = functools.partial(
            static_tpu.forward, q_length, options.query_offset, same_keys=same_keys
        )
    default = functools.partial(matmuls, parallel=False)
    out, inverse_row_sum = platform_dependent(inputs, default=default, kernels=kernels, **parallel)
    if same_keys:
        return out, ()
    is_exact = _all_when_mapped(jnp.all(inverse_row_sum < 1 / MIN_ROW_SUM))

    def run_loop() -> tuple[jax.Array, jax.Array, jax.Array]:
        rows = lambda x: x[..., 0].transpose(2, 1, 0)  # [b, q, h, 1] → [h, q, b]
        out, stats = fused_forward(q_length, options, inputs)
        return out, rows(stats.inverse_row_sum), rows(stats.row_max)

    out, inverse_row_sum, row_max = lax.cond(
        is_exact, lambda: (out, inverse_row_sum, inverse_row_sum), run_loop
    )
    return out, _Residuals(inverse_row_sum, row_max, is_exact)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend_static_bwd(
    options: Options,
    on_tpu: bool,
    inputs: FusedInputs,
    out: jax.Array,
    residuals: _OptionalResiduals,
    dout: jax.Array,
) -> FusedInputs:
    """Returns the cotangents of the inputs."""

    def run_matmuls(inverse_row_sum: jax.Array | None, delta: jax.Array | None) -> FusedInputs:
        def matmuls(inputs: FusedInputs, _: jax.Array, *rest: Any, parallel: bool = True) -> FusedInputs:
            return _matmul_bwd(inputs, *rest, parallel=parallel)

        kernels: dict[str, Callable[..., PyTree]] = {}
        if on_tpu:
            from synthesizer_jax.attention import static_tpu

            def kernel(inputs: FusedInputs, out: jax.Array, _: jax.Array, *rest: Any) -> FusedInputs:
                return static_tpu.backward(options.query_offset, inputs, out, *rest)

            kernels["tpu"] = kernel
        cotangents: FusedInputs = platform_dependent(
            *(inputs, out, delta, inverse_row_sum, dout),
            default=functools.partial(matmuls, parallel=False),
            kernels=kernels,
            **dict.fromkeys(_ACCELERATORS, matmuls),
        )
        return cotangents

    if not isinstance(residuals, _Residuals):
        return run_matmuls(None, None)
    inverse_row_sum, row_max, is_exact = residuals
    # delta = Σ_e dO ∘ O; inside the `lax.cond` it would keep the output
    delta = softmax_vjp_delta(out, dout, row_max.dtype)

    def run_loop() -> FusedInputs:
        rows = (x.transpose(2, 1, 0)[..., None] for x in (row_max, inverse_row_sum))  # [b, q, h, 1]
        return fused_backward(options, inputs, SoftmaxStats(*rows), delta, dout)

    cotangents: FusedInputs = lax.cond(
        _all_when_mapped(is_exact), lambda: run_matmuls(inverse_row_sum, delta), run_loop
    )
    return cotangents


def _matmul_fwd(
    q_length: int, inputs: FusedInputs, *, parallel: bool = True
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the output, and 1 over the denominators ``[h, q, b]`` unless the mask is separable.

    Heads are computed at once if `parallel`; on CPUs one after another, so that a head stays in the cache.
    """
    _, biases, values, mask, _ = inputs
    logits, queries = _logits(q_length, values.shape[1], biases), mask.queries(q_length)
    if is_separable(mask):
        weights = softmax(logits, mask.band_pairs(*logits.shape[1:]))  # [h, q, k]
        out = jax.vmap(_weighted_sum, (0, 2), 2)(weights, values).astype(values.dtype)
        return zero_padding(out, queries), None
    dtype = logits_dtype(logits, values)
    regions = _regions(mask, q_length, values)
    num_keys = sum(_contract_keys("qk,bk->qb", pairs.astype(dtype), keys, dtype) for pairs, keys in regions)
    has_keys = num_keys > 0
    has_keys = has_keys if queries is None else has_keys & queries.T

    def head(logits: jax.Array, shared_max: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        # E = exp(S - c)
        numerators = _exp_logits(logits, shared_max, regions)
        # l = E m
        row_sum = sum(
            _contract_keys("qk,bk->qb", e.astype(values.dtype), keys, dtype)
            for e, (_, keys) in zip(numerators, regions, strict=True)
        )
        inverse_row_sum = jnp.where(has_keys, 1 / jnp.maximum(row_sum, MIN_ROW_SUM), 0)
        # O = E (m ∘ V) / l
        out = sum(map(_weighted_sum, numerators, _mask_values(values, regions)))
        # [b, q, e], [q, b]
        return (out * inverse_row_sum.T[..., None]).astype(values.dtype), inverse_row_sum

    args = logits, _shared_max(logits, values, mask), values
    results: tuple[jax.Array, jax.Array] = map_heads(
        head, logits.shape[0], args, (0, 0, 2), (2, 0), parallel=parallel
    )
    return results


def _matmul_bwd(
    inputs: FusedInputs,
    delta: jax.Array | None,
    inverse_row_sum: jax.Array | None,
    dout: jax.Array,
    *,
    parallel: bool = True,
) -> FusedInputs:
    """Returns the cotangents of the inputs; without `delta`, `is_separable` is true.

    With the weights ``P = (E ∘ m) / l`` of an example, where ``l = E m``, and summed over examples::

      dV = Pᵀ dO = m ∘ Eᵀ (dO / l)
      dS = Σ_b P ∘ (dP - delta) = E ∘ (Σ_b (dO / l) (m ∘ V)ᵀ - Σ_b m delta / l)
    """
    _, biases, values, mask, _ = inputs
    make_logits = functools.partial(_logits, dout.shape[1], values.shape[1])
    logits, logits_vjp = jax.vjp(make_logits, biases)
    if delta is None or inverse_row_sum is None:
        dout = zero_padding(dout, mask.queries(dout.shape[1]))
        band = mask.band_pairs(*logits.shape[1:])
        weights, softmax_vjp = jax.vjp(lambda x: softmax(x, band), logits)
        # dP = Σ_b dO Vᵀ,  dV = Pᵀ dO
        products = jax.vmap(_weighted_sum_vjp, (0, 2, 2), (0, 2))
        dweights, dvalues = products(weights, values, dout)
        # dS = P ∘ (dP - Σ_k P ∘ dP)
        (dlogits,) = softmax_vjp(dweights)
    else:
        scaled_delta = delta[..., 0].transpose(2, 1, 0) * inverse_row_sum  # [h, q, b]
        args = (logits, _shared_max(logits, values, mask), values, inverse_row_sum, scaled_delta, dout)
        head = functools.partial(_head_cotangents, _regions(mask, dout.shape[1], values))
        axes = 0, 0, 2, 0, 0, 2
        dlogits, dvalues = map_heads(head, logits.shape[0], args, axes, (0, 2), parallel=parallel)
    (dbiases,) = logits_vjp(dlogits)
    return inputs.cotangents(Products(), dbiases, dvalues)


def _logits(q_length: int, k_length: int, biases: Biases) -> jax.Array:
    """Returns the sum of the biases, ``[h, q, k]`` in float32 or wider."""
    terms = (*biases.tables, *biases.diagonals)
    return materialize(terms, q_length=q_length, k_length=k_length)[0]


def _head_cotangents(
    regions: list[_Region],
    logits: jax.Array,
    shared_max: jax.Array,
    values: jax.Array,
    inverse_row_sum: jax.Array,
    scaled_delta: jax.Array,
    dout: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the cotangents of a head's logits ``[q, k]`` and values ``[b, k, e]``."""
    # dO / l
    scaled_dout = dout.astype(inverse_row_sum.dtype) * inverse_row_sum.T[..., None]
    # m ∘ V
    masked_values, mask_values_vjp = jax.vjp(lambda v: _mask_values(v, regions), values)
    # E = exp(S - c)
    numerators = _exp_logits(logits, shared_max, regions)
    dlogits, dmasked_values = [], []
    for e, v, (_, keys) in zip(numerators, masked_values, regions, strict=True):
        # dE = Σ_b (dO / l) (m ∘ V)ᵀ,  d(m ∘ V) = Eᵀ (dO / l)
        de, dv = _weighted_sum_vjp(e, v, scaled_dout)
        # dS = E ∘ (dE - Σ_b m delta / l)
        delta = _contract_keys("qb,bk->qk", scaled_delta, keys, e.dtype)
        dlogits.append(e * (de - delta))
        dmasked_values.append(dv)
    # dV = m ∘ d(m ∘ V)
    (dvalues,) = mask_values_vjp(dmasked_values)
    return functools.reduce(operator.add, dlogits).astype(logits.dtype), dvalues


def _regions(mask: Mask, q_length: int, values: jax.Array) -> list[_Region]:
    """Returns the mask as a sum of products of pairs ``[q or 1, k]`` and real keys ``[b, k]``.

    A mask with a prefix is a sum of two: what the band allows, and what only the prefix allows.
    """
    batch, k_length = values.shape[:2]
    keys = mask.keys(k_length)
    keys = jnp.ones((batch, k_length), bool) if keys is None else keys
    band, prefix = mask.band_pairs(q_length, k_length), mask.prefix(k_length)
    if band is None:
        return [(jnp.ones((1, k_length), bool), keys)]
    if prefix is None:
        return [(band, keys)]
    return [(band, keys), (~band & prefix.any(axis=0)[None], keys & prefix)]


def _shared_max(logits: jax.Array, values: jax.Array, mask: Mask) -> jax.Array:
    """Returns c, each row's maximum over the keys not masked in all examples, ``[h, q, 1]``."""
    regions = _regions(mask, logits.shape[1], values)
    in_any_region = functools.reduce(operator.or_, (pairs for pairs, _ in regions))
    lowest = jnp.finfo(logits.dtype).min
    return jnp.max(logits, axis=-1, keepdims=True, where=in_any_region[None], initial=lowest)


def _exp_logits(logits: jax.Array, shared_max: jax.Array, regions: list[_Region]) -> list[jax.Array]:
    """Returns a head's ``exp(S - c)`` in each region and zero outside, ``[q, k]``."""
    lowest = jnp.finfo(logits.dtype).min
    return [jnp.exp(jnp.where(pairs, logits - shared_max, lowest)) for pairs, _ in regions]


def _contract_keys(spec: str, x: jax.Array, keys: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return jnp.einsum(spec, x, keys.astype(x.dtype), preferred_element_type=dtype)


def _mask_values(values: jax.Array, regions: list[_Region]) -> list[jax.Array]:
    """Returns a head's values ``[b, k, e]`` in each region, zero where its keys are padding."""
    return [jnp.where(keys[..., None], values, 0) for _, keys in regions]


def _weighted_sum(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Sums values ``[b, k, e]`` with weights ``[q, k]`` that all examples share, ``[b, q, e]``.

    That is one matrix product, in float32 or wider; the weights are rounded to the values' dtype.
    """
    # [q, k] · [k, b e] → [q, b e]
    out = _matmul(weights.astype(values.dtype), _in_columns(values), (1, 0))
    return out.reshape(out.shape[0], -1, values.shape[2]).swapaxes(0, 1)


def _weighted_sum_vjp(
    weights: jax.Array, values: jax.Array, dout: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the cotangents of `_weighted_sum`'s weights and values, from that of its result."""
    dout = _in_columns(dout.astype(values.dtype))  # [q, b e]
    # dV = Wᵀ dO
    dvalues = _matmul(weights.astype(values.dtype), dout, (0, 0))  # [k, b e]
    dvalues = dvalues.reshape(dvalues.shape[0], -1, values.shape[2]).swapaxes(0, 1)
    # dW = dO Vᵀ, summed over examples
    dweights = _matmul(dout, _in_columns(values), (1, 1))  # [q, k]
    return dweights.astype(weights.dtype), dvalues.astype(values.dtype)


def _in_columns(x: jax.Array) -> jax.Array:
    """Reshapes ``[b, n, e]`` to ``[n, b e]``."""
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)


def _matmul(x: jax.Array, y: jax.Array, axes: tuple[int, int]) -> jax.Array:
    dims = ((axes[:1], axes[1:]), ((), ()))
    return lax.dot_general(x, y, dims, preferred_element_type=logits_dtype(x, y))


@custom_vmap
def _all_when_mapped(flag: jax.Array) -> jax.Array:
    """Returns the flag; under `jax.vmap`, whether the flags of all mapped calls are true.

    A `lax.cond` on the result then remains a cond under `jax.vmap`.
    """
    return flag


@_all_when_mapped.def_vmap
def _all_when_mapped_vmap(size: int, mapped: list[bool], flag: jax.Array) -> tuple[jax.Array, bool]:
    return _all_when_mapped(jnp.all(flag, axis=0)), False
