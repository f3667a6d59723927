"""`tpu_scripts/launch` on Cloud TPU machines, against a `gcloud` that answers as it is told."""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.tpu_scripts.world import ROOT, SCRIPTS, World

PLACE = ("--name", "pod", "--zone", "here")
SPOT = (*PLACE, "--type", "v6e-16", "--spot")
RUN = ("--", "quickstart", "--workdir", "bucket/runs/rv")
GS = ("--", "quickstart", "--workdir", "gs://runs/rv")
QUEUE = ["gcloud", "compute", "tpus", "queued-resources"]
FOLLOW = "--command=tail -n 100 -F synthesizer_jax/run.log"
EVERYWHERE = ["pod", "--zone=here", "--node=all", "--worker=all"]


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ("--type", "v6e-16"),
            "--accelerator-type=v6e-16 --runtime-version=v2-alpha-tpuv6e --node-id=pod",
        ),
        (
            ("--type", "v5litepod-8", "--spot"),
            "--accelerator-type=v5litepod-8 --runtime-version=v2-alpha-tpuv5-lite --node-id=pod --spot",
        ),
        (
            ("--type", "v5p-8", "--slices", "3", "--reserved"),
            "--accelerator-type=v5p-8 --runtime-version=v2-alpha-tpuv5 --node-count=3 --node-prefix=pod"
            " --reserved",
        ),
        (
            ("--type", "v4-8", "--version", "mine", "--project", "p"),
            "--project=p --accelerator-type=v4-8 --runtime-version=mine --node-id=pod",
        ),
        (
            (
                "--type",
                "v2-8",
            ),
            "--accelerator-type=v2-8 --runtime-version=tpu-ubuntu2204-base --node-id=pod",
        ),
    ],
)
def test_create_asks_for_every_kind_of_capacity(world, options, expected):
    done = world.launch("create", *PLACE, *options)
    assert done.returncode == 0, done.stderr
    assert world.calls() == [[*QUEUE, "create", "pod", "--zone=here", *expected.split()]]


def test_flexible_starts_need_the_alpha_command(world):
    world.launch("create", *PLACE, "--type", "v6e-16", "--flex-start", "10h")
    (call,) = world.calls()
    assert call[:6] == ["gcloud", "alpha", *QUEUE[1:], "create"]
    assert call[-2:] == ["--provisioning-model=flex-start", "--max-run-duration=10h"]


def test_a_refused_quota_ends_with_the_remedy(world):
    world.answers("create", "quota")
    done = world.launch("create", *SPOT)
    assert done.returncode == 2
    said, error = done.stderr.splitlines()
    assert "RESOURCE_EXHAUSTED" in said
    assert error.startswith(
        "error: gcloud refused to create pod; if it speaks of quota, ask for more"
    )


def test_waiting_goes_through_the_states_and_over_a_broken_network(world):
    world.answers("describe", "WAITING_FOR_RESOURCES", "BROKEN", "PROVISIONING", "ACTIVE")
    done = world.launch("wait", *PLACE, "--poll", "0")
    assert done.returncode == 0
    states = re.findall(r"pod is (\w+)", done.stderr)
    assert states == ["WAITING_FOR_RESOURCES", "UNKNOWN", "PROVISIONING", "ACTIVE"]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("FAILED", "pod is FAILED and will not come back"),
        ("SUSPENDED", "pod is SUSPENDED and will not come back"),
        ("NOT_FOUND", "there is no pod in here; launch create asks for it"),
    ],
)
def test_waiting_ends_where_no_machines_will_come(world, state, message):
    world.answers("describe", "PROVISIONING", state)
    done = world.launch("wait", *PLACE, "--poll", "0")
    assert done.returncode == 2
    assert f"error: {message}" in done.stderr


def test_status_tells_of_the_machines_and_of_every_host(world):
    world.answers("status", "run t1v-0 running;run t1v-1 lost")
    assert (
        world.launch("status", *PLACE).stdout == "pod ACTIVE\nrun t1v-0 running\nrun t1v-1 lost\n"
    )
    # gcloud takes parentheses outside quotes for its own grouping, and finds nothing.
    assert '--filter=name~"/nodes/pod(-[0-9]+)?$"' in world.calls()[1]
    world.answers("describe", "PROVISIONING")
    assert world.launch("status", *PLACE).stdout == "pod PROVISIONING\n"
    world.answers("describe", "ACTIVE")
    world.answers("list", "PREEMPTED")
    assert world.launch("status", *PLACE).stdout == "pod PREEMPTED\n"


