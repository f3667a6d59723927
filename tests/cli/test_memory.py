"""Long commands start again with large pages, once, and only where that helps."""

import os
import sys

import pytest

from synthesizer_jax.runtime import large_pages


@pytest.fixture
def starts(monkeypatch, tmp_path):
    """Commands that were started again; `kernel` writes what the kernel says."""
    started = []
    monkeypatch.setattr(os, "execv", lambda program, arguments: started.append(arguments))
    monkeypatch.setattr(large_pages.platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(large_pages, "ENABLED", tmp_path / "enabled")
    monkeypatch.setenv(large_pages.VARIABLE, "")
    monkeypatch.delenv(large_pages.VARIABLE)

    def kernel(says):
        large_pages.ENABLED.write_text(says)
        large_pages.restart_with_large_pages()
        return started

    return kernel


def test_a_command_starts_again_once(starts):
    asked = "always [madvise] never\n"
    assert starts(asked) == [[sys.executable, *sys.orig_argv[1:]]]
    assert os.environ[large_pages.VARIABLE] == large_pages.LARGE_PAGES
    assert len(starts(asked)) == 1


@pytest.mark.parametrize("says", ["[always] madvise never\n", "always madvise [never]\n"])
def test_nothing_happens_where_the_kernel_decides(starts, says):
    assert starts(says) == []
    assert large_pages.VARIABLE not in os.environ


def test_nothing_happens_without_glibc(starts, monkeypatch):
    monkeypatch.setattr(large_pages.platform, "libc_ver", lambda: ("", ""))
    assert starts("always [madvise] never\n") == []
