"""The persistent cache of compiled programs, which lets a command start faster the next time."""

from __future__ import annotations

import logging
import os
import pathlib
import re
import sys
import warnings
from typing import TextIO

_log = logging.getLogger("synthesizer_jax.hosts")

MAX_BYTES = 4 * 2**30
"""The maximum size of the cache in bytes.

If the cache grows larger, the least recently used programs are removed.
"""

VARIABLE = "JAX_COMPILATION_CACHE_DIR"
"""The environment variable with the directory of JAX's cache."""


def enable_compilation_cache() -> None:
    """Makes JAX cache compiled programs in ``$XDG_CACHE_HOME/synthesizer_jax/compiled``.

    The function does nothing if this directory is not writable, or if the environment variable
    ``JAX_COMPILATION_CACHE_DIR`` already names a directory. The function only sets environment
    variables that JAX reads, so that commands that do not need JAX do not have to import it.

    If a program in the cache turns out to be damaged, the program is removed and compiled again.
    """
    _remove_damaged_programs()
    if VARIABLE in os.environ:
        return
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    directory = pathlib.Path(home) / "synthesizer_jax" / "compiled"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return
    if not os.access(directory, os.W_OK):
        return

    # For each compiled program, JAX writes a file with the program, and then a second file with the
    # time of the program's last use. If a process was killed before it wrote the second file, JAX
    # would warn about the program at every start. Programs without the second file are therefore
    # removed.
    for program in directory.glob("*-cache"):
        time_of_use = program.with_name(f"{program.name.removesuffix('cache')}atime")
        if not time_of_use.exists():
            program.unlink(missing_ok=True)

    os.environ[VARIABLE] = str(directory)
    os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(MAX_BYTES))
    # Cache small programs too. When a command starts, it compiles dozens of small programs, and
    # reading a small program from the cache is faster than compiling it again.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


def compilation_cache() -> pathlib.Path | None:
    """Returns the directory of the cache on this machine.

    The result is None if JAX does not cache compiled programs, or if the cache is in a bucket.
    """
    # JAX reads the environment variable when it is imported, and its setting may change later.
    directory = os.environ.get(VARIABLE)
    if "jax" in sys.modules:
        import jax

        is_enabled: bool = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
        named: str | None = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
        directory = named if is_enabled else None
    if not directory or "://" in directory:
        return None
    return pathlib.Path(directory)


def shown_compilation_cache() -> str | None:
    """Returns the directory of the cache as text for users, with ``~`` for the home directory."""
    directory = compilation_cache()
    if directory is None:
        return None
    # If the user has no home directory, `expanduser` returns "~", but `pathlib.Path.home` raises an
    # error.
    home = os.path.expanduser("~")
    if directory.is_relative_to(home):
        return str(pathlib.Path("~") / directory.relative_to(home))
    return str(directory)


def clear_compilation_cache() -> None:
    """Removes all programs from the cache."""
    directory = compilation_cache()
    if directory is not None:
        _remove(directory, "")


_DAMAGED = re.compile(r"Error reading persistent compilation cache entry for '([^']+)'")
"""Matches JAX's warning about a damaged program. The group of the match is the program's name."""


def _remove_damaged_programs() -> None:
    """Removes each program for which JAX warns that the program cannot be read from the cache.

    JAX compiles such a program again, but does not replace a file of the cache that exists. Without
    this function, JAX would warn and compile at every start.
    """
    show = warnings.showwarning

    def show_or_remove(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        """Shows a warning, or removes a damaged program from the cache."""
        match = _DAMAGED.match(str(message))
        directory = compilation_cache()
        if match is None or directory is None:
            show(message, category, filename, lineno, file, line)
            return
        # The warning contains only the name of the program, and other programs may have the same
        # name. All of them are removed, because they can be compiled again.
        _remove(directory, f"{match[1]}-")
        _log.warning(
            "The program %s in %s is damaged. It is compiled again, and replaced.",
            match[1],
            directory,
        )

    warnings.showwarning = show_or_remove


def _remove(directory: pathlib.Path, prefix: str) -> None:
    """Removes the programs whose names begin with a prefix, and the times of their last use."""
    for kind in ("cache", "atime"):
        for path in directory.glob(f"{prefix}*-{kind}"):
            path.unlink(missing_ok=True)
