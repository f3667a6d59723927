"""Tests that written files are complete or do not exist."""

import errno
import fcntl
import os
import pathlib
import resource

import pytest
from safetensors import SafetensorError

from synthesizer_jax.base.files import (
    name_write_errors,
    new_directory,
    open_atomic,
    temporary_directory,
    write_atomic,
)
from tests.environment import python


@pytest.mark.parametrize("content", ["Größe\n", "Größe\n".encode(), ["Grö", "ße\n"]], ids=repr)
def test_a_written_file_has_its_content(tmp_path: pathlib.Path, content) -> None:
    path = tmp_path / "new" / "file"
    assert write_atomic(path, content).read_text(encoding="utf-8") == "Größe\n"
    assert list(path.parent.iterdir()) == [path]


def test_an_error_leaves_the_old_file_and_links_are_not_followed(tmp_path: pathlib.Path) -> None:
    path = write_atomic(tmp_path / "file", "old")
    elsewhere = tmp_path / "elsewhere"
    with pytest.raises(RuntimeError, match="half way"), open_atomic(path) as file:
        file.write(b"new")
        raise RuntimeError("half way")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    elsewhere.write_text("untouched")
    path.unlink()
    path.symlink_to(elsewhere)
    with open_atomic(path) as file:
        file.write(b"last")
        write_atomic(path, "new")  # as if by another host with the same process id
        assert (path.read_text(), elsewhere.read_text()) == ("new", "untouched")
    assert path.read_text() == "last"


def test_a_new_directory_appears_whole_or_not_at_all(tmp_path):
    (tmp_path / "big").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "big")
    with new_directory(tmp_path / "link") as staging:
        (staging / "a").write_text("a")
        assert staging.parent == tmp_path and not (tmp_path / "big").exists()
    assert (tmp_path / "link" / "a").read_text() == "a" and (tmp_path / "link").is_symlink()
    with pytest.raises(FileExistsError, match="Choose a new directory"), new_directory(tmp_path):
        pytest.fail("a full directory was taken")
    with pytest.raises(RuntimeError, match="fails"), new_directory(tmp_path / "b" / "c") as staging:
        (staging / "a").write_text("a")
        raise RuntimeError("fails")
    assert list((tmp_path / "b").iterdir()) == []


def test_only_one_of_two_processes_makes_a_directory(tmp_path):
    """If two processes make the same directory, only the first one succeeds.

    The second process ends with an error, because the directory already exists.
    """
    path = tmp_path / "new"
    message = r"new already exists, .*\. Choose a new directory"
    with pytest.raises(FileExistsError, match=message), new_directory(path) as second:
        (second / "a").write_text("second")
        with new_directory(path) as first:
            (first / "a").write_text("first")
    assert (path / "a").read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_named_by_what_the_user_knows(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match=r"File too large\. The file was not written: '.*/file'"):
            write_atomic(tmp_path / "file", b"x" * 2000)
        message = r"File too large\. Nothing was written: '.*/folder'"
        with pytest.raises(OSError, match=message), new_directory(tmp_path / "folder") as staging:
            write_atomic(staging / "file", b"x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "full"), "No space left on device. All is kept: 'there'"),
        (
            OSError(errno.ENOSPC, "full", "temporary"),
            "No space left on device. All is kept: 'there'",
        ),
        (
            ValueError("dump: Disk quota exceeded [os_error_code='122']"),
            "quota exceeded. All is kept: 'there'",
        ),
        (
            SafetensorError("No space left on device (os error 28)"),
            "No space left on device. All is kept: 'there'",
        ),
        (
            RuntimeError("write() failed: No space left on device; at 0"),
            "device. All is kept: 'there'",
        ),
        (OSError(errno.ECONNREFUSED, "refused"), "refused$"),
        (ValueError("another"), "another$"),
    ],
    ids=repr,
)
def test_errors_of_writing_give_one_sentence_and_others_stay(error, said):
    with (
        pytest.raises((OSError, ValueError), match=said),
        name_write_errors(pathlib.Path("there"), "All is kept"),
    ):
        raise error


KILLED = """
import os, pathlib, signal, sys
from synthesizer_jax.base.files import new_directory
with new_directory(pathlib.Path(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_only_files_of_killed_processes_are_removed(tmp_path):
    held, other = tmp_path / ".b.incomplete-0123abce", tmp_path / ".b.3"
    for directory in (held, other):
        directory.mkdir()
    lock = os.open(held, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    python("-c", KILLED, tmp_path / "b", code=-9)
    assert len(list(tmp_path.iterdir())) == 3
    with new_directory(tmp_path / "b"):
        os.close(lock)
    assert set(tmp_path.iterdir()) == {tmp_path / "b", held, other}


def test_interfering_processes_cause_no_error(tmp_path, monkeypatch):
    """Processes that interfere with each other cause no errors.

    One process removes a directory that was just listed. Another process cleans up while a new
    directory is made.
    """
    (tmp_path / ".new-gone").symlink_to(tmp_path / "elsewhere")  # opening it must fail
    mkdir = pathlib.Path.mkdir

    def mkdir_and_clean_up(path: pathlib.Path) -> None:
        mkdir(path)
        monkeypatch.setattr(pathlib.Path, "mkdir", mkdir)
        with temporary_directory(tmp_path, ".new"):
            pass

    monkeypatch.setattr(pathlib.Path, "mkdir", mkdir_and_clean_up)
    with temporary_directory(tmp_path, ".new") as directory:
        assert directory.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == [".new-gone"]
