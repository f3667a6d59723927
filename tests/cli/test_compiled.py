"""Compiled programs in the user's cache directory."""

import os
import subprocess
import sys

import pytest

from synthesizer_jax.runtime.compilation_cache import VARIABLE, enable_compilation_cache

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


def test_what_a_killed_process_left_is_compiled_again(tmp_path):
    hits(tmp_path)
    place = tmp_path / "synthesizer_jax" / "compiled"
    for used in place.glob("*-atime"):
        used.unlink()
    assert hits(tmp_path) == 0
    assert len(list(place.glob("*-atime"))) == len(list(place.glob("*-cache"))) > 0


@pytest.mark.parametrize("set_before", [True, False])
def test_nothing_changes_for_who_has_a_place_or_can_have_none(tmp_path, monkeypatch, set_before):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path if set_before else tmp_path / "file"))
    monkeypatch.delenv(VARIABLE, raising=False)
    if set_before:
        monkeypatch.setenv(VARIABLE, str(tmp_path))
    before = dict(os.environ)
    enable_compilation_cache()
    assert dict(os.environ) == before
