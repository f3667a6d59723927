"""Finding one's place among several processes, and what is said when some are missing."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from typing import NamedTuple

import pytest

from synthesizer_jax.runtime import processes
from synthesizer_jax.runtime.preemption import EXIT_PREEMPTED
from synthesizer_jax.sharding import BatchShards


@pytest.fixture
def variables(monkeypatch):
    """Sets environment variables; without it none of a group are set."""
    for name in (processes.ADDRESS, processes.PROCESSES, processes.PROCESS, "TPU_WORKER_HOSTNAMES"):
        monkeypatch.delenv(name, raising=False)

    def put(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return put


def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_one_process_alone_starts_nothing(variables):
    said = []
    processes.start_group(said.append)
    assert said == []


def test_the_variables_name_a_place(variables):
    variables(
        JAX_COORDINATOR_ADDRESS="host:1234", SYNTHESIZER_PROCESSES="4", SYNTHESIZER_PROCESS="3"
    )
    assert processes._find_group_member(1) == processes.GroupMember("host:1234", 4, 3)


def test_half_named_places_are_refused(variables):
    variables(SYNTHESIZER_PROCESSES="2")
    with pytest.raises(ValueError, match="without JAX_COORDINATOR_ADDRESS and SYNTHESIZER_PROCESS"):
        processes._find_group_member(1)
    variables(JAX_COORDINATOR_ADDRESS="host:1", SYNTHESIZER_PROCESS="2")
    with pytest.raises(ValueError, match="PROCESS=2 is not a number below SYNTHESIZER_PROCESSES=2"):
        processes._find_group_member(1)
    for address in ("host", ":1", "host:port"):
        variables(JAX_COORDINATOR_ADDRESS=address, SYNTHESIZER_PROCESS="1")
        with pytest.raises(ValueError, match="is not host:port, such as"):
            processes._find_group_member(1)


def test_slurm_is_found(variables, monkeypatch):
    variables(
        SLURM_JOB_ID="77",
        SLURM_NTASKS="2",
        SLURM_PROCID="1",
        SLURM_LOCALID="0",
        SLURM_STEP_NODELIST="node[7-8]",
        SLURM_STEP_NUM_NODES="2",
    )
    place = processes._find_group_member(1)
    assert (place.count, place.index, place.address.split(":")[0]) == (2, 1, "node7")


def test_cloud_tpus_get_the_port_that_is_open(variables, monkeypatch):
    monkeypatch.delenv("JAX_COORDINATOR_PORT", raising=False)
    variables(TPU_WORKER_HOSTNAMES="a,b", TPU_WORKER_ID="1")
    processes._find_group_member(1)
    assert processes.os.environ["JAX_COORDINATOR_PORT"] == processes.OPEN_PORT


def test_all_are_called_and_answer():
    address, said = f"127.0.0.1:{port()}", []
    places = [processes.GroupMember(address, 3, index) for index in range(3)]
    threads = [
        threading.Thread(
            target=processes._wait_for_group,
            args=(p, said.append),
            kwargs={"patience": 30, "timeout": 30},
        )
        for p in places[::-1]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert said == []


def test_missing_processes_are_named():
    said = []
    address = f"127.0.0.1:{port()}"

    def come():
        with contextlib.suppress(RuntimeError):  # the group never starts
            processes._wait_for_group(
                processes.GroupMember(address, 4, 2), said.append, patience=30, timeout=3
            )

    other = threading.Thread(target=come)
    other.start()
    with pytest.raises(RuntimeError, match=r"2 of 4 processes did not connect within 2 s: 1, 3;"):
        processes._wait_for_group(
            processes.GroupMember(address, 4, 0), said.append, patience=1, timeout=2
        )
    assert said[-1].startswith("waiting for 2 of 4 processes: 1, 3; is the program running")
    other.join()


def test_a_process_that_reaches_nobody_says_so():
    said = []
    place = processes.GroupMember(f"127.0.0.1:{port()}", 2, 1)
    with pytest.raises(
        RuntimeError, match=r"process 1 of 2 cannot reach process 0 at 127\.0\.0\.1"
    ):
        processes._wait_for_group(place, said.append, patience=0.1, timeout=0.5)
    assert said[0] == f"process 1 is waiting for process 0 at {place.address}"


def test_sigterm_before_all_have_come_ends_a_process_with_its_own_code():
    program = (
        "from synthesizer_jax.runtime import processes\n"
        "from synthesizer_jax.runtime.preemption import exit_on_signals\n"
        "exit_on_signals()\n"
        "processes.start_group(patience=0.1)\n"
    )
    place = {
        processes.ADDRESS: f"127.0.0.1:{port()}",
        processes.PROCESSES: "2",
        processes.PROCESS: "0",
    }
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, **place},
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        while "waiting for 1 of 2 processes: 1" not in process.stderr.readline():
            assert process.poll() is None
        process.terminate()
        assert process.wait() == EXIT_PREEMPTED


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
