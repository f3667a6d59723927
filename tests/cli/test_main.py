"""The program around the commands: it ends, whatever still runs."""

import subprocess
import sys

import pytest

from synthesizer_jax.cli.main import _one_line_message
from synthesizer_jax.runs.progress import show_phases
from synthesizer_jax.runtime.processes import print_line

STUCK = """
import sys, threading
from synthesizer_jax.cli import main
main.END_SECONDS = 0.1
threading.Thread(target=threading.Event().wait).start()  # the interpreter would wait for it for ever
sys.argv[1:] = {arguments}
main.main()
"""


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["train", "nope"], 2)])
def test_a_stuck_thread_does_not_keep_the_program(arguments, code) -> None:
    program = STUCK.format(arguments=arguments)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("no\x1b]0;title\x07 run\u202e\n", r"no\x1b]0;title\x07 run\u202e"),
        (
            "runs/x: " + "name, " * 10**5 + "remedy",
            f"runs/x: {'name, ' * 248}name … {'name, ' * 49}remedy",
        ),
    ],
    ids=["escapes", "long"],
)
def test_what_a_file_holds_cannot_fill_or_command_the_terminal(message, line, capfd) -> None:
    assert len(_one_line_message(ValueError(message))) < 2000
    assert _one_line_message(ValueError(message)).replace("  ", " ") == line
    with show_phases() as phase:
        phase(message, 1)
    print_line(message)
    assert "\x1b" not in capfd.readouterr().err
