"""What storage promises: atomic renames, locks, and answers."""

import errno
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from synthesizer_jax.checkpoints import storage
from synthesizer_jax.checkpoints.manager import Checkpoints, finished_steps
from synthesizer_jax.evaluation.files import evaluation_folder
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


@pytest.mark.parametrize("content", [b"{}", b"\xff", b"[" * 100_000, b'{"machine": "other"}'])
def test_what_another_process_left_is_nobodys(tmp_path: pathlib.Path, content: bytes) -> None:
    path = tmp_path / lock.LOCK_FILE
    path.write_bytes(content)
    os.utime(path, (2**40, 2**40))  # by a clock that is ahead
    said: list[str] = []
    with lock.lock_directory(tmp_path, log=said.append):
        assert json.loads(path.read_text())["process"] == os.getpid()
    assert not said


def test_without_locks_of_the_file_system_one_line_says_so(tmp_path, monkeypatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    said: list[str] = []
    with lock.lock_directory(tmp_path, log=said.append):
        pass
    assert said == [f"{tmp_path}: the file system has no locks; let no other training use it"]


@pytest.mark.parametrize("name", ["train.lock", "events.jsonl", "evaluation", "tensorboard"])
def test_links_in_a_run_are_not_written_through(tmp_path: pathlib.Path, name: str) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    (run / name).symlink_to(outside)
    with (
        pytest.raises(OSError, match=rf"run/{name} is a link; put what it points to in its place"),
        lock.lock_directory(run),
    ):
        pass
    with pytest.raises(OSError, match="is a link"):
        evaluation_folder(run, 4)
    assert list(tmp_path.iterdir()) == [run]


def test_a_link_to_the_run_itself_is_the_users(tmp_path: pathlib.Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "mine").symlink_to(tmp_path / "run")
    with lock.lock_directory(tmp_path / "mine"):
        assert evaluation_folder(tmp_path / "mine", 4) == tmp_path / "mine" / "evaluation" / "4"


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
        with pytest.raises(ValueError, match="DATA_LOSS"), storage.finish_tasks():
            handler.restore(tmp_path / "state", args=ocp.args.StandardRestore(arrays))
    assert not printed
