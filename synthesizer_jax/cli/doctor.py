"""`synthesizer-jax doctor` and `synthesizer-jax local`: this machine, and several processes on it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import pathlib
import platform
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, NamedTuple

import typer

from synthesizer_jax.cli.options import DataDir, storage_option
from synthesizer_jax.files import in_bucket

GIB = 2**30
DISK, MEMORY = 10 * GIB, 4 * GIB
"""Less free disk space or memory than this is a warning."""

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "libtpu")
SETTINGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS")
TPU_FILES = ("/dev/accel0", "/dev/vfio/0")


class _Finding(NamedTuple):
    """The result of a check: how bad it is, what was found, and how to correct it."""

    level: str
    text: str
    remedy: str = ""


def doctor(
    workdir: Annotated[pathlib.Path | None, storage_option("Directory for a future run.")] = None,
    data_dir: DataDir = None,
    timeout: Annotated[
        float, typer.Option(help="Maximum number of seconds to wait for other processes.")
    ] = 60.0,
) -> None:
    """Check versions, devices, processes, directories and memory, and print remedies for problems.

    Start it like a training, on all hosts at once. The exit code is 1 if there is a problem.

    Example: synthesizer-jax doctor --workdir runs/rv
    """
    import jax

    from synthesizer_jax.runtime import processes

    checks: list[Callable[[], Iterator[_Finding]]] = [
        lambda: _check_group(timeout),
        _check_versions,
        _check_devices,
        _check_memory,
        *(lambda p=p: _check_directory(p) for p in (workdir, data_dir) if p is not None),
    ]
    failed = False
    for check in checks:
        for level, text, remedy in check():
            failed |= level == "FAIL"
            prefix = f"[{jax.process_index()}] " if processes.process_count() > 1 else ""
            typer.echo(f"{prefix}{level:4} {text}")
            if remedy:
                typer.echo(f"{prefix}       → {remedy}")
    raise typer.Exit(1 if failed else 0)


def _check_group(timeout: float) -> Iterator[_Finding]:
    """Joins the group of processes."""
    from synthesizer_jax.runtime import processes

    try:
        joined = processes.join_group(timeout=timeout)
    except (RuntimeError, ValueError) as error:
        remedy = "start the same command on every host, and let its port through the firewall"
        yield _Finding("FAIL", " ".join(str(error).split()), remedy)
        return
    yield _Finding("ok", "all processes have connected" if joined else "one process")


def _check_versions() -> Iterator[_Finding]:
    """Shows versions and settings, which must be equal on all processes."""
    from synthesizer_jax.runtime import processes

    own = {"Python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            own[package] = importlib.metadata.version(package)
    yield _Finding("ok", ", ".join(f"{name} {number}" for name, number in own.items()))
    if own["jax"] != own["jaxlib"]:
        text = f"jax {own['jax']} does not match jaxlib {own['jaxlib']}"
        yield _Finding("FAIL", text, f"pip install 'jaxlib=={own['jax']}'")
    own |= {name: os.environ[name] for name in SETTINGS if name in os.environ}
    everyone = processes.all_gather("doctor", own)
    different = [i for i, one in enumerate(everyone) if one != everyone[0]]
    if different:
        yield _Finding(
            "FAIL",
            f"versions or settings differ: {everyone[0]} on process 0, {everyone[different[0]]} on "
            f"{', '.join(map(str, different))}",
            "set up every host from the same commit and constraints file, and restart all",
        )


def _check_devices() -> Iterator[_Finding]:
    """Checks that JAX uses the accelerators of this host."""
    import jax

    try:
        devices = jax.devices()
    except RuntimeError as error:
        remedy = "end other programs that use the device, or set JAX_PLATFORMS"
        yield _Finding("FAIL", " ".join(str(error).split())[:300], remedy)
        return
    count, kind = jax.local_device_count(), devices[0].device_kind
    yield _Finding("ok", f"{len(devices)} × {kind}, {count} of them on this host")
    there = [path for path in TPU_FILES if pathlib.Path(path).exists()]
    if there and devices[0].platform == "cpu":
        remedy = "pip install -c constraints.txt 'synthesizer_jax[tpu]', and unset JAX_PLATFORMS"
        text = f"{there[0]} shows that there is a TPU, but JAX runs on the CPU"
        yield _Finding("FAIL", text, remedy)


def _check_memory() -> Iterator[_Finding]:
    """Checks the free memory of the host."""
    from synthesizer_jax.costs.host_memory import free_memory

    free = free_memory()
    if free is not None:
        remedy = "" if free >= MEMORY else "end other programs; training needs several gigabytes"
        yield _Finding("WARN" if remedy else "ok", f"{free / GIB:.1f} GiB of memory free", remedy)


def _check_directory(directory: pathlib.Path) -> Iterator[_Finding]:
    """Checks that a directory, which may be in a bucket, is writable and that its disk has free space."""
    probe = directory / f".doctor_{os.getpid()}_{socket.gethostname()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"x")
        probe.unlink()
        free = DISK if in_bucket(directory) else shutil.disk_usage(directory).free
    except OSError as error:
        yield _Finding("FAIL", f"{directory}: {error}", "give a directory that is writable")
        return
    remedy = "" if free >= DISK else "delete old runs, or give another directory"
    space = "" if in_bucket(directory) else f", {free / GIB:.0f} GiB free"
    yield _Finding("WARN" if remedy else "ok", f"{directory} is writable{space}", remedy)


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
