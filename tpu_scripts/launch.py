#!/usr/bin/env python3
"""Creates Cloud TPU machines, keeps a run going on them, and deletes them.

  POD="--name pod --zone us-east5-b"
  RUN="--workdir gs://BUCKET/runs/rv --data-dir gs://BUCKET/data"
  launch.py create  $POD --type v6e-16 --spot
  launch.py setup   $POD
  launch.py train   $POD -- quickstart $RUN
  launch.py status  $POD
  launch.py logs    $POD
  launch.py run     $POD -- eval $RUN
  launch.py stop    $POD
  launch.py delete  $POD
  launch.py babysit $POD --type v6e-16 --spot -- quickstart $RUN

`babysit` does all of this, and repeats it after every preemption until the run
has ended. `train` and `run` return when the program has started on every host.
The program continues when you log out. `stop` lets a run save, and the same
`train` continues it.

The words after `--` are arguments of `synthesizer-jax train`, or of
`synthesizer-jax` itself after `run`. Prepare and upload the data before you
start. Every host copies its log to logs/ in --workdir. With --dry-run, the
commands are printed and not run. docs/pods.md describes every step.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence

CHECKOUT = pathlib.Path(__file__).resolve().parent.parent
GCLOUD = ["gcloud", "compute", "tpus", "queued-resources"]
GONE = ("FAILED", "SUSPENDED", "SUSPENDING", "DELETING")
"""The states of a request whose machines will not come back."""

SOFTWARE = {"v5e": "v2-alpha-tpuv5-lite", "v5p": "v2-alpha-tpuv5", "v6e": "v2-alpha-tpuv6e"}
"""The software of machines, by generation. Other generations use `tpu-ubuntu2204-base`."""

INTERRUPTED = ("75", "143", "idle")
"""The states that a host reports if its run must be started again.

