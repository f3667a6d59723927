"""What `tpu_scripts/` runs on a host: the supervisor of a run, its start, its flags."""

import contextlib
import os
import pathlib
import re
import select
import shlex
import shutil
import signal

import pytest

from tests.tpu_scripts.world import SCRIPTS, World

VENV = """#!/usr/bin/env bash
# python3.11 -m venv .venv
mkdir -p .venv/bin
printf '#!/bin/sh\\necho "$*" >> pip.log\\n' > .venv/bin/python
cp "$WORLD/synthesizer-jax" .venv/bin/synthesizer-jax
chmod +x .venv/bin/python .venv/bin/synthesizer-jax
"""
# Says that it runs, and obeys SIGTERM by its exit code.
OBEDIENT = """#!/usr/bin/env bash
trap 'exit 75' TERM
echo started > "$WORLD/started"
while :; do read -r -t 1 <> "$WORLD/never" || true; done
"""
STUBBORN = OBEDIENT.replace("'exit 75'", "''")
PRINTS = "#!/usr/bin/env bash\nenv | sort\necho arguments: $*\n"


@pytest.fixture
def world(tmp_path):
    yield World(tmp_path)
    for path in tmp_path.glob("**/run.pid"):  # what a failed test left running
        with contextlib.suppress(OSError):
            pid = int(path.read_text())
            if b"tpu_scripts/host" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
                os.killpg(pid, signal.SIGKILL)


class Host:
    """A checkout with a program, as `setup` leaves it."""

    def __init__(self, world, program):
        self.world, self.checkout = world, world.folder / "synthesizer_jax"
        shutil.copytree(SCRIPTS, self.checkout / "tpu_scripts")
        self.program = self.checkout / ".venv" / "bin" / "synthesizer-jax"
        self.program.parent.mkdir(parents=True)
        self.program.write_text(program)
        self.program.chmod(0o755)
        for name in ("started", "never"):
            os.mkfifo(world.folder / name)

    def __call__(self, *words, **environment):
        script = self.checkout / "tpu_scripts" / "host"
        return self.world.run(script, *words, cwd="/", **environment)

    def word(self):
        name, _, word = self("status").stdout.removeprefix("run ").partition(" ")
        assert name
        return word.strip()

    def wait_until_started(self):
        assert (self.world.folder / "started").read_text() == "started\n"

    def train(self, *words):
        """Starts a run; returns a file descriptor that is readable when its supervisor has ended."""
        done = self("run", "none", "--", "train", "quickstart", *words)
        assert done.returncode == 0, done.stderr
        return os.pidfd_open(int((self.checkout / "run.pid").read_text()))

    def started(self, *words):
        """As `train`, and waits until the program runs."""
        process = self.train(*words)
        self.wait_until_started()
        assert self.word() == "running"
        return process

    def signal(self, send, number, process):
        """Sends the supervisor (`os.kill`) or all of the run (`os.killpg`) a signal; waits for its end."""
        send(int((self.checkout / "run.pid").read_text()), number)
        wait_for_end(process)


def wait_for_end(process):
    assert select.select([process], [], [], 60)[0]
    os.close(process)


def test_a_run_is_detached_and_leaves_its_exit_code(world):
    host = Host(world, "#!/bin/sh\necho started > $WORLD/started\necho trained $*\nexit 3\n")
    assert host.word() == "idle"
    process = host.train("--workdir", "my runs/rv")
    host.wait_until_started()
    wait_for_end(process)
    assert host.word() == "3"
    assert (
        (host.checkout / "run.log")
        .read_text()
        .endswith("trained train quickstart --workdir my runs/rv\n")
    )


def test_sigterm_reaches_the_program_and_its_exit_code_is_kept(world):
    host = Host(world, OBEDIENT)
    host.signal(os.kill, signal.SIGTERM, host.started("--workdir", "rv"))
    assert host.word() == "75"


def test_a_run_that_was_stopped_says_so_until_it_goes_on(world):
    host = Host(world, OBEDIENT)
    process = host.started("--workdir", "rv")
    second = host("run", "none", "--", "train", "quickstart", "--workdir", "rv")
    assert second.returncode == 2
    assert "a run is going on on" in second.stderr
    assert host("stop").returncode == 0
    wait_for_end(process)
    assert host.word() == "stopped"
    assert host("stop").returncode == 0
    host.signal(os.kill, signal.SIGTERM, host.started("--workdir", "rv"))
    assert host.word() == "75"


