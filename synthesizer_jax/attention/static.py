"""The static route: logits that examples share are exponentiated once, not once per example.

Let ``E = exp(S - c)``, where c is the row maximum over the keys that are not masked in all examples, and
let m be 1 for an example's real keys and 0 for padding. Then ``O = E (m ∘ V) / E m``. E has no batch axis,
and both products are matrix products over the whole batch. The division cancels any factor of E, but not
an underflow: if the denominator of a real query is below `MIN_ROW_SUM`, the loop of the fused route
computes the step instead, which is exact for logits of any range.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import NamedTuple, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from synthesizer_jax.attention import blocked, static_tpu
from synthesizer_jax.attention.derivatives import with_gradient
from synthesizer_jax.attention.fused import CHECKPOINT_NAME
from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.parts import (
    MIN_ROW_SUM,
    Biases,
    Call,
    FusedInputs,
    Products,
    SoftmaxStats,
    divide_terms,
    softmax_vjp_delta,
)
from synthesizer_jax.attention.products import weighted_sum, weighted_sum_vjp
from synthesizer_jax.attention.reference import softmax
from synthesizer_jax.attention.terms import (
    Relative,
    Static,
    diagonals,
    logits_dtype,
    materialize,
)

_Result = TypeVar("_Result")


def attend_static(call: Call) -> jax.Array:
    """Returns ``softmax(Σ terms) · values``, ``[b, q, h, e]``, for terms without a batch axis."""
    dtype, q_length = call.values.dtype, call.q_length
    if dtype == jnp.float16 and not _is_separable(call.mask):
        # E would underflow in float16
        call = dataclasses.replace(call, values=call.values.astype(jnp.float32))
    inputs = static_inputs(call)
    # Known while the passes are traced; None: the Pallas kernels cannot take the inputs.
    query_offset = None if static_tpu.obstacle(q_length, inputs) else call.mask.query_offset
    attend = with_gradient(
        functools.partial(_attend_static_fwd, q_length, query_offset),
        functools.partial(_attend_static_bwd, q_length, query_offset),
        name=CHECKPOINT_NAME,
    )
    out: jax.Array = attend(inputs)
    return out.astype(dtype)


def static_inputs(call: Call) -> FusedInputs:
    """Returns the inputs in the form of the fused route, with products of parameters multiplied out."""
    q, k, offset = call.q_length, call.k_length, call.mask.query_offset
    divided = divide_terms(call.terms)
    assert divided is not None
    products, (tables, diagonal_terms) = divided
    if products.low_rank:
        logits = materialize((*tables, *products.low_rank), q_length=q, k_length=k)
        tables = (Static(logits[0]),)
    relatives = tuple(
        Relative(diagonals(term, q, k, query_offset=offset), 1 - q) for term in diagonal_terms
    )
    return FusedInputs(Products(), Biases(tables, relatives), call.values, call.mask)


def obstacle(call: Call) -> str | None:
    """Returns why this route cannot take a call; None if it can."""
    if any(term.is_weights for term in call.terms):
        return "Banded terms are weights without a softmax"
    for term in call.terms:
        if not term.is_made_of_parameters:
            return f"a {type(term).__name__} term is made from tokens"
        if divide_terms((term,)) is None:
            return f"it has no {type(term).__name__} terms, only Static, Relative and LowRank"
    if call.mask.allowed is not None:
        return "Mask.allowed may differ between examples"
    return None


def select_kernel(call: Call, platform: str) -> tuple[str, str | None]:
    """Returns what runs the route on a platform, and why kernels cannot, if there are any."""
    if platform != "tpu":
        return "matrix products", None
    reason = static_tpu.obstacle(call.q_length, static_inputs(call))
    return ("matrix products" if reason else "Pallas kernels"), reason


class _Residuals(NamedTuple):
    """The residuals where examples differ in the keys that they see.

    Attributes:
      inverse_row_sum: 1 over the denominators, ``[h, q, b]``; 0 for queries that are padding or see no
        key.
      row_max: what was subtracted from the logits, ``[h, q, b]``, if `is_exact` is false; not read
        otherwise.
      is_exact: a scalar bool: whether no denominator of a real query was below `MIN_ROW_SUM`.
    """

    inverse_row_sum: jax.Array
    row_max: jax.Array
    is_exact: jax.Array


_OptionalResiduals: TypeAlias = _Residuals | tuple[()]
_Region: TypeAlias = tuple[jax.Array, jax.Array]
"""Pairs ``[q or 1, k]`` and keys ``[b, k]``, bool: a mask that is the product of both."""


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend_static_fwd(
    q_length: int, query_offset: int | None, inputs: FusedInputs
) -> tuple[jax.Array, _OptionalResiduals]:
    """Returns the output ``[b, q, h, e]`` and the residuals."""
    is_separable = _is_separable(inputs.mask)

    def run_kernels(inputs: FusedInputs) -> tuple[jax.Array, _OptionalResiduals]:
        out, inverse_row_sum = static_tpu.forward(
            q_length, query_offset, inputs, same_keys=is_separable
        )
        if inverse_row_sum is None:
            return out, ()
        inverse_row_sum = inverse_row_sum.swapaxes(1, 2)
        is_exact = jnp.ones_like(inverse_row_sum, shape=(), dtype=bool)
        return out, _Residuals(inverse_row_sum, inverse_row_sum, is_exact)

    default = functools.partial(_matmul_fwd, q_length)
    if query_offset is None:
        return default(inputs)
    results: tuple[jax.Array, _OptionalResiduals] = lax.platform_dependent(
        inputs, tpu=run_kernels, default=default
    )
    return results


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend_static_bwd(
    q_length: int,
    query_offset: int | None,
    inputs: FusedInputs,
    out: jax.Array,
    residuals: _OptionalResiduals,
    dout: jax.Array,
) -> FusedInputs:
    """Returns the cotangents of the inputs."""

    def run_kernels(
        inputs: FusedInputs, out: jax.Array, residuals: _OptionalResiduals, dout: jax.Array
    ) -> FusedInputs:
        inverse_row_sum = None
        if isinstance(residuals, _Residuals):
            inverse_row_sum = residuals.inverse_row_sum.swapaxes(1, 2)
        return static_tpu.backward(query_offset, inputs, out, inverse_row_sum, dout)

    default = functools.partial(_matmul_bwd, q_length)
    if query_offset is None:
        return default(inputs, out, residuals, dout)
    cotangents: FusedInputs = lax.platform_dependent(
        inputs, out, residuals, dout, tpu=run_kernels, default=default
    )
    return cotangents


def _matmul_fwd(q_length: int, inputs: FusedInputs) -> tuple[jax.Array, _OptionalResiduals]:
    """Computes `_attend_static_fwd` in plain JAX."""
    _, biases, values, mask, _ = inputs
    logits = _logits(q_length, values.shape[1], biases)
    if not _is_separable(mask):
        return _guarded_fwd(logits, values, mask)
    weights = softmax(logits, mask.band_pairs(*logits.shape[1:]))
    out = _swap_heads_first(weighted_sum(weights, _swap_heads_first(values))).astype(values.dtype)
    queries = mask.queries(q_length)
    return out if queries is None else jnp.where(queries[..., None, None], out, 0), ()


def _matmul_bwd(
    q_length: int,
    inputs: FusedInputs,
    out: jax.Array,
    residuals: _OptionalResiduals,
    dout: jax.Array,
) -> FusedInputs:
    """Computes `_attend_static_bwd` in plain JAX."""
    _, biases, values, mask, _ = inputs
    logits, logits_vjp = jax.vjp(functools.partial(_logits, q_length, values.shape[1]), biases)
    if _is_separable(mask):
        queries = mask.queries(q_length)
        dout = dout if queries is None else jnp.where(queries[..., None, None], dout, 0)
        band = mask.band_pairs(*logits.shape[1:])
        weights, softmax_vjp = jax.vjp(lambda x: softmax(x, band), logits)
        # dP = Σ_b dO Vᵀ,  dV = Pᵀ dO
        dweights, dvalues = weighted_sum_vjp(
            weights, _swap_heads_first(values), _swap_heads_first(dout)
        )
        # dS = P ∘ (dP - Σ_k P ∘ dP)
        (dlogits,), dvalues = softmax_vjp(dweights), _swap_heads_first(dvalues)
    else:
        assert isinstance(residuals, _Residuals)
        dlogits, dvalues = _guarded_bwd(logits, values, mask, out, residuals, dout)
    (dbiases,) = logits_vjp(dlogits)
    return inputs.cotangents(Products(), dbiases, dvalues)


def _logits(q_length: int, k_length: int, biases: Biases) -> jax.Array:
    """Returns the sum of the biases, ``[h, q, k]`` in float32 or wider."""
    terms = (*biases.tables, *biases.diagonals)
    return materialize(terms, q_length=q_length, k_length=k_length)[0]


def _fused_inputs(logits: jax.Array, values: jax.Array, mask: Mask) -> FusedInputs:
    return FusedInputs(Products(), Biases((Static(logits),)), values, mask)


def _is_separable(mask: Mask) -> bool:
    """Returns whether all real queries at a position see the same keys in every example.

    That is the case without padding, and in causal self-attention with padding at the end, where no real
    query sees a padded key. Examples then share the softmax.
    """
    if mask.key_valid is not None or mask.prefix_lengths is not None:
        return False
    _, after = mask.band
    is_causal = after is not None and after <= 0
    return mask.key_lengths is None or (is_causal and mask.self_attention)


def _guarded_fwd(logits: jax.Array, values: jax.Array, mask: Mask) -> tuple[jax.Array, _Residuals]:
    """Returns the output and the residuals where examples differ in the keys that they see.

    Returns:
      The output ``[b, q, h, e]``, by matrix products, or by the fused route's loop if these would lose
      digits; and the residuals.
    """
    shared_max = _shared_max(logits, values, mask)
    out, inverse_row_sum, is_exact = _run_in_groups(_grouped_fwd, logits, shared_max, values, mask)
    is_exact = _all_when_mapped(is_exact)

    def use_matmuls() -> tuple[jax.Array, jax.Array, jax.Array]:
        return out, inverse_row_sum, inverse_row_sum

    def run_loop() -> tuple[jax.Array, jax.Array, jax.Array]:
        out, stats = blocked.forward(logits.shape[1], _fused_inputs(logits, values, mask))
        return (
            out,
            _swap_heads_first(stats.inverse_row_sum)[..., 0],
            _swap_heads_first(stats.row_max)[..., 0],
        )

    out, inverse_row_sum, row_max = lax.cond(is_exact, use_matmuls, run_loop)
    return out, _Residuals(inverse_row_sum, row_max, is_exact)


def _guarded_bwd(
    logits: jax.Array,
    values: jax.Array,
    mask: Mask,
    out: jax.Array,
    residuals: _Residuals,
    dout: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the cotangents of the logits and the values."""
    inverse_row_sum, row_max, is_exact = residuals
    shared_max = _shared_max(logits, values, mask)
    is_exact = _all_when_mapped(is_exact)
    # delta = Σ_e dO ∘ O
    delta = softmax_vjp_delta(out, dout, inverse_row_sum.dtype)

    def run_matmuls() -> tuple[jax.Array, jax.Array]:
        scaled_delta = _swap_heads_first(delta)[..., 0] * inverse_row_sum
        cotangents: tuple[jax.Array, jax.Array] = _run_in_groups(
            _grouped_bwd, logits, shared_max, values, mask, inverse_row_sum, scaled_delta, dout
        )
        return cotangents

    def run_loop() -> tuple[jax.Array, jax.Array]:
        stats = SoftmaxStats(
            _swap_heads_first(row_max[..., None]), _swap_heads_first(inverse_row_sum[..., None])
        )
        inputs = _fused_inputs(logits, values, mask)
        cotangents = blocked.backward(inputs, stats, delta, dout)
        return jax.tree.leaves(cotangents.biases)[0], cotangents.values

    dlogits, dvalues = lax.cond(is_exact, run_matmuls, run_loop)
    return dlogits, dvalues


