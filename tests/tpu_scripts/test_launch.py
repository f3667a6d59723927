"""Compares dry runs of the launcher with files, and runs its scripts with a fake program."""

import os
import pathlib
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import yaml

from synthesizer_jax.cli.recipes import load_recipe
from tpu_scripts import launch

HERE = pathlib.Path(__file__).parent
POD = ["--name", "pod", "--zone", "us-east5-b"]
RUN = ["--workdir", "gs://b/runs/rv", "--data-dir=gs://b/data"]
TRAIN = ["--", "quickstart", *RUN, "--set", "training.steps=3"]
OPTIONS = ["--gcloud=--network=vpc", "--gcloud=--service-account=a@b.iam.gserviceaccount.com"]
RESERVATION = ["--alpha", "--gcloud=--reservation=mine", "--extras=data,gcs,tpu"]
FLEX = "--gcloud=--provisioning-model=flex-start"
GOLDEN = {
    "create": ["create", *POD, "--type", "v6e:4x4", "--spot", "--slices", "2", *OPTIONS],
    "train": ["train", *POD, "--flags=--xla_tpu_enable_latency_hiding_scheduler=true", *TRAIN],
    "babysit": ["babysit", *POD, "--type", "v5p-16", *RESERVATION, "--delete-at-end", *TRAIN],
}


def run(arguments: list[str]) -> subprocess.CompletedProcess:
    script = [sys.executable, str(launch.CHECKOUT / "tpu_scripts" / "launch.py")]
    # The launcher checks fields only if `synthesizer-jax` is on the path, so set a path without it.
    environment = {**os.environ, "PATH": "/usr/bin:/bin"}
    return subprocess.run([*script, *arguments], capture_output=True, text=True, env=environment)


def dry_run(name: str) -> str:
    arguments = GOLDEN[name]
    done = run([arguments[0], "--dry-run", *arguments[1:]])
    assert done.returncode == 0, done.stderr
    return done.stdout.replace(str(launch.CHECKOUT), "CHECKOUT")


@pytest.mark.parametrize("name", GOLDEN)
def test_a_dry_run_prints_the_commands(name):
    """A dry run prints the expected commands.

    After a change, run `python -m tests.tpu_scripts.test_launch` to rewrite the files with the
    expected commands.
    """
    assert dry_run(name) == (HERE / f"{name}.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["create", *POD, "--type", "v6e-17"], "v6e"),
        (["create", *POD, "--type", "tpu7x:2x2x4"], "only available on GKE"),
        (["setup", "--name", "pod", "--zone", "us-east5"], "us-east5-b"),
        (
            ["train", *POD, "--", "quickstart", "--workdir", "runs/rv"],
            "--workdir is runs/rv, which is deleted",
        ),
        (["run", *POD, "--", "eval", "--data-dir=data"], "--data-dir is data, which is deleted"),
        (
            ["train", *POD, "--", "x", "--set=vocabulary.path=v.model"],
            "vocabulary.path is v.model, which",
        ),
        (
            ["status", "--name", "Pod_1", *POD[2:]],
            "--name is Pod_1, which Google Cloud does not accept. Use up to 63 lower",
        ),
        (["create", *POD, FLEX], f"{FLEX} is an option of gcloud alpha. Add --alpha"),
        (
            ["create", *POD, FLEX, "--alpha", "--spot"],
            f"{FLEX} cannot be combined with --spot or --reserved",
        ),
        (["train", *POD, "--", "quickstart", *RUN[:2]], "give a --data-dir with prepared data"),
        (["run", *POD, "--", "quickstart", *RUN[:2]], "--extras train,gcs,tpu,data"),
        (["create", *POD, "--spot", "--reserved"], "--reserved: not allowed with argument --spot"),
        (["train", *POD], "after --"),
        (["stop", *POD, "--", "x"], "takes no arguments after --"),
    ],
)
def test_what_would_fail_on_the_machines_is_reported_in_advance(arguments, message):
    done = run(arguments)
    assert done.returncode == 2 or done.stderr.startswith("error: ")
    assert message in done.stderr


PROGRAM = """#!{python}
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("began", *sys.argv[1:], flush=True)
if "wait" in sys.argv:
    time.sleep(60)
sys.exit(3 if "fail" in sys.argv else 0)
"""


