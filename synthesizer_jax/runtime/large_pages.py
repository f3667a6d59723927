"""Large memory pages for the arrays that training on a CPU allocates in every step."""

from __future__ import annotations

import os
import pathlib
import platform
import sys

LARGE_PAGES = "glibc.malloc.hugetlb=1"
"""The setting of glibc (2.35 and later) that requests large pages from the kernel."""

VARIABLE = "GLIBC_TUNABLES"
ENABLED = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")


def restart_with_large_pages() -> None:
    """Restarts this process with memory pages of 2 MiB, if the system supports them.

    XLA frees the temporary arrays of a step, gigabytes in total, and allocates them again in the next step,
    which takes a fifth of a step with pages of 4 KiB. glibc reads the setting only when a process starts.
    Does nothing if the kernel always or never uses large pages, or if `VARIABLE` is set.
    """
    if VARIABLE in os.environ or platform.libc_ver()[0] != "glibc":
        return
    try:
        asked = "[madvise]" in ENABLED.read_text(encoding="ascii")
    except OSError:
        return
    if asked:
        os.environ[VARIABLE] = LARGE_PAGES
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