def test_setup_waits_for_ssh_and_installs_everywhere(world):
    world.answers("scp", "refused", "refused", "accepted")
    done = world.launch("setup", *PLACE, "--bucket", "runs", "--poll", "0")
    assert done.returncode == 0, done.stderr
    *copies, install = world.calls()
    assert [call[:5] for call in copies] == [[*QUEUE, "scp"]] * 3
    assert copies[0][6:] == ["pod:synthesizer_jax.tar.gz", *EVERYWHERE[1:]]
    assert install[4:9] == ["ssh", *EVERYWHERE]
    assert install[9].endswith("&& synthesizer_jax/tpu_scripts/host setup --bucket runs")


@pytest.mark.parametrize(
    ("question", "answer", "tries"),
    [("scp", "refused", 10), ("ssh", "refused", 3), ("ssh", "unprepared", 3)],
)
def test_setup_gives_up_with_the_remedy(world, question, answer, tries):
    world.answers(question, answer)
    done = world.launch("setup", *PLACE, "--poll", "0")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: the hosts of pod were not set up;")
    assert sum(call[4] == question for call in world.calls()) == tries


@pytest.mark.parametrize(
    ("options", "start"),
    [
        ((), "none"),
        (("--type", "v6e-16"), "v6e"),
        (("--type", "v5litepod-16", "--slices", "2"), "v5e --slices 2"),
        (("--type", "v6e-16", "--flags", "none"), "none"),
        (
            ("--type", "v4-8", "--no-flag", "xla_enable_async_all_gather"),
            "v4 --no-flag xla_enable_async_all_gather",
        ),
    ],
)
def test_train_starts_on_all_hosts_and_quotes_for_them(world, options, start):
    done = world.launch("train", *PLACE, *options, "--", "finetune", "--workdir", "bucket/my $rv")
    assert done.returncode == 0, done.stderr
    (call,) = world.calls()
    assert call[:9] == [*QUEUE, "ssh", *EVERYWHERE]
    assert call[9] == (
        f"--command=synthesizer_jax/tpu_scripts/host run {start} -- train finetune"
        " --workdir bucket/my\\ \\$rv"
    )


def test_a_host_that_gcloud_only_mentions_was_not_reached(world):
    world.answers("ssh", "unprepared")
    done = world.launch("train", *PLACE, *RUN)
    assert done.returncode == 2
    told, error = done.stderr.splitlines()
    assert told.startswith("Could not prepare all")
    assert error.startswith("error: the run was not started on every host")


def test_what_gcloud_never_knew_is_an_error(world):
    world.answers("describe", "BROKEN")
    for action, words in (
        ("status", PLACE),
        ("wait", PLACE),
        ("babysit", (*SPOT, "--bucket", "runs", *RUN)),
    ):
        done = world.launch(action, *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.splitlines() == [
            "ERROR: (gcloud) the network is down",
            "error: gcloud does not tell whether there is pod; what it said stands above",
        ]


def test_stop_logs_and_delete(world):
    for words in (("stop",), ("logs", "--slice", "1", "--worker", "3"), ("delete",)):
        assert world.launch(words[0], *PLACE, *words[1:]).returncode == 0
    assert world.calls() == [
        [*QUEUE, "ssh", *EVERYWHERE, "--command=synthesizer_jax/tpu_scripts/host stop"],
        [*QUEUE, "ssh", "pod", "--zone=here", "--node=1", "--worker=3", FOLLOW],
        [*QUEUE, "delete", "pod", "--zone=here", "--force", "--quiet"],
    ]


def test_a_failing_gcloud_fails_the_script(world):
    world.answers("delete", "busy")
    assert world.launch("delete", *PLACE).returncode == 1


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("create", SPOT),
        ("status", PLACE),
        ("wait", PLACE),
        ("setup", (*PLACE, "--bucket", "runs")),
        ("train", (*PLACE, *RUN)),
        ("logs", PLACE),
        ("stop", PLACE),
        ("delete", PLACE),
        ("babysit", (*SPOT, "--bucket", "runs", *RUN)),
        ("xpk", (*PLACE, "--type", "v6e-16", "--cluster", "c", "--image", "i", *GS)),
        ("slurm", ("--name", "pod", *RUN)),
    ],
)
def test_a_dry_run_calls_nothing_and_prints_commands(world, action, words):
    done = world.launch(action, "--dry-run", *words)
    assert (done.returncode, done.stderr, world.calls()) == (0, "", [])
    for line in done.stdout.splitlines():
        assert shlex.split(line)[0] in ("gcloud", "git", "rm", "xpk", "sbatch")


