"""`synthesizer-jax doctor`."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import shutil
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from synthesizer_jax.cli.options import DataDir, storage_option
from synthesizer_jax.files import in_bucket
from synthesizer_jax.messages import one_line_error

GIB = 2**30
DISK, MEMORY = 10 * GIB, 4 * GIB
"""Less free disk space or memory than this is a warning."""

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
JAX = ((0, 10), (0, 12))
"""Tested versions: the first inclusive, the second exclusive."""

TPU_FILES = ("/dev/accel0", "/dev/vfio/0")
MEGASCALE = ("MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS")
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS")

MARKS = {"ok": "ok  ", "warning": "WARN", "problem": "FAIL"}


@dataclasses.dataclass(frozen=True)
class _Finding:
    """The result of a check.

    Attributes:
      level: a key of `MARKS`.
      text: what was found.
      remedy: how to correct it; empty if nothing is wrong.
    """

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
    checks: list[Callable[[], Iterator[_Finding]]] = [
        _check_slice_variables,
        lambda: _check_group(timeout),
        _check_versions,
        _check_devices,
        _check_host_memory,
        *(lambda p=p: _check_directory(p) for p in (workdir, data_dir) if p is not None),
        _check_agreement,
    ]
    failed = False
    for check in checks:
        for finding in check():
            failed |= finding.level == "problem"
            typer.echo(f"{_process_prefix()}{MARKS[finding.level]} {finding.text}")
            if finding.remedy:
                typer.echo(f"{_process_prefix()}       → {finding.remedy}")
    raise typer.Exit(1 if failed else 0)


def _process_prefix() -> str:
    """Returns ``[INDEX] `` if there are several processes; they must have joined their group."""
    import jax

    from synthesizer_jax.runtime import processes

    return f"[{jax.process_index()}] " if processes.process_count() > 1 else ""


def _check_versions() -> Iterator[_Finding]:
    """Checks the versions of JAX and jaxlib."""
    versions = {name: _version_of(name) for name in (*PACKAGES, "libtpu")}
    shown = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    yield _Finding("ok", f"Python {platform.python_version()}, {shown}")
    numbers = tuple(int(part) for part in (versions["jax"] or "0.0").split(".")[:2])
    if not JAX[0] <= numbers < JAX[1]:
        yield _Finding(
            "warning",
            f"jax {versions['jax']} is not one of the tested versions, 0.10 and 0.11",
            "pip install -c constraints.txt synthesizer_jax",
        )
    if versions["jax"] != versions["jaxlib"]:
        yield _Finding(
            "problem",
            f"jax {versions['jax']} does not match jaxlib {versions['jaxlib']}",
            f"pip install 'jaxlib=={versions['jax']}'",
        )


def _version_of(package: str) -> str | None:
    """Returns the installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_slice_variables() -> Iterator[_Finding]:
    """Checks the environment variables of multislice training, which may be out of date."""
    variables = {name: os.environ[name] for name in MEGASCALE if os.environ.get(name)}
    if not variables:
        return
    clear = f"unset {' '.join(MEGASCALE)}; the launcher sets them at every start"
    missing = [name for name in MEGASCALE if name not in variables]
    if missing:
        yield _Finding("problem", f"{', '.join(variables)} without {', '.join(missing)}", clear)
        return
    count, index, address = (variables[name] for name in MEGASCALE)
    if not (count.isdigit() and index.isdigit() and int(index) < int(count)):
        yield _Finding(
            "problem", f"slice {index} of {count} does not exist; slices are numbered from 0", clear
        )
        return
    try:
        socket.getaddrinfo(address.split(":")[0], None)
    except OSError:
        text = f"the host of {MEGASCALE[2]}={address} is unknown; its slices may have been deleted"
        yield _Finding("problem", text, clear)
        return
    yield _Finding("ok", f"slice {index} of {count}, coordinator {address}")


