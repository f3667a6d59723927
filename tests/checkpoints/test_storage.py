"""What storage promises: atomic renames, locks, and answers."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from synthesizer_jax.checkpoints import storage
from synthesizer_jax.checkpoints.manager import Checkpoints, finished_steps
from synthesizer_jax.runs import lock
from synthesizer_jax.training.state import TrainState


def state(step: int) -> TrainState:
    return TrainState(jnp.asarray(step, jnp.int32), {"x": jnp.ones(3)}, {}, {})


@pytest.fixture
def bucket(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A directory that the system calls a mounted bucket."""
    directory = tmp_path / "a bucket"
    directory.mkdir()
    mounts = tmp_path / "mounts"
    place = str(directory).replace(" ", "\\040")
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nname {place} fuse.gcsfuse rw,user_id=0 0 0\n")
    monkeypatch.setattr(storage, "MOUNTS", mounts)
    return directory


def test_buckets_do_not_rename_atomically(bucket: pathlib.Path) -> None:
    assert not storage.renames_atomically(bucket / "runs" / "rv")
    assert storage.renames_atomically(bucket.parent)


def test_in_a_bucket_only_a_committed_checkpoint_is_one(bucket: pathlib.Path) -> None:
    checkpoints = Checkpoints(bucket, asynchronous=False)
    for step in (1, 2):
        checkpoints.save(state(step), None)
    checkpoints.close()
    assert finished_steps(bucket) == [1, 2]
    (bucket / "2" / storage.COMMITTED).unlink()  # as when a process was killed while it saved
    assert finished_steps(bucket) == [1]
    again = Checkpoints(bucket, asynchronous=False)
    restored = again.restore_newest(jax.eval_shape(lambda: state(0)), None)
    assert restored is not None
    assert int(restored.step) == 1
    for name in ("state", "_CHECKPOINT_METADATA"):  # what was written last is missing
        shutil.rmtree(bucket / "2" / name, ignore_errors=True)
    again.save(state(2), None)  # in the place of the unfinished one
    again.close()
    assert finished_steps(bucket) == [1, 2]


