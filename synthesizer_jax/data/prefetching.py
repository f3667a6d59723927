"""Batches that are made in the background, ahead of the training step."""

from __future__ import annotations

import collections
import concurrent.futures
import pathlib
import types

import numpy as np

from synthesizer_jax.data.pipeline import Position, Stream

DEPTH = 2
"""Number of batches that are made ahead."""


class PrefetchedStream:
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

    def __enter__(self) -> PrefetchedStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self.close()

    def __next__(self) -> dict[str, np.ndarray]:
        while len(self._ahead) <= DEPTH:
            self._ahead.append(self._thread.submit(self._make_batch))
        batch, self._position = self._ahead.popleft().result()
        return batch

    def save(self, directory: pathlib.Path) -> None:
        """Writes the position after the last batch that was taken; see `Stream.save`."""
        self._stream.save(directory, self._position)

    def restore(self, directory: pathlib.Path) -> None:
        """Continues after a saved position; see `Stream.restore`."""
        self._drop()
        self._stream.restore(directory)
        self._position = self._stream.position()

    def close(self) -> None:
        """Ends the thread; no more batches can be taken."""
        self._drop()
        self._thread.shutdown()

    def _make_batch(self) -> tuple[dict[str, np.ndarray], Position]:
        return next(self._stream), self._stream.position()

    def _drop(self) -> None:
        """Drops the batches that were not taken, and waits until the stream is not used."""
        for batch in self._ahead:
            batch.cancel()
        concurrent.futures.wait(self._ahead)
        self._ahead.clear()
