"""Who trains in a directory, as its lock says it."""

from __future__ import annotations

import os
import pathlib
import socket
from typing import Any

BEAT_SECONDS = 10.0
"""How often the owner of a lock shows that it lives."""

DEAD_SECONDS = 60.0
"""A lock on another machine without a sign of life for so long is nobody's."""

BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")
NAMESPACE = pathlib.Path("/proc/self/ns/pid")
"""Containers that share a machine and its name have process numbers of their own."""


class InUseError(OSError):
    """Another process trains in the directory."""

    def __init__(self, directory: pathlib.Path, owner: dict[str, Any]):
        super().__init__(
            f"{directory} is in use: process {owner.get('process', '?')} on {owner.get('host', '?')} "
            "trains there; wait for its end, or use another --workdir"
        )


def myself() -> dict[str, Any]:
    """What this process writes into a lock."""
    return {"host": socket.gethostname(), "process": os.getpid(), "machine": machine()}


def machine() -> str:
    """What tells this machine from others, from itself before it was started again, and from containers."""
    boot = BOOT.read_text(encoding="ascii").strip() if BOOT.exists() else ""
    namespace = os.readlink(NAMESPACE) if NAMESPACE.is_symlink() else ""
    return f"{socket.gethostname()} {boot} {namespace}".strip()


def is_alive(process: int) -> bool:
    """Whether this machine has such a process."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another's
        return True
    return True
