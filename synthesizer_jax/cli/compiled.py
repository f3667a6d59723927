"""Compiled programs outlast the process."""

from __future__ import annotations

import os
import pathlib

LARGEST = 4 * 2**30
"""Bytes on disk; what was not used for longest goes first."""

PLACE = "JAX_COMPILATION_CACHE_DIR"


def keep_compiled() -> None:
    """Lets JAX keep compiled programs in ``$XDG_CACHE_HOME/synthesizer_jax/compiled``.

    It is said by the environment, which JAX reads when it is imported, because many commands end without
    it. A directory set in ``JAX_COMPILATION_CACHE_DIR`` is left alone, and
    ``JAX_ENABLE_COMPILATION_CACHE=false`` turns the cache off. Does nothing where the directory cannot be
    written.
    """
    if PLACE in os.environ:
        return
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    place = pathlib.Path(home) / "synthesizer_jax" / "compiled"
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(place, os.W_OK):
        os.environ[PLACE] = str(place)
        os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(LARGEST))
