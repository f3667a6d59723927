"""`synthesizer-jax local`: several processes on one machine, like the hosts of a pod."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Annotated

import typer


def local(
    command: Annotated[list[str], typer.Argument(help="A command of synthesizer-jax, after --.")],
    processes: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 2,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="CPU devices of each process; by default JAX's number."),
    ] = None,
) -> None:
    """Run a command as one group of several processes on this machine.

    If one process fails, the others are killed. SIGTERM and Ctrl-C are sent to all processes.

    Example: synthesizer-jax local --processes 2 --devices 4 -- train quickstart --workdir runs/rv
    """
    environment = {} if devices is None else {"JAX_NUM_CPU_DEVICES": str(devices)}
    arguments = [sys.executable, "-m", "synthesizer_jax", *command]
    raise typer.Exit(_run_group(arguments, processes, environment))


def _run_group(command: Sequence[str], processes: int, environment: dict[str, str]) -> int:
    """Runs a command in several processes and waits for all of them.

    Args:
      command: the command of each process.
      processes: the number of processes.
      environment: additional environment variables.

    Returns:
      The exit code of the first process that failed, or 0. A process that a signal ended counts as
      128 plus the number of the signal.
    """
    from synthesizer_jax.runtime.preemption import EXIT_CODES
    from synthesizer_jax.runtime.processes import ADDRESS, PROCESS, PROCESSES

    shared = {**os.environ, **environment, ADDRESS: f"127.0.0.1:{_free_port()}"}
    shared[PROCESSES] = str(processes)
    group: dict[int, subprocess.Popen[bytes]] = {}
    asked: list[int] = []

    def stop(number: int, _: object) -> None:
        asked.append(number)
        # A second Ctrl-C kills all processes. The terminal sends Ctrl-C to the processes too, so SIGTERM
        # is sent here, because they would take another SIGINT for a second Ctrl-C.
        _signal_group(group, signal.SIGKILL if asked.count(signal.SIGINT) > 1 else signal.SIGTERM)

    old = {number: signal.signal(number, stop) for number in EXIT_CODES}
    code = 0
    try:
        for index in range(processes):
            process = subprocess.Popen(command, env={**shared, PROCESS: str(index)})
            group[process.pid] = process
        if asked:  # some processes may have started after the signal
            _signal_group(group, signal.SIGTERM)
        while group:
            pid, status = os.wait()
            if group.pop(pid, None) is None:
                continue
            own = os.waitstatus_to_exitcode(status)
            own = 128 - own if own < 0 else own
            code = code or (EXIT_CODES[signal.SIGINT] if own and signal.SIGINT in asked else own)
            if own not in (0, *EXIT_CODES.values()):
                _signal_group(group, signal.SIGKILL)
    finally:
        _signal_group(group, signal.SIGKILL)
        for number, handler in old.items():
            signal.signal(number, handler)
    return code


def _signal_group(group: dict[int, subprocess.Popen[bytes]], number: int) -> None:
    """Sends a signal to all processes that have not ended."""
    for pid in list(group):
        with contextlib.suppress(ProcessLookupError):  # it has ended, but was not waited for
            os.kill(pid, number)


def _free_port() -> int:
    """Returns a port on which no process listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
