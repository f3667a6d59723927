"""Compiled programs in the user's cache directory."""

import os
import subprocess
import sys

import jax
import pytest

from synthesizer_jax.runtime.compilation_cache import enable_compilation_cache

PROGRAM = """
from synthesizer_jax.runtime.compilation_cache import enable_compilation_cache
enable_compilation_cache()
import jax, jax.numpy as jnp
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((8, 8))).block_until_ready()
print(hits.count("/jax/compilation_cache/cache_hits"))
"""


def hits(home):
    """Programs that a fresh process took from the cache."""
    always = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PLATFORMS": "cpu"}
    environment = {k: v for k, v in os.environ.items() if "COMPILATION_CACHE" not in k}
    environment |= {"XDG_CACHE_HOME": str(home), **always}
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, check=True, capture_output=True, text=True
    )
    return int(found.stdout.splitlines()[-1])


def test_a_second_process_compiles_nothing(tmp_path):
    assert hits(tmp_path) == 0
    assert hits(tmp_path) > 0
    place = tmp_path / "synthesizer_jax" / "compiled"
    assert place.stat().st_mode & 0o077 == 0 and any(place.iterdir())


@pytest.mark.parametrize("set_before", [True, False])
def test_nothing_changes_for_who_has_a_place_or_can_have_none(tmp_path, monkeypatch, set_before):
    changed = []
    monkeypatch.setattr(jax.config, "update", lambda *x: changed.append(x))
    home = tmp_path if set_before else tmp_path / "file"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    place = str(tmp_path) if set_before else None
    monkeypatch.setattr(type(jax.config), "jax_compilation_cache_dir", place)
    enable_compilation_cache()
    assert changed == []
