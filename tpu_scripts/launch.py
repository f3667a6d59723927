#!/usr/bin/env python3
"""Cloud TPU machines from nothing to a run that outlives preemption, and back to zero cost.

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

`babysit` does all of it, again after every preemption, until the run has ended. `train` and `run` return
when the program has started on every host; it goes on when you log out. `stop` lets a run save; the same
`train` continues it. What follows `--` goes to `synthesizer-jax train`, after `run` to `synthesizer-jax`.
Data is prepared and uploaded before. Every host's log is copied to logs/ in --workdir.
--dry-run prints the commands instead of running them. docs/pods.md tells the whole way.
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
"""States of a request whose machines will not come back."""

SOFTWARE = {"v5e": "v2-alpha-tpuv5-lite", "v5p": "v2-alpha-tpuv5", "v6e": "v2-alpha-tpuv6e"}
"""The machines' software by generation; others have `tpu-ubuntu2204-base`."""

INTERRUPTED = ("75", "143", "idle")
"""How a host tells that its run is to be started again: saved, ended before it began, or lost."""

READS_DATA = ("train", "distill", "eval", "predict", "inspect")
"""The program's commands that prepare what is missing of their data."""

# On every host. A run holds run.lock as long as it lives, and then writes its exit code to
# run.exit.
SETUP = """
set -e
mkdir -p synthesizer_jax && tar -xzf synthesizer_jax.tar.gz -C synthesizer_jax && cd synthesizer_jax
python3 -m pip install --quiet --user uv
[ -x .venv/bin/python ] || python3 -m uv venv --quiet --seed --python 3.11 .venv
.venv/bin/python -m pip install --quiet -c constraints.txt '.[{extras}]'
"""
RUN = """
cd synthesizer_jax && exec 9>> run.lock && flock -n 9 || {{ echo "a run is going on"; exit 1; }}
rm -f run.exit
{flags}setsid nohup sh -c '"$0" "$@"; echo $? > run.exit' \
"$PWD"/.venv/bin/synthesizer-jax {command} >> run.log 2>&1 < /dev/null &
"""
# Copies the log every minute, and when the run has ended; not even a preemption's SIGTERM ends it
# before.
KEEP_LOG = """
setsid nohup sh -c 'trap "" TERM; keep() { .venv/bin/python -c "$0" run.log "$1/$(hostname).log"; }
until flock -w 60 run.lock true; do keep "$1"; done; keep "$1"' \
'import sys; from etils.epath import Path; Path(sys.argv[2]).write_bytes(Path(sys.argv[1]).read_bytes())' \
LOGS > /dev/null 2>&1 < /dev/null 9>&- &
"""
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
    """Ends the program with a sentence."""
    sys.exit(f"error: {message}")


