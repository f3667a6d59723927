"""The static route: logits that examples share are exponentiated once, not once per example.

With ``E = exp(S - c)``, c the row maximum over the keys that any example may see, and m the keys
that are real, ``out = E (m ∘ v) / E m``. E has no batch axis, and both products are matrix products
over the whole batch. The division undoes any factor of E, but not an underflow: when some real
query's denominator is below `LEAST`, the step runs the fused route's loop, which is exact for any range.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from synthesizer_jax.attention import blocked, static_tpu
from synthesizer_jax.attention.derivatives import with_gradient
from synthesizer_jax.attention.fused import KEPT
from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.parts import Inputs, Rows, inner
from synthesizer_jax.attention.products import combine, combine_back
from synthesizer_jax.attention.reference import softmax
from synthesizer_jax.attention.static_kernels_tpu import LEAST
from synthesizer_jax.attention.terms import (
    LowRank,
    Relative,
    Static,
    Terms,
    diagonals,
    materialise,
    wide,
)


def attend_static(terms: Terms, values: jax.Array, *, mask: Mask, q_length: int) -> jax.Array:
    """``softmax(Σ terms) · values`` for terms without a batch axis.

    Args:
      terms: terms of parameters only.
      values: ``[b, k, h, e]``.
      mask: anything but segments and `Mask.allowed`.
      q_length: number of queries.

    Returns:
      ``[b, q, h, e]`` in the values' dtype.
    """
    dtype = values.dtype
    if dtype == jnp.float16 and not separable(mask):  # whose exponents are too few for numerators
        values = values.astype(jnp.float32)
    inputs = _inputs(terms, values, mask, q_length)
    offset = None if static_tpu.obstacle(q_length, inputs) else mask.query_offset
    attend = with_gradient(
        functools.partial(_forward_anywhere, q_length, offset),
        functools.partial(_backward_anywhere, q_length, offset),
        functools.partial(blocked.plain, q_length),
        name=KEPT,
    )
    return attend(inputs).astype(dtype)


def kernel_of(
    terms: Terms, values: jax.Array, mask: Mask, q_length: int, platform: str
) -> tuple[str, str]:
    """What runs this route on a platform, and why not the platform's kernels, if so."""
    if platform != "tpu":
        return "matrix products", ""
    why = static_tpu.obstacle(q_length, Inputs((), terms, values, mask))
    return ("matrix products" if why else "Pallas kernels"), why


def _inputs(terms: Terms, values: jax.Array, mask: Mask, q_length: int) -> Inputs:
    """The fused route's form of the inputs, with products of parameters multiplied out."""
    k_length = values.shape[1]
    products = tuple(t for t in terms if isinstance(t, LowRank))
    squares = tuple(t for t in terms if isinstance(t, Static))
    if products:
        squares = (Static(_logits(q_length, k_length, (*squares, *products))),)
    lines = tuple(
        Relative(diagonals(t, q_length, k_length, mask.query_offset), 1 - q_length)
        for t in terms
        if isinstance(t, Relative)
    )
    return Inputs((), squares + lines, values, mask)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward_anywhere(q_length: int, offset: int | None, inputs: Inputs) -> tuple[jax.Array, Any]:
    """The output ``[b, q, h, e]``, and what the backward pass needs.

    Args:
      q_length: number of queries.
      offset: the mask's `query_offset`; None: the kernels do not take these inputs.
      inputs: see `_inputs`.
    """
    same = separable(inputs.mask)

    def kernels(inputs: Inputs) -> tuple[jax.Array, Any]:
        out, inverse = static_tpu.forward(q_length, offset, inputs, same=same)
        if inverse is None:
            return out, ()
        inverse = inverse.swapaxes(1, 2)
        return out, (inverse, inverse, jnp.ones_like(inverse, shape=(), dtype=bool))

    default = functools.partial(_forward_default, q_length)
    if offset is None:
        return default(inputs)
    return lax.platform_dependent(inputs, tpu=kernels, default=default)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _backward_anywhere(
    q_length: int, offset: int | None, inputs: Inputs, out: jax.Array, kept: Any, g: jax.Array
) -> Inputs:
    """The cotangents of the inputs."""

    def kernels(inputs: Inputs, out: jax.Array, kept: Any, g: jax.Array) -> Inputs:
        return static_tpu.backward(offset, inputs, out, kept[0].swapaxes(1, 2) if kept else None, g)

    default = functools.partial(_backward_default, q_length)
    if offset is None:
        return default(inputs, out, kept, g)
    return lax.platform_dependent(inputs, out, kept, g, tpu=kernels, default=default)