The exit code is 75 if the run has saved, and 143 if the run had nothing to save. The host is idle
if the run was lost.
"""

READS_DATA = ("train", "distill", "eval", "predict", "inspect")
"""The commands of `synthesizer-jax` that prepare missing data."""

# The following scripts run on every host. A run holds a lock on run.lock until the run ends.
# Afterwards, its exit code is written to run.exit.
SETUP = """
set -e
mkdir -p synthesizer_jax && tar -xzf synthesizer_jax.tar.gz -C synthesizer_jax && cd synthesizer_jax
python3 -m pip install --quiet --user uv
[ -x .venv/bin/python ] || python3 -m uv venv --quiet --seed --python 3.11 .venv
.venv/bin/python -m pip install --quiet -c constraints.txt '.[{extras}]'
"""
RUN = """
cd synthesizer_jax && exec 9>> run.lock && flock -n 9 || {{ echo "A run is in progress."; exit 1; }}
rm -f run.exit
{flags}setsid nohup sh -c '"$0" "$@"; echo $? > run.exit' \
"$PWD"/.venv/bin/synthesizer-jax {command} >> run.log 2>&1 < /dev/null &
"""
COPY_FILE = (
    "import sys; from etils.epath import Path; "
    "Path(sys.argv[2]).write_bytes(Path(sys.argv[1]).read_bytes())"
)
"""A program that copies a file to a path, which may be in a bucket."""

# This script copies the log every minute, and again when the run has ended. A preemption sends
# SIGTERM, which the script ignores so that it can copy the end of the log.
KEEP_LOG = """
setsid nohup sh -c 'trap "" TERM; keep() { .venv/bin/python -c "$0" run.log "$1/$(hostname).log"; }
until flock -w 60 run.lock true; do keep "$1"; done; keep "$1"' \
'COPY_FILE' LOGS > /dev/null 2>&1 < /dev/null 9>&- &
""".replace("COPY_FILE", COPY_FILE)
STATUS = """
cd synthesizer_jax 2> /dev/null && if flock -n run.lock true
then echo "run $(hostname) $(cat run.exit 2> /dev/null || echo idle)"
else echo "run $(hostname) running"
fi
"""
STOP = """
cd synthesizer_jax && pkill -TERM -f "python[0-9.]* $PWD/.venv/bin/synthesizer-jax"
flock -w 300 run.lock true
"""


def fail(message: str) -> None:
    """Prints an error and ends the program."""
    sys.exit(f"error: {message}")


class Pod:
    """A queued resource and the TPU machines that belong to it.

    Args:
      args: the options of the command line.
    """

    def __init__(self, args: argparse.Namespace):
        self.args = args
        project = [f"--project={args.project}"] if args.project else []
        self.place = [f"--zone={args.zone}", *project]
        self.reach = [*self.place, *(["--tunnel-through-iap"] if args.tunnel_through_iap else [])]

    def call(self, command: Sequence[str], *, tries: int = 1) -> bool:
        """Runs a command, or prints it with ``--dry-run``. Returns whether it succeeded.

        Args:
          command: the command and its arguments.
          tries: the maximum number of attempts. More than one is useful, because new machines
            refuse the first connections.
        """
        if self.args.dry_run:
            print(shlex.join(command))
            return True
        for number in range(tries):
            if subprocess.run(command, check=False).returncode == 0:
                return True
            if number < tries - 1:
                time.sleep(self.args.poll)
        return False

    def on_hosts(self, script: str, *, tries: int = 1) -> bool:
        """Runs a shell script on every host of every slice."""
        return self.call(self.ssh("all", "all", script), tries=tries)

    def ssh(self, node: str, worker: str, script: str) -> list[str]:
        """Returns the SSH command that runs a script on hosts."""
        where = [f"--node={node}", f"--worker={worker}", f"--command={script.strip()}"]
        return [*GCLOUD, "ssh", self.args.name, *self.reach, *where]

    def create(self) -> None:
        """Requests the machines."""
        args = self.args
        if not args.type:
            fail("Give --type, such as v6e-16.")
        chips = CHECKOUT / "synthesizer_jax" / "costs" / "chips.py"
        question = [sys.executable, "-I", str(chips), args.type]
        found = subprocess.run(question, stdout=subprocess.PIPE, text=True, check=False)
        if found.returncode:
            sys.exit(found.returncode)  # the subprocess has printed the available sizes
        chip, kind, topology, _, usual = found.stdout.split()
        if chip == "tpu7x":
            fail("TPU7x is only available on GKE. See docs/pods.md.")
        shape = [f"--accelerator-type={kind}"]
        if usual != "usual":
            shape = [f"--type={kind.rpartition('-')[0]}", f"--topology={topology}"]
        nodes = [f"--node-id={args.name}"]
        if args.slices > 1:
            nodes = [f"--node-count={args.slices}", f"--node-prefix={args.name}"]
        software = args.version or SOFTWARE.get(chip, "tpu-ubuntu2204-base")
        gcloud = ["gcloud", "alpha", *GCLOUD[1:]] if args.alpha else GCLOUD
        command = [*gcloud, "create", args.name, *self.place, *shape, *nodes]
        command += [f"--runtime-version={software}", *args.gcloud]
        command += [f"--{option}" for option in ("spot", "reserved") if getattr(args, option)]
        if not self.call(command):
            fail(
                f"{args.name} was not created. If gcloud mentions a quota, request more under IAM "
                "& Admin, Quotas (--spot and flex-start use the preemptible quota), or choose "
                "another --zone, --type or --spot."
            )

    def state(self) -> str:
        """Returns the state of the queued resource.

        The state is NONE if the queued resource does not exist, and SUSPENDED if one of the
        machines is gone. The state is UNKNOWN if gcloud fails.
        """
        question = [*GCLOUD, "describe", self.args.name, *self.place, "--format=value(state.state)"]
        machines = ["gcloud", "compute", "tpus", "tpu-vm", "list", *self.place]
        machines += [f"--filter=name~/nodes/{self.args.name}", "--format=value(state)"]
        if self.args.dry_run:
            self.call(question)
            return "ACTIVE"
        answer = subprocess.run(question, capture_output=True, text=True, check=False)
        if answer.returncode:
            if "NOT_FOUND" in answer.stderr:
                return "NONE"
            print(answer.stderr, file=sys.stderr)
            return "UNKNOWN"
        found = answer.stdout.strip()
        if found == "ACTIVE":
            listed = subprocess.run(machines, capture_output=True, text=True, check=False)
            if re.search("PREEMPTED|TERMINATED|STOPP", listed.stdout):
                return "SUSPENDED"
        return found

    def wait(self) -> bool:
        """Waits until the machines are ready or gone, and returns whether they are ready."""
        before = ""
        while True:
            state = self.state()
            if state != before:
                print(f"{self.args.name} is {state}", file=sys.stderr)
            if state == "ACTIVE" or state in GONE:
                return state == "ACTIVE"
            before = state
            time.sleep(self.args.poll)

    def setup(self) -> bool:
        """Installs this checkout's commit on every host, and returns whether that succeeded."""
        archive = CHECKOUT / "build" / f"{self.args.name}.tar.gz"
        if not self.args.dry_run:
            archive.parent.mkdir(exist_ok=True)
        there = f"{self.args.name}:synthesizer_jax.tar.gz"
        copy = [*GCLOUD, "scp", str(archive), there, *self.reach, "--node=all", "--worker=all"]
        git = ["git", "-C", str(CHECKOUT), "archive", "--format=tar.gz"]
        git += [f"--output={archive}", "HEAD"]
        install = SETUP.format(extras=self.args.extras)
        return self.call(git) and self.call(copy, tries=10) and self.on_hosts(install, tries=3)

    def start(self, command: Sequence[str]) -> bool:
        """Starts a `synthesizer-jax` command on every host, and returns whether that succeeded."""
        flags = f"LIBTPU_INIT_ARGS={shlex.quote(self.args.flags)} " if self.args.flags else ""
        script = RUN.format(flags=flags, command=shlex.join(command))
        workdir = options_of(command).get("--workdir")
        if workdir:
            script += KEEP_LOG.strip().replace("LOGS", shlex.quote(f"{workdir}/logs"))
        return self.on_hosts(script)

    def host_states(self) -> list[str]:
        """Returns the state of the run on each host: ``running``, ``idle`` or an exit code.

        The list is empty if no host can be reached.
        """
        if self.args.dry_run:
            self.on_hosts(STATUS)
            return ["0"]
        command = self.ssh("all", "all", STATUS)
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        return re.findall(r"^run \S+ (\S+)$", answer.stdout, re.MULTILINE)

    def watch(self) -> str:
        """Waits until the run on the machines has ended, and returns how it ended.

        Returns:
          "finished", "interrupted", or the exit code of a host that failed.
        """
        failures = silences = 0
        while True:
            states = self.host_states()
            if states and set(states) == {"0"}:
                return "finished"
            if self.state() != "ACTIVE" or silences == 20:
                return "interrupted"
            failed = [state for state in states if state not in ("0", "running", *INTERRUPTED)]
            if any(state in INTERRUPTED for state in states) and not failed:
                return "interrupted"
            # Runs may crash shortly before machines are taken away. A failure therefore counts only
            # if it persists.
            failures = failures + 1 if failed else 0
            silences = 0 if states else silences + 1
            if failures == 3:
                return failed[0]
            time.sleep(self.args.poll)

    def delete(self) -> None:
        """Deletes the queued resource and its machines."""
        command = [*GCLOUD, "delete", self.args.name, *self.place, "--force", "--quiet"]
        if not self.call(command, tries=3):
            fail(
                f"{self.args.name} was not deleted and still costs money. Run launch.py delete "
                "again."
            )

    def _ensure_running(self, command: Sequence[str]) -> bool:
        """Starts the run unless it is already running, and returns whether it is running now."""
        if "running" in self.host_states():
            return True
        # On some hosts, the run from before an interruption may still be alive, so stop it first.
        return self.setup() and self.on_hosts(STOP) and self.start(command)

    def babysit(self, command: Sequence[str]) -> None:
        """Creates machines, installs the package, starts the run, and waits until it has ended.

        Every step is repeated if the machines are taken away.
        """
        for _ in range(self.args.max_restarts + 1):
            state = self.state()
            if state in GONE:
                self.delete()
            if state in (*GONE, "NONE") or self.args.dry_run:
                self.create()
            if not self.wait():
                continue
            if not self._ensure_running(command):
                continue
            outcome = self.watch()
            if outcome == "interrupted":
                continue
            if outcome != "finished":
                self.call(self.ssh("0", "0", "tail -n 20 synthesizer_jax/run.log"))
            if self.args.delete_at_end:
                self.delete()
            if outcome == "finished":
                return
            fail(f"The run ended with exit code {outcome}. The end of its log is above.")
        fail(
            f"{self.args.name} was interrupted more often than --max-restarts "
            f"({self.args.max_restarts})."
        )


