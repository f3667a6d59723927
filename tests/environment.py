"""Starts Python processes for tests, and prepares their environment variables."""

import os
import subprocess
import sys

OPTIMIZED = "TESTS_OPTIMIZED" in os.environ
"""Whether programs are compiled as for users.

By default, programs are compiled quickly, because the tests compile much and compute little.
"""

FAST_COMPILE = {} if OPTIMIZED else {"xla_backend_optimization_level": 0}
"""Compiler options for quick compilation."""

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
"""A program that runs the commands of a JSON file, so that libraries are imported only once."""


def python(*words: object, code: int = 0, **options) -> subprocess.CompletedProcess:
    """Runs Python in a new process, and checks its exit code."""
    ended = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, **options
    )
    assert ended.returncode == code, ended.stderr
    return ended


def without_devices() -> dict[str, str]:
    """Returns this process's environment variables, without the number of simulated devices."""
    own = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    flags = own["XLA_FLAGS"].split()
    return {**own, "XLA_FLAGS": " ".join(f for f in flags if "device_count" not in f)}
