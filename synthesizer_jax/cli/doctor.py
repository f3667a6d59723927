"""Defines the commands `doctor` and `local`, which check a machine and start processes."""

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
import time

import typer

from synthesizer_jax.base.files import in_bucket
from synthesizer_jax.base.typing import Count, NotNegative
from synthesizer_jax.cli.options import DataDir

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "libtpu", "tokenizers")
PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
SETTINGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS")


def doctor(
    *,
    workdir: pathlib.Path | None = None,
    data_dir: DataDir = None,
    timeout: NotNegative = 60.0,
    clear_cache: bool = False,
) -> None:
    """Show versions, devices and memory, and check processes and directories before a run.

    Start this command as you would start a training, on all hosts at the same
    time. The command reports an error if the processes have different versions
    or settings, or if a directory is not writable.

    Example: synthesizer-jax doctor --workdir runs/rv

    Args:
      workdir: the directory of a future run.
      timeout: the maximum number of seconds to wait for other processes.
      clear_cache: remove all compiled programs that are kept for later commands.
    """
    import jax

    from synthesizer_jax.costs.host_memory import free_memory
    from synthesizer_jax.hosts import processes
    from synthesizer_jax.hosts.compilation_cache import (
        clear_compilation_cache,
        compilation_cache,
        shown_compilation_cache,
    )

    processes.join_group(timeout=timeout)
    versions = {"Python": platform.python_version()}
    for package in PACKAGES + PLUGINS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    versions |= {name: os.environ[name] for name in SETTINGS if name in os.environ}
    everyone = processes.all_gather("doctor", versions)
    different = [i for i, one in enumerate(everyone) if one != everyone[0]]
    if different:
        raise ValueError(
            f"Versions or settings differ. Process 0 has {everyone[0]}. Process {different[0]} has "
            f"{everyone[different[0]]}. These processes differ from process 0: "
            f"{', '.join(map(str, different))}. Set up every host from the same commit and "
            "constraints file, and restart all processes."
        )

    kind = jax.devices()[0].device_kind
    local_devices = jax.local_device_count()
    lines = [
        ", ".join(f"{name} {version}" for name, version in versions.items()),
        f"{jax.device_count()} × {kind}, {local_devices} of them on this host",
        f"{(free_memory() or 0) / 2**30:.1f} GiB of memory free",
    ]
    cache = compilation_cache()
    if cache is not None:
        if clear_cache:
            clear_compilation_cache()
        size = sum(path.stat().st_size for path in cache.glob("*-cache"))
        lines.append(f"{size / 2**20:.0f} MiB of compiled programs in {shown_compilation_cache()}")
    for directory in filter(None, (workdir, data_dir)):
        probe = directory / f".doctor_{os.getpid()}_{socket.gethostname()}"
        # Do not call mkdir for a path in a bucket, because TensorFlow's mkdir never returns if the
        # bucket does not exist.
        if not in_bucket(directory):
            directory.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_bytes(b"x")
        except FileNotFoundError as error:  # the message of gcsfs only names the request
            raise FileNotFoundError(
                f"The bucket of {directory} does not exist ({error}). Create it."
            ) from None
        probe.unlink()
        line = f"{directory} is writable"
        if not in_bucket(directory):
            line += f", {shutil.disk_usage(directory).free / 2**30:.0f} GiB free"
        lines.append(line)
    prefix = f"[{jax.process_index()}] " if len(everyone) > 1 else ""
    typer.echo("\n".join(f"{prefix}{line}" for line in lines))


def local(command: list[str], *, processes: Count = 2, devices: Count | None = None) -> None:
    """Run a command in a group of processes on this machine, as if each process had its own host.

    If one process fails, the others are killed. SIGTERM and Ctrl-C are passed
    on to all processes. The exit code is the exit code of the first process
    that failed. If a signal ended that process, the exit code is 128 plus the
    number of the signal.

    Example: synthesizer-jax local --processes 2 --devices 4 -- train quickstart --workdir runs/rv

    Args:
      command: a command of synthesizer-jax, which must be written after --.
      processes: the number of processes.
      devices: the number of CPU devices of each process. By default, JAX chooses the number.
    """
    from synthesizer_jax.hosts.preemption import EXIT_CODES
    from synthesizer_jax.hosts.processes import ADDRESS, PROCESS, PROCESSES

    # Let the operating system choose a free port.
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    shared = {**os.environ, ADDRESS: address, PROCESSES: str(processes)}
    if devices is not None:
        shared["JAX_NUM_CPU_DEVICES"] = str(devices)
    received: list[int] = []
    for handled in EXIT_CODES:
        signal.signal(handled, lambda number, _: received.append(number))

    group: list[subprocess.Popen[bytes]] = []
    code = 0
    try:
        for index in range(processes):
            arguments = [sys.executable, "-m", "synthesizer_jax", *command]
            environment = {**shared, PROCESS: str(index)}
            # When the user presses Ctrl-C, a terminal sends a signal to all processes of its
            # session. Start each process in a new session, so that it gets the signal only once,
            # from the loop below.
            group.append(subprocess.Popen(arguments, env=environment, start_new_session=True))
        while True:
            # Keep the first exit code that is not 0. The exit code of a running process is None.
            codes = [process.poll() for process in group]
            code = code or next((ended for ended in codes if ended), 0)
            if None not in codes or code not in (0, *EXIT_CODES.values()):
                break
            while received:
                number = received.pop()
                for process in group:
                    process.send_signal(number)
            time.sleep(0.1)
    finally:
        for process in group:
            process.kill()
            process.wait()
    # If a process was ended by a signal, Python gives it a negative exit code, which is minus the
    # number of the signal.
    raise typer.Exit(128 - code if code < 0 else code)