def test_a_bucket_that_is_not_mounted_is_not_written_to(world):
    host = Host(world, OBEDIENT)
    (host.checkout / "bucket").mkdir()
    done = host("run", "none", "--", "train", "quickstart", "--workdir", "bucket/runs/rv")
    assert done.returncode == 2
    assert "the bucket is not mounted on" in done.stderr
    assert host.word() == "idle"


def test_what_does_not_stop_is_killed(world):
    host = Host(world, STUBBORN)
    process = host.started("--workdir", "rv")
    assert host("stop", SYNTHESIZER_GRACE="0").returncode == 0
    wait_for_end(process)
    assert host.word() == "stopped"


def test_a_failure_at_a_stop_is_a_failure(world):
    host = Host(world, OBEDIENT.replace("exit 75", "exit 1"))
    process = host.started("--workdir", "rv")
    assert host("stop").returncode == 0
    wait_for_end(process)
    assert host.word() == "1"


def test_a_run_that_is_killed_is_lost(world):
    host = Host(world, OBEDIENT)
    host.signal(os.killpg, signal.SIGKILL, host.started("--workdir", "rv"))
    assert host.word() == "lost"


def test_a_number_that_is_another_process_after_a_reboot_is_no_run(world):
    host = Host(world, OBEDIENT)
    (host.checkout / "run.pid").write_text(f"{os.getpid()}\n")
    assert host.word() == "lost"
    assert host("stop").returncode == 0  # and has not killed the tests


def test_a_host_without_installation_says_so(world):
    host = Host(world, OBEDIENT)
    host.program.unlink()
    done = host("run", "none", "--", "train", "quickstart")
    assert done.returncode == 2
    assert "nothing is installed on" in done.stderr


def test_from_the_checkout_to_a_finished_run(world):
    """`launch` with a gcloud that runs on a host what it is asked to run there."""
    (world.folder / "home").mkdir()
    checkout = world.folder / "home" / "synthesizer_jax"
    world.program("python3.11", VENV)
    world.program("gcsfuse", '#!/bin/sh\necho "$*" > "$WORLD/mounted"\n')
    world.program("mountpoint", "#!/bin/sh\nexit 1\n")
    program = '#!/bin/sh\necho "$* with $LIBTPU_INIT_ARGS"; echo started > $WORLD/started\n'
    (world.folder / "synthesizer-jax").write_text(program)
    os.mkfifo(world.folder / "started")
    place = ("--name", "pod", "--zone", "here")
    done = world.launch("setup", *place, "--bucket", "mine")
    assert done.returncode == 0, done.stderr
    assert (checkout / "pip.log").read_text().splitlines() == [
        "-m pip install --quiet --upgrade -c ./constraints.txt pip",
        "-m pip install --quiet -c ./constraints.txt .[data,gcs,tpu]",
    ]
    assert (world.folder / "mounted").read_text().split()[-2:] == ["mine", "bucket"]
    done = world.launch(
        "train", *place, "--type", "v6e-16", "--", "quickstart", "--workdir", "gs://a b"
    )
    assert done.returncode == 0, done.stderr
    process = os.pidfd_open(int((checkout / "run.pid").read_text()))
    assert (world.folder / "started").read_text()
    wait_for_end(process)
    assert re.fullmatch(r"pod ACTIVE\nrun \S+ 0\n", world.launch("status", *place).stdout)
    log = (checkout / "run.log").read_text()
    assert "train quickstart --workdir gs://a b with --xla_tpu" in log


@pytest.mark.parametrize(
    ("words", "project", "installed"),
    [
        ((), "", ["-c ./constraints.txt .[data,gcs,tpu]"]),
        (("--release", "0.4.0"), "", ["synthesizer_jax[data,gcs,tpu]==0.4.0"]),
        (("--code",), "", ["-c ./.program/constraints.txt ./.program[data,gcs,tpu]"]),
        (
            ("--code",),
            "pyproject.toml",
            [
                "-c ./.program/constraints.txt ./.program[data,gcs,tpu]",
                "-c ./.program/constraints.txt .",
            ],
        ),
        (("--release", "1.0", "--code"), "setup.py", ["synthesizer_jax[data,gcs,tpu]==1.0", "."]),
    ],
)
def test_setup_installs_the_program_and_then_the_code(world, words, project, installed):
    host = Host(world, OBEDIENT)
    python = host.checkout / ".venv" / "bin" / "python"
    python.write_text('#!/bin/sh\necho "$*" >> pip.log\n')
    python.chmod(0o755)
    if project:
        (host.checkout / project).write_text("")
    assert host("setup", *words).returncode == 0
    _, *lines = (host.checkout / "pip.log").read_text().splitlines()
    assert lines == [f"-m pip install --quiet {line}" for line in installed]