def _forward_default(q_length: int, inputs: Inputs) -> tuple[jax.Array, Any]:
    """`_forward_anywhere` in plain JAX."""
    _, biases, values, mask, _ = inputs
    logits = _logits(q_length, values.shape[1], biases)
    if not separable(mask):
        return _guarded((logits, values, mask))
    weights = softmax(logits, mask.band(*logits.shape[1:]))
    out = _swap(combine(weights, _swap(values))).astype(values.dtype)
    real = mask.queries(q_length)
    return out if real is None else jnp.where(real[..., None, None], out, 0), ()


def _backward_default(
    q_length: int, inputs: Inputs, out: jax.Array, kept: Any, g: jax.Array
) -> Inputs:
    """`_backward_anywhere` in plain JAX."""
    _, biases, values, mask, _ = inputs
    logits, back = jax.vjp(functools.partial(_logits, q_length, values.shape[1]), biases)
    if separable(mask):
        real = mask.queries(q_length)
        g = g if real is None else jnp.where(real[..., None, None], g, 0)
        band = mask.band(*logits.shape[1:])
        weights, weights_back = jax.vjp(lambda x: softmax(x, band), logits)
        dweights, dvalues = combine_back(weights, _swap(values), _swap(g))
        (dlogits,), dvalues = weights_back(dweights), _swap(dvalues)
    else:
        dlogits, dvalues, _ = _guarded_back((logits, values, mask), out, kept, g)
    (dbiases,) = back(dlogits)
    return inputs.cotangents((), dbiases, dvalues)


def _logits(q_length: int, k_length: int, biases: Terms) -> jax.Array:
    """The sum of biases, ``[h, q, k]`` float32 or wider."""
    return materialise(biases, q_length=q_length, k_length=k_length)[0]


def _as_fused(logits: jax.Array, values: jax.Array, mask: Mask) -> Inputs:
    """The same for the fused route."""
    return Inputs((), (Static(logits),), values, mask)


def separable(mask: Mask) -> bool:
    """Whether all real queries of one position see the same keys in every example.

    That is so without padding, and in causal self-attention with padding at the end, where no real
    query sees a padded key: one softmax serves all.
    """
    if mask.key_valid is not None or mask.prefix_lengths is not None:
        return False
    return mask.key_lengths is None or (mask.causal and mask.self_attention)


Problem = tuple[jax.Array, jax.Array, Mask]
"""Logits ``[h, q, k]``, values ``[b, k, h, e]`` and a mask."""


def _guarded(problem: Problem) -> tuple[jax.Array, Any]:
    """The output ``[b, q, h, e]``, and what `_guarded_back` needs."""
    logits, values, mask = problem
    peak = _peak(logits, values, mask)
    out, inverse, exact = _in_groups(_forward, logits, peak, values, mask)
    exact = _agree(exact)

    def slow():
        out, rows = blocked.forward(logits.shape[1], _as_fused(*problem))
        return out, _swap(rows.inverse)[..., 0], _swap(rows.top)[..., 0]

    out, inverse, top = lax.cond(exact, lambda: (out, inverse, inverse), slow)
    return out, (inverse, top, exact)


