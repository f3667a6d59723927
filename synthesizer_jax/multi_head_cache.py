"""The decoding cache of `MultiHeadAttention`, in Linen and in NNX, with Flax's variable names."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from synthesizer_jax.attention import Cache, Mask, Terms, extend, init_cache
from synthesizer_jax.flax_attention import as_mask, merge_batch_axes
from synthesizer_jax.mixers.decoding import decoding_mask


def check_step_shapes(inputs: tuple[jax.Array, ...], cached_shape: tuple[int, ...]) -> None:
    """Raises a `ValueError` unless a step has exactly one token and the batch dimensions of the cache."""
    expected = (*cached_shape[:-3], 1)
    for x in inputs:
        if x.shape[:-1] != expected:
            raise ValueError(
                f"MultiHeadAttention: autoregressive cache shape error, expected inputs of shape "
                f"{(*expected, x.shape[-1])}, got {x.shape}"
            )


def decoding_step_mask(
    mask: Mask, index: jax.Array, cached_shape: tuple[int, ...]
) -> jax.Array | None:
    """Materializes the mask of a decoding step, ``[batch... or 1..., heads or 1, 1, k]``.

    Args:
      mask: the mask over all positions.
      index: the position of the step's token.
      cached_shape: shape of the cached keys, ``(batch..., k, heads, width)``.

    Returns:
      A boolean array, or None if nothing is masked.
    """
    ndim, length = len(cached_shape), cached_shape[-3]
    mask = _key_mask(as_mask(mask, (*cached_shape[:-3], cached_shape[-2], 1, length)))
    pairs = dataclasses.replace(mask, query_offset=index).pairs(1, length)
    if pairs is None:
        return None
    return pairs.reshape((1,) * (ndim - pairs.ndim) + pairs.shape[-ndim:])


def _key_mask(mask: Mask) -> Mask:
    """The mask without padding of queries: the query of a decoding step is never padding."""
    return dataclasses.replace(mask, query_lengths=None, query_valid=None, self_attention=False)


def empty_cache_arrays(
    terms: Terms, values: jax.Array, *, length: int, batch: tuple[int, ...]
) -> dict[str, jax.Array]:
    """Returns an empty cache: arrays ``[batch..., length, heads, width]`` by Flax's names.

    Args:
      terms: the terms of any step.
      values: ``[b, n, heads, width]`` for any n, b the product of the batch dimensions.
      length: number of positions.
      batch: the batch dimensions.
    """
    cache = init_cache(terms, values, max_length=length, allow_window=False)
    return {**_arrays_by_name(cache, batch), "cache_index": jnp.array(0, jnp.int32)}


def extend_cache_arrays(
    arrays: dict[str, jax.Array],
    terms: Terms,
    values: jax.Array,
    *,
    mask: Mask,
    batch: tuple[int, ...],
) -> tuple[Terms, jax.Array, Mask, dict[str, jax.Array]]:
    """Writes a token to the cache.

    Args:
      arrays: from `empty_cache_arrays` or the previous step.
      terms: the terms of the token.
      values: ``[b, 1, heads, width]``.
      mask: the mask over all positions; positions after the token are masked in any case.
      batch: the batch dimensions.

    Returns:
      The terms, values and mask over all positions, and the new cache.

    Raises:
      ValueError: the cache is full. Compiled functions, which cannot check this, return NaN instead.
    """
    index = arrays["cache_index"]
    key_names = sorted((n for n in arrays if n.startswith("cached_key")), key=_key_number)
    cache = Cache(
        keys=tuple(merge_batch_axes(arrays[n], batch) for n in key_names),
        values=merge_batch_axes(arrays["cached_value"], batch),
        length=index,
    )
    mask = _key_mask(decoding_mask(mask, index, 1))
    terms, values, mask, cache = extend(cache, terms, values, at=index, mask=mask)
    return terms, values, mask, {**_arrays_by_name(cache, batch), "cache_index": index + 1}


def _arrays_by_name(cache: Cache, batch: tuple[int, ...]) -> dict[str, jax.Array]:
    names = ["cached_value", "cached_key", *(f"cached_key_{i}" for i in range(1, len(cache.keys)))]
    arrays = (cache.values, *cache.keys)
    return {n: x.reshape(*batch, *x.shape[1:]) for n, x in zip(names, arrays, strict=False)}


def _key_number(name: str) -> int:
    return int(name.removeprefix("cached_key").removeprefix("_") or 0)
