"""Free memory of the host or of the container that the process runs in."""

from __future__ import annotations

import itertools
import pathlib
import re

MEMORY = pathlib.Path("/proc/meminfo")
OWN_GROUPS = pathlib.Path("/proc/self/cgroup")
GROUPS = pathlib.Path("/sys/fs/cgroup")


def free_memory() -> int | None:
    """Returns the bytes that a program can still allocate; None if the host does not report it.

    This is the minimum over the host (memory and swap) and the limits of the process's control groups
    (version 2), such as those of containers and SLURM jobs. The page cache counts as free.
    """
    amounts = []
    if MEMORY.exists():
        lines = re.findall(r"(\w+): +(\d+) kB", MEMORY.read_text("ascii"))
        sizes = {name: 1024 * int(size) for name, size in lines}
        if "MemAvailable" in sizes:
            amounts.append(sizes["MemAvailable"] + sizes.get("SwapFree", 0))
    match = re.search("^0::(.*)$", OWN_GROUPS.read_text(), re.M) if OWN_GROUPS.exists() else None
    path = GROUPS / match[1].strip("/") if match else GROUPS.parent
    for group in itertools.takewhile(lambda group: group != GROUPS.parent, (path, *path.parents)):
        # Parent groups may be hidden from a container.
        limit, used = (group / f"memory.{name}" for name in ("max", "current"))
        if not (limit.exists() and used.exists()) or limit.read_text("ascii").strip() == "max":
            continue
        kept = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text("ascii"), re.M)
        taken = int(used.read_text("ascii"))
        amounts.append(int(limit.read_text("ascii")) - taken + (int(kept[1]) if kept else 0))
    return min(amounts) if amounts else None
