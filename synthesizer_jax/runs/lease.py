"""A lease by which only one training at a time uses a directory in a bucket, where files have no locks."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from synthesizer_jax.files import BUCKET
from synthesizer_jax.messages import one_line_error
from synthesizer_jax.runs.owner import (
    BEAT_SECONDS,
    DEAD_SECONDS,
    InUseError,
    Owner,
    describe_process,
    is_alive,
    machine_id,
)

if TYPE_CHECKING:
    import tensorstore as ts

ME = uuid.uuid4().hex
"""Identifies this process; process ids repeat when a container restarts."""

HELD: set[str] = set()
"""The ids of the leases that this process holds."""

POLL_SECONDS = 2.0
"""Interval at which the lease of another process is read."""

_log = logging.getLogger(__name__)


def _open_store(directory: pathlib.Path) -> ts.KvStore:
    """Returns the directory as a key-value store of TensorStore."""
    import tensorstore as ts

    bucket, _, path = str(directory).removeprefix(BUCKET).partition("/")
    return ts.KvStore.open({"driver": "gcs", "bucket": bucket, "path": f"{path}/"}).result()


def _kill_process(message: str) -> None:
    """Ends this process after it lost its lease, because it would overwrite the other process's files."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(2)


@contextlib.contextmanager
def hold_lease(
    directory: pathlib.Path,
    name: str,
    *,
    log: Callable[[str], None],
    store: ts.KvStore | None = None,
    lost: Callable[[str], None] = _kill_process,
) -> Iterator[None]:
    """Context manager that holds the lease of a directory in a bucket.

    The lease is an object that is only written by compare-and-swap of its generation. Its owner renews it
    every `BEAT_SECONDS`. A lease has expired if it was not renewed for `DEAD_SECONDS`, or if its owner was
    a process of this machine that no longer exists.

    Args:
      directory: a directory in a bucket.
      name: name of the object.
      log: receives a line before waiting for the lease of another machine to expire.
      store: the directory as a key-value store; None opens it.
      lost: receives a message, in another thread, if this process failed to renew the lease for so long
        that another process acquired it.

    Raises:
      InUseError: another process holds the lease.
      OSError: the storage failed or denied access.
    """
    lease = _Lease(store, directory, name)
    lease.acquire(log)
    closed = threading.Event()
    renewing = threading.Thread(target=lease.renew, args=(closed, lost), name="lease", daemon=True)
    renewing.start()
    try:
        yield
    finally:
        closed.set()
        renewing.join()
        lease.release()


class _Lease:
    """A lease on a directory, see `hold_lease`."""

    def __init__(self, store: ts.KvStore | None, directory: pathlib.Path, name: str):
        self._directory, self._name, self._id = directory, name, uuid.uuid4().hex
        self._generation = b""
        with self._storage_errors():
            self._store = _open_store(directory) if store is None else store

    def acquire(self, log: Callable[[str], None]) -> None:
        """Acquires the lease, after waiting for the expiry of one on another machine."""
        owner, generation = self._read()
        if owner and not self._is_dead(owner):
            log(
                f"{self._directory} is locked by a training on {owner.get('host')}; waiting until its lock "
                f"has not been renewed for {DEAD_SECONDS:.0f} s"
            )
            end = time.monotonic() + DEAD_SECONDS
            while owner and time.monotonic() < end:
                time.sleep(POLL_SECONDS)
                owner, seen = self._read()
                if owner and seen != generation:
                    raise InUseError(self._directory, owner)
                generation = seen
        if not self._hold(generation):
            raise InUseError(self._directory, self._read()[0])
        HELD.add(self._id)

    def _is_dead(self, owner: Owner) -> bool:
        """Whether the owner was a process of this machine that no longer exists.

        Raises:
          InUseError: the owner is this process.
        """
        if owner.get("machine") != machine_id():
            return False
        if owner.get("id") == ME:
            if owner.get("lease") in HELD:
                raise InUseError(self._directory, owner)
            return True
        process = owner.get("process")
        return not isinstance(process, int) or process == os.getpid() or not is_alive(process)

    def renew(self, closed: threading.Event, lost: Callable[[str], None]) -> None:
        """Renews the lease until `closed`."""
        while not closed.wait(BEAT_SECONDS):
            try:
                if self._hold(self._generation):
                    continue
                host = self._read()[0].get("host", "?")
            except OSError as error:  # the next attempt may succeed
                _log.warning("%s", error)
                continue
            lost(
                f"{self._directory} was taken over by a training on {host}, because this one did not renew "
                f"its lock for {DEAD_SECONDS:.0f} s; this process ends, and the other one continues the run"
            )
            return

    def release(self) -> None:
        """Deletes the object; if that fails, the lease expires after `DEAD_SECONDS`."""
        HELD.discard(self._id)
        try:
            self._swap(self._generation, None)
        except OSError as error:
            _log.warning("%s", error)

    def _hold(self, expected: bytes) -> bool:
        """Acquires or renews the lease if its generation is `expected`; returns whether that succeeded."""
        owner = {**describe_process(), "id": ME, "lease": self._id, "time": time.time()}
        for _ in range(2):
            self._swap(expected, json.dumps(owner).encode())
            # The result is read back, because the store repeats a write whose response was lost.
            found, seen = self._read()
            if found:
                break
            expected = seen  # the object was deleted in the meantime
        if found.get("lease") == self._id:
            self._generation = seen
        return found.get("lease") == self._id

    def _swap(self, expected: bytes, value: bytes | None) -> None:
        """Writes the object, or deletes it for None, if its generation is `expected`."""
        with self._storage_errors():
            self._store.write(self._name, value, if_equal=expected).result()

    def _read(self) -> tuple[Owner, bytes]:
        """Returns the owner, an empty dictionary if there is none, and the generation."""
        with self._storage_errors():
            found = self._store.read(self._name).result()
        try:
            owner = json.loads(found.value)
        except ValueError:  # no object, or another one
            owner = {}
        return owner if isinstance(owner, dict) else {}, bytes(found.stamp.generation)

    @contextlib.contextmanager
    def _storage_errors(self) -> Iterator[None]:
        """Context manager that raises the errors of TensorStore, which have many types, as `OSError`."""
        try:
            yield
        except Exception as error:
            raise OSError(
                f"{self._directory}: the bucket does not answer as it should ({one_line_error(error)}); "
                "check its name and your permissions, then start again"
            ) from error
