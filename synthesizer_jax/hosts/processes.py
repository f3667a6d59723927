"""Functions for groups of processes: starting a group, barriers, and exchanging values."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np

from synthesizer_jax.base.messages import escape_controls

T = TypeVar("T")

ADDRESS = "JAX_COORDINATOR_ADDRESS"
PROCESSES = "SYNTHESIZER_PROCESSES"
PROCESS = "SYNTHESIZER_PROCESS"
"""The environment variables that define a group of processes.

The variables contain the address ``host:port`` of process 0, the number of processes, and the index
of this process.
"""

OPEN_PORT = "8476"
"""The default port of the coordinator on TPUs.

JAX's own default is port 8482, which Google Cloud's firewall blocks between many slices. The
environment variable ``JAX_COORDINATOR_PORT`` takes precedence over `OPEN_PORT`.
"""

PATIENCE = 30.0
"""The number of seconds after which a message says that processes are missing."""

BARRIER_SECONDS = 3600
"""The number of seconds after which a barrier fails."""

BACKGROUND = "synthesizer_jax_background"
"""The prefix of the names of threads for which a command does not wait when it exits."""


def print_line(text: str) -> None:
    """Prints a line to standard error."""
    print(escape_controls(text), file=sys.stderr, flush=True)


def start_group() -> None:
    """Joins this process to its group (see `join_group`), and prints the devices of the group."""
    if join_group() and is_process_zero() and process_count() > 1:
        kinds = {device.device_kind for device in jax.devices()}
        print_line(
            f"The group has {process_count()} processes with {jax.local_device_count()} devices "
            f"each: {jax.device_count()} × {', '.join(sorted(kinds))}."
        )


def join_group(timeout: float = 300.0) -> bool:
    """Joins this process to its group, and returns whether there is a group.

    Call this function before any other use of JAX. The environment variables `ADDRESS`, `PROCESSES`
    and `PROCESS` can define the group. If the environment variables are not set,
    `jax.distributed.initialize` finds the group on Cloud TPU, GKE, SLURM and Open MPI. The function
    does nothing if there is only one process, under Pathways, or if JAX is already in use. The
    function does not initialize devices.

    Args:
      timeout: the number of seconds to wait for the other processes.

    Raises:
      ValueError: if the environment variables are incomplete or invalid.
      RuntimeError: if some processes do not connect within `timeout` seconds.
    """
    if jax.distributed.is_initialized() or "proxy" in os.environ.get("JAX_PLATFORMS", ""):
        return False
    os.environ.setdefault("JAX_COORDINATOR_PORT", OPEN_PORT)
    # JAX's own signal handler would discard a SIGTERM that arrives before this program handles
    # signals.
    jax.config.update("jax_enable_preemption_service", False)
    group = _group_from_environment()
    errors: list[BaseException] = []

    def initialize() -> None:
        """Connects to the group, and stores any error so that the main thread can raise it."""
        try:
            # When JAX's own timeout expires, JAX ends the process with a C++ stack trace. JAX's
            # timeout is therefore longer than the timeout of `join_group`.
            jax.distributed.initialize(**group, initialization_timeout=int(timeout) + 60)
        except BaseException as error:
            errors.append(error)

    # The call of `initialize` blocks, so it runs in a separate thread. The main thread can still
    # handle signals.
    joining = threading.Thread(target=initialize, daemon=True)
    joining.start()
    joining.join(min(PATIENCE, timeout))
    if joining.is_alive():
        print_line(
            "Waiting for the other processes of the group. Is the program running on every host?"
        )
        joining.join(timeout - PATIENCE)
    if joining.is_alive():
        raise RuntimeError(
            f"Not all processes of the group have connected within {timeout:.0f} s. Start the same "
            "command on every host, and open the coordinator's port in the firewall."
        )

    # JAX raises an error with one of these texts if there is no group, or if JAX is already in use.
    expected = ("coordinator_address should be defined", "must be called before")
    for error in errors:
        if group or not any(text in str(error) for text in expected):
            raise error
    return not errors


def _group_from_environment() -> dict[str, Any]:
    """Returns the arguments for `jax.distributed.initialize` from the environment variables.

    If the environment variables are not set, the result is empty.

    Raises:
      ValueError: if the environment variables are incomplete or invalid.
    """
    if PROCESSES not in os.environ and PROCESS not in os.environ:
        return {}
    address, count, index = (os.environ.get(name, "") for name in (ADDRESS, PROCESSES, PROCESS))
    is_process = count.isdigit() and index.isdigit() and int(index) < int(count)
    if not is_process or not re.fullmatch(r".+:\d+", address):
        raise ValueError(
            f"{ADDRESS}={address}, {PROCESSES}={count} and {PROCESS}={index} do not describe a "
            f"process of a group. Set {ADDRESS} to host:port, such as 10.0.0.2:{OPEN_PORT}, "
            f"{PROCESSES} to the number of processes, and {PROCESS} to the index of this process, "
            "which counts from 0."
        )
    return {
        "coordinator_address": address,
        "num_processes": int(count),
        "process_id": int(index),
        "cluster_detection_method": "deactivate",
    }


def process_count() -> int:
    """Returns the number of processes in the group.

    If there is no group, the function does not initialize devices.
    """
    return jax.process_count() if jax.distributed.is_initialized() else 1


def is_process_zero() -> bool:
    """Returns whether this process is process 0, which writes the shared files of a run."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


