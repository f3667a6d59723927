"""One training at a time in a bucket, where no file can be locked."""

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
from typing import Any

from synthesizer_jax.files import BUCKET
from synthesizer_jax.training.owner import (
    BEAT_SECONDS,
    DEAD_SECONDS,
    InUseError,
    is_alive,
    machine,
    myself,
)
from synthesizer_jax.training.storage import short

ME = uuid.uuid4().hex
"""This process; its number alone comes again when a container is started anew."""

HELD: set[str] = set()
"""What this process holds, by the leases' names for themselves."""

POLL_SECONDS = 2.0
"""Between two looks at another's lease."""

_log = logging.getLogger(__name__)


def open_store(directory: pathlib.Path) -> Any:
    """The directory as TensorStore's keys and values."""
    import tensorstore as ts

    bucket, _, path = str(directory).removeprefix(BUCKET).partition("/")
    return ts.KvStore.open({"driver": "gcs", "bucket": bucket, "path": f"{path}/"}).result()


def end_at_once(message: str) -> None:
    """Ends a process whose lease has gone to another: whatever it wrote would damage the other's run."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(2)


@contextlib.contextmanager
def leased(
    directory: pathlib.Path,
    name: str,
    *,
    log: Callable[[str], None],
    store: Any = None,
    lost: Callable[[str], None] = end_at_once,
) -> Iterator[None]:
    """Holds a directory in a bucket for this process.

    The lease is an object that only those replace who know its last state (compare and swap, by the
    object's generation). Its owner renews it every `BEAT_SECONDS`; one that has not done so for
    `DEAD_SECONDS`, or was a process of this machine that is no more, counts as dead.

    Args:
      directory: in a bucket.
      name: of the object.
      log: takes a line before it is found out whether an owner is dead.
      store: a `tensorstore.KvStore`; None is that of the directory.
      lost: takes a sentence, in another thread, if this process was silent for so long that another took
        the lease.

    Raises:
      InUseError: another process holds it.
      OSError: storage does not answer, or does not permit it.
    """
    lease = Lease(store, directory, name)
    lease.take(log)
    closed = threading.Event()
    renewing = threading.Thread(target=lease.renew, args=(closed, lost), name="lease", daemon=True)
    renewing.start()
    try:
        yield
    finally:
        closed.set()
        renewing.join()
        lease.drop()


class Lease:
    """An object that says who trains in a directory."""

    def __init__(self, store: Any, directory: pathlib.Path, name: str):
        self._directory, self._name, self._id = directory, name, uuid.uuid4().hex
        self._generation = b""
        with self._answers():
            self._store = open_store(directory) if store is None else store

    def take(self, log: Callable[[str], None]) -> None:
        """Writes the object, in the place of a dead owner's where there is one."""
        owner, generation = self._read()
        if owner and not self._is_dead(owner):
            log(
                f"{self._directory} is held by a training on {owner.get('host')}; waiting until that has "
                f"shown no sign of life for {DEAD_SECONDS:.0f} s"
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

    def _is_dead(self, owner: dict[str, Any]) -> bool:
        """Whether the owner was a process of this machine that is no more.

        Raises:
          InUseError: it is this process itself.
        """
        if owner.get("machine") != machine():
            return False
        if owner.get("id") == ME:
            if owner.get("lease") in HELD:
                raise InUseError(self._directory, owner)
            return True
        process = owner.get("process")
        return not isinstance(process, int) or process == os.getpid() or not is_alive(process)

    def renew(self, closed: threading.Event, lost: Callable[[str], None]) -> None:
        """Replaces the object by a newer one until `closed`."""
        while not closed.wait(BEAT_SECONDS):
            try:
                if self._hold(self._generation):
                    continue
                host = self._read()[0].get("host", "?")
            except OSError as error:  # the next beat may reach storage
                _log.warning("%s", error)
                continue
            lost(
                f"{self._directory} was taken over by a training on {host}, as this one showed no sign of "
                f"life for {DEAD_SECONDS:.0f} s; it ends, and what it has saved is left to the other"
            )
            return

    def drop(self) -> None:
        """Removes the object if it is this process'; one that stays is nobody's after `DEAD_SECONDS`."""
        HELD.discard(self._id)
        try:
            self._swap(self._generation, None)
        except OSError as error:
            _log.warning("%s", error)

    def _hold(self, expected: bytes) -> bool:
        """Writes that this process holds it, if the object is as expected; returns whether it does."""
        owner = {**myself(), "id": ME, "lease": self._id, "time": time.time()}
        for _ in range(2):
            self._swap(expected, json.dumps(owner).encode())
            # Whether that was done is read: answers can be lost, so that the same is sent again.
            found, seen = self._read()
            if found:
                break
            expected = seen  # somebody has removed it
        if found.get("lease") == self._id:
            self._generation = seen
        return found.get("lease") == self._id

    def _swap(self, expected: bytes, value: bytes | None) -> None:
        """Writes, or with None removes, where the generation is as expected."""
        with self._answers():
            self._store.write(self._name, value, if_equal=expected).result()

    def _read(self) -> tuple[dict[str, Any], bytes]:
        """Who holds it, empty where nobody does, and the generation."""
        with self._answers():
            found = self._store.read(self._name).result()
        try:
            owner = json.loads(found.value)
        except ValueError:  # nothing, or nothing of ours
            owner = {}
        return owner if isinstance(owner, dict) else {}, bytes(found.stamp.generation)

    @contextlib.contextmanager
    def _answers(self) -> Iterator[None]:
        """Says where an error came from; TensorStore has many kinds."""
        try:
            yield
        except Exception as error:
            raise OSError(
                f"{self._directory}: the bucket does not answer as it should ({short(error)}); look at its "
                "name and your permissions, and start again"
            ) from error