def _run_in_groups(
    function: Callable[..., _Result], logits: jax.Array, *args: jax.Array | Mask
) -> _Result:
    """Calls ``function(group_size, logits, *args)`` with a number of heads that suits the platform.

    On CPUs each head is a group, so that a group stays in the cache; elsewhere all heads are one group.
    """
    heads = logits.shape[0]
    result: _Result = lax.platform_dependent(
        logits,
        *args,
        cpu=functools.partial(function, 1),
        default=functools.partial(function, heads),
    )
    return result


def _grouped_fwd(
    group_size: int, logits: jax.Array, shared_max: jax.Array, values: jax.Array, mask: Mask
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the forward pass by matrix products, for groups of heads.

    Returns:
      The output ``[b, q, h, e]``; 1 over the denominators, ``[h, q, b]``; and whether no denominator of a
      real query is below `MIN_ROW_SUM`.
    """
    heads, q_length, _ = logits.shape
    batch, _, _, width = values.shape
    dtype = logits_dtype(logits, values)
    regions = _regions(mask, q_length, values)
    num_keys = sum(
        _contract_keys("qk,bk->qb", r[0].astype(dtype), keys, dtype=dtype) for r, keys in regions
    )
    has_keys = jnp.expand_dims(num_keys > 0, 0)
    queries = mask.queries(q_length)
    has_keys = has_keys if queries is None else has_keys & queries.T[None]

    def update_group(
        j: jax.Array, results: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        out, inverse_row_sums, is_exact = results
        # E = exp(S - c)
        numerators = _exp_logits(
            _select_group(logits, j, group_size), _select_group(shared_max, j, group_size), regions
        )
        group_values = _select_values(values, j, group_size)
        # l = E m
        row_sum = sum(
            _contract_keys("hqk,bk->hqb", e.astype(values.dtype), keys, dtype=dtype)
            for e, (_, keys) in zip(numerators, regions, strict=True)
        )
        inverse_row_sum = jnp.where(has_keys, 1 / jnp.maximum(row_sum, MIN_ROW_SUM), 0)
        # O = E (m ∘ V) / l
        masked_values = _mask_values(group_values, regions)
        group_out = sum(map(weighted_sum, numerators, masked_values)) * inverse_row_sum[..., None]
        return (
            _update_values(out, group_out, j, group_size=group_size),
            lax.dynamic_update_slice_in_dim(
                inverse_row_sums, inverse_row_sum, j * group_size, axis=0
            ),
            is_exact & jnp.all((row_sum >= MIN_ROW_SUM) | ~has_keys),
        )

    out = jnp.zeros_like(values, shape=(batch, q_length, heads, width))
    inverse_row_sums = jnp.zeros_like(values, shape=(heads, q_length, batch), dtype=dtype)
    init = out, inverse_row_sums, jnp.ones_like(values, shape=(), dtype=bool)
    results: tuple[jax.Array, jax.Array, jax.Array] = lax.fori_loop(
        0, heads // group_size, update_group, init
    )
    return results


def _grouped_bwd(
    group_size: int,
    logits: jax.Array,
    shared_max: jax.Array,
    values: jax.Array,
    mask: Mask,
    inverse_row_sum: jax.Array,
    scaled_delta: jax.Array,
    dout: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Computes the backward pass by matrix products, for groups of heads.

    With the weights ``P = (E ∘ m) / l`` of an example, where ``l = E m``, and summed over examples::

      dV = Pᵀ dO = m ∘ Eᵀ (dO / l)
      dS = Σ_b P ∘ (dP - delta) = E ∘ (Σ_b (dO / l) (m ∘ V)ᵀ - Σ_b m delta / l)

    Returns:
      The cotangents of the logits and the values.
    """
    heads, q_length, _ = logits.shape
    regions = _regions(mask, q_length, values)

    def update_group(
        j: jax.Array, cotangents: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        dlogits, dvalues = cotangents
        # dO / l
        group_inverse = _select_group(inverse_row_sum, j, group_size)
        group_dout = _select_values(dout, j, group_size).astype(group_inverse.dtype)
        scaled_dout = group_dout * group_inverse[..., None]
        group_dlogits, group_dvalues = _group_cotangents(
            _select_group(logits, j, group_size),
            _select_group(shared_max, j, group_size),
            _select_values(values, j, group_size),
            scaled_dout=scaled_dout,
            scaled_delta=_select_group(scaled_delta, j, group_size),
            regions=regions,
        )
        dlogits = lax.dynamic_update_slice_in_dim(dlogits, group_dlogits, j * group_size, axis=0)
        return dlogits, _update_values(dvalues, group_dvalues, j, group_size=group_size)

    init = jnp.zeros_like(logits), jnp.zeros_like(values)
    cotangents: tuple[jax.Array, jax.Array] = lax.fori_loop(
        0, heads // group_size, update_group, init
    )
    return cotangents


def _group_cotangents(
    logits: jax.Array,
    shared_max: jax.Array,
    values: jax.Array,
    *,
    scaled_dout: jax.Array,
    scaled_delta: jax.Array,
    regions: list[_Region],
) -> tuple[jax.Array, jax.Array]:
    """Returns the cotangents of the logits ``[h, q, k]`` and the values ``[h, k, b, e]`` of a group."""
    # m ∘ V
    masked_values, mask_values_vjp = jax.vjp(lambda v: _mask_values(v, regions), values)
    # E = exp(S - c)
    numerators = _exp_logits(logits, shared_max, regions)
    dlogits, dmasked_values = [], []
    for e, v, (_, keys) in zip(numerators, masked_values, regions, strict=True):
        # dE = Σ_b (dO / l) (m ∘ V)ᵀ,  d(m ∘ V) = Eᵀ (dO / l)
        de, dv = weighted_sum_vjp(e, v, scaled_dout)
        # dS = E ∘ (dE - Σ_b m delta / l)
        delta = _contract_keys("hqb,bk->hqk", scaled_delta, keys, dtype=e.dtype)
        dlogits.append(e * (de - delta))
        dmasked_values.append(dv)
    # dV = m ∘ d(m ∘ V)
    (dvalues,) = mask_values_vjp(dmasked_values)
    return cast("jax.Array", sum(dlogits)), dvalues


def _select_group(x: jax.Array, j: jax.Array, group_size: int) -> jax.Array:
    """Returns group j of ``[h, ...]``."""
    return lax.dynamic_slice_in_dim(x, j * group_size, group_size, axis=0)


def _select_values(x: jax.Array, j: jax.Array, group_size: int) -> jax.Array:
    """Returns group j of ``[b, n, h, e]``, transposed to ``[h, n, b, e]``."""
    return _swap_heads_first(lax.dynamic_slice_in_dim(x, j * group_size, group_size, axis=2))


def _update_values(x: jax.Array, group: jax.Array, j: jax.Array, *, group_size: int) -> jax.Array:
    """Returns ``[b, n, h, e]`` with group j replaced by a group ``[h, n, b, e]``."""
    return lax.dynamic_update_slice_in_dim(
        x, _swap_heads_first(group.astype(x.dtype)), j * group_size, axis=2
    )


def _regions(mask: Mask, q_length: int, values: jax.Array) -> list[_Region]:
    """Returns the mask as a sum of products of pairs ``[q or 1, k]`` and real keys ``[b, k]``.

    A mask with a prefix is a sum of two: what the band allows, and what only the prefix allows.
    """
    batch, k_length = values.shape[:2]
    keys = mask.keys(k_length)
    keys = jnp.ones((batch, k_length), bool) if keys is None else keys
    band, prefix = mask.band_pairs(q_length, k_length), mask.prefix(k_length)
    if band is None:
        return [(jnp.ones((1, 1, k_length), bool), keys)]
    band = band[None]
    if prefix is None:
        return [(band, keys)]
    return [(band, keys), (~band & prefix.any(axis=0)[None, None], keys & prefix)]


def _shared_max(logits: jax.Array, values: jax.Array, mask: Mask) -> jax.Array:
    """Returns c, each row's maximum over the keys not masked in all examples, ``[h, q, 1]``."""
    regions = _regions(mask, logits.shape[1], values)
    in_any_region = functools.reduce(operator.or_, (pairs for pairs, _ in regions))
    lowest = jnp.finfo(logits.dtype).min
    return jnp.max(logits, axis=-1, keepdims=True, where=in_any_region, initial=lowest)


def _exp_logits(
    logits: jax.Array, shared_max: jax.Array, regions: list[_Region]
) -> list[jax.Array]:
    """Returns ``exp(S - c)`` in each region and zero outside, ``[h, q, k]`` in float32 or wider."""
    lowest = jnp.finfo(logits.dtype).min
    return [jnp.exp(jnp.where(pairs, logits - shared_max, lowest)) for pairs, _ in regions]


def _contract_keys(spec: str, x: jax.Array, keys: jax.Array, *, dtype: jnp.dtype) -> jax.Array:
    return jnp.einsum(spec, x, keys.astype(x.dtype), preferred_element_type=dtype)


def _mask_values(values: jax.Array, regions: list[_Region]) -> list[jax.Array]:
    """Returns the values ``[h, k, b, e]`` of each region, zero where its keys are padding."""
    return [jnp.where(keys.T[..., None], values, 0) for _, keys in regions]


def _swap_heads_first(x: jax.Array) -> jax.Array:
    """Transposes ``[b, n, h, e]`` to ``[h, n, b, e]``, the layout of this route, and back."""
    return x.transpose(2, 1, 0, 3)


@custom_vmap
def _all_when_mapped(flag: jax.Array) -> jax.Array:
    """Returns the flag; under `jax.vmap`, whether the flags of all mapped calls are true.

    A `lax.cond` on the result then remains a cond under `jax.vmap`.
    """
    return flag


@_all_when_mapped.def_vmap
def _all_when_mapped_vmap(size: int, mapped: list[bool], flag: jax.Array) -> tuple[jax.Array, bool]:
    return _all_when_mapped(jnp.all(flag, axis=0)), False
