"""Tests exit codes, the command `doctor`, and the cache of compiled programs."""

import contextlib
import os
import pathlib
import pty
import subprocess
import sys

import jax
import pytest

from synthesizer_jax.cli.main import _one_line_message
from synthesizer_jax.hosts import compilation_cache, processes
from synthesizer_jax.hosts.compilation_cache import VARIABLE, enable_compilation_cache
from synthesizer_jax.hosts.processes import print_line
from synthesizer_jax.runs.progress import show_phases
from tests.cli.commands import call
from tests.environment import python

PHASES = """
from synthesizer_jax.runs.progress import show_phases
with show_phases() as phase:
    advance = phase("counting", None)
    print("a result")
    advance(2)
    raise KeyboardInterrupt
"""

STUCK = """
import sys, threading
from synthesizer_jax.cli import main
main.END_SECONDS = 0.1
threading.Thread(target=threading.Event().wait).start()  # Python would wait for it forever
sys.argv[1:] = ["models", "nope"]
main.main()
"""


def test_a_stuck_thread_does_not_keep_the_program() -> None:
    ended = python("-c", STUCK, code=2)
    assert (ended.stdout, ended.stderr.count("\n")) == ("", 1)
    assert ended.stderr.startswith("error: There is no model 'nope'")


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("no\x1b]0;title\x07 run\u202e\n", r"no\x1b]0;title\x07 run\u202e"),
        ("a\n  b", "a b"),
        (
            "runs/x: " + "name, " * 10**5 + "remedy",
            f"runs/x: {'name, ' * 248}name … {'name, ' * 49}remedy",
        ),
    ],
    ids=["escapes", "lines", "long"],
)
def test_what_a_file_holds_cannot_fill_or_command_the_terminal(message, line, capfd) -> None:
    assert len(_one_line_message(ValueError(message))) < 2000
    assert _one_line_message(ValueError(message)).replace("  ", " ") == line
    with show_phases() as phase:
        phase(message, 1)
    print_line(message)
    assert "\x1b" not in capfd.readouterr().err
    assert "SYNTHESIZER_JAX_TRACEBACK=1" in _one_line_message(RuntimeError("x"))


def test_a_progress_bar_leaves_standard_output_alone_and_is_removed() -> None:
    ours, theirs = pty.openpty()
    terminal = {"stderr": theirs, "env": os.environ | {"TERM": "xterm"}}
    ended = subprocess.run([sys.executable, "-c", PHASES], stdout=subprocess.PIPE, **terminal)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # Linux raises an error at the end of a terminal
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    assert ended.stdout == b"a result\n"
    assert shown.startswith(b"counting\r\n") and "━".encode() in shown
    # At the end, the cursor is shown again, and the line of the bar is erased.
    _, _, after = shown.rpartition("━".encode())
    assert b"\x1b[?25h" in after and b"\x1b[2K" in after and b"KeyboardInterrupt" in after


def test_the_doctor_finds_a_healthy_machine_and_hosts_that_differ(tmp_path, monkeypatch) -> None:
    said = call(f"doctor --workdir {tmp_path / 'run'}")
    for word in ("Python 3.", "jax 0.1", "8 × cpu", "memory free", "is writable"):
        assert word in said
    assert list((tmp_path / "run").iterdir()) == []

    def everyone(_, mine):
        """Returns the facts that four hosts report. Two of the hosts differ from the others."""
        return [mine, mine, mine | {"flax": "0.1"}, mine | {"flax": "0.1"}]

    monkeypatch.setattr(processes, "all_gather", everyone)
    with pytest.raises(
        ValueError, match=r"Versions or settings differ.*'flax': '0.1'.* from process 0: 2, 3\."
    ):
        call("doctor")
    monkeypatch.setattr(processes, "all_gather", lambda _, mine: [mine, mine])
    monkeypatch.setattr(jax, "process_index", lambda: 3)
    assert all(line.startswith("[3] ") for line in call("doctor").splitlines())


PROGRAM = """
from synthesizer_jax.hosts.compilation_cache import enable_compilation_cache
enable_compilation_cache()
import jax, jax.numpy as jnp
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((8, 8))).block_until_ready()
print(hits.count("/jax/compilation_cache/cache_hits"))
"""


