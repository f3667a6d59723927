"""How much memory this host, or the container that the process runs in, has left."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator

MEMORY = pathlib.Path("/proc/meminfo")
OWN_GROUPS = pathlib.Path("/proc/self/cgroup")
GROUPS = pathlib.Path("/sys/fs/cgroup")

UNLIMITED = 2**60
"""Limits from here on are none: cgroups v1 says so by the largest number there is."""


def free_memory() -> int | None:
    """Bytes that a program could still take; None: the host does not say.

    The least of what the host has (memory and swap) and of what the limits of the process' control groups,
    such as those of containers and of SLURM jobs, leave. What the system keeps of files counts as free.
    """
    found = [*host_memory(), *group_memory()]
    return min(found) if found else None


def host_memory() -> Iterator[int]:
    """What the host has left, where it says so."""
    if not MEMORY.exists():
        return
    text = MEMORY.read_text(encoding="ascii")
    sizes = {name: 1024 * int(size) for name, size in re.findall(r"(\w+): +(\d+) kB", text)}
    if "MemAvailable" in sizes:
        yield sizes["MemAvailable"] + sizes.get("SwapFree", 0)


def group_memory() -> Iterator[int]:
    """What the limit of each of the process' control groups, and of those around it, leaves."""
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
                continue  # a container may not see the groups around it
            text = (group / limit).read_text(encoding="ascii").strip()
            if text == "max" or int(text) >= UNLIMITED:
                continue
            kept = re.search(rf"^{files} (\d+)$", (group / "memory.stat").read_text("ascii"), re.M)
            taken = int((group / used).read_text(encoding="ascii"))
            yield int(text) - taken + (int(kept[1]) if kept else 0)
