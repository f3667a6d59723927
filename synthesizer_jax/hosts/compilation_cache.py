"""The persistent cache of compiled programs, which makes later starts faster."""

from __future__ import annotations

import os
import pathlib

MAX_BYTES = 4 * 2**30
"""The maximum size of the cache in bytes. The least recently used programs are removed first."""

VARIABLE = "JAX_COMPILATION_CACHE_DIR"
"""The environment variable with the directory of JAX's cache."""


def enable_compilation_cache() -> None:
    """Makes JAX cache compiled programs in ``$XDG_CACHE_HOME/synthesizer_jax/compiled``.

    It does nothing if the directory is not writable, or if the environment variable
    ``JAX_COMPILATION_CACHE_DIR`` names another directory. JAX is configured by environment
    variables, so that commands that do not need JAX do not import it.
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

    # JAX writes a program and then, in a file of its own, the time of its use. If a process was
    # killed in between, JAX would warn about the program at every start, so it is removed.
    for program in directory.glob("*-cache"):
        time_of_use = program.with_name(f"{program.name.removesuffix('cache')}atime")
        if not time_of_use.exists():
            program.unlink(missing_ok=True)

    os.environ[VARIABLE] = str(directory)
    os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(MAX_BYTES))
    # A start compiles dozens of small programs. Reading them is faster than compiling them.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
