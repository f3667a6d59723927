"""Tests which processes may write to a run directory."""

import errno
import os
import pathlib
import subprocess
import sys

import pytest

from synthesizer_jax.evaluation.scoring import evaluation_folder
from synthesizer_jax.runs import lock

HOLD = (
    "import pathlib, sys; from synthesizer_jax.runs.lock import lock_directory\n"
    "with lock_directory(pathlib.Path(sys.argv[1])):\n    print('held', flush=True); "
    "sys.stdin.read()\n"
)


def test_a_lock_dies_with_its_owner(tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(
            lock.InUseError, match=rf"in use: process {process.pid} on .* another --work"
        ):
            lock.lock_directory(directory).__enter__()
        process.kill()
        process.wait()
    (directory / lock.LOCK_FILE).write_bytes(b"\xff of another system")
    with lock.lock_directory(directory):
        owner = (directory / lock.LOCK_FILE).read_text()
        assert owner.startswith(f"process {os.getpid()} on ")
    with lock.lock_directory(directory):
        pass


def test_without_locks_of_the_file_system_one_line_says_so(tmp_path, monkeypatch, caplog) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    with lock.lock_directory(tmp_path):
        pass
    assert f"{tmp_path} cannot be locked" in caplog.text


@pytest.mark.parametrize("name", ["train.lock", "evaluation"])
def test_links_in_a_run_are_not_written_through(tmp_path: pathlib.Path, name: str) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    (run / name).symlink_to(outside)
    said = rf"run/{name} is a symbolic link. Replace it with the file"
    with pytest.raises(OSError, match=said), lock.lock_directory(run):
        pass
    with pytest.raises(OSError, match="is a symbolic link"):
        evaluation_folder(run, 4)
    assert list(tmp_path.iterdir()) == [run]
    (tmp_path / "mine").symlink_to(run)  # a link to the run itself is allowed
    (run / name).unlink()
    assert evaluation_folder(tmp_path / "mine", 4) == tmp_path / "mine" / "evaluation" / "4"
