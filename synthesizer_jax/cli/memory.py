"""Large pages for what training on a CPU allocates anew in every step."""

from __future__ import annotations

import os
import pathlib
import platform
import sys

LARGE_PAGES = "glibc.malloc.hugetlb=1"
"""The setting of glibc (2.35 and later) that asks the kernel for large pages."""

VARIABLE = "GLIBC_TUNABLES"
ENABLED = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")


def with_large_pages() -> None:
    """Starts this process again so that its memory comes in pages of 2 MiB, where that is possible.

    XLA returns a step's temporaries, gigabytes of them, and asks for them again in the next one; in
    pages of 4 KiB that costs a fifth of a step. glibc reads the setting only when a process starts.
    Does nothing where the kernel gives large pages anyway or never, or where `VARIABLE` is set.
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
