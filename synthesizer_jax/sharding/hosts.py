"""Several processes as one program: the start, and agreements among them that use no device.

Barriers around slow storage go through the coordination service of `jax.distributed`, not through a
collective: devices that wait for minutes look hung to the runtime of a multi-slice pod.
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
from typing import Any, NoReturn

import jax
from jax._src import cloud_tpu_init, clusters, distributed

ADDRESS = "JAX_COORDINATOR_ADDRESS"
PROCESSES = "SYNTHESIZER_PROCESSES"
PROCESS = "SYNTHESIZER_PROCESS"
"""Environment variables that name the group by hand: ``host:port`` of process 0, how many, which one."""

OPEN_PORT = "8476"
"""Coordinator's port on TPUs unless ``JAX_COORDINATOR_PORT`` says otherwise: JAX's own default, 8482, is
closed in the firewall that Cloud makes for several slices."""

PATIENCE, TIMEOUT = 30.0, 300.0
"""Seconds until missing processes are named, and until the start is given up."""

BARRIER_SECONDS = 3600

GO = b"go\n"
"""What process 0 answers when all are there; the coordinator itself says other things on that port."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where this process stands.

    Attributes:
      address: ``host:port`` of process 0.
      count: number of processes.
      index: of this one.
      local_devices: ids of the devices it takes; None: all of its host's.
    """

    address: str
    count: int
    index: int
    local_devices: Sequence[int] | None = None


def say(text: str) -> None:
    """A line on standard error."""
    print(text, file=sys.stderr, flush=True)


def start(
    log: Callable[[str], None] = say, *, patience: float = PATIENCE, timeout: float = TIMEOUT
) -> None:
    """Joins this process to its group, and tells what devices the group has.

    Args:
      log: takes one line.
      patience: seconds after which missing processes are named.
      timeout: seconds after which the start is given up.

    Raises:
      ValueError: the variables do not say who this process is.
      RuntimeError: some processes did not come, or JAX finds no devices.
    """
    place = join(log, patience=patience, timeout=timeout)
    if place is None:
        return
    kinds = {device.device_kind for device in jax.devices()}  # all must ask, or the first waits
    if place.index == 0:
        log(
            f"{place.count} processes with {jax.local_device_count()} devices each: "
            f"{jax.device_count()} × {', '.join(sorted(kinds))}, coordinator {place.address}"
        )


def join(
    log: Callable[[str], None] = say, *, patience: float = PATIENCE, timeout: float = TIMEOUT
) -> Place | None:
    """Joins this process to its group, before anything else is done with JAX. Touches no device.

    Nothing happens where there is one process, where Pathways is the single controller, or when the
    group exists already. Groups are found as `jax.distributed.initialize` finds them (Cloud TPU, GKE,
    SLURM, Open MPI), or named by `ADDRESS`, `PROCESSES` and `PROCESS`.

    Args:
      log: takes one line.
      patience: seconds after which missing processes are named.
      timeout: seconds after which the start is given up.

    Returns:
      Where it stands; None where nothing was to do.

    Raises:
      ValueError: the variables do not say who this process is.
      RuntimeError: some processes did not come.
    """
    if jax.distributed.is_initialized() or "proxy" in os.environ.get("JAX_PLATFORMS", ""):
        return None
    place = find_place(timeout)
    if place is None or place.count == 1:
        return None
    call_roll(place, log, patience=patience, timeout=timeout)
    # JAX's own listener would swallow a SIGTERM that comes before the program's.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        place.address,
        place.count,
        place.index,
        place.local_devices,
        cluster_detection_method="deactivate",
        initialization_timeout=int(timeout),
    )
    return place


def find_place(timeout: float) -> Place | None:
    """This process's place in its group; None where there is no group."""
    if PROCESSES in os.environ or PROCESS in os.environ:
        return named_place()
    if cloud_tpu_init.running_in_cloud_tpu_vm or "TPU_WORKER_HOSTNAMES" in os.environ:
        os.environ.setdefault("JAX_COORDINATOR_PORT", OPEN_PORT)
    detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
    address, processes, process, devices = detect(None, None, None, None, None, int(timeout))
    if address is None or processes is None or process is None:
        return None
    return Place(address, processes, process, devices)


def named_place() -> Place:
    """What `ADDRESS`, `PROCESSES` and `PROCESS` say."""
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
    return Place(address, int(count), int(index))


