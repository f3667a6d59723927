"""The static route: logits that examples share are exponentiated once, not once per example.

With ``E = exp(S - c)``, c the row maximum over the keys that any example may see, and m the keys
that are real, ``out = E (m ∘ v) / E m``. E has no batch axis, and both products are matrix products
over the whole batch. The division undoes any factor of E, but not an underflow: when some real
query's denominator is below `LEAST`, the step runs the fused route, which is exact for any range.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from synthesizer_jax.attention import fused
from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.products import combine, combine_back
from synthesizer_jax.attention.terms import Static, Terms, materialise, wide

LEAST = 2.0**-64
"""The smallest denominator that is trusted.

Weights lost to underflow are then below 1e-15 of a row's sum for up to 4,096 keys, and the division
of the cotangent cannot overflow.
"""


def attend_static(terms: Terms, values: jax.Array, *, mask: Mask, q_length: int) -> jax.Array:
    """``softmax(Σ terms) · values`` for terms without a batch axis.

    Args:
      terms: terms of parameters only.
      values: ``[b, k, h, e]``.
      mask: anything but segments and `Mask.allowed`.
      q_length: number of queries.

    Returns:
      ``[b, q, h, e]`` in the values' dtype. Forward-mode differentiation raises a `TypeError`.
    """
    k_length = values.shape[1]
    (logits,) = materialise(
        terms, q_length=q_length, k_length=k_length, query_offset=mask.query_offset
    )
    if not separable(mask):
        return _guarded(logits, values, mask)
    weights = jax.nn.softmax(logits, axis=-1, where=mask.band(q_length, k_length))
    out = _swap(combine(weights, _swap(values))).astype(values.dtype)
    real = mask.queries(q_length)
    return out if real is None else jnp.where(real[..., None, None], out, 0)


def separable(mask: Mask) -> bool:
    """Whether all real queries of one position see the same keys in every example.

    That is so without padding, and in causal self-attention with padding at the end, where no real
    query sees a padded key: one softmax serves all.
    """
    if mask.key_valid is not None or mask.prefix_lengths is not None:
        return False
    return mask.key_lengths is None or (mask.causal and mask.self_attention)


@jax.custom_vjp
def _guarded(logits: jax.Array, values: jax.Array, mask: Mask) -> jax.Array:
    """The output ``[b, q, h, e]`` for logits ``[h, q, k]`` and values ``[b, k, h, e]``."""
    return _guarded_fwd(logits, values, mask)[0]


def _guarded_fwd(logits: jax.Array, values: jax.Array, mask: Mask):
    values = _swap(_real(values, mask))
    regions = _regions(mask, logits.shape[1], values)
    weights = _weights(logits, regions)
    dtype = wide(logits, values)
    total = sum(
        _over_keys("hqk,bk->hqb", e.astype(values.dtype), keys, dtype)
        for e, (_, keys) in zip(weights, regions, strict=True)
    )
    seen = sum(_over_keys("qk,bk->qb", r.astype(dtype), keys, dtype) for r, keys in regions) > 0
    real = mask.queries(logits.shape[1])
    seen = seen if real is None else seen & real.T
    exact = _agree(jnp.all((total >= LEAST) | ~seen))

    def fast():
        inverse = jnp.where(seen, 1 / jnp.where(seen, total, 1), 0)
        out = sum(map(combine, weights, _kept(values, regions))) * inverse[..., None]
        return out.astype(values.dtype), inverse, inverse

    def slow():
        out, rows = fused.forward(logits.shape[1], _as_bias(logits, values, mask))
        return _swap(out), _swap(rows.inverse)[..., 0], _swap(rows.top)[..., 0]

    out, inverse, top = lax.cond(exact, fast, slow)
    out = _swap(out)
    return out, (logits, values, mask, out, inverse, top, exact)


def _guarded_bwd(residuals: tuple[Any, ...], g: jax.Array):
    logits, values, mask, out, inverse, top, exact = residuals

    def fast():
        regions = _regions(mask, logits.shape[1], values)
        slope = _swap(g) * inverse[..., None]
        delta = jnp.sum(g.astype(inverse.dtype) * out, axis=-1).transpose(2, 1, 0) * inverse
        kept, kept_back = jax.vjp(lambda v: _kept(v, regions), values)
        dlogits, dkept = jnp.zeros_like(logits), []
        for e, v, (_, keys) in zip(_weights(logits, regions), kept, regions, strict=True):
            de, dv = combine_back((e, v), slope)
            dlogits += e * (de - _over_keys("hqb,bk->hqk", delta, keys, delta.dtype))
            dkept.append(dv)
        return dlogits, _real(_swap(*kept_back(dkept)), mask)

    def slow():
        rows = fused.Rows(_swap(top[..., None]), _swap(inverse[..., None]))
        back = fused.backward(_as_bias(logits, values, mask), out, rows, g)
        return jax.tree.leaves(back.biases)[0], back.values

    return *lax.cond(exact, fast, slow), None


_guarded.defvjp(_guarded_fwd, _guarded_bwd)


def _as_bias(logits: jax.Array, values: jax.Array, mask: Mask) -> fused.Inputs:
    return fused.Inputs((), (Static(logits),), _swap(values), mask)


def _regions(mask: Mask, q_length: int, values: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """The mask as disjoint products of pairs ``[q or 1, k]`` and real keys ``[b, k]``.

    A prefix needs two: what the band allows, and what only a prefix allows.
    """
    _, k_length, batch, _ = values.shape
    keys = mask.keys(k_length)
    keys = jnp.ones((batch, k_length), bool) if keys is None else keys
    band, prefix = mask.band(q_length, k_length), mask.prefix(k_length)
    if band is None:
        return [(jnp.ones((1, k_length), bool), keys)]
    if prefix is None:
        return [(band, keys)]
    return [(band, keys), (~band & prefix.any(axis=0), keys & prefix)]


def _weights(logits: jax.Array, regions: list[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
    """``exp(S - c)`` inside each region and zero outside, ``[h, q, k]`` float32 or wider."""
    everywhere = functools.reduce(operator.or_, (pairs for pairs, _ in regions))
    least = jnp.finfo(logits.dtype).min
    top = jnp.max(logits, axis=-1, keepdims=True, where=everywhere, initial=least)
    return [jnp.exp(jnp.where(pairs, logits - top, -jnp.inf)) for pairs, _ in regions]


def _over_keys(spec: str, x: jax.Array, keys: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return jnp.einsum(spec, x, keys.astype(x.dtype), preferred_element_type=dtype)


def _real(values: jax.Array, mask: Mask) -> jax.Array:
    """The values ``[b, k, h, e]`` of real keys, and zeros."""
    keys = mask.keys(values.shape[1])
    return values if keys is None else jnp.where(keys[..., None, None], values, 0)


def _kept(values: jax.Array, regions: list[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
    """The values ``[h, k, b, e]`` that each region may meet; the first meets all that are real."""
    return [values, *(jnp.where(keys.T[..., None], values, 0) for _, keys in regions[1:])]


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
