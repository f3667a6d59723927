"""What is a checkpoint, and who may write to a run."""

import errno
import os
import pathlib
import subprocess
import sys

import pytest

from synthesizer_jax.checkpoints.manager import finished_steps
from synthesizer_jax.runs import lock


@pytest.mark.parametrize("name", ["²", "007", "-1", "4.tmp", "x"])
def test_other_names_are_no_checkpoints(tmp_path: pathlib.Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert finished_steps(tmp_path) == []


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
        owner = (directory / lock.LOCK_FILE).read_text()
        assert owner.startswith(f"process {os.getpid()} on ")
    assert list(directory.iterdir()) == []


def test_a_directory_in_which_nothing_was_made_is_removed(tmp_path: pathlib.Path) -> None:
    with lock.lock_directory(tmp_path / "new"):
        pass
    assert not (tmp_path / "new").exists()
    with lock.lock_directory(tmp_path / "new"):
        (tmp_path / "new" / "file").touch()
    assert (tmp_path / "new" / "file").exists()


@pytest.mark.parametrize("content", [b"", b"\xff", b"process 1 on other"])
def test_what_another_process_left_is_nobodys(tmp_path: pathlib.Path, content: bytes) -> None:
    path = tmp_path / lock.LOCK_FILE
    path.write_bytes(content)
    os.utime(path, (2**40, 2**40))  # by a clock that is ahead
    with lock.lock_directory(tmp_path):
        assert path.read_text().startswith(f"process {os.getpid()} on ")


def test_without_locks_of_the_file_system_one_line_says_so(tmp_path, monkeypatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    said: list[str] = []
    with lock.lock_directory(tmp_path, log=said.append):
        pass
    assert said == [f"{tmp_path}: the file system has no locks; let no other training use it"]
