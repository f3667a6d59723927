"""Files are whole or not there."""

import errno
import fcntl
import os
import pathlib
import subprocess
import sys

import pytest

from synthesizer_jax.files import new_directory, open_atomic, write_atomic


@pytest.mark.parametrize("content", ["Größe\n", "Größe\n".encode(), ["Grö", "ße\n"]], ids=repr)
def test_what_was_written_is_there(tmp_path: pathlib.Path, content) -> None:
    path = tmp_path / "new" / "file"
    assert write_atomic(path, content).read_text(encoding="utf-8") == "Größe\n"
    assert list(path.parent.iterdir()) == [path]


def test_an_error_leaves_what_was_there(tmp_path: pathlib.Path) -> None:
    path = write_atomic(tmp_path / "file", "old")

    def texts():
        yield "new"
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        write_atomic(path, texts())
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_in_the_place_of_the_other_file_is_not_followed(tmp_path: pathlib.Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("untouched")
    path = tmp_path / "file"
    (tmp_path / f"file.{os.getpid()}.tmp").symlink_to(elsewhere)
    with open_atomic(path) as file:
        file.write(b"new")
    assert (path.read_bytes(), elsewhere.read_text()) == (b"new", "untouched")


def test_a_new_directory_appears_whole_or_not_at_all(tmp_path):
    (tmp_path / "big").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "big")
    with new_directory(tmp_path / "link") as staging:
        (staging / "a").write_text("a")
        assert staging.parent == tmp_path and not (tmp_path / "big").exists()
    assert (tmp_path / "link" / "a").read_text() == "a" and (tmp_path / "link").is_symlink()
    with pytest.raises(FileExistsError, match="give a new directory"), new_directory(tmp_path):
        pytest.fail("a full directory was taken")
    with pytest.raises(RuntimeError, match="fails"), new_directory(tmp_path / "b" / "c") as staging:
        (staging / "a").write_text("a")
        raise RuntimeError("fails")
    assert list((tmp_path / "b").iterdir()) == []


def test_what_killed_processes_left_is_removed_and_nothing_else(tmp_path):
    names = (".b.incomplete-0123abcd", ".b.incomplete-0123abce", ".b.3")
    left, held, other = (tmp_path / name for name in names)
    for directory in (left, held, other):
        directory.mkdir()
    (left / "file").write_text("half")
    lock = os.open(held, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with new_directory(tmp_path / "b"):
        os.close(lock)
    assert set(tmp_path.iterdir()) == {tmp_path / "b", held, other}


TERMINATED = """
import os, signal, sys
from synthesizer_jax.cli import main
from synthesizer_jax.files import new_directory

def command():
    with new_directory(__import__("pathlib").Path(sys.argv[1])):
        os.kill(os.getpid(), signal.Signals[sys.argv[2]])
        signal.pause()

main.app = command
main.run()
"""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGKILL", -9)])
def test_a_stopped_command_leaves_nothing_for_good(tmp_path, name, code):
    command = [sys.executable, "-c", TERMINATED, str(tmp_path / "new"), name]
    for _ in range(2):
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.returncode == code, ended.stderr
        assert len(list(tmp_path.iterdir())) == (name == "SIGKILL")
    with new_directory(tmp_path / "new"):
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "new"]


def test_a_full_disk_is_named(tmp_path):
    named = pytest.raises(OSError, match=rf"No space .*; nothing was written: '{tmp_path}/new'")
    with named, new_directory(tmp_path / "new"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