class Pod:
    """A queued resource and its machines.

    Args:
      args: the command line's.
    """

    def __init__(self, args: argparse.Namespace):
        self.args = args
        project = [f"--project={args.project}"] if args.project else []
        self.place = [f"--zone={args.zone}", *project]
        self.reach = [*self.place, *(["--tunnel-through-iap"] if args.tunnel_through_iap else [])]

    def call(self, command: Sequence[str], *, tries: int = 1) -> bool:
        """Runs a command, or prints it; new machines refuse the first connections."""
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
        """Returns the command that runs a script on hosts."""
        where = [f"--node={node}", f"--worker={worker}", f"--command={script.strip()}"]
        return [*GCLOUD, "ssh", self.args.name, *self.reach, *where]

    def create(self) -> None:
        """Asks for the machines."""
        args = self.args
        if not args.type:
            fail("give --type, such as v6e-16")
        chips = CHECKOUT / "synthesizer_jax" / "costs" / "chips.py"
        question = [sys.executable, "-I", str(chips), args.type]
        found = subprocess.run(question, stdout=subprocess.PIPE, text=True, check=False)
        if found.returncode:
            sys.exit(found.returncode)  # it has said which sizes there are
        chip, kind, topology, _, usual = found.stdout.split()
        if chip == "tpu7x":
            fail("TPU7x exists on GKE alone; see docs/pods.md")
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
                f"{args.name} was not created; if gcloud speaks of quota, ask for more under IAM & "
                "Admin, Quotas (--spot and flex-start use the preemptible quota), or take another "
                "--zone, --type or --spot"
            )

    def state(self) -> str:
        """Returns the state of the request, or NONE; where a machine is gone it is SUSPENDED."""
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
        """Waits for the machines; returns whether they came."""
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
        """Installs what is committed in this checkout, on every host."""
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
        """Starts a command of the program on every host."""
        flags = f"LIBTPU_INIT_ARGS={shlex.quote(self.args.flags)} " if self.args.flags else ""
        script = RUN.format(flags=flags, command=shlex.join(command))
        if workdir := options_of(command).get("--workdir"):
            script += KEEP_LOG.strip().replace("LOGS", shlex.quote(f"{workdir}/logs"))
        return self.on_hosts(script)

    def host_states(self) -> list[str]:
        """Returns what each host says of its run: running, idle or an exit code; empty: not reached."""
        if self.args.dry_run:
            self.on_hosts(STATUS)
            return ["0"]
        command = self.ssh("all", "all", STATUS)
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        return re.findall(r"^run \S+ (\S+)$", answer.stdout, re.MULTILINE)

    def watch(self) -> str:
        """Follows a run; returns "finished", "interrupted", or the exit code of a host that failed."""
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
            # Machines that are being taken away make runs crash first, so a failure counts when it
            # stays.
            failures, silences = (failures + 1 if failed else 0), (0 if states else silences + 1)
            if failures == 3:
                return failed[0]
            time.sleep(self.args.poll)

    def delete(self) -> None:
        """Gives the machines back."""
        command = [*GCLOUD, "delete", self.args.name, *self.place, "--force", "--quiet"]
        if not self.call(command, tries=3):
            fail(f"{self.args.name} is not deleted and costs money; run launch.py delete again")

    def babysit(self, command: Sequence[str]) -> None:
        """Keeps a run going until it has ended: machines, installation, run, and all of it again."""
        for _ in range(self.args.max_restarts + 1):
            if (state := self.state()) in GONE:
                self.delete()
            if state in (*GONE, "NONE") or self.args.dry_run:
                self.create()
            if not self.wait():
                continue
            if "running" not in self.host_states() and not (
                self.setup() and self.on_hosts(STOP) and self.start(command)
            ):
                continue
            outcome = self.watch()
            if outcome != "interrupted":
                if outcome != "finished":
                    self.call(self.ssh("0", "0", "tail -n 20 synthesizer_jax/run.log"))
                if self.args.delete_at_end:
                    self.delete()
                if outcome == "finished":
                    return
                fail(f"the run ended with exit code {outcome}; its log is above")
        fail(
            f"{self.args.name} was interrupted more often than --max-restarts "
            f"{self.args.max_restarts}"
        )


def options_of(command: Sequence[str]) -> dict[str, str]:
    """Returns the options of a command, and what it sets, by name."""
    words = [word.removeprefix("--set=") for word in command]
    pairs = zip(words, [*words[1:], ""], strict=True)
    return {w.partition("=")[0]: w.partition("=")[2] or following for w, following in pairs}


def check_data(command: Sequence[str], extras: str) -> None:
    """Checks that machines with some extras of the package can read the data of a command."""
    prepares = command[0] in ("quickstart", "data")
    reads = command[0] in READS_DATA and "--data-dir" not in options_of(command)
    if (prepares or reads) and "data" not in extras.split(","):
        fail(
            f"{command[0]} would prepare data, which needs --extras {extras},data"
            f"{'' if prepares else '; or give --data-dir with prepared data, see docs/pods.md'}"
        )


