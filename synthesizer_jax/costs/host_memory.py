"""The free memory of the host."""

from __future__ import annotations

import pathlib
import re

MEMORY = pathlib.Path("/proc/meminfo")


def free_memory() -> int | None:
    """Returns the bytes of memory and swap that a program can still allocate.

    The page cache counts as free. Limits of containers are not taken into account. Returns `None`
    if the system does not report its memory as Linux does.
    """
    if not MEMORY.exists():
        return None
    sizes = {
        name: 1024 * int(size)
        for name, size in re.findall(r"(\w+): +(\d+) kB", MEMORY.read_text("ascii"))
    }
    if "MemAvailable" not in sizes:
        return None
    return sizes["MemAvailable"] + sizes.get("SwapFree", 0)
