"""Finding one's group of processes, and what is said when some are missing."""

import os
import signal
import socket
import subprocess
import sys
from typing import NamedTuple

import jax
import pytest

from synthesizer_jax.runtime import processes
from synthesizer_jax.runtime.preemption import EXIT_CODES
from synthesizer_jax.sharding import BatchShards


@pytest.fixture
def join(monkeypatch):
    """Joins a group by environment variables; returns the arguments that JAX gets."""
    for name in (processes.ADDRESS, processes.PROCESSES, processes.PROCESS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("JAX_COORDINATOR_PORT", raising=False)
    asked = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **place: asked.append(place))

    def join(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        assert processes.join_group()
        return asked[-1]

    return join


def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.usefixtures("join")
def test_one_process_alone_starts_nothing(monkeypatch):
    monkeypatch.undo()
    said = []
    processes.start_group(said.append)
    assert said == [] and processes.process_count() == 1 and processes.is_process_zero()


def test_the_variables_name_a_place(join):
    found = join(
        JAX_COORDINATOR_ADDRESS="host:1234", SYNTHESIZER_PROCESSES="4", SYNTHESIZER_PROCESS="3"
    )
    assert (found["coordinator_address"], found["num_processes"], found["process_id"]) == (
        *("host:1234", 4),
        3,
    )


def test_without_variables_jax_looks_for_a_cluster_with_the_port_that_is_open(join):
    assert set(join()) == {"initialization_timeout"}
    assert os.environ["JAX_COORDINATOR_PORT"] == processes.OPEN_PORT


def test_half_named_places_are_refused(join):
    with pytest.raises(ValueError, match="without JAX_COORDINATOR_ADDRESS and SYNTHESIZER_PROCESS"):
        join(SYNTHESIZER_PROCESSES="2")
    with pytest.raises(ValueError, match="PROCESS=2 is not a number below SYNTHESIZER_PROCESSES=2"):
        join(JAX_COORDINATOR_ADDRESS="host:1", SYNTHESIZER_PROCESS="2")
    for address in ("host", ":1", "host:port"):
        with pytest.raises(ValueError, match="is not host:port, such as"):
            join(JAX_COORDINATOR_ADDRESS=address, SYNTHESIZER_PROCESS="1")


PROGRAM = """
import sys
from synthesizer_jax.runtime import processes
from synthesizer_jax.runtime.preemption import exit_on_signals
exit_on_signals()
try:
    processes.start_group(patience=0.1, timeout=float(sys.argv[1]))
except RuntimeError as error:
    processes.print_line(str(error))
    processes.exit_process(2)
"""


@pytest.mark.parametrize(("timeout", "code"), [(0.2, 2), (300, EXIT_CODES[signal.SIGTERM])])
def test_a_process_that_waits_for_others_says_so_and_heeds_signals(timeout, code):
    place = {
        processes.ADDRESS: f"127.0.0.1:{port()}",
        processes.PROCESSES: "2",
        processes.PROCESS: "0",
    }
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(timeout)],
        env={**os.environ, **place},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while "waiting for the other processes of the group" not in process.stderr.readline():
            assert process.poll() is None
        if code == EXIT_CODES[signal.SIGTERM]:
            process.terminate()
        _, errors = process.communicate()
        assert process.returncode == code
    assert ("not all processes of the group have connected within 0 s" in errors) == (code == 2)


def test_ranges():
    assert processes.format_ranges([1, 2, 3, 7, 9, 10]) == "1 to 3, 7, 9 to 10"


class Device(NamedTuple):
    process_index: int
    id: int


class Spread:
    """A sharding of rows over devices of several processes, given as ``(process, first, last)``."""

    def __init__(self, *parts):
        self.parts = parts

    def devices_indices_map(self, shape):
        return {
            Device(p, i): (slice(first, last),) for i, (p, first, last) in enumerate(self.parts)
        }


def test_processes_bring_the_shards_of_their_devices():
    rows = BatchShards(16, 8, Spread((0, 0, 4), (0, 4, 8), (1, 8, 12), (1, 12, 16)))
    assert rows.shards_of(0) == rows.saved_by(0) == [0, 1, 2, 3]
    assert rows.shards_of(1) == rows.saved_by(1) == [4, 5, 6, 7]


def test_devices_that_share_rows_bring_them_both_and_save_them_once():
    rows = BatchShards(16, 4, Spread((0, 0, 16), (1, 0, 16)))
    assert rows.shards_of(0) == rows.shards_of(1) == [0, 1, 2, 3]
    assert (rows.saved_by(0), rows.saved_by(1)) == ([0, 1, 2, 3], [])


def test_more_processes_than_shards_and_devices_in_any_order():
    rows = BatchShards(8, 2, Spread((0, 6, 8), (1, 0, 2), (2, 2, 4), (3, 4, 6)))
    assert [rows.shards_of(p) for p in range(4)] == [[1], [0], [0], [1]]
    assert [rows.saved_by(p) for p in range(4)] == [[1], [0], [], []]
