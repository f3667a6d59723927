"""The persistent cache of compiled programs, which lets a command start faster the next time."""

from __future__ import annotations

import os
import pathlib

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
    """
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
