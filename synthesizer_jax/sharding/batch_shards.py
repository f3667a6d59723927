"""Conversion between host arrays and global arrays, and the examples that each process loads."""

from __future__ import annotations

import collections
from collections.abc import Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

from synthesizer_jax.base.typing import PyTree


def replicate_to_devices(x: jax.typing.ArrayLike, sharding: jax.sharding.Sharding) -> jax.Array:
    """Makes a global array of an array that is the same on every process."""
    if jax.process_count() == 1:
        return jax.device_put(x, sharding)
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def gather_to_host(x: jax.Array) -> np.ndarray:
    """Gathers a global array to the host of every process."""
    if jax.process_count() == 1:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


class BatchShards:
    """Assigns the virtual shards of a batch to the processes whose devices hold their examples.

    Of B examples, shard s of V has those from s · B/V to (s + 1) · B/V − 1. A process loads all shards of
    which its devices hold an example, so several processes may load the same shard. V divides B.
    """

    def __init__(self, batch_size: int, shards: int, sharding: jax.sharding.Sharding):
        self._batch_size, self._sharding = batch_size, sharding
        self._shard_size = batch_size // shards
        self._shards_of_process = collections.defaultdict[int, set[int]](set)
        indices: Mapping[jax.Device, PyTree] = sharding.devices_indices_map((batch_size,))
        for device, (rows,) in indices.items():
            shard_of_rows = {row // self._shard_size for row in range(batch_size)[rows]}
            self._shards_of_process[device.process_index] |= shard_of_rows

    def shards_of(self, process: int) -> list[int]:
        """Returns the shards that a process loads, in ascending order."""
        return sorted(self._shards_of_process[process])

    def saved_by(self, process: int) -> list[int]:
        """Returns the shards whose position in the data a process saves.

        A shard that several processes load is saved by the one with the lowest index.
        """
        saved_by_lower = {s for p, shards in self._shards_of_process.items() if p < process for s in shards}
        return sorted(self._shards_of_process[process] - saved_by_lower)

    def to_global_array(self, local: np.ndarray) -> jax.Array:
        """Makes the global batch of the examples ``[n, ...]`` of this process' shards."""
        slot_of_shard = {s: i for i, s in enumerate(self.shards_of(jax.process_index()))}

        def examples_at(index: PyTree) -> np.ndarray:
            shards, offsets = np.divmod(np.arange(self._batch_size)[index[0]], self._shard_size)
            slots = np.array([slot_of_shard[s] for s in shards.tolist()])
            return local[slots * self._shard_size + offsets]

        shape = (self._batch_size, *local.shape[1:])
        return jax.make_array_from_callback(shape, self._sharding, examples_at)
