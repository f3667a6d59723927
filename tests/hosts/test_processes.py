"""Tests how processes find each other, and which errors they report if some are missing."""

import os
import signal
import socket
import subprocess
import sys

import jax
import pytest

from synthesizer_jax.hosts import processes
from tests.environment import python


@pytest.fixture
def join(monkeypatch):
    """Returns a function that joins a group of processes described by environment variables.

    The function returns the arguments that are passed to JAX.
    """
    for name in (processes.ADDRESS, processes.PROCESSES, processes.PROCESS, "JAX_COORDINATOR_PORT"):
        monkeypatch.delenv(name, raising=False)
    asked = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **place: asked.append(place))

    def join(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        assert processes.join_group()
        return asked[-1]

    return join


def test_one_process_alone_starts_nothing(capsys):
    processes.start_group()
    assert capsys.readouterr().err == ""
    assert processes.process_count() == 1 and processes.is_process_zero()


def test_the_variables_name_a_place(join):
    assert set(join()) == {"initialization_timeout"}, "JAX looks for a cluster"
    assert os.environ["JAX_COORDINATOR_PORT"] == processes.OPEN_PORT
    found = join(
        JAX_COORDINATOR_ADDRESS="host:1234", SYNTHESIZER_PROCESSES="4", SYNTHESIZER_PROCESS="3"
    )
    place = (found["coordinator_address"], found["num_processes"], found["process_id"])
    assert place == ("host:1234", 4, 3)


@pytest.mark.parametrize("place", [("", "2", "0"), ("host:1", "2", "2"), (":1", "2", "0")])
def test_half_named_places_are_refused(join, place):
    names = (processes.ADDRESS, processes.PROCESSES, processes.PROCESS)
    with pytest.raises(
        ValueError, match=r"do not describe a process of a group\. Set .* to host:port, such as"
    ):
        join(**dict(zip(names, place, strict=True)))


PROGRAM = """
import sys
from synthesizer_jax.hosts import processes
from tests.environment import python
processes.PATIENCE = 0.1
try:
    processes.join_group(float(sys.argv[1]))
except RuntimeError as error:
    processes.print_line(str(error))
    processes.exit_process(2)
"""


@pytest.mark.parametrize(("timeout", "code"), [(0.2, 2), (300, -signal.SIGTERM)])
def test_a_process_that_waits_for_others_says_so_and_heeds_signals(timeout, code):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    place = {
        processes.ADDRESS: f"127.0.0.1:{port}",
        processes.PROCESSES: "2",
        processes.PROCESS: "0",
    }
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(timeout)],
        env={**os.environ, **place},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while "Waiting for the other processes of the group" not in process.stderr.readline():
            assert process.poll() is None
        if code < 0:
            process.terminate()
        _, errors = process.communicate()
        assert process.returncode == code
    assert ("Not all processes of the group have connected within 0 s" in errors) == (code == 2)


ABANDONS = """
import sys, threading
from synthesizer_jax.cli import main
from synthesizer_jax.hosts import processes
from tests.environment import python

def fail():
    processes.background_thread().submit(threading.Event().wait)
    print("wrong", file=sys.stderr)
    sys.exit(2)

main.run = fail
main.END_SECONDS = 3600
main.main()
"""


def test_an_error_ends_the_process_while_a_thread_compiles():
    ended = python("-c", ABANDONS, code=2, timeout=300)
    assert ended.stderr == "wrong\n"
