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
from typing import Annotated, Any

import typer

from synthesizer_jax.cli.places import DataDir, option
from synthesizer_jax.files import in_bucket

GIB = 2**30
DISK, MEMORY = 10 * GIB, 4 * GIB
"""Less than this that is free is worth a warning."""

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
JAX = ((0, 10), (0, 12))
"""Versions that the project is tested with: from the first, below the second."""

TPU_FILES = ("/dev/accel0", "/dev/vfio/0")
MEGASCALE = ("MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS")
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS")

MARKS = {"ok": "ok  ", "warning": "WARN", "problem": "FAIL"}


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
      level: a key of `MARKS`.
      text: what is so.
      remedy: what to type or do; empty where all is well.
    """

    level: str
    text: str
    remedy: str = ""


def doctor(
    workdir: Annotated[
        pathlib.Path | None, option("Directory that a run is to be written to.")
    ] = None,
    data_dir: DataDir = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for other processes.")] = 60.0,
) -> None:
    """Check versions, devices, processes, directories and memory, and say what to do.

    Run it like a training run: on every host at once. Ends with exit code 1 where something fails.

    Example: synthesizer-jax doctor --workdir runs/rv
    """
    checks: list[Callable[[], Iterator[Finding]]] = [
        slices,
        lambda: group(timeout),
        versions,
        devices,
        memory,
        *(lambda p=p: place(p) for p in (workdir, data_dir) if p is not None),
        agreement,
    ]
    failed = False
    for check in checks:
        for finding in check():
            failed |= finding.level == "problem"
            typer.echo(f"{speaker()}{MARKS[finding.level]} {finding.text}")
            if finding.remedy:
                typer.echo(f"{speaker()}       → {finding.remedy}")
    raise typer.Exit(1 if failed else 0)


def speaker() -> str:
    """The beginning of a line: which of several processes says it; empty before they have met."""
    import jax

    from synthesizer_jax.sharding import hosts

    return f"[{jax.process_index()}] " if hosts.count() > 1 else ""


def versions() -> Iterator[Finding]:
    """The packages' versions."""
    found = {name: version_of(name) for name in (*PACKAGES, "libtpu")}
    shown = ", ".join(f"{name} {number}" for name, number in found.items() if number)
    yield Finding("ok", f"Python {platform.python_version()}, {shown}")
    numbers = tuple(int(part) for part in (found["jax"] or "0.0").split(".")[:2])
    if not JAX[0] <= numbers < JAX[1]:
        yield Finding(
            "warning",
            f"jax {found['jax']} is not among the tested versions, 0.10 and 0.11",
            "pip install -c constraints.txt synthesizer_jax",
        )
    if found["jax"] != found["jaxlib"]:
        yield Finding(
            "problem",
            f"jax {found['jax']} and jaxlib {found['jaxlib']} do not belong together",
            f"pip install 'jaxlib=={found['jax']}'",
        )