def _check_group(timeout: float) -> Iterator[_Finding]:
    """Joins the group of processes."""
    from synthesizer_jax.runtime import processes

    try:
        joined = processes.join_group(timeout=timeout)
    except (RuntimeError, ValueError) as error:
        port = os.environ.get("JAX_COORDINATOR_PORT", processes.OPEN_PORT)
        yield _Finding(
            "problem",
            " ".join(str(error).split()),
            f"start the same command on every host; the firewall must let port {port} through",
        )
        return
    yield _Finding("ok", "all processes have connected" if joined else "one process")


def _check_devices() -> Iterator[_Finding]:
    """Checks that JAX uses the accelerators of this host."""
    import jax

    try:
        devices = jax.devices()
    except RuntimeError as error:
        text = " ".join(str(error).split())[:300]
        yield _Finding(
            "problem", text, "end other programs that use the device, or set JAX_PLATFORMS"
        )
        return
    kind = devices[0].device_kind
    yield _Finding(
        "ok", f"{len(devices)} × {kind}, {jax.local_device_count()} of them on this host"
    )
    there = [path for path in TPU_FILES if pathlib.Path(path).exists()]
    if there and devices[0].platform == "cpu":
        remedy = "pip install -c constraints.txt 'synthesizer_jax[tpu]', and unset JAX_PLATFORMS"
        yield _Finding(
            "problem", f"{there[0]} shows that there is a TPU, but JAX runs on the CPU", remedy
        )


def _check_host_memory() -> Iterator[_Finding]:
    """Checks the free memory of the host."""
    from synthesizer_jax.costs.host_memory import free_memory

    free = free_memory()
    if free is None:
        return
    level = "ok" if free >= MEMORY else "warning"
    remedy = "" if free >= MEMORY else "end other programs; reading data needs several gigabytes"
    yield _Finding(level, f"{free / GIB:.1f} GiB of memory free", remedy)


def _check_directory(directory: pathlib.Path) -> Iterator[_Finding]:
    """Checks that a directory is writable and that its disk has free space."""
    if in_bucket(directory):
        yield _check_bucket(directory)
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".doctor_") as file:
            file.write(b"x")
            file.flush()
        free = shutil.disk_usage(directory).free
    except OSError as error:
        yield _Finding("problem", f"{directory}: {error}", "give a directory that is writable")
        return
    level = "ok" if free >= DISK else "warning"
    remedy = "" if free >= DISK else "delete old runs, or give another directory"
    yield _Finding(level, f"{directory} is writable, {free / GIB:.0f} GiB free", remedy)


def _check_bucket(directory: pathlib.Path) -> _Finding:
    """Checks a directory in a bucket by writing, reading and deleting an object."""
    path = directory / f".doctor_{uuid.uuid4().hex}"
    try:
        path.write_bytes(b"x")
        path.read_bytes()
        path.unlink()
    except Exception as error:  # those of storage have many types
        text = f"{directory}: the bucket does not answer as it should ({one_line_error(error)})"
        return _Finding("problem", text, "check its name and your permissions")
    return _Finding("ok", f"{directory} is writable")


def _check_agreement() -> Iterator[_Finding]:
    """Checks that all processes run the same code with the same settings."""
    from synthesizer_jax.runtime import processes

    if processes.process_count() == 1:
        return
    everyone = processes.all_gather("doctor", _host_identity())
    for name in everyone[0]:
        others = [i for i, one in enumerate(everyone) if one[name] != everyone[0][name]]
        if others:
            yield _Finding(
                "problem",
                f"{name} differs: {everyone[0][name]!r} on process 0, "
                f"{everyone[others[0]][name]!r} on {processes.format_ranges(others)}",
                "set up every host from the same commit and constraints file, and restart all",
            )
            return
    yield _Finding("ok", f"{len(everyone)} processes run the same code with the same flags")


def _host_identity() -> dict[str, str | None]:
    """Returns the versions and settings that must be equal on all processes."""
    import synthesizer_jax

    root = pathlib.Path(synthesizer_jax.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    installed = {name: _version_of(name) for name in (*PACKAGES, "libtpu")}
    flags = {name: os.environ.get(name) for name in FLAGS}
    python = ".".join(map(str, sys.version_info[:3]))
    return {"the package's code": digest.hexdigest()[:12], "Python": python, **installed, **flags}