def options_of(command: Sequence[str]) -> dict[str, str]:
    """Returns the values of a command's options and of the fields that `--set` sets, by name.

    The command may contain ``NAME=VALUE`` or the two words ``NAME VALUE``.
    """
    words = [word.removeprefix("--set=") for word in command]
    values = {}
    for word, next_word in zip(words, [*words[1:], ""], strict=True):
        name, _, value = word.partition("=")
        values[name] = value or next_word
    return values


def check_data(command: Sequence[str], extras: str) -> None:
    """Checks that machines with the given optional packages can read a command's data."""
    prepares = command[0] in ("quickstart", "data")
    reads = command[0] in READS_DATA and "--data-dir" not in options_of(command)
    if (prepares or reads) and "data" not in extras.split(","):
        problem = (
            f"{command[0]} would prepare data on the machines, which needs --extras {extras},data."
        )
        if not prepares:
            problem += " You can also give a --data-dir with prepared data (see docs/pods.md)."
        fail(problem)


def check_command(command: Sequence[str], extras: str) -> None:
    """Checks a command's directories, data, recipe and fields before any machine costs money."""
    for name, place in options_of(command).items():
        if name in ("--workdir", "--data-dir", "vocabulary.path") and not place.startswith("gs://"):
            fail(f"{name} is {place}, which is deleted with the machines. Give gs://BUCKET/….")
    check_data(command, extras)
    if command[0] == "train" and shutil.which("synthesizer-jax"):
        # Keep every option --set together with the word after it.
        settings = [w for i, w in enumerate(command) if "--set" in (w, command[i - 1])]
        checked = ["synthesizer-jax", "recipes", command[1], *settings]
        if subprocess.run(checked, stdout=subprocess.DEVNULL, check=False).returncode:
            sys.exit(2)  # the subprocess has printed the error


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = ("create", "setup", "train", "run", "status", "logs", "stop", "delete", "babysit")
    parser.add_argument("action", choices=actions)
    parser.add_argument("--name", required=True, help="The name of the request and its machines.")
    parser.add_argument("--zone", required=True, help="The zone, such as us-east5-b.")
    parser.add_argument("--project", help="The project. The default is gcloud's project.")
    parser.add_argument(
        "--type", help="The size of a slice, such as v6e-16, or its topology, such as v6e:4x4."
    )
    parser.add_argument("--slices", type=int, default=1, help="The number of slices of the run.")
    tier = parser.add_mutually_exclusive_group()
    tier.add_argument(
        "--spot", action="store_true", help="Use cheap machines that can be taken away."
    )
    tier.add_argument("--reserved", action="store_true", help="Use the project's reservation.")
    parser.add_argument(
        "--version", help="The software of the machines. The default depends on --type."
    )
    parser.add_argument(
        "--gcloud",
        action="append",
        default=[],
        help="An option of gcloud's command create. Repeatable.",
    )
    parser.add_argument(
        "--alpha",
        action="store_true",
        help="Create the machines with gcloud alpha, which has more options.",
    )
    parser.add_argument(
        "--extras", default="train,gcs,tpu", help="The extras of the package to install."
    )
    parser.add_argument("--flags", help="LIBTPU_INIT_ARGS of the run. docs/pods.md lists some.")
    parser.add_argument(
        "--tunnel-through-iap", action="store_true", help="Connect to hosts through a tunnel."
    )
    parser.add_argument(
        "--max-restarts", type=int, default=100, help="How often babysit restarts the run."
    )
    parser.add_argument(
        "--delete-at-end", action="store_true", help="Let babysit delete the machines at the end."
    )
    parser.add_argument(
        "--poll", type=float, default=30, help="The number of seconds between two checks."
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="Print the commands, and do not run them."
    )
    return parser