def started(world, *words, **environment):
    """The environment that `tpu_scripts/start` gives the program, and its arguments."""
    if not (world.folder / "synthesizer_jax").exists():
        Host(world, PRINTS)
    script = world.folder / "synthesizer_jax" / "tpu_scripts" / "start"
    done = world.run(
        script, *words, "--", "train", "quickstart", "--workdir", "rv", cwd="/", **environment
    )
    assert done.returncode == 0, done.stderr
    *settings, arguments = done.stdout.splitlines()
    assert arguments == "arguments: train quickstart --workdir rv"
    return dict(line.split("=", 1) for line in settings if "=" in line)


STALE = {
    "MEGASCALE_NUM_SLICES": "9",
    "MEGASCALE_SLICE_ID": "8",
    "MEGASCALE_COORDINATOR_ADDRESS": "gone",
}
JOBSET = {"JOBSET_NAME": "pod", "JOBSET_JOB": "slice", "JOBSET_SLICES": "2", "JOBSET_SLICE": "1"}


def test_slices_are_computed_anew_at_every_start(world):
    given = started(world, "none", **STALE, **JOBSET)
    assert {name: given[name] for name in STALE} == {
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
        "MEGASCALE_COORDINATOR_ADDRESS": "pod-slice-0-0.pod",
    }
    alone = started(world, "none", **STALE, **{**JOBSET, "JOBSET_SLICES": "1"})
    assert not STALE.keys() & alone.keys()
    # Outside JobSets of ours they are left alone.
    assert started(world, "none", **STALE)["MEGASCALE_SLICE_ID"] == "8"


def test_start_keeps_compiled_programs_on_the_bucket(world):
    assert "JAX_COMPILATION_CACHE_DIR" not in started(world, "none")
    bucket = world.folder / "synthesizer_jax" / "bucket"
    bucket.mkdir()
    assert started(world, "none")["JAX_COMPILATION_CACHE_DIR"] == str(bucket / "compiled")
    mine = started(world, "none", JAX_COMPILATION_CACHE_DIR="mine")
    assert mine["JAX_COMPILATION_CACHE_DIR"] == "mine"


def test_flags_come_before_those_of_the_environment(world):
    given = started(world, "v6e", LIBTPU_INIT_ARGS="--mine=1")["LIBTPU_INIT_ARGS"].split()
    assert given[0] == "--xla_tpu_enable_latency_hiding_scheduler=true"
    assert "--xla_tpu_scoped_vmem_limit_kib=98304" in given
    assert given[-1] == "--mine=1"
    assert "LIBTPU_INIT_ARGS" not in started(world, "none")


PRESETS = ("v4", "v5e", "v5p", "v6e", "tpu7x", "gpu-hopper", "gpu-blackwell")


def flags(world, *words):
    done = world.run(SCRIPTS / "flags", *words)
    assert done.returncode == 0, done.stderr
    settings = {}
    for line in done.stdout.splitlines():
        export, setting = shlex.split(line)
        assert export == "export"
        settings.update([setting.split("=", 1)])
    return settings


def names(settings):
    """The names of all flags and variables."""
    flags = " ".join(settings.get(name, "") for name in ("LIBTPU_INIT_ARGS", "XLA_FLAGS"))
    return re.findall(r"--(\w+)=", flags) + [
        name for name in settings if name not in ("LIBTPU_INIT_ARGS", "XLA_FLAGS")
    ]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("slices", ["1", "2"])
def test_every_flag_can_be_left_out(world, preset, slices):
    given = names(flags(world, preset, "--slices", slices))
    assert len(given) == len(set(given)) > 1
    assert ("xla_tpu_enable_megascale_barrier" in given) == (slices == "2" and "gpu" not in preset)
    last = given[-1]
    assert names(flags(world, preset, "--slices", slices, "--no-flag", last)) == given[:-1]
    without = [word for name in given for word in ("--no-flag", name)]
    assert flags(world, preset, "--slices", slices, *without) == {}


def test_presets_differ_where_the_chips_do(world):
    hopper, blackwell = flags(world, "gpu-hopper"), flags(world, "gpu-blackwell")
    assert hopper["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in blackwell
    assert blackwell["XLA_FLAGS"] == "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL"
    assert flags(world, "none") == {}
    assert "scoped_vmem" not in flags(world, "v5p")["LIBTPU_INIT_ARGS"]


def test_flags_explain_themselves(world):
    done = world.run(SCRIPTS / "flags", "v6e", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "tpu_scripts/flags PRESET" in done.stdout
    assert "set -e" not in done.stdout