@pytest.mark.parametrize("name", ["²", "007", "-1", "4.tmp", "x"])
def test_other_names_are_no_checkpoints(tmp_path: pathlib.Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert finished_steps(tmp_path) == []


@pytest.mark.parametrize(
    "error",
    [
        ValueError("PERMISSION_DENIED: Error opening file: Permission denied"),
        ValueError("UNAVAILABLE: all retries failed"),
        Exception("[Errno 5] Input/output error"),
    ],
    ids=lambda e: str(e)[:8],
)
def test_storage_that_does_not_answer_damages_nothing(tmp_path, monkeypatch, error) -> None:
    checkpoints = Checkpoints(tmp_path, asynchronous=False)
    for step in (1, 2):
        checkpoints.save(state(step), None)

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(checkpoints, "_restore", fail)
    with pytest.raises(
        OSError, match=r"2 cannot be read now .*nothing was changed; check its permissions"
    ):
        checkpoints.restore_newest(jax.eval_shape(lambda: state(0)), None)
    assert finished_steps(tmp_path) == [1, 2]
    checkpoints.close()


HOLD = (
    "import pathlib, sys; from synthesizer_jax.runs.lock import lock_directory\n"
    "with lock_directory(pathlib.Path(sys.argv[1])):\n    print('held', flush=True); sys.stdin.read()\n"
)


def holder(directory: pathlib.Path) -> subprocess.Popen[str]:
    """A process that trains in a directory until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_lock_dies_with_its_owner(tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "run"
    with holder(directory) as process:
        with pytest.raises(
            lock.InUseError, match=rf"run is in use: process {process.pid} on .* another --workdir"
        ):
            lock.lock_directory(directory).__enter__()
        process.kill()
        process.wait()
    assert (directory / lock.LOCK_FILE).exists()
    with lock.lock_directory(directory):
        owner = json.loads((directory / lock.LOCK_FILE).read_text())
        assert owner["process"] == os.getpid()
    assert list(directory.iterdir()) == []


def test_a_directory_in_which_nothing_was_made_is_removed(tmp_path: pathlib.Path) -> None:
    with lock.lock_directory(tmp_path / "new"):
        pass
    assert not (tmp_path / "new").exists()
    with lock.lock_directory(tmp_path / "new"):
        (tmp_path / "new" / "file").touch()
    assert (tmp_path / "new" / "file").exists()


def left_by_another_machine(directory: pathlib.Path, seconds: float) -> pathlib.Path:
    """A lock that its owner renewed so long ago."""
    path = directory / lock.LOCK_FILE
    path.write_text(json.dumps({"host": "other", "process": 7, "machine": "other boot"}))
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))
    return path


def test_a_lock_of_a_dead_machine_is_nobodys(tmp_path: pathlib.Path) -> None:
    left_by_another_machine(tmp_path, lock.DEAD_SECONDS + 1)
    said: list[str] = []
    with lock.lock_directory(tmp_path, log=said.append):
        pass
    assert said == [
        f"{tmp_path} is locked by a training on other; waiting until its lock has not been renewed for 60 s"
    ]


def test_a_machine_that_shows_life_keeps_its_lock(tmp_path, monkeypatch) -> None:
    path = left_by_another_machine(tmp_path, 30)

    def beat(_: float) -> None:
        os.utime(path)

    monkeypatch.setattr(lock.time, "sleep", beat)
    with pytest.raises(lock.InUseError, match="process 7 on other trains there"):
        lock.lock_directory(tmp_path, log=lambda _: None).__enter__()
    assert path.exists()


def test_the_owner_shows_life(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.01)
    with lock.lock_directory(tmp_path):
        path = tmp_path / lock.LOCK_FILE
        os.utime(path, (0, 0))
        while path.stat().st_mtime == 0:
            pass
        assert json.loads(path.read_text())["process"] == os.getpid()


def test_a_sign_of_life_never_leaves_the_lock_empty(tmp_path: pathlib.Path) -> None:
    class Watched:
        """A file whose content is read after every call."""

        def __getattr__(self, name: str) -> Callable[..., object]:
            def call(*arguments: object) -> object:
                returned = getattr(file, name)(*arguments)
                contents.append((tmp_path / "lock").read_text())
                return returned

            return call

    with lock._open_locked(tmp_path / "lock") as file:
        lock._write_heartbeat(file)
        file.flush()
        contents: list[str] = []
        lock._write_heartbeat(Watched())
        file.flush()
    assert contents
    assert all(json.loads(content)["process"] == os.getpid() for content in contents)


def test_a_longer_sign_of_life_is_overwritten_whole(tmp_path: pathlib.Path) -> None:
    (tmp_path / "lock").write_text(json.dumps({"process": 1, "host": "x" * 400}))
    with lock._open_locked(tmp_path / "lock") as file:
        lock._write_heartbeat(file)
        assert lock._read_owner(file)["process"] == os.getpid()
        assert json.loads((tmp_path / "lock").read_text())["process"] == os.getpid()


def test_the_first_damaged_array_is_said_without_tracebacks_of_the_others(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = {f"x{n}": np.ones((64, 64), np.float32) for n in range(60)}
    handler = ocp.StandardCheckpointHandler()
    ocp.Checkpointer(handler).save(tmp_path / "state", args=ocp.args.StandardSave(arrays))
    for path in (tmp_path / "state").rglob("d/*"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    monkeypatch.setattr(sys, "excepthook", lambda *raised: printed.append(raised))
    for _ in range(3):
        with pytest.raises(ValueError, match="DATA_LOSS"), storage.finish_reads():
            handler.restore(tmp_path / "state", args=ocp.args.StandardRestore(arrays))
    assert not printed