def test_a_dry_run_prints_what_is_called(world):
    words = (*PLACE, "--type", "v6e-16", "--", "finetune", "--workdir", "bucket/my 'runs'/$rv")
    world.launch("train", *words)
    assert [shlex.split(world.launch("train", "--dry-run", *words).stdout)] == world.calls()


@pytest.mark.parametrize(
    ("action", "words", "message"),
    [
        ("create", PLACE, "create needs --type"),
        ("train", ("--name", "tpu"), "train needs --zone"),
        ("jobset", ("--name", "tpu", *RUN), "jobset needs --type and --image"),
        ("train", PLACE, "train needs a recipe and a --workdir after --"),
        ("stop", (*PLACE, *RUN), "stop takes nothing after --"),
        ("delete", ("--nmae", "tpu"), "delete takes no --nmae"),
        ("delete", (*PLACE, "--spot"), "delete takes no --spot"),
        ("delete", ("pod",), "unknown option pod"),
        ("delete", ("--name", "--zone"), "--name needs a value"),
        ("fly", PLACE, "unknown action fly"),
        ("stop", ("--name", "My_pod", "--zone", "z"), "--name is My_pod; it is at most 40"),
        ("create", (*SPOT, "--slices", "0"), "--slices is 0; it is a whole number from 1"),
        ("create", (*SPOT, "--reserved"), "take one of --spot, --reserved, --reservation and"),
        ("create", (*PLACE, "--type", "v6e-4", "--flex-start", "long"), "--flex-start is long"),
        ("create", (*PLACE, "--type", "v6e-4", "--flex-start", "8d"), "--flex-start is 8d"),
        ("create", (*PLACE, "--type", "v6e"), "'v6e' names no slice; give chips as in v6e:2x4"),
        (
            "setup",
            (*PLACE, "--bucket", "gs://runs"),
            "--bucket is gs://runs; the name of a bucket has small",
        ),
        ("babysit", (*SPOT, *RUN), "bucket/runs/rv is in the directory where --bucket"),
        (
            "babysit",
            (
                *SPOT,
                "--",
                "quickstart",
                "--workdir=gs://b/r",
                "--set",
                "vocabulary.path=./bucket/v",
            ),
            "vocabulary.path=./bucket/v is in the directory where --bucket is mounted: give --bucket",
        ),
        (
            "create",
            (*PLACE, "--type", "tpu7x-16"),
            "TPU7x (Ironwood) exists on GKE only; use launch",
        ),
        (
            "babysit",
            (*PLACE, "--type", "tpu7x-16", "--bucket", "runs", *RUN),
            "TPU7x (Ironwood) exists on GKE only",
        ),
        ("create", (*PLACE, "--type", "v3-8", "--slices", "2"), "--slices needs TPU v4 or later"),
        ("create", (*PLACE, "--type", "h100"), "unknown chip in 'h100'; choose from v2, v3, v4"),
        ("train", (*PLACE, "--flags", "v9", *RUN), "unknown flags v9"),
        (
            "train",
            (*PLACE, "--flags", "v4", "--no-flag", "x", *RUN),
            "the flags of v4 do not hold x",
        ),
    ],
)
def test_mistakes_are_one_line(world, action, words, message):
    done = world.launch(action, *words)
    assert (done.returncode, done.stdout, world.calls()) == (2, "", [])
    assert done.stderr.startswith(f"error: {message}")
    assert len(done.stderr.splitlines()) == 1


def test_values_may_follow_an_equals_sign(world):
    assert world.launch("delete", "--name=pod", "--zone=here").returncode == 0
    assert world.calls() == [[*QUEUE, "delete", "pod", "--zone=here", "--force", "--quiet"]]


