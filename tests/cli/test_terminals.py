"""Every part of a run as a user types it, on a terminal and without one."""

import fcntl
import json
import os
import pathlib
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from synthesizer_jax.tasks import synthetic
from tests.cli.test_own_code import RECIPE
from tests.conftest import ROOT
from tests.environment import COMMANDS, without_devices

pytestmark = pytest.mark.slow

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[()][A-Z0-9]")


def on_a_terminal(command: list[str], **options) -> str:
    """What a program shows on a terminal of its own."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, **options):
        os.close(theirs)
        parts = []
        while True:
            try:
                parts.append(os.read(ours, 65536))
            except OSError:  # Linux: nobody writes any more
                break
    os.close(ours)
    return ESCAPES.sub("", b"".join(parts).decode())


def without_one(command: list[str], **options) -> str:
    """What a program writes into a file."""
    ended = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **options,
    )
    return ended.stdout.decode()


def damage(checkpoint: pathlib.Path) -> None:
    """Flips one bit in every file of a checkpoint's arrays."""
    for path in checkpoint.rglob("d/*"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize("run", [on_a_terminal, without_one], ids=lambda f: f.__name__)
def test_a_run_from_its_recipe_to_its_report(run, synthetic_data, tmp_path) -> None:
    (tmp_path / "DATA").symlink_to(synthetic_data)
    vocabulary = synthetic.vocabulary(synthetic_data).path
    (tmp_path / "mine.py").write_text(RECIPE.replace("VOCABULARY", vocabulary))
    (tmp_path / "files").mkdir()
    environment = without_devices() | {
        "XDG_STATE_HOME": str(tmp_path),
        "SYNTHESIZER_DATA_DIR": "DATA",
        "COLUMNS": "160",
    }

    def say(*commands: str) -> list[tuple[int, str]]:
        """Exit code and text of every command."""
        (tmp_path / "commands").write_text(json.dumps([command.split() for command in commands]))
        program = [sys.executable, "-c", COMMANDS, str(tmp_path / "commands")]
        said = run(program, env=environment, cwd=tmp_path)
        found = re.split(r"=== exit (\d+)\r?\n", said)
        assert len(found) == 2 * len(commands) + 1, said
        texts = [" ".join(text.split()) for text in found[::2]]
        return [(int(code), text) for code, text in zip(found[1::2], texts, strict=False)]

    def check(*expected: tuple[str, int, str]) -> None:
        """Runs commands, and looks for an exit code and a text in what each says."""
        ended = say(*(command for command, _, _ in expected))
        other = [
            f"{command}: {code}: {text}"
            for (command, wanted, part), (code, text) in zip(expected, ended, strict=True)
            if code != wanted or part not in text
        ]
        assert not other, "\n".join(other)

    train = "train mine.py --workdir runs/mine"
    check(
        ("recipes", 0, "quickstart"),
        ("recipes quickstart", 0, "training.steps=6000 int: 1 to"),
        ("train quickstrat --workdir runs/x", 2, "quickstart"),
        ("models t5_1_1_small", 0, "76,9"),
        ("models mesh_vanilla_base", 0, "222,903,552"),
        ("plan quickstart --topology v6e:4x4", 0, "16 chips"),
        (
            "plan mine.py --topology v6e-17",
            2,
            "error: v6e has no slice 'v6e-17'; near it are v6e:4x4",
        ),
        (f"{train} --set evaluation.method=sample", 2, "error: evaluation.method"),
        (f"{train} --set model.dtype=float17", 2, "error: model.dtype"),
        (f"{train} --set training.steps=0", 2, "error: training.steps"),
        (f"{train} --set init_from=mine.py", 2, "holds no experiment.json; give the directory"),
        ("data import x --from files", 2, "choose one of mine, glue, super_glue, multi30k"),
        ("data import glue --from files", 2, "error: no glue file in files"),
        (train, 0, "runs/mine has finished its 2 steps: score "),
        (f"{train} --set training.steps=4 --set data.batch_size=2", 2, "holds another run: data."),
        (f"{train} --set training.steps=4", 0, "step 4/4 evaluated in"),
        (f"{train} --set training.steps=4", 0, "next: synthesizer-jax eval --workdir runs/mine"),
        ("eval --workdir runs/mine --all --save-predictions", 0, "best steps"),
        ("eval --workdir runs/mine --split test", 2, "error: own_sst2"),
        ("eval --workdir runs/mine --split train --max-examples 1", 0, "own_sst2 │ train │ 1"),
        ("generate --workdir runs/mine own", 0, ""),
        ("report runs/mine runs/mine", 0, "report: "),
        ("doctor --workdir runs/new", 0, "ok runs/new is writable"),
    )
    assert (tmp_path / "runs/mine/evaluation/4/own_sst2.jsonl").is_file()
    damage(tmp_path / "runs/mine/checkpoints/4/state")
    check(
        # Its own classes are found again in a new process.
        ("eval --workdir runs/mine --step 4", 2, "checkpoints/4 cannot be read"),
        ("eval --workdir runs/mine", 0, "step 2"),
        ("generate --workdir runs/mine own", 0, "checkpoints/4 cannot be read"),
        (train + " --set training.steps=4", 0, "set aside as"),
    )


@pytest.mark.parametrize("run", [on_a_terminal, without_one], ids=lambda f: f.__name__)
def test_a_dry_run_of_a_launch(run) -> None:
    launch = ["tpu_scripts/launch", "train", "--dry-run", "--name", "pod", "--zone", "here"]
    environment = os.environ | {
        "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    }
    recipe = ["--", "quickstart", "--workdir", "gs://bucket/rv"]
    said = run([*launch, "--type", "v6e:4x4", *recipe], cwd=ROOT, env=environment)
    assert r"run\ v6e\ --\ train\ quickstart\ --workdir\ gs://bucket/rv" in said
    said = run([*launch, "--type", "v6e-17", *recipe], cwd=ROOT, env=environment)
    assert "v6e-17" in said and "v6e-16" in said
    said = run(
        [*launch, "--", "quickstrat", "--workdir", "gs://bucket/rv"], cwd=ROOT, env=environment
    )
    assert "quickstrat" in said and "quickstart" in said
