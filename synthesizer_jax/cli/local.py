"""`synthesizer-jax local`: several processes on one machine, as on the hosts of a pod."""

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
    command: Annotated[
        list[str], typer.Argument(help="A command of synthesizer-jax, after two dashes.")
    ],
    processes: Annotated[int, typer.Option(min=1, help="How many processes.")] = 2,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="CPU devices of each process; default: as many as JAX."),
    ] = None,
) -> None:
    """Run a command as several processes on this machine that train as one.

    When one of them ends with an error the others are ended at once; SIGTERM and Ctrl-C go to all.

    Example: synthesizer-jax local --processes 2 --devices 4 -- train quickstart --workdir runs/rv
    """
    environment = {} if devices is None else {"JAX_NUM_CPU_DEVICES": str(devices)}
    arguments = [sys.executable, "-m", "synthesizer_jax", *command]
    raise typer.Exit(run_group(arguments, processes, environment))


def run_group(command: Sequence[str], processes: int, environment: dict[str, str]) -> int:
    """Runs a group to its end.

    Args:
      command: of every process.
      processes: how many.
      environment: further variables.

    Returns:
      The exit code: 0 where all ended well, else that of the first that did not; 128 and the number
      of the signal where one ended it.
    """
    from synthesizer_jax.sharding.hosts import ADDRESS, PROCESS, PROCESSES
    from synthesizer_jax.training.survival import EXIT_CODES

    shared = {**os.environ, **environment, ADDRESS: f"127.0.0.1:{free_port()}"}
    shared[PROCESSES] = str(processes)
    group: dict[int, subprocess.Popen[bytes]] = {}
    asked: list[int] = []

    def stop(number: int, _: object) -> None:
        asked.append(number)
        # A second Ctrl-C ends all at once. The first reaches them from the terminal too, so they get
        # another signal from here, or they would take it for a second.
        send(group, signal.SIGKILL if asked.count(signal.SIGINT) > 1 else signal.SIGTERM)

    old = {number: signal.signal(number, stop) for number in EXIT_CODES}
    code = 0
    try:
        for index in range(processes):
            process = subprocess.Popen(command, env={**shared, PROCESS: str(index)})
            group[process.pid] = process
        if asked:  # some may have begun after it
            send(group, signal.SIGTERM)
        while group:
            pid, status = os.wait()
            if group.pop(pid, None) is None:
                continue
            own = os.waitstatus_to_exitcode(status)
            own = 128 - own if own < 0 else own
            code = code or (EXIT_CODES[signal.SIGINT] if own and signal.SIGINT in asked else own)
            if own not in (0, *EXIT_CODES.values()):
                send(group, signal.SIGKILL)
    finally:
        send(group, signal.SIGKILL)
        for number, handler in old.items():
            signal.signal(number, handler)
    return code


def send(group: dict[int, subprocess.Popen[bytes]], number: int) -> None:
    """A signal to all that still run."""
    for pid in list(group):
        with contextlib.suppress(ProcessLookupError):  # ended, and not yet told
            os.kill(pid, number)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