@pytest.mark.parametrize("words", [("--help",), ("create", "-h"), ("create", *PLACE, "--help")])
def test_help_shows_every_action(world, words):
    done = world.run(SCRIPTS / "launch", *words)
    assert done.returncode == 0
    for action in ("create", "babysit", "jobset", "xpk", "slurm"):
        assert f"launch {action}" in done.stdout
    assert "set -e" not in done.stdout


def babysit(world, *options):
    return world.launch("babysit", *SPOT, "--poll", "0", "--bucket", "runs", *options, *RUN)


BEGIN = ["scp", "host setup", "host stop", "host run"]


def test_babysit_outlives_two_preemptions(world):
    first = ["NOT_FOUND", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE", "ACTIVE", "SUSPENDED"]
    second = ["NOT_FOUND", "PROVISIONING", "ACTIVE", "ACTIVE", "ACTIVE"]
    third = ["NOT_FOUND", "ACTIVE"]
    world.answers("describe", *first, *second, *third)
    # Once for every look at active machines; the second time one is taken without a word of the queue.
    world.answers("list", "READY", "READY", "READY", "READY", "PREEMPTED", "READY")
    before = ["idle", "running", "refused"]
    world.answers(
        "status",
        *(f"run t1v-0 {word}" for word in before[:2]),
        "refused",
        *[
            "run t1v-0 idle",
            "run t1v-0 running",
            "run t1v-0 75;run t1v-1 1",
            "run t1v-0 idle",
            "run t1v-0 0",
        ],
    )
    done = babysit(world)
    assert done.returncode == 0, done.stderr
    assert world.story() == [
        *("create", *BEGIN, "delete"),
        *("create", *BEGIN, "delete"),
        *("create", *BEGIN),
    ]
    assert "interrupted (2 of at most 100 times)" in done.stderr
    assert done.stderr.splitlines()[-1] == "the run is finished"


@pytest.mark.parametrize("code", [75, 143])
def test_babysit_starts_again_on_machines_that_stayed(world, code):
    left = f"run a {code};run b 1"
    world.answers("status", "run a idle", left, left, "run a 0;run b 0")
    assert babysit(world).returncode == 0
    assert world.story() == [*BEGIN, *BEGIN]


def test_babysit_starts_again_what_was_not_started_everywhere(world):
    world.answers("status", "run a idle", *["run a running;run b idle"] * 2, "run a 0;run b 0")
    assert babysit(world).returncode == 0
    assert world.story() == [*BEGIN, *BEGIN]


def test_babysit_follows_a_run_that_goes_on(world):
    world.answers("status", "run a running;run b running", "run a running;run b 0")
    assert babysit(world, "--delete-at-end").returncode == 0
    assert world.story() == ["delete"]


def test_babysit_ends_with_an_error_of_the_run(world):
    world.answers("status", "run a idle", "run a running;run b 1")
    done = babysit(world)
    assert done.returncode == 2
    assert world.story() == [*BEGIN, "tail -n"]
    assert done.stderr.splitlines()[-1] == (
        "error: the run failed with exit code 1, see the log; its machines cost money until:"
        " tpu_scripts/launch delete --name pod --zone here"
    )
    done = babysit(world, "--delete-at-end")
    assert world.story()[-1] == "delete"
    assert done.stderr.splitlines()[-1].endswith("see the log; its machines are deleted")


def test_babysit_ends_where_somebody_stops_the_run(world):
    world.answers("status", "run a idle", "run a running;run b running", "run a stopped;run b 75")
    done = babysit(world, "--delete-at-end")
    assert done.returncode == 2
    assert world.story() == BEGIN
    assert "error: the run was stopped and has saved" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "last"),
    [
        ("run a running;run b 75", "the run was stopped and has saved"),  # b was the first to leave
        ("run a stopped;run b 3", "the run failed with exit code 3"),
    ],
)
def test_babysit_tells_a_stop_from_a_failure(world, words, last):
    world.answers("status", "run a idle", words, "run a stopped;run b 75")
    if "3" in words:
        world.answers("status", "run a idle", words)
    done = babysit(world)
    assert done.returncode == 2
    assert world.story()[:5] == [*BEGIN, *(["tail -n"] if "3" in words else [])]
    assert f"error: {last}" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("states", "story"),
    [
        (("ACTIVE", "ACTIVE", "ACTIVE", "DELETING"), BEGIN),
        (("NOT_FOUND", "NOT_FOUND", "PROVISIONING", "NOT_FOUND"), ["create"]),
    ],
)
def test_babysit_ends_where_somebody_deletes_the_machines(world, states, story):
    world.answers("describe", *states)
    world.answers("status", "run a idle", "run a running")
    done = babysit(world)
    assert done.returncode == 2
    assert world.story() == story
    assert "error: pod was deleted meanwhile" in done.stderr.splitlines()[-1]


