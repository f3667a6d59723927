"""Checksums of arrays that lie over any number of devices and processes.

The checksum of an array is the sum, modulo 2³², of a hash of every element and its place. So every device
sums what it holds, the sums of devices and processes add up, and an array that is read back over another
mesh has the same checksum. A single changed element always changes it: the hash is a bijection of the
element's bits.
"""

from __future__ import annotations

import collections
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MODULUS = 2**32

AXIS_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1)
"""Odd factors of an element's indices, one an axis, in turn (the primes of xxHash32)."""


def checksums(tree: Any) -> dict[str, int]:
    """This process' part of the checksum of every array.

    Args:
      tree: a pytree of arrays; of those on several devices each part is counted once, by the process
        that has its first copy.

    Returns:
      ``{path: 32-bit number}``; add the processes' parts with `add`.
    """
    begun = {
        jax.tree_util.keystr(path, simple=True, separator="/"): parts_of(leaf)
        for path, leaf in jax.tree.leaves_with_path(tree)
    }
    return {name: sum(map(int, parts)) % MODULUS for name, parts in begun.items()}


def add(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The checksums of whole arrays, from those of the processes' parts."""
    total: collections.Counter[str] = collections.Counter()
    for part in parts:
        total.update(part)
    return {name: value % MODULUS for name, value in total.items()}


def different(expected: Mapping[str, int], found: Mapping[str, int]) -> list[str]:
    """The arrays that are there and expected, and whose checksums differ."""
    return sorted(n for n in expected.keys() & found.keys() if expected[n] != found[n])


def of_bytes(data: bytes) -> int:
    """The checksum of a file (CRC-32)."""
    return zlib.crc32(data)


def parts_of(x: Any) -> list[jax.Array]:
    """Checksums of the parts of an array that this process counts; computed in the background."""
    if not isinstance(x, jax.Array):
        return [_sum(jnp.asarray(x), np.zeros(np.ndim(x), np.uint32))]
    return [
        _sum(shard.data, np.array([s.start or 0 for s in shard.index], np.uint32))
        for shard in x.addressable_shards
        if shard.replica_id == 0
    ]


@jax.jit
def _sum(x: jax.Array, start: jax.Array) -> jax.Array:
    """The sum over a part of an array whose first element has the index `start`."""
    words = _words(x)
    starts = [*start, *[0] * (words.ndim - x.ndim)]
    place = jnp.zeros((), jnp.uint32)
    for axis, first in enumerate(starts):
        index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) + jnp.uint32(first)
        factor = AXIS_FACTORS[axis % len(AXIS_FACTORS)] ^ (axis // len(AXIS_FACTORS) << 1)
        place = place + index * jnp.uint32(factor)
    return _mix(words ^ _mix(place)).sum(dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
    """The bits of an array's elements as 32-bit words, those of wider elements along a new last axis."""
    if x.dtype == bool:
        return x.astype(jnp.uint32)
    width = min(x.dtype.itemsize, 4)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    return jax.lax.bitcast_convert_type(x, f"uint{8 * width}").astype(jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of 32-bit words whose every output bit depends on all input bits (MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
