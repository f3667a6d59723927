"""Runs the command line in child processes whose output goes to files."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pathlib
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence

import jax

from synthesizer_jax.cli import main as program

SECONDS = 1800
"""The time limit of a child process, which may run several combinations."""


def in_child(function: Callable[[], int], log: pathlib.Path, devices: int) -> int:
    """Calls a function in a forked process, and returns the exit code of the forked process.

    The parent process has imported all modules, but it has not initialized JAX's devices. Every
    child process can therefore use a different number of devices.

    Args:
      function: a function that returns the exit code.
      log: the file to which the child process prints.
      devices: the number of simulated devices of the child process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            print_to(log)
            jax.config.update("jax_num_cpu_devices", devices)
            code = function()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -signal.SIGALRM


def print_to(log: pathlib.Path) -> None:
    """Redirects the standard output and the standard error of this process to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def command(arguments: Sequence[str]) -> int:
    """Runs the command line in this process and returns its exit code."""
    sys.argv = ["synthesizer-jax", *arguments]
    print("$", shlex.join(sys.argv), flush=True)
    try:
        program.run()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


@contextlib.contextmanager
def captured_errors(errors: io.StringIO) -> Iterator[None]:
    """Context manager that collects all errors that are printed or logged."""
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, [logging.StreamHandler(errors)]
    try:
        with contextlib.redirect_stderr(errors):
            yield
    finally:
        root.handlers = handlers