def version_of(package: str) -> str | None:
    """An installed version."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def slices() -> Iterator[Finding]:
    """The variables of several slices, which outlive the slices they were set for."""
    found = {name: os.environ[name] for name in MEGASCALE if os.environ.get(name)}
    if not found:
        return
    clear = f"unset {' '.join(MEGASCALE)}, and let the launcher set them at every start"
    missing = [name for name in MEGASCALE if name not in found]
    if missing:
        yield Finding("problem", f"{', '.join(found)} without {', '.join(missing)}", clear)
        return
    count, index, address = (found[name] for name in MEGASCALE)
    if not (count.isdigit() and index.isdigit() and int(index) < int(count)):
        yield Finding("problem", f"slice {index} of {count} is none", clear)
        return
    try:
        socket.getaddrinfo(address.split(":")[0], None)
    except OSError:
        text = f"{MEGASCALE[2]}={address} is not known: left over from slices that are gone"
        yield Finding("problem", text, clear)
        return
    yield Finding("ok", f"slice {index} of {count}, coordinator {address}")


def group(timeout: float) -> Iterator[Finding]:
    """The other processes."""
    from synthesizer_jax.sharding import hosts

    try:
        place = hosts.join(timeout=timeout)
    except (RuntimeError, ValueError) as error:
        port = os.environ.get("JAX_COORDINATOR_PORT", hosts.OPEN_PORT)
        yield Finding(
            "problem",
            " ".join(str(error).split()),
            f"start the same command on every host; the firewall must let port {port} through",
        )
        return
    text = "one process" if place is None else f"process {place.index} of {place.count}"
    yield Finding("ok", text)


def devices() -> Iterator[Finding]:
    """What JAX sees."""
    import jax

    try:
        found = jax.devices()
    except RuntimeError as error:
        text = " ".join(str(error).split())[:300]
        yield Finding(
            "problem", text, "end other programs that use the device, or set JAX_PLATFORMS"
        )
        return
    kind = found[0].device_kind
    yield Finding("ok", f"{len(found)} × {kind}, {jax.local_device_count()} of them here")
    there = [path for path in TPU_FILES if pathlib.Path(path).exists()]
    if there and found[0].platform == "cpu":
        remedy = "pip install -c constraints.txt 'synthesizer_jax[tpu]', and unset JAX_PLATFORMS"
        yield Finding("problem", f"{there[0]} is a TPU's, but JAX runs on the CPU", remedy)


def memory() -> Iterator[Finding]:
    """Free memory of the host."""
    from synthesizer_jax.sharding.memory import free_memory

    free = free_memory()
    if free is None:
        return
    level = "ok" if free >= MEMORY else "warning"
    remedy = "" if free >= MEMORY else "end other programs: reading data needs some gigabytes"
    yield Finding(level, f"{free / GIB:.1f} GiB of memory free", remedy)


def place(directory: pathlib.Path) -> Iterator[Finding]:
    """A directory that is to be written to."""
    if in_bucket(directory):
        yield bucket(directory)
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".doctor_") as file:
            file.write(b"x")
            file.flush()
        free = shutil.disk_usage(directory).free
    except OSError as error:
        yield Finding("problem", f"{directory}: {error}", "give a directory that you may write to")
        return
    level = "ok" if free >= DISK else "warning"
    remedy = "" if free >= DISK else "delete old runs, or give another directory"
    yield Finding(level, f"{directory} is writable, {free / GIB:.0f} GiB free", remedy)


def bucket(directory: pathlib.Path) -> Finding:
    """A directory in a bucket, by an object that is written, read and removed again."""
    from synthesizer_jax.training.lease import leased

    try:
        with leased(directory, f".doctor_{uuid.uuid4().hex}", log=typer.echo):
            pass
    except OSError as error:
        text, _, remedy = str(error).rpartition("; ")
        return Finding("problem", text, remedy)
    return Finding("ok", f"{directory} is writable")


def agreement() -> Iterator[Finding]:
    """Whether all processes run the same code under the same settings."""
    from synthesizer_jax.sharding import hosts

    if hosts.count() == 1:
        return
    everyone = hosts.Occasion("doctor").everyone(identity())
    for name in everyone[0]:
        others = [i for i, one in enumerate(everyone) if one[name] != everyone[0][name]]
        if others:
            yield Finding(
                "problem",
                f"{name} differs: {everyone[0][name]!r} on process 0, "
                f"{everyone[others[0]][name]!r} on {hosts.ranges(others)}",
                "set up every host from the same commit and constraints file, and restart all",
            )
            return
    yield Finding("ok", f"{len(everyone)} processes run the same code with the same flags")


def identity() -> dict[str, Any]:
    """What must be equal on all hosts."""
    import synthesizer_jax

    root = pathlib.Path(synthesizer_jax.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    installed = {name: version_of(name) for name in (*PACKAGES, "libtpu")}
    flags = {name: os.environ.get(name) for name in FLAGS}
    python = ".".join(map(str, sys.version_info[:3]))
    return {"the package's code": digest.hexdigest()[:12], "Python": python, **installed, **flags}
