"""The owner of a lock: the process that trains in a directory."""

from __future__ import annotations

import os
import pathlib
import socket
from typing import TypeAlias

Owner: TypeAlias = dict[str, object]
"""The JSON in a lock: ``host``, ``process`` and ``machine`` of the owner, and more in a lease."""

BEAT_SECONDS = 10.0
"""Interval at which the owner of a lock renews it."""

DEAD_SECONDS = 60.0
"""A lock of another machine that was not renewed for this long has expired."""

BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")
NAMESPACE = pathlib.Path("/proc/self/ns/pid")
"""Containers on one machine with the same host name have separate process ids."""


class InUseError(OSError):
    """Another process trains in the directory."""

    def __init__(self, directory: pathlib.Path, owner: Owner):
        super().__init__(
            f"{directory} is in use: process {owner.get('process', '?')} on {owner.get('host', '?')} "
            "trains there; wait for its end, or use another --workdir"
        )


def describe_process() -> Owner:
    """Returns the content of a lock of this process."""
    return {"host": socket.gethostname(), "process": os.getpid(), "machine": machine_id()}


def machine_id() -> str:
    """Returns an identifier of this machine, which differs between reboots and between containers."""
    boot = BOOT.read_text(encoding="ascii").strip() if BOOT.exists() else ""
    namespace = os.readlink(NAMESPACE) if NAMESPACE.is_symlink() else ""
    return f"{socket.gethostname()} {boot} {namespace}".strip()


def is_alive(process: int) -> bool:
    """Whether this machine has a process with that id."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    return True
