"""Groups of processes that run one program: their start, and synchronization without devices.

Barriers around slow storage use the coordination service of `jax.distributed` instead of a collective,
because the runtime of a multi-slice pod considers devices that wait for minutes to hang.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn, TypeVar

import jax
from jax._src import cloud_tpu_init, clusters, distributed

from synthesizer_jax.messages import escape_controls

if TYPE_CHECKING:
    from jax._src.lib import _jax

T = TypeVar("T")

ADDRESS = "JAX_COORDINATOR_ADDRESS"
PROCESSES = "SYNTHESIZER_PROCESSES"
PROCESS = "SYNTHESIZER_PROCESS"
"""Environment variables that define a group: ``host:port`` of process 0, number of processes, own index."""

OPEN_PORT = "8476"
"""The coordinator's default port on TPUs; JAX's own, 8482, is blocked by Google Cloud's firewall for many
slices. ``JAX_COORDINATOR_PORT`` takes precedence."""

PATIENCE, TIMEOUT = 30.0, 300.0
"""Seconds until missing processes are reported, and until the start fails."""

BARRIER_SECONDS = 3600

GO = b"go\n"
"""Process 0's response when all processes are connected; the coordinator's own protocol differs from it."""


@dataclasses.dataclass(frozen=True)
class GroupMember:
    """A process in its group.

    Attributes:
      address: ``host:port`` of process 0.
      count: number of processes.
      index: index of this process.
      local_devices: ids of the devices that the process uses; None is all of its host.
    """

    address: str
    count: int
    index: int
    local_devices: Sequence[int] | None = None


def print_line(text: str) -> None:
    """Prints a line to standard error."""
    print(escape_controls(text), file=sys.stderr, flush=True)


def start_group(
    log: Callable[[str], None] = print_line, *, patience: float = PATIENCE, timeout: float = TIMEOUT
) -> None:
    """Joins this process to its group and logs the devices of the group.

    Args:
      log: receives a line.
      patience: seconds until missing processes are reported.
      timeout: seconds until the start fails.

    Raises:
      ValueError: the environment variables are incomplete or invalid.
      RuntimeError: some processes did not connect, or JAX finds no devices.
    """
    member = join_group(log, patience=patience, timeout=timeout)
    if member is None:
        return
    kinds = {device.device_kind for device in jax.devices()}  # blocks until every process calls it
    if member.index == 0:
        log(
            f"{member.count} processes with {jax.local_device_count()} devices each: "
            f"{jax.device_count()} × {', '.join(sorted(kinds))}, coordinator {member.address}"
        )


def join_group(
    log: Callable[[str], None] = print_line, *, patience: float = PATIENCE, timeout: float = TIMEOUT
) -> GroupMember | None:
    """Joins this process to its group, without initializing devices; must precede other uses of JAX.

    Does nothing for a single process, under Pathways, or if the group exists already. Groups are detected
    as by `jax.distributed.initialize` (Cloud TPU, GKE, SLURM, Open MPI), or defined by the variables
    `ADDRESS`, `PROCESSES` and `PROCESS`.

    Args:
      log: receives a line.
      patience: seconds until missing processes are reported.
      timeout: seconds until the start fails.

    Returns:
      This process in its group; None if the function did nothing.

    Raises:
      ValueError: the environment variables are incomplete or invalid.
      RuntimeError: some processes did not connect.
    """
    if jax.distributed.is_initialized() or "proxy" in os.environ.get("JAX_PLATFORMS", ""):
        return None
    member = _find_group_member(timeout)
    if member is None or member.count == 1:
        return None
    _wait_for_group(member, log, patience=patience, timeout=timeout)
    # JAX's own handler would discard a SIGTERM that arrives before the program handles signals.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        member.address,
        member.count,
        member.index,
        member.local_devices,
        cluster_detection_method="deactivate",
        initialization_timeout=int(timeout),
    )
    return member


def _find_group_member(timeout: float) -> GroupMember | None:
    """Returns this process in its group; None if there is no group."""
    if PROCESSES in os.environ or PROCESS in os.environ:
        return _group_member_from_environment()
    if cloud_tpu_init.running_in_cloud_tpu_vm or "TPU_WORKER_HOSTNAMES" in os.environ:
        os.environ.setdefault("JAX_COORDINATOR_PORT", OPEN_PORT)
    detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
    address, processes, process, devices = detect(None, None, None, None, None, int(timeout))
    if address is None or processes is None or process is None:
        return None
    return GroupMember(address, processes, process, devices)


def _group_member_from_environment() -> GroupMember:
    names = (ADDRESS, PROCESSES, PROCESS)
    missing = [name for name in names if name not in os.environ]
    if missing:
        there = next(name for name in names[1:] if name in os.environ)
        raise ValueError(f"{there} is set without {' and '.join(missing)}; set all three")
    address, count, index = (os.environ[name] for name in names)
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        raise ValueError(f"{ADDRESS}={address!r} is not host:port, such as 10.0.0.2:{OPEN_PORT}")
    if not (count.isdigit() and index.isdigit() and int(index) < int(count)):
        raise ValueError(f"{PROCESS}={index} is not a number below {PROCESSES}={count}")
    return GroupMember(address, int(count), int(index))


def _wait_for_group(
    member: GroupMember, log: Callable[[str], None], *, patience: float, timeout: float
) -> None:
    """Waits until every process has started, and reports missing ones.

    Process 0 listens on the coordinator's port, which is known to be open, and closes it before the
    coordinator starts. The other processes send their index and wait for its response.

    Raises:
      RuntimeError: some processes did not connect within `timeout`; the message has their indices.
    """
    host, _, port = member.address.rpartition(":")
    until = time.monotonic() + timeout
    if member.index > 0:
        _report_to_process_zero(member, (host, int(port)), until=until, log=log, patience=patience)
        return
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("", int(port)), backlog=4096))
        arrived: dict[int, socket.socket] = {}
        quiet = time.monotonic() + patience
        while missing := sorted(set(range(1, member.count)) - arrived.keys()):
            now = time.monotonic()
            if now > until:
                raise RuntimeError(
                    f"{len(missing)} of {member.count} processes did not connect within {timeout:.0f} s: "
                    f"{format_ranges(missing)}; start the same command on every host"
                )
            if now > quiet:
                log(
                    f"waiting for {len(missing)} of {member.count} processes: {format_ranges(missing)}; is "
                    "the program running on every host?"
                )
                quiet = now + patience
            listener.settimeout(max(min(quiet, until) - now, 0.01))
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                stack.enter_context(connection)
                index = _read_index(connection)
                if index is not None and 0 < index < member.count:
                    arrived[index] = connection
        for connection in arrived.values():
            with contextlib.suppress(OSError):
                connection.sendall(GO)


def _report_to_process_zero(
    member: GroupMember,
    address: tuple[str, int],
    *,
    until: float,
    log: Callable[[str], None],
    patience: float,
) -> None:
    """Sends the index of this process to process 0, repeatedly if need be, and waits for the response."""
    quiet = time.monotonic() + patience
    while True:
        try:
            with socket.create_connection(address, timeout=5) as connection:
                connection.sendall(f"{member.index}\n".encode())
                connection.settimeout(max(until - time.monotonic(), 0.01))
                if connection.recv(8) == GO:
                    return
        except OSError:  # process 0 has not started yet, or was restarted
            pass
        now = time.monotonic()
        if now > until:
            raise RuntimeError(
                f"process {member.index} of {member.count} cannot reach process 0 at {member.address}; "
                "start the same command on every host, and open that port in the firewall"
            )
        if now > quiet:
            log(f"process {member.index} is waiting for process 0 at {member.address}")
            quiet = now + patience
        time.sleep(0.2)


def _read_index(connection: socket.socket) -> int | None:
    """Reads the index that a process sends; None if it sends something else."""
    connection.settimeout(5)
    with contextlib.suppress(OSError, ValueError):
        return int(connection.recv(16))
    return None


def format_ranges(numbers: Sequence[int]) -> str:
    """Formats ascending integers as ``1, 3 to 7``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]} to {p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def process_count() -> int:
    """Returns the number of processes in the group, without initializing devices."""
    return distributed.global_state.num_processes or 1


def is_process_zero() -> bool:
    """Whether this process writes the files that all processes share."""
    return distributed.global_state.process_id == 0


class Exchange:
    """A point in the program where processes exchange values, without devices.

    All processes must create their exchanges in the same order.

    Args:
      name: a name for error messages.
    """

    _count = itertools.count()

    def __init__(self, name: str):
        self._key = f"synthesizer_jax/{next(self._count)}/{name}"

    def all_gather(self, value: T) -> list[T]:
        """Returns the values of all processes in order, after all have called this method once.

        Args:
          value: a value that can be converted to JSON.
        """
        if process_count() == 1:
            return [value]
        client, key = _coordination_client(), self._key
        client.key_value_set(f"{key}/{distributed.global_state.process_id}", json.dumps(value))
        client.wait_at_barrier(f"{key}/barrier", BARRIER_SECONDS * 1000)
        found = dict(client.key_value_dir_get(f"{key}/"))
        return [json.loads(found[f"{key}/{p}"]) for p in range(process_count())]


def barrier(name: str) -> None:
    """Waits until every process has called this function, without devices."""
    Exchange(name).all_gather(None)


def publish(name: str, text: str) -> None:
    """Publishes a text under a name to all processes; see `read_published`."""
    _coordination_client().key_value_set(f"synthesizer_jax/{name}", text, allow_overwrite=True)


def read_published(name: str) -> str | None:
    """Returns the text that a process last published under a name; None if there is none."""
    try:
        return str(_coordination_client().key_value_try_get(f"synthesizer_jax/{name}"))
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" in str(error):
            return None
        raise


@contextlib.contextmanager
def process_zero_first(name: str) -> Iterator[None]:
    """Context manager that process 0 leaves before the other processes enter it."""
    if not is_process_zero():
        barrier(name)
    try:
        yield
    finally:
        if is_process_zero():
            barrier(name)


def exit_process(code: int) -> NoReturn:
    """Ends this process after an error.

    A process of a group does not wait for the others, which may be waiting for it; they end when they
    lose the connection to it.
    """
    if process_count() == 1:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _coordination_client() -> _jax.DistributedRuntimeClient:
    client = distributed.global_state.client
    assert client is not None
    return client
