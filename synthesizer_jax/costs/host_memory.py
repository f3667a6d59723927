"""Free memory of the host or of the container that the process runs in."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator

MEMORY = pathlib.Path("/proc/meminfo")
OWN_GROUPS = pathlib.Path("/proc/self/cgroup")
GROUPS = pathlib.Path("/sys/fs/cgroup")

UNLIMITED = 2**60
"""Limits of at least this many bytes mean no limit; cgroups v1 stores the largest integer."""


def free_memory() -> int | None:
    """Returns the bytes that a program can still allocate; None if the host does not report it.

    This is the minimum over the host (memory and swap) and the limits of the process's control groups,
    such as those of containers and SLURM jobs. The page cache counts as free.
    """
    amounts = [*host_memory(), *_cgroup_memory()]
    return min(amounts) if amounts else None


def host_memory() -> Iterator[int]:
    """Yields the free bytes of the host, including swap, if the host reports them."""
    if not MEMORY.exists():
        return
    text = MEMORY.read_text(encoding="ascii")
    sizes = {name: 1024 * int(size) for name, size in re.findall(r"(\w+): +(\d+) kB", text)}
    if "MemAvailable" in sizes:
        yield sizes["MemAvailable"] + sizes.get("SwapFree", 0)


def _cgroup_memory() -> Iterator[int]:
    """Yields the free bytes of each of the process's control groups and their parents that has a limit."""
    if not OWN_GROUPS.exists():
        return
    for line in OWN_GROUPS.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            root, limit, used, files = GROUPS, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit = GROUPS / "memory", "memory.limit_in_bytes"
            used, files = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        own = root / path.strip("/")
        for group in (own, *own.parents):
            if group == root.parent:
                break
            if not (group / limit).exists() or not (group / used).exists():
                continue  # parent groups may be hidden from a container
            text = (group / limit).read_text(encoding="ascii").strip()
            if text == "max" or int(text) >= UNLIMITED:
                continue
            kept = re.search(rf"^{files} (\d+)$", (group / "memory.stat").read_text("ascii"), re.M)
            taken = int((group / used).read_text(encoding="ascii"))
            yield int(text) - taken + (int(kept[1]) if kept else 0)