def check_command(command: Sequence[str], extras: str) -> None:
    """Checks what costs money later: places that outlive the machines, data, recipe and fields."""
    for name, place in options_of(command).items():
        if name in ("--workdir", "--data-dir", "vocabulary.path") and not place.startswith("gs://"):
            fail(f"{name} {place} goes away with the machines; give gs://BUCKET/…")
    check_data(command, extras)
    if command[0] == "train" and shutil.which("synthesizer-jax"):
        settings = [w for i, w in enumerate(command) if "--set" in (w, command[i - 1])]
        checked = ["synthesizer-jax", "recipes", command[1], *settings]
        if subprocess.run(checked, stdout=subprocess.DEVNULL, check=False).returncode:
            sys.exit(2)  # it has said what is wrong


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = ("create", "setup", "train", "run", "status", "logs", "stop", "delete", "babysit")
    parser.add_argument("action", choices=actions)
    parser.add_argument("--name", required=True, help="of the request and its machines")
    parser.add_argument("--zone", required=True, help="such as us-east5-b")
    parser.add_argument("--project", help="by default the one of gcloud's configuration")
    parser.add_argument("--type", help="v6e-16, or by its chips, v6e:4x4")
    parser.add_argument("--slices", type=int, default=1, help="several slices as one run")
    tier = parser.add_mutually_exclusive_group()
    tier.add_argument("--spot", action="store_true", help="cheap, may be taken away")
    tier.add_argument("--reserved", action="store_true", help="of the project's reservation")
    parser.add_argument("--version", help="the machines' software; by default the one for --type")
    parser.add_argument("--gcloud", action="append", default=[], help="of its create; repeatable")
    parser.add_argument("--alpha", action="store_true", help="ask by gcloud alpha, for its options")
    parser.add_argument("--extras", default="train,gcs,tpu", help="of the package, to install")
    parser.add_argument("--flags", help="LIBTPU_INIT_ARGS of the run; docs/pods.md has some")
    parser.add_argument("--tunnel-through-iap", action="store_true", help="reach the hosts so")
    parser.add_argument("--max-restarts", type=int, default=100, help="of babysit")
    parser.add_argument("--delete-at-end", action="store_true", help="babysit deletes the machines")
    parser.add_argument("--poll", type=float, default=30, help="seconds between two looks")
    parser.add_argument("--dry-run", action="store_true", help="print commands, run none")
    return parser


def parse_arguments(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the options, and what follows `--`."""
    end = words.index("--") if "--" in words else len(words)
    args = make_parser().parse_args(words[:end])
    if not re.fullmatch("[a-z]+-[a-z]+[0-9]+-[a-z]", args.zone):
        fail(f"--zone is {args.zone}; a zone is a region and a letter, such as us-east5-b")
    if not re.fullmatch("[a-z]([-a-z0-9]{0,61}[a-z0-9])?", args.name):
        fail(
            f"--name is {args.name}; Google Cloud takes up to 63 lowercase letters, digits and "
            "hyphens that begin with a letter and do not end with a hyphen, such as pod-1"
        )
    flex = next((option for option in args.gcloud if "flex-start" in option), None)
    if flex is not None and not args.alpha:
        fail(f"--gcloud={flex} is an option of gcloud alpha; add --alpha")
    if flex is not None and (args.spot or args.reserved):
        fail(f"--gcloud={flex} excludes --spot and --reserved; leave them out")
    command = list(words[end + 1 :])
    if args.action in ("train", "run", "babysit"):
        command = command if args.action == "run" else ["train", *command]
        if len(command) < 2:
            fail(f"{args.action} needs what the program is to do after --")
        check_command(command, args.extras)
    elif command:
        fail(f"{args.action} takes nothing after --")
    return args, command


def main() -> None:
    """Runs an action."""
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
            fail(f"{args.action} did not succeed on every host; launch.py status shows them")


if __name__ == "__main__":
    main()