def own_cache(home: pathlib.Path) -> dict[str, str]:
    """Returns the environment of a user whose home directory contains no cache yet."""
    always = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PLATFORMS": "cpu"}
    own = {k: v for k, v in os.environ.items() if "COMPILATION_CACHE" not in k}
    return own | {"XDG_CACHE_HOME": str(home), **always}


def test_a_damaged_program_is_compiled_again_and_replaced(tmp_path) -> None:
    own = own_cache(tmp_path)
    python("-c", PROGRAM, env=own)
    place = tmp_path / "synthesizer_jax" / "compiled"
    whole = {path: path.read_bytes() for path in place.glob("*-cache")}
    for path in whole:
        path.write_bytes(path.read_bytes()[:100])
    ended = python("-c", PROGRAM, env=own)
    assert ended.stdout.splitlines()[-1] == "0"
    assert ended.stderr.count("is damaged. It is compiled again, and replaced.") == len(whole)
    assert {path: len(path.read_bytes()) for path in whole} == {k: len(v) for k, v in whole.items()}
    ended = python("-c", PROGRAM, env=own)
    assert int(ended.stdout.splitlines()[-1]) == len(whole) and "damaged" not in ended.stderr


def test_the_doctor_shows_and_clears_the_cache(tmp_path) -> None:
    own = own_cache(tmp_path)
    python("-c", PROGRAM, env=own)
    place = tmp_path / "synthesizer_jax" / "compiled"
    assert (
        f"MiB of compiled programs in {place}"
        in python("-m", "synthesizer_jax", "doctor", env=own).stdout
    )
    assert list(place.glob("*-cache"))
    python("-m", "synthesizer_jax", "doctor", "--clear-cache", env=own)
    assert not [*place.glob("*-cache"), *place.glob("*-atime")]


def test_a_cache_in_a_bucket_is_not_a_directory() -> None:
    """The command `doctor` and the log of a run name only a directory of this machine."""
    program = (
        "from synthesizer_jax.hosts import compilation_cache as c; print(c.compilation_cache())"
    )
    ended = python("-c", program, env={**os.environ, VARIABLE: "gs://bucket/compiled"})
    assert ended.stdout == "None\n"


def test_the_cache_is_shown_below_the_home_directory(tmp_path, monkeypatch) -> None:
    """The log of a run names the cache. A user without a home directory can train, too."""
    below = tmp_path / "cache" / "compiled"
    monkeypatch.setattr(compilation_cache, "compilation_cache", lambda: below)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compilation_cache.shown_compilation_cache() == "~/cache/compiled"
    monkeypatch.setenv("HOME", str(tmp_path / "other"))
    assert compilation_cache.shown_compilation_cache() == str(below)

    def no_user(uid: int) -> None:
        """Raises the error of `pwd` for a user who is not in the list of users."""
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", no_user)
    assert compilation_cache.shown_compilation_cache() == str(below)


def test_a_second_process_compiles_nothing_but_what_a_killed_one_has_left(tmp_path) -> None:
    own = own_cache(tmp_path)

    def hits() -> int:
        return int(python("-c", PROGRAM, env=own).stdout.splitlines()[-1])

    assert hits() == 0
    assert hits() > 0
    place = tmp_path / "synthesizer_jax" / "compiled"
    assert place.stat().st_mode & 0o077 == 0
    for used in place.glob("*-atime"):
        used.unlink()
    assert hits() == 0
    assert len(list(place.glob("*-atime"))) == len(list(place.glob("*-cache"))) > 0


@pytest.mark.parametrize("set_before", [True, False])
def test_an_existing_or_impossible_cache_is_left_alone(tmp_path, monkeypatch, set_before):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path if set_before else tmp_path / "file"))
    monkeypatch.delenv(VARIABLE, raising=False)
    if set_before:
        monkeypatch.setenv(VARIABLE, str(tmp_path))
    before = dict(os.environ)
    enable_compilation_cache()
    assert dict(os.environ) == before
