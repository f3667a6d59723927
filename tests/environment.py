"""The environment of processes that tests start."""

import os
import subprocess
import sys

OPTIMIZED = "TESTS_OPTIMIZED" in os.environ
"""Whether programs are compiled as users' are; by default the tests compile much and compute little."""

FAST_COMPILE = {} if OPTIMIZED else {"xla_backend_optimization_level": 0}
"""Compiler options of tests that compile much and compute little."""

COMMANDS = """
import json, os, sys
from synthesizer_jax.cli.main import run
for command in json.load(open(sys.argv[1])):
    sys.argv[1:] = command
    try:
        run()
    except SystemExit as end:
        sys.stdout.flush()
        os.write(1, f"=== exit {end.code}\\n".encode())  # whole, whatever other threads print
"""
"""A program that runs the commands that a JSON file lists: libraries are loaded once."""


def python(*words: object, code: int = 0, **options) -> subprocess.CompletedProcess:
    """A process of Python that ends with a code."""
    ended = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, **options
    )
    assert ended.returncode == code, ended.stderr
    return ended


def without_devices() -> dict[str, str]:
    """The tests' own, without the number of devices that they run on."""
    own = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    flags = own["XLA_FLAGS"].split()
    return {**own, "XLA_FLAGS": " ".join(f for f in flags if "device_count" not in f)}
