"""Batches that are made in the background, ahead of the training step."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import pathlib

import numpy as np

from synthesizer_jax.data.pipeline import Position, Stream

DEPTH = 2
"""Number of batches that are made ahead."""


class PrefetchedStream(contextlib.AbstractContextManager["PrefetchedStream"]):
    """The batches of a stream, made ahead by a thread; the position is that of the last batch taken.

    As a context manager it ends the thread.

    Args:
      stream: from now on used by this object alone.
    """

    def __init__(self, stream: Stream):
        self._stream = stream
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "batches")
        self._ahead: collections.deque[
            concurrent.futures.Future[tuple[dict[str, np.ndarray], Position]]
        ] = collections.deque()
        self._position = stream.position()

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def __next__(self) -> dict[str, np.ndarray]:
        while len(self._ahead) <= DEPTH:
            self._ahead.append(self._thread.submit(self._make_batch))
        batch, self._position = self._ahead.popleft().result()
        return batch

    def save(self, directory: pathlib.Path) -> None:
        """Writes the position after the last batch that was taken; see `Stream.save`."""
        self._stream.save(directory, self._position)

    def restore(self, directory: pathlib.Path) -> None:
        """Continues after a saved position, before a batch is taken; see `Stream.restore`."""
        self._stream.restore(directory)
        self._position = self._stream.position()

    def _make_batch(self) -> tuple[dict[str, np.ndarray], Position]:
        return next(self._stream), self._stream.position()
