"""Compiled programs outlast the process."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import jax

LARGEST = 4 * 2**30
"""Bytes on disk; what was not used for longest goes first."""


def keep_compiled() -> None:
    """Lets JAX keep compiled programs in ``$XDG_CACHE_HOME/synthesizer_jax/compiled``.

    A directory set in ``JAX_COMPILATION_CACHE_DIR`` is left alone, and
    ``JAX_ENABLE_COMPILATION_CACHE=false`` turns the cache off. Does nothing where the directory cannot
    be written.
    """
    config: Any = jax.config
    if config.jax_compilation_cache_dir is not None:
        return
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    place = pathlib.Path(home) / "synthesizer_jax" / "compiled"
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(place, os.W_OK):
        config.update("jax_compilation_cache_dir", str(place))
        config.update("jax_compilation_cache_max_size", LARGEST)
