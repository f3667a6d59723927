"""Host arrays to global ones and back: which rows a process has to bring, and what all see."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def spread(x: jax.typing.ArrayLike, sharding: jax.sharding.Sharding) -> jax.Array:
    """The global array of an array that every process has whole."""
    if jax.process_count() == 1:
        return jax.device_put(x, sharding)
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda where: x[where])


def whole(x: jax.Array) -> np.ndarray:
    """A global array, whole on every process' host."""
    if jax.process_count() == 1:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


class Rows:
    """The rows of a batch that is cut into virtual shards and spread over devices.

    Shard s of V holds rows s · B/V to (s + 1) · B/V − 1. A process brings the shards whose rows its
    devices take; where several processes take rows of a shard, each brings all of it.

    Args:
      batch_size: B.
      shards: V, a divisor of B.
      sharding: of the batch's first axis.
    """

    def __init__(self, batch_size: int, shards: int, sharding: jax.sharding.Sharding):
        self._batch_size, self._sharding = batch_size, sharding
        self._per_shard = batch_size // shards
        self._readers: dict[int, set[int]] = {}
        places: dict[Any, Any] = dict(sharding.devices_indices_map((batch_size,)))
        for device, where in places.items():
            rows = range(batch_size)[where[0]]
            shard = slice(rows[0] // self._per_shard, rows[-1] // self._per_shard + 1)
            readers = self._readers.setdefault(device.process_index, set())
            readers.update(range(shards)[shard])

    def shards_of(self, process: int) -> list[int]:
        """The shards that a process brings, in order."""
        return sorted(self._readers[process])

    def saved_by(self, process: int) -> list[int]:
        """Those whose positions it saves: no process before it brings them."""
        before = [s for p, shards in self._readers.items() if p < process for s in shards]
        return sorted(self._readers[process] - set(before))

    def place(self, rows: np.ndarray) -> jax.Array:
        """The global array of which this process brings the rows of its shards, ``[n, ...]``."""
        position = {s: i for i, s in enumerate(self.shards_of(jax.process_index()))}

        def part(where: Any) -> np.ndarray:
            shard, row = np.divmod(np.arange(self._batch_size)[where[0]], self._per_shard)
            own = np.array([position[s] for s in shard.tolist()]) * self._per_shard + row
            return rows[own]

        shape = (self._batch_size, *rows.shape[1:])
        return jax.make_array_from_callback(shape, self._sharding, part)
