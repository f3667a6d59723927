"""Files are whole or not there."""

import os
import pathlib

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
