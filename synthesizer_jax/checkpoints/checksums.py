"""Checksums of arrays that are sharded over any number of devices and processes.

The checksum of an array is the sum, modulo 2³², of a hash of every element and its index. Each
device computes the sum over its own shard. The sums of all shards are then added. The checksum
therefore does not depend on the mesh.

For a given index, the hash is a bijection of the element's bits. A change of a single element
therefore always changes the checksum.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from synthesizer_jax.base.typing import PyTree

MODULUS = 2**32

AXIS_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1)
"""Odd factors of the indices along the axes, used in turn. All factors are primes of xxHash32."""


def checksums(tree: PyTree) -> dict[str, int]:
    """Returns what the shards of this process contribute to the checksum of every array.

    Args:
      tree: a pytree of arrays. A replicated shard is counted only by the process that holds the
        shard's first replica.

    Returns:
      A dictionary ``{path: 32-bit integer}``. `combine_checksums` adds the contributions of all
      processes.
    """
    # Dispatch all sums before reading the first result, so that the devices compute in parallel.
    begun = {
        jax.tree_util.keystr(path, simple=True, separator="/"): _partial_checksums(leaf)
        for path, leaf in jax.tree.leaves_with_path(tree)
    }
    return {name: sum(map(int, parts)) % MODULUS for name, parts in begun.items()}


def combine_checksums(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Adds the contributions of all processes, and returns the checksums of whole arrays."""
    total: collections.Counter[str] = collections.Counter()
    for part in parts:
        total.update(part)
    return {name: value % MODULUS for name, value in total.items()}


def _partial_checksums(x: ArrayLike) -> list[jax.Array]:
    """Returns the checksums of the shards of an array that this process counts.

    The checksums may not be computed yet, because the function does not wait for the devices.
    """
    if not isinstance(x, jax.Array):
        return [_sum(jnp.asarray(x), np.zeros(np.ndim(x), np.uint32))]
    parts = []
    for shard in x.addressable_shards:
        if shard.replica_id == 0:
            # `shard.index` is a tuple of slices. The start of a slice over a whole axis is None.
            start = np.array([part.start or 0 for part in shard.index], np.uint32)
            parts.append(_sum(shard.data, jax.device_put(start)))
    return parts


@jax.jit
def _sum(x: jax.Array, start: jax.Array) -> jax.Array:
    """Returns the checksum of a shard.

    Args:
      x: the elements of the shard.
      start: ``[x.ndim]`` uint32, the index of the shard's first element in the whole array.
    """
    words = _words(x)
    position = jnp.zeros((), jnp.uint32)
    for axis in range(words.ndim):
        # If elements are wider than 32 bits, `words` has additional axes, which are never sharded.
        first = start[axis] if axis < x.ndim else 0
        index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) + jnp.uint32(first)
        # From the sixth axis on, the five factors are used again in a modified form.
        factor = AXIS_FACTORS[axis % len(AXIS_FACTORS)] ^ (axis // len(AXIS_FACTORS) << 1)
        position = position + index * jnp.uint32(factor)
    return _mix(words ^ _mix(position)).sum(dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
    """Returns the bits of the elements as 32-bit words.

    An element that is wider than 32 bits, or a complex number, becomes several words, which are on
    additional axes of the result.
    """
    if x.dtype == bool:
        return x.astype(jnp.uint32)
    width = min(x.dtype.itemsize, 4)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    return jax.lax.bitcast_convert_type(x, f"uint{8 * width}").astype(jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    """Returns a bijective hash of each 32-bit word, which is the finalizer of MurmurHash3."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
