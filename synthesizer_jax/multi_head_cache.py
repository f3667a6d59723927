"""What `MultiHeadAttention` keeps while it decodes, under Flax's names, in Linen and in NNX."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from synthesizer_jax.attention import Cache, Mask, Terms, extend, init_cache
from synthesizer_jax.flax_attention import as_mask, flat
from synthesizer_jax.mixers.decoding import step_mask


def check_step(inputs: tuple[jax.Array, ...], cached: tuple[int, ...]) -> None:
    """Raises a `ValueError` for a decoding step of other than one token, or of another batch."""
    expected = (*cached[:-3], 1)
    for x in inputs:
        if x.shape[:-1] != expected:
            raise ValueError(
                f"MultiHeadAttention: autoregressive cache shape error, a step takes tokens of shape "
                f"{(*expected, x.shape[-1])} instead of {x.shape}"
            )


def step_array(mask: Mask, index: jax.Array, cached: tuple[int, ...]) -> jax.Array | None:
    """A `Mask` as the array of a decoding step, ``[batch... or 1..., heads or 1, 1, k]``.

    Args:
      mask: in positions.
      index: the step's position.
      cached: shape of the cache, ``(batch..., k, heads, width)``.
    """
    mask = _of_keys(as_mask(mask, (*cached[:-3], cached[-2], 1, cached[-3])))
    pairs = dataclasses.replace(mask, query_offset=index).pairs(1, cached[-3])
    if pairs is None:
        return None
    return pairs.reshape((1,) * (len(cached) - pairs.ndim) + pairs.shape[-len(cached) :])


def _of_keys(mask: Mask) -> Mask:
    """The mask of a step, which says of keys alone what is real: the step's query is."""
    return dataclasses.replace(mask, query_lengths=None, query_valid=None, self_attention=False)


def new_cache(
    terms: Terms, values: jax.Array, length: int, batch: tuple[int, ...]
) -> dict[str, jax.Array]:
    """What decoding keeps, empty: arrays ``[batch..., length, heads, width]`` by Flax's names.

    Args:
      terms: of any step.
      values: ``[b, n, heads, width]``, any n.
      length: number of positions.
      batch: the batch dimensions, b together.
    """
    cache = init_cache(terms, values, max_length=length, self_attention=False)
    return {**_named(cache, batch), "cache_index": jnp.array(0, jnp.int32)}


def step(
    kept: dict[str, jax.Array], terms: Terms, values: jax.Array, mask: Mask, batch: tuple[int, ...]
) -> tuple[Terms, jax.Array, Mask, dict[str, jax.Array]]:
    """Adds a token to what decoding keeps.

    Args:
      kept: from `new_cache` or an earlier step.
      terms: the token's.
      values: ``[b, 1, heads, width]``.
      mask: over all positions; later ones are hidden, whatever it says.
      batch: the batch dimensions.

    Returns:
      The terms, values and mask over all positions, and what to keep.

    Raises:
      ValueError: outside of compiled functions, if the cache is full; compiled functions give NaN.
    """
    at = kept["cache_index"]
    keys = sorted((n for n in kept if n.startswith("cached_key")), key=_key_number)
    cache = Cache(
        keys=tuple(flat(kept[n], batch) for n in keys),
        values=flat(kept["cached_value"], batch),
        length=at,
    )
    mask = _of_keys(step_mask(mask, at, 1))
    terms, values, mask, cache = extend(cache, terms, values, at=at, mask=mask)
    return terms, values, mask, {**_named(cache, batch), "cache_index": at + 1}


def _named(cache: Cache, batch: tuple[int, ...]) -> dict[str, jax.Array]:
    names = ["cached_value", "cached_key", *(f"cached_key_{i}" for i in range(1, len(cache.keys)))]
    arrays = (cache.values, *cache.keys)
    return {n: x.reshape(*batch, *x.shape[1:]) for n, x in zip(names, arrays, strict=False)}


def _key_number(name: str) -> int:
    return int(name.removeprefix("cached_key").removeprefix("_") or 0)