def _guarded_back(
    problem: Problem, out: jax.Array, kept: Any, g: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    logits, values, mask = problem
    inverse, top, exact = kept
    peak = _peak(logits, values, mask)
    exact = _agree(exact)
    delta = inner(out, g, inverse.dtype)

    def fast():
        shift = _swap(delta)[..., 0] * inverse
        return _in_groups(_backward, logits, peak, values, mask, inverse, shift, g)

    def slow():
        rows = Rows(_swap(top[..., None]), _swap(inverse[..., None]))
        back = blocked.backward(_as_fused(*problem), rows, delta, g)
        return jax.tree.leaves(back.biases)[0], back.values

    return *lax.cond(exact, fast, slow), jax.tree.map(lambda _: None, mask)


def _in_groups(function: Callable[..., Any], *args: Any) -> Any:
    """Calls with the heads in one group, on CPUs with every head alone, so that it stays in cache."""
    heads = args[0].shape[0]
    return lax.platform_dependent(
        *args, cpu=functools.partial(function, 1), default=functools.partial(function, heads)
    )


def _forward(size: int, logits: jax.Array, peak: jax.Array, values: jax.Array, mask: Mask):
    """Groups of `size` heads: the output, ``1 / total [h, q, b]``, and whether totals are exact."""
    heads, q_length, _ = logits.shape
    batch, _, _, width = values.shape
    dtype = wide(logits, values)
    regions = _regions(mask, q_length, values)
    seen = sum(_over_keys("qk,bk->qb", r.astype(dtype), keys, dtype) for r, keys in regions) > 0
    real = mask.queries(q_length)
    seen = seen if real is None else seen & real.T

    def group(j: jax.Array, results: Any):
        out, inverses, exact = results
        weights = _weights(_table(logits, j, size), _table(peak, j, size), regions)
        own = _heads(values, j, size)
        total = sum(
            _over_keys("hqk,bk->hqb", e.astype(values.dtype), keys, dtype)
            for e, (_, keys) in zip(weights, regions, strict=True)
        )
        inverse = jnp.where(seen, 1 / jnp.maximum(total, LEAST), 0)
        summed = sum(map(combine, weights, _kept(own, regions))) * inverse[..., None]
        return (
            _put_heads(out, summed, j, size),
            lax.dynamic_update_slice_in_dim(inverses, inverse, j * size, axis=0),
            exact & jnp.all((total >= LEAST) | ~seen),
        )

    out = jnp.zeros_like(values, shape=(batch, q_length, heads, width))
    inverses = jnp.zeros_like(values, shape=(heads, q_length, batch), dtype=dtype)
    start = out, inverses, jnp.ones_like(values, shape=(), dtype=bool)
    return lax.fori_loop(0, heads // size, group, start)


def _backward(
    size: int,
    logits: jax.Array,
    peak: jax.Array,
    values: jax.Array,
    mask: Mask,
    inverse: jax.Array,
    shift: jax.Array,
    g: jax.Array,
):
    """Groups of `size` heads: the cotangents of the logits and the values.

    Args:
      size: heads of a group.
      logits: ``[h, q, k]``.
      peak: their `_peak`.
      values: ``[b, k, h, e]``.
      mask: which keys a query may see.
      inverse: `_forward`'s, ``[h, q, b]``.
      shift: `inner` times that, ``[h, q, b]``.
      g: the cotangent of the output, ``[b, q, h, e]``.
    """
    heads, q_length, _ = logits.shape
    regions = _regions(mask, q_length, values)

    def group(j: jax.Array, results: Any):
        dlogits, dvalues = results
        slope = _heads(g, j, size) * _table(inverse, j, size)[..., None]
        own = _heads(values, j, size)
        kept, kept_back = jax.vjp(lambda v: _kept(v, regions), own)
        weights = _weights(_table(logits, j, size), _table(peak, j, size), regions)
        down, dkept = [], []
        for e, v, (_, keys) in zip(weights, kept, regions, strict=True):
            de, dv = combine_back(e, v, slope)
            own_shift = _over_keys("hqb,bk->hqk", _table(shift, j, size), keys, e.dtype)
            down.append(e * (de - own_shift))
            dkept.append(dv)
        (back,) = kept_back(dkept)
        dlogits = lax.dynamic_update_slice_in_dim(dlogits, sum(down), j * size, axis=0)
        return dlogits, _put_heads(dvalues, back, j, size)

    start = jnp.zeros_like(logits), jnp.zeros_like(values)
    return lax.fori_loop(0, heads // size, group, start)


def _table(x: jax.Array, j: jax.Array, size: int) -> jax.Array:
    """Group j of ``[h, ...]``."""
    return lax.dynamic_slice_in_dim(x, j * size, size, axis=0)


def _heads(x: jax.Array, j: jax.Array, size: int) -> jax.Array:
    """Group j of ``[b, n, h, e]`` in this route's layout ``[h, n, b, e]``."""
    return _swap(lax.dynamic_slice_in_dim(x, j * size, size, axis=2))


def _put_heads(x: jax.Array, group: jax.Array, j: jax.Array, size: int) -> jax.Array:
    """``[b, n, h, e]`` with group j replaced by one in this route's layout."""
    return lax.dynamic_update_slice_in_dim(x, _swap(group.astype(x.dtype)), j * size, axis=2)


def _regions(mask: Mask, q_length: int, values: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """The mask as disjoint products of pairs ``[q or 1, k]`` and real keys ``[b, k]``.

    A prefix needs two: what the band allows, and what only a prefix allows.
    """
    batch, k_length = values.shape[:2]
    keys = mask.keys(k_length)
    keys = jnp.ones((batch, k_length), bool) if keys is None else keys
    band, prefix = mask.band(q_length, k_length), mask.prefix(k_length)
    if band is None:
        return [(jnp.ones((1, k_length), bool), keys)]
    if prefix is None:
        return [(band, keys)]
    return [(band, keys), (~band & prefix.any(axis=0), keys & prefix)]


def _peak(logits: jax.Array, values: jax.Array, mask: Mask) -> jax.Array:
    """c, each row's maximum over the keys that any example may see, ``[h, q, 1]``."""
    regions = _regions(mask, logits.shape[1], values)
    everywhere = functools.reduce(operator.or_, (pairs for pairs, _ in regions))
    least = jnp.finfo(logits.dtype).min
    return jnp.max(logits, axis=-1, keepdims=True, where=everywhere, initial=least)


def _weights(
    logits: jax.Array, peak: jax.Array, regions: list[tuple[jax.Array, jax.Array]]
) -> list[jax.Array]:
    """``exp(S - c)`` inside each region and zero outside, ``[h, q, k]`` float32 or wider."""
    return [jnp.exp(jnp.where(pairs, logits - peak, -jnp.inf)) for pairs, _ in regions]


def _over_keys(spec: str, x: jax.Array, keys: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return jnp.einsum(spec, x, keys.astype(x.dtype), preferred_element_type=dtype)


def _kept(values: jax.Array, regions: list[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
    """The values ``[h, k, b, e]`` that each region may meet, zero where they are padding."""
    return [jnp.where(keys.T[..., None], values, 0) for _, keys in regions]


def _swap(x: jax.Array) -> jax.Array:
    """``[b, n, h, e]`` to ``[h, n, b, e]``, the layout of this route, and back."""
    return x.transpose(2, 1, 0, 3)


@custom_vmap
def _agree(exact: jax.Array) -> jax.Array:
    """Itself; under `vmap` all mapped calls take one decision, so that the cond stays a cond."""
    return exact


@_agree.def_vmap
def _agree_mapped(size: int, mapped: list[bool], exact: jax.Array) -> tuple[jax.Array, bool]:
    return _agree(jnp.all(exact, axis=0)), False
