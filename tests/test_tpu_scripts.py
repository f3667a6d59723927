"""`tpu_scripts/launch` against a `gcloud` that records what it is asked."""

import os
import pathlib
import subprocess

import pytest

SCRIPT = pathlib.Path(__file__).resolve().parents[1] / "tpu_scripts" / "launch"
FAKE = """#!/usr/bin/env bash
printf '%s\\n' "$*" >> "$RECORD"
exit "${FAIL:-0}"
"""


@pytest.fixture
def launch(tmp_path):
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "gcloud"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    record = tmp_path / "calls"

    def run(*arguments, fail=0):
        record.write_text("")
        done = subprocess.run(
            [SCRIPT, *arguments],
            env={
                **os.environ,
                "PATH": f"{fake.parent}:{os.environ['PATH']}",
                "RECORD": str(record),
                "FAIL": str(fail),
            },
            capture_output=True,
            text=True,
        )
        return done, record.read_text().splitlines()

    return run


PLACE = ("--name", "tpu", "--zone", "here")


def test_create_and_delete(launch):
    done, calls = launch("create", *PLACE, "--type", "v5litepod-8", "--version", "v2-alpha")
    assert done.returncode == 0
    assert calls == [
        "compute tpus tpu-vm create tpu --zone=here --accelerator-type=v5litepod-8 --version=v2-alpha"
    ]
    _, calls = launch("delete", *PLACE)
    assert calls == ["compute tpus tpu-vm delete tpu --zone=here --quiet"]


def test_train_quotes_its_arguments_for_the_host(launch):
    _, calls = launch("train", *PLACE, "--", "finetune", "--workdir", "my runs/rv", "--quiet")
    assert len(calls) == 1
    assert r"synthesizer-jax train finetune --workdir my\ runs/rv --quiet > train.log" in calls[0]


def test_a_dry_run_calls_nothing_and_prints_the_command(launch):
    done, calls = launch("delete", *PLACE, "--dry-run")
    assert calls == []
    assert done.stdout.split() == [
        "gcloud",
        "compute",
        "tpus",
        "tpu-vm",
        "delete",
        "tpu",
        "--zone=here",
        "--quiet",
    ]


def test_a_failing_gcloud_fails_the_script(launch):
    assert launch("delete", *PLACE, fail=1)[0].returncode == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("create", *PLACE), "create needs --type and --version"),
        (("train", "--name", "tpu"), "train needs --name and --zone"),
        (("train", *PLACE), "train needs a recipe and a --workdir after --"),
        (("delete", "--nmae", "tpu"), "unknown option --nmae"),
        (("fly", *PLACE), "unknown action fly"),
    ],
)
def test_mistakes_are_one_line(launch, arguments, message):
    done, calls = launch(*arguments)
    assert (done.returncode, calls) == (2, [])
    assert done.stderr.startswith(f"error: {message}")
    assert len(done.stderr.splitlines()) == 1
