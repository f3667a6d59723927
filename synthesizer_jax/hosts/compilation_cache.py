"""The persistent cache of compiled programs."""

from __future__ import annotations

import os
import pathlib

MAX_BYTES = 4 * 2**30
"""Maximum size in bytes; the least recently used programs are removed first."""

VARIABLE = "JAX_COMPILATION_CACHE_DIR"


def enable_compilation_cache() -> None:
    """Makes JAX cache compiled programs in ``$XDG_CACHE_HOME/synthesizer_jax/compiled``.

    By environment variables, because many commands do not import JAX. A directory in
    ``JAX_COMPILATION_CACHE_DIR`` takes precedence. Does nothing if the directory is not writable.
    """
    if VARIABLE in os.environ:
        return
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    directory = pathlib.Path(home) / "synthesizer_jax" / "compiled"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(directory, os.W_OK):
        for program in directory.glob("*-cache"):
            # Without a time of use its process was killed, and JAX would warn for ever.
            if not program.with_name(f"{program.name.removesuffix('cache')}atime").exists():
                program.unlink(missing_ok=True)
        os.environ[VARIABLE] = str(directory)
        os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(MAX_BYTES))
        # A start has dozens of small programs, which take longer to compile than to read.
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