def call_roll(place: Place, log: Callable[[str], None], *, patience: float, timeout: float) -> None:
    """Waits until every process has come, and says who has not.

    Process 0 listens on the coordinator's own port, which is known to be open, and closes it before
    the coordinator starts. The others tell it their number and wait for its word.

    Raises:
      RuntimeError: after `timeout`, with the numbers of those that did not come.
    """
    host, _, port = place.address.rpartition(":")
    until = time.monotonic() + timeout
    if place.index > 0:
        answer_roll(place, (host, int(port)), until, log, patience=patience)
        return
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("", int(port)), backlog=4096))
        arrived: dict[int, socket.socket] = {}
        quiet = time.monotonic() + patience
        while missing := sorted(set(range(1, place.count)) - arrived.keys()):
            now = time.monotonic()
            if now > until:
                raise RuntimeError(
                    f"{len(missing)} of {place.count} processes did not come within {timeout:.0f} s: "
                    f"{ranges(missing)}; start the same command on every host"
                )
            if now > quiet:
                log(
                    f"waiting for {len(missing)} of {place.count} processes: {ranges(missing)}; is "
                    "the program running on every host?"
                )
                quiet = now + patience
            listener.settimeout(max(min(quiet, until) - now, 0.01))
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                stack.enter_context(connection)
                index = read_number(connection)
                if index is not None and 0 < index < place.count:
                    arrived[index] = connection
        for connection in arrived.values():
            with contextlib.suppress(OSError):
                connection.sendall(GO)


def answer_roll(
    place: Place,
    address: tuple[str, int],
    until: float,
    log: Callable[[str], None],
    *,
    patience: float,
) -> None:
    """Tells process 0 that this one is here, as often as it takes, and waits for its word."""
    quiet = time.monotonic() + patience
    while True:
        try:
            with socket.create_connection(address, timeout=5) as connection:
                connection.sendall(f"{place.index}\n".encode())
                connection.settimeout(max(until - time.monotonic(), 0.01))
                if connection.recv(8) == GO:
                    return
        except OSError:  # not there yet, or started again
            pass
        now = time.monotonic()
        if now > until:
            raise RuntimeError(
                f"process {place.index} of {place.count} cannot reach process 0 at {place.address}; "
                "start the same command on every host, and let that port through the firewall"
            )
        if now > quiet:
            log(f"process {place.index} is waiting for process 0 at {place.address}")
            quiet = now + patience
        time.sleep(0.2)


def read_number(connection: socket.socket) -> int | None:
    """The number that a process sends; None where it sends something else."""
    connection.settimeout(5)
    with contextlib.suppress(OSError, ValueError):
        return int(connection.recv(16))
    return None


def ranges(numbers: Sequence[int]) -> str:
    """Rising numbers as ``1, 3 to 7``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]} to {p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def count() -> int:
    """Number of processes in the group; unlike `jax.process_count` it starts no device."""
    return distributed.global_state.num_processes or 1


def first() -> bool:
    """Whether this process is the one that writes what all share."""
    return distributed.global_state.process_id == 0


class Occasion:
    """A place in the program where the processes' values come together. Uses no device.

    Every process must make its occasions in the same order.

    Args:
      name: for messages.
    """

    _count = itertools.count()

    def __init__(self, name: str):
        self._key = f"synthesizer_jax/{next(self._count)}/{name}"

    def everyone(self, value: Any) -> list[Any]:
        """The processes' values in their order; returns when all have come.

        Args:
          value: anything that is JSON; given once by every process.
        """
        if count() == 1:
            return [value]
        client, key = service(), self._key
        client.key_value_set(f"{key}/{distributed.global_state.process_id}", json.dumps(value))
        client.wait_at_barrier(f"{key}/barrier", BARRIER_SECONDS * 1000)
        found = dict(client.key_value_dir_get(f"{key}/"))
        return [json.loads(found[f"{key}/{p}"]) for p in range(count())]


def barrier(name: str) -> None:
    """Returns when every process has come here. Uses no device."""
    Occasion(name).everyone(None)


def tell(name: str, text: str) -> None:
    """Lets every process know of something; see `told`."""
    service().key_value_set(f"synthesizer_jax/{name}", text, allow_overwrite=True)


def told(name: str) -> str | None:
    """What a process of the group has last said with `tell`; None: nothing yet."""
    try:
        return str(service().key_value_try_get(f"synthesizer_jax/{name}"))
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" in str(error):
            return None
        raise


@contextlib.contextmanager
def one_after_the_first(name: str) -> Iterator[None]:
    """Work that process 0 does before the others begin, such as writing what they then find."""
    if not first():
        barrier(name)
    try:
        yield
    finally:
        if first():
            barrier(name)


def leave(code: int) -> NoReturn:
    """Ends this process after an error.

    One of a group does not wait for the others, who may be waiting for it: they end when they miss it.
    """
    if count() == 1:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def service() -> Any:
    """The client of the coordination service."""
    return distributed.global_state.client
