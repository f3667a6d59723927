"""Long commands start again with large pages, once, and only where that helps."""

import os
import sys

import pytest

from synthesizer_jax.cli import memory


@pytest.fixture
def starts(monkeypatch, tmp_path):
    """Commands that were started again; `kernel` writes what the kernel says."""
    started = []
    monkeypatch.setattr(os, "execv", lambda program, arguments: started.append(arguments))
    monkeypatch.setattr(memory.platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(memory, "ENABLED", tmp_path / "enabled")
    monkeypatch.setenv(memory.VARIABLE, "")
    monkeypatch.delenv(memory.VARIABLE)

    def kernel(says):
        memory.ENABLED.write_text(says)
        memory.with_large_pages()
        return started

    return kernel


def test_a_command_starts_again_once(starts):
    asked = "always [madvise] never\n"
    assert starts(asked) == [[sys.executable, *sys.orig_argv[1:]]]
    assert os.environ[memory.VARIABLE] == memory.LARGE_PAGES
    assert len(starts(asked)) == 1


@pytest.mark.parametrize("says", ["[always] madvise never\n", "always madvise [never]\n"])
def test_nothing_happens_where_the_kernel_decides(starts, says):
    assert starts(says) == []
    assert memory.VARIABLE not in os.environ


def test_nothing_happens_without_glibc(starts, monkeypatch):
    monkeypatch.setattr(memory.platform, "libc_ver", lambda: ("", ""))
    assert starts("always [madvise] never\n") == []
