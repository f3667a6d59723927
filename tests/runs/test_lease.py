"""The lease of a directory in a bucket, on TensorStore's keys and values in memory."""

import json
import os
import pathlib
import subprocess
import sys
import threading
import time

import pytest
import tensorstore as ts

from synthesizer_jax.runs import lease
from synthesizer_jax.runs.owner import InUseError, machine_id

DIRECTORY = pathlib.Path("gs://bucket/run")
KEY = "train.lock"


@pytest.fixture
def store():
    return ts.KvStore.open("memory://").result()


def leased(store, said=None, **options):
    log = [].append if said is None else said.append
    return lease.hold_lease(DIRECTORY, KEY, log=log, store=store, **options)


def owner_in(store) -> dict:
    return json.loads(store.read(KEY).result().value)


def write(store, **owner) -> None:
    store.write(KEY, json.dumps(owner).encode()).result()


class Watched:
    """A store that tells how often it was written to, and fails before writing, or after."""

    def __init__(self, store):
        self.store, self.writes, self.failures, self.losses = store, 0, [], []
        self.changed = threading.Condition()

    def read(self, key):
        return self.store.read(key)

    def write(self, key, value, **options):
        with self.changed:
            self.writes += 1
            self.changed.notify_all()
        if self.failures:
            raise self.failures.pop()
        written = self.store.write(key, value, **options)
        if self.losses:
            written.result()
            raise self.losses.pop()
        return written

    def wait_for(self, writes: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.writes >= writes, timeout=60)


def test_one_at_a_time(store) -> None:
    with leased(store):
        assert owner_in(store)["process"] == os.getpid()
        with pytest.raises(
            InUseError, match=rf"is in use: process {os.getpid()} on .* another --work"
        ):
            leased(store).__enter__()
    assert store.list().result() == []
    with leased(store):
        pass


def test_the_owner_shows_that_it_lives(store, monkeypatch) -> None:
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.01)
    watched = Watched(store)
    with leased(watched):
        first = owner_in(store)["time"]
        watched.wait_for(4)
        assert owner_in(store)["time"] > first
    assert store.list().result() == []


def test_storage_that_fails_once_loses_nothing(store, monkeypatch, caplog) -> None:
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.01)
    watched, lost = Watched(store), []
    with leased(watched, lost=lost.append):
        watched.failures.append(ValueError("UNAVAILABLE: 503"))
        watched.wait_for(5)
    assert lost == []
    assert (
        "run: the bucket does not answer as it should (ValueError: UNAVAILABLE: 503)" in caplog.text
    )


def test_an_answer_that_is_lost(store, monkeypatch) -> None:
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.01)
    watched, lost = Watched(store), []
    with leased(watched, lost=lost.append):
        watched.losses.append(OSError("timeout"))
        watched.wait_for(6)
    assert lost == []
    assert store.list().result() == []


def test_a_start_whose_answer_is_lost_blocks_nothing(store) -> None:
    watched = Watched(store)
    watched.losses.append(OSError("timeout"))
    with pytest.raises(OSError, match="timeout"):
        leased(watched).__enter__()
    with leased(watched):
        pass


def test_a_lease_that_was_removed_by_hand_is_taken_again(store, monkeypatch) -> None:
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.01)
    watched, lost = Watched(store), []
    with leased(watched, lost=lost.append):
        store.write(KEY, None).result()
        watched.wait_for(watched.writes + 4)
        assert owner_in(store)["id"] == lease.ME
    assert lost == []


def test_what_is_saved_is_not_lost_for_a_lease_that_stays(store, caplog) -> None:
    watched = Watched(store)
    with leased(watched):
        watched.failures.append(OSError("timeout"))
    assert "the bucket does not answer as it should (OSError: timeout)" in caplog.text
    with leased(store):  # by this process' own number it is dead
        pass


def test_no_permission(store) -> None:
    watched = Watched(store)
    watched.failures.append(ValueError("PERMISSION_DENIED: 403"))
    with pytest.raises(OSError, match=r"PERMISSION_DENIED: 403\); check its name and your permi"):
        leased(watched).__enter__()


def test_a_lease_that_another_took(store, monkeypatch) -> None:
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.01)
    lost, told = [], threading.Event()

    def end(message: str) -> None:
        lost.append(message)
        told.set()

    with leased(store, lost=end):
        for _ in range(100):  # until no beat comes between
            write(store, host="other", machine="other boot", process=7)
            if told.wait(0.1):
                break
    assert "was taken over by a training on other" in lost[0]
    assert owner_in(store)["host"] == "other"  # and is left to it


@pytest.mark.parametrize("mine", [False, True], ids=["another number", "this number"])
def test_a_dead_process_of_this_machine(store, mine: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    number = os.getpid() if mine else process.pid
    write(store, host="here", machine=machine_id(), process=number, id="before")
    said: list[str] = []
    with leased(store, said):
        assert owner_in(store)["id"] == lease.ME
    assert said == []


class Clock:
    """Time that passes when somebody sleeps; `then` happens in the first sleep."""

    def __init__(self, then=lambda: None):
        self.now, self.then = 0.0, then

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.then()
        self.then = lambda: None

    time = staticmethod(time.time)


def test_a_number_that_is_another_process_now(store, monkeypatch) -> None:
    write(store, host="here", machine=machine_id(), process=os.getppid(), id="other")
    clock, said = Clock(), []
    monkeypatch.setattr(lease, "time", clock)
    with leased(store, said):
        assert clock.now == lease.DEAD_SECONDS
    assert len(said) == 1


@pytest.mark.parametrize("damage", [False, True], ids=["killed", "of no use"])
def test_an_owner_on_another_machine_that_is_dead(store, monkeypatch, damage: bool) -> None:
    clock, said = Clock(), []
    monkeypatch.setattr(lease, "time", clock)
    if damage:
        store.write(KEY, b"\xff{").result()
    else:
        write(store, host="other", machine="other boot", process=7)
    with leased(store, said):
        assert owner_in(store)["id"] == lease.ME
    assert clock.now == (0 if damage else lease.DEAD_SECONDS)
    assert len(said) == (0 if damage else 1)


def test_an_owner_on_another_machine_that_lives(store, monkeypatch) -> None:
    other = {"host": "other", "machine": "other boot", "process": 7}
    write(store, **other, time=1.0)
    clock = Clock(lambda: write(store, **other, time=2.0))
    monkeypatch.setattr(lease, "time", clock)
    with pytest.raises(InUseError, match="process 7 on other"):
        leased(store).__enter__()
    assert clock.now == lease.POLL_SECONDS


def test_an_owner_that_ends_meanwhile(store, monkeypatch) -> None:
    write(store, host="other", machine="other boot", process=7)
    clock = Clock(lambda: store.write(KEY, None).result())
    monkeypatch.setattr(lease, "time", clock)
    with leased(store):
        assert clock.now == lease.POLL_SECONDS
