"""What stands in for gcloud, kubectl, xpk and SLURM in the tests of `tpu_scripts/`.

Every program records its call. What it answers is scripted: a file named after the question holds one
answer a line, the last of which stays. A `World` with a `home` runs what ssh is asked to run there.
"""

import os
import pathlib
import shlex
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tpu_scripts"
LAUNCH = SCRIPTS / "launch"

PROGRAM = r"""#!/usr/bin/env bash
me=$(basename "$0")
{ printf '%q ' "$me" "$@"; echo; } >> "$WORLD/calls"

answer() {
  local file=$WORLD/$1 line
  [[ -s $file ]] || { echo "$2"; return; }
  line=$(head -n 1 "$file")
  [[ $(wc -l < "$file") -eq 1 ]] || sed -i 1d "$file"
  echo "$line"
}

unprepared() {
  echo "Could not prepare all 1 nodes, attempting to ssh into the rest." >&2
  exit 0
}

refuse() {
  echo "ERROR: (gcloud) $1" >&2
  exit "${2:-1}"
}

case "$me $*" in
  gcloud*' describe '*)
    said=$(answer describe ACTIVE)
    case $said in
      NOT_FOUND) refuse "NOT_FOUND: Resource was not found" ;;
      BROKEN) refuse "the network is down" ;;
    esac
    echo "$said"
    ;;
  gcloud*' tpu-vm list '*) answer list READY ;;
  gcloud*' create '*)
    [[ $(answer create granted) == granted ]] || refuse "RESOURCE_EXHAUSTED: Quota exceeded for TPUs"
    ;;
  gcloud*' delete '*) [[ $(answer delete deleted) == deleted ]] || refuse "the resource is busy" ;;
  gcloud*' scp '*)
    [[ $(answer scp accepted) == accepted ]] || refuse "Connection refused" 255
    [[ ! -d $WORLD/home ]] || cp "$5" "$WORLD/home/${6#*:}"
    ;;
  gcloud*' ssh '*)
    command=${!#}
    command=${command#--command=}
    if [[ -d $WORLD/home ]]; then
      cd "$WORLD/home" && exec bash -c "$command"
    elif [[ $command == *'host status' ]]; then
      said=$(answer status 'run t1v-0 0')
      case $said in
        refused) refuse "Connection refused" 255 ;;
        unprepared) unprepared ;;
      esac
      tr ';' '\n' <<< "$said"
    else
      case $(answer ssh accepted) in
        refused) refuse "Connection refused" 255 ;;
        unprepared) unprepared ;;
      esac
    fi
    ;;
  kubectl*) cat > "$WORLD/applied" ;;
  srun*) exit "$(answer srun 0)" ;;
esac
"""
NAMES = ("gcloud", "kubectl", "xpk", "sbatch", "srun", "scontrol")


class World:
    """A machine with the programs above."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        for name in NAMES:
            self.program(name, PROGRAM)
        self.program("synthesizer-jax", "#!/bin/sh\n")  # starting the program itself takes seconds

    def program(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def answers(self, question: str, *lines: str) -> None:
        (self.folder / question).write_text("".join(f"{line}\n" for line in lines))

    def environment(self, **more: str) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("MEGASCALE_", "JOBSET_", "JAX_", "XLA_", "LIBTPU_"))
        }
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return {**kept, "PATH": path, "WORLD": str(self.folder), **more}

    def run(self, *command, cwd=ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(word) for word in command],
            cwd=cwd,
            env=self.environment(**environment),
            capture_output=True,
            text=True,
            timeout=120,
        )

    def launch(self, action: str, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run(LAUNCH, action, *words)

    def calls(self) -> list[list[str]]:
        """Every call so far, oldest first."""
        record = self.folder / "calls"
        return (
            [shlex.split(line) for line in record.read_text().splitlines()]
            if record.exists()
            else []
        )

    def story(self) -> list[str]:
        """The calls that change something, in short: create, scp, host setup, host run, delete."""
        told = []
        for call in self.calls():
            verb = next(
                word for word in call[3:] if not word.endswith(("tpus", "queued-resources"))
            )
            if verb == "ssh":
                command = call[-1].removeprefix("--command=")
                verb = command.rpartition("tpu_scripts/")[2] if "host" in command else command
                verb = " ".join(verb.split()[:2])
            if verb not in ("describe", "tpu-vm", "host status"):
                told.append(verb)
        return told