_barriers = itertools.count()
"""Counts the barriers, so that every barrier has a unique key."""


def barrier(name: str) -> None:
    """Waits until every process has called this function.

    All processes must call `barrier` in the same order.

    The barrier does not use the devices. If the devices waited at a barrier for minutes, the
    runtime of a TPU pod with several slices would assume that the devices hang.
    """
    if process_count() > 1:
        import orbax.checkpoint as ocp

        key = f"synthesizer_jax/{next(_barriers)}/{name}"
        ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=BARRIER_SECONDS * 1000)


def all_gather(name: str, value: T) -> list[T]:
    """Returns the values of all processes, in the order of the processes.

    The function waits until every process has called `all_gather`.

    Args:
      name: the name of the barrier.
      value: the value of this process, which must be JSON data.
    """
    if process_count() == 1:
        return [value]
    from jax.experimental import multihost_utils

    barrier(name)
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(data.size))
    # `process_allgather` needs arrays of the same shape from all processes, so the JSON texts are
    # padded.
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: data.size] = data
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(row[:n].tobytes()) for row, n in zip(rows, sizes.flat, strict=True)]


@contextlib.contextmanager
def process_zero_first(name: str) -> Iterator[None]:
    """Context manager that runs its block in process 0 first, and then in all other processes."""
    if not is_process_zero():
        barrier(name)
    try:
        yield
    finally:
        if is_process_zero():
            barrier(name)


def background_thread() -> concurrent.futures.ThreadPoolExecutor:
    """Returns a thread pool with one thread, for work that is abandoned if a command fails.

    The pool is used for compilation, because nothing can stop XLA while it compiles. When Python
    exits, it waits for the threads of a thread pool. Python would not wait for a daemon thread, but
    a daemon thread that returned from C++ code while Python exits would abort the process. See
    `has_background_thread`.
    """
    return concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=BACKGROUND)


def has_background_thread() -> bool:
    """Returns whether the thread of a pool from `background_thread` is still running."""
    return any(thread.name.startswith(BACKGROUND) for thread in threading.enumerate())


def exit_process(code: int) -> NoReturn:
    """Ends this process after an error.

    In a group, this process does not wait for the other processes, because the other processes may
    be waiting for this process. The other processes end when they lose the connection to this
    process.
    """
    if not jax.distributed.is_initialized():
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