def test_a_host_runs_one_command_at_a_time_and_tells_how_it_ended(tmp_path):
    programs = [
        tmp_path / n / ".venv" / "bin" / "synthesizer-jax" for n in ("synthesizer_jax", "mine")
    ]
    for program in programs:
        program.parent.mkdir(parents=True)
        program.write_text(PROGRAM.format(python=sys.executable))
        program.chmod(0o755)
    python = programs[0].with_name("python")
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"')
    python.chmod(0o755)
    logs = tmp_path / "runs" / "logs"
    logs.mkdir(parents=True)
    mine = subprocess.Popen([programs[1], "train", "wait"], stdout=subprocess.PIPE, text=True)
    assert mine.stdout.readline() == "began train wait\n"

    def host(script: str) -> str:
        command = ["bash", "-c", script.strip()]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout

    def told() -> str:
        return host(launch.STATUS).split()[-1]

    class Host(launch.Pod):
        def on_hosts(self, script: str, *, tries: int = 1) -> bool:
            self.said = host(script)
            return True

    pod = Host(launch.parse_arguments(["stop", *POD])[0])

    def until(word: str, tell: Callable[[], str] = told) -> None:
        for _ in range(100):
            if word in tell().splitlines():
                return
            time.sleep(0.1)
        raise AssertionError(f"{tell()} has no line {word}")

    def read(folder: pathlib.Path) -> str:
        return "".join(path.read_text() for path in folder.iterdir())

    assert told() == "idle"
    pod.start(["train", "fail", "--workdir", str(logs.parent)])
    until("3")
    until(f"began train fail --workdir {logs.parent}", lambda: read(logs))
    pod.start(["train", "wait"])
    until("running")
    until("began train wait", (tmp_path / "synthesizer_jax" / "run.log").read_text)
    pod.start(["train"])
    assert "A run is in progress." in pod.said
    host(launch.STOP)
    assert told() == "75"
    assert mine.poll() is None, "only runs in the launcher's folder are stopped"
    mine.kill()
    mine.communicate()
    pod.start(["train"])
    until("0")


class Stage(launch.Pod):
    """A fake pod whose answers are given in advance."""

    def __init__(self, states: list[str], told: list[list[str]]):
        options = [*POD, "--type", "v6e-16", "--poll", "0", "--max-restarts", "3"]
        super().__init__(launch.parse_arguments(["babysit", *options, *TRAIN])[0])
        self.states = iter(states)
        self.told = iter(told)
        self.did = []

    def call(self, command, *, tries=1):
        word = next(
            (w for w in ("create", "scp", "setsid", "delete") if w in " ".join(command)), ""
        )
        self.did += [word] if word else []
        return True

    def state(self):
        return next(self.states)

    def host_states(self):
        return next(self.told)


def test_a_preempted_run_is_started_again_on_new_machines():
    states = ["NONE", "ACTIVE", "ACTIVE", "SUSPENDED", "SUSPENDED", "ACTIVE"]
    pod = Stage(states, [["idle"], ["running"], [], ["idle"], ["0", "0"]])
    pod.babysit(["train"])
    assert pod.did == ["create", "scp", "setsid", "delete", "create", "scp", "setsid"]


def test_a_run_that_fails_ends_babysit():
    pod = Stage(["ACTIVE"] * 9, [["running"], *[["3", "running"]] * 3])
    with pytest.raises(SystemExit, match="exit code 3"):
        pod.babysit(["train"])


if __name__ == "__main__":
    for name in GOLDEN:
        (HERE / f"{name}.txt").write_text(dry_run(name))


def test_the_commands_that_are_shown_can_run_where_they_run():
    """All commands that are shown to users can run in the place where they are to run.

    The commands are those in the launcher's docstring, in the cluster files, and on the page.

    The test also checks optional packages and numbers of devices.
    """
    page = (launch.CHECKOUT / "docs" / "pods.md").read_text().replace("\\\n", " ")
    extras = launch.make_parser().get_default("extras")
    shown = []
    for line in re.findall(r"launch\.py .* -- .*", f"{launch.__doc__}\n{page}"):
        command = shlex.split(line.partition(" -- ")[2].replace("$RUN", " ".join(RUN)))
        shown.append((command if " run " in line else ["train", *command], extras, 16))
    (extras,) = re.findall(r"pip install .*\.\[(.*)\]", page.partition("## SLURM")[2])
    scripts = launch.CHECKOUT / "tpu_scripts"
    slurm, jobset = ((scripts / name).read_text() for name in ("slurm.sbatch", "jobset.yaml"))
    for nodes, line in re.findall(r"sbatch .*--nodes=(\d+) \S+slurm.sbatch (.*)", slurm + page):
        shown.append((shlex.split(line), extras, 8 * int(nodes)))
    hosts = yaml.safe_load(jobset)["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = hosts["template"]["spec"]["containers"]
    (extras,) = re.findall("ARG EXTRAS=(.*)", (launch.CHECKOUT / "Dockerfile").read_text())
    devices = hosts["parallelism"] * container["resources"]["limits"]["google.com/tpu"]
    shown.append((container["args"], extras, devices))
    assert len(shown) == 8
    for command, extras, devices in shown:
        launch.check_data(command, extras)
        if command[0] == "train":
            assert load_recipe(command[1]).data.batch_size % devices == 0, (command, devices)