def test_babysit_waits_for_a_network_that_comes_back(world):
    world.answers("status", "refused", "unprepared", "run a running", "run a 0")
    assert babysit(world).returncode == 0
    assert world.story() == []
    world.answers("describe", "ACTIVE", "ACTIVE", "BROKEN", "BROKEN", "BROKEN", "ACTIVE")
    world.answers("scp", *["refused"] * 10, "accepted")
    world.answers("status", "run a idle", "run a running", "run a 0")
    assert babysit(world).returncode == 0
    assert world.story() == ["scp"] * 10


def test_a_crash_on_machines_that_are_taken_away_is_a_preemption(world):
    world.answers("describe", "ACTIVE", "ACTIVE", "ACTIVE", "SUSPENDING", "NOT_FOUND", "ACTIVE")
    world.answers("status", "run a idle", "run a 1", "run a 1", "run a idle", "run a 0")
    done = babysit(world)
    assert done.returncode == 0, done.stderr
    assert world.story() == [*BEGIN, "delete", "create", *BEGIN]


def test_babysit_is_bounded(world):
    world.answers("describe", "FAILED")
    done = babysit(world, "--max-restarts", "2")
    assert done.returncode == 2
    assert world.story() == ["delete", "delete"]
    assert "pod was interrupted more often than --max-restarts 2" in done.stderr.splitlines()[-1]
    world.answers("describe", "NOT_FOUND", "FAILED")
    done = babysit(world, "--max-restarts", "1", "--delete-at-end")
    assert world.story()[2:] == ["create", "delete", "delete"]
    assert done.stderr.splitlines()[-1].endswith("--max-restarts 1; its machines are deleted")


def test_babysit_asks_three_times_for_machines(world):
    world.answers("describe", "NOT_FOUND")
    world.answers("create", "quota")
    done = babysit(world)
    assert done.returncode == 2
    assert world.story() == ["create"] * 3
    assert done.stderr.splitlines()[-1].startswith("error: gcloud refused to create pod;")


def test_babysit_says_when_hosts_are_there_but_do_not_start(world):
    world.answers("status", "refused")
    world.answers("scp", "refused")
    done = babysit(world)
    assert done.returncode == 2
    assert "pod is there but the run does not start" in done.stderr.splitlines()[-1]
    assert "delete" not in world.story()
    babysit(world, "--delete-at-end")
    assert world.story()[-1] == "delete"


def commands_of(page):
    """The commands of the page's blocks for bash, continued lines joined."""
    for block in re.findall(r"```bash\n(.*?)```", page, flags=re.S):
        yield from block.replace("\\\n", " ").splitlines()


def test_every_command_of_the_run_book_works_as_a_dry_run(world):
    given, launched = "NUMBER=1\n", 0
    for line in commands_of((ROOT / "docs" / "pods.md").read_text()):
        if re.match(r"[A-Z]+=[^(]*$", line):
            given += f"{line}\n"
        elif line.startswith("tpu_scripts/"):
            if line.startswith("tpu_scripts/launch"):
                line = re.sub(r"^(\S+ \S+)", r"\1 --dry-run", line)
            done = world.run("bash", "-euc", given + line)
            assert (done.returncode, done.stderr) == (0, ""), line
            assert done.stdout.strip(), line
            launched += 1
    assert launched > 15
    assert world.calls() == []


SHELLCHECK = shutil.which(
    "shellcheck", path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
)


@pytest.mark.skipif(SHELLCHECK is None, reason="needs shellcheck")
def test_shellcheck_finds_nothing():
    scripts = sorted(
        str(path) for path in SCRIPTS.iterdir() if path.suffix not in (".yaml", ".txt")
    )
    assert len(scripts) >= 9
    done = subprocess.run(
        [SHELLCHECK, "--external-sources", *scripts], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == ""