def parse_arguments(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the launcher's options, and the command that follows `--`."""
    end = words.index("--") if "--" in words else len(words)
    args = make_parser().parse_args(words[:end])
    if not re.fullmatch("[a-z]+-[a-z]+[0-9]+-[a-z]", args.zone):
        fail(
            f"--zone is {args.zone}, but a zone consists of a region and a letter, such as "
            "us-east5-b."
        )
    if not re.fullmatch("[a-z]([-a-z0-9]{0,61}[a-z0-9])?", args.name):
        fail(
            f"--name is {args.name}, which Google Cloud does not accept. Use up to 63 lowercase "
            "letters, digits and hyphens, begin with a letter, and do not end with a hyphen."
        )
    flex = next((option for option in args.gcloud if "flex-start" in option), None)
    if flex is not None and not args.alpha:
        fail(f"--gcloud={flex} is an option of gcloud alpha. Add --alpha.")
    if flex is not None and (args.spot or args.reserved):
        fail(f"--gcloud={flex} cannot be combined with --spot or --reserved. Leave them out.")
    command = list(words[end + 1 :])
    if args.action in ("train", "run", "babysit"):
        if args.action != "run":
            command = ["train", *command]
        if len(command) < 2:
            fail(f"{args.action} needs the arguments of the program after --.")
        check_command(command, args.extras)
    elif command:
        fail(f"{args.action} takes no arguments after --.")
    return args, command


def main() -> None:
    """Runs the action that the command line names."""
    args, command = parse_arguments(sys.argv[1:])
    pod = Pod(args)
    if args.action == "create":
        pod.create()
        pod.wait()
    elif args.action == "babysit":
        pod.babysit(command)
    elif args.action == "delete":
        pod.delete()
    elif args.action == "status":
        print(f"{args.name} {pod.state()}", *pod.host_states(), sep="\n")
    elif args.action == "logs":
        pod.call(pod.ssh("0", "0", "tail -n 100 -F synthesizer_jax/run.log"))
    else:
        done = {
            "setup": pod.setup,
            "stop": lambda: pod.on_hosts(STOP),
            "train": lambda: pod.start(command),
            "run": lambda: pod.start(command),
        }[args.action]()
        if not done:
            fail(f"{args.action} did not succeed on every host. launch.py status shows the hosts.")


if __name__ == "__main__":
    main()
