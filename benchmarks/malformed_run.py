"""The good run of `malformed.py`, and what it gives, read with JSON and Orbax alone."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
from malformed_cases import RECIPE, Said, good

STEPS, MORE = 6, 8
"""The run's, with checkpoints of the last two, and how far it is continued."""

TEXT = "the dog sleeps well"


@dataclasses.dataclass
class Run:
    """A run of `reliability_run.py`, continued and read while nothing is damaged.

    Attributes:
      data: the data directory.
      run: its directory.
      continued: a copy of it that went on.
      generated: what `generate` says, by step.
      evaluated: what `eval` writes, by step.
    """

    data: pathlib.Path
    run: pathlib.Path
    continued: pathlib.Path
    generated: dict[int, str]
    evaluated: dict[int, Any]


def make(place: pathlib.Path) -> Run:
    """Trains the run, continues a copy of it, and reads both checkpoints."""
    from synthesizer_jax.data import embedded

    data, run, continued = place / "data", place / "run", place / "continued"
    embedded.prepare(data)
    good(train(run, data, STEPS))
    shutil.rmtree(run / "evaluation")
    shutil.copytree(run, continued)
    good(train(continued, data, MORE))
    found = Run(data, run, continued, {}, {})
    for step in (STEPS - 1, STEPS):
        found.generated[step] = good(generate(run, "--step", str(step))).out
        good(evaluate(run, data, "--step", str(step)))
        found.evaluated[step] = evaluation(run, step)
    if len(set(found.generated.values())) < 2:
        raise SystemExit("the two checkpoints give one answer, so that they cannot be told apart")
    shutil.rmtree(run / "evaluation")
    return found


def train(workdir: pathlib.Path, data: pathlib.Path, steps: int, *settings: str) -> list[str]:
    """The command that trains, or continues, the run."""
    always = (f"training.steps={steps}", "mesh.fsdp=1", "training.save_every=5")
    # So large that every step gives another answer.
    always += ("training.optimizer.learning_rate.value=0.05",)
    command = ["train", str(RECIPE), "--workdir", str(workdir), "--data-dir", str(data), "--quiet"]
    return command + [word for setting in (*always, *settings) for word in ("--set", setting)]


def generate(workdir: pathlib.Path, *options: str) -> list[str]:
    """The command that decodes one text."""
    return ["generate", "--workdir", str(workdir), *options, TEXT]


def evaluate(workdir: pathlib.Path, data: pathlib.Path, *options: str) -> list[str]:
    """The command that evaluates."""
    return ["eval", "--workdir", str(workdir), "--data-dir", str(data), *options]


def evaluation(workdir: pathlib.Path, step: int) -> Any:
    """What `eval` has written of a step."""
    path = workdir / "evaluation" / f"step_{step}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def evaluated_step(said: Said) -> int:
    """The step that `eval` says it has evaluated."""
    found = re.search(r"^step ([\d,]+)", said.out, re.MULTILINE)
    if found is None:
        raise ValueError("eval names no step")
    return int(found[1].replace(",", ""))


def records(path: pathlib.Path, kind: str = "train") -> list[tuple[int, float, float]]:
    """Step, loss and checksum of the data of a metrics file's lines."""
    lines = path.read_bytes().split(b"\n")
    found = [r for line in lines if isinstance(r := parsed(line), dict) and r.get("kind") == kind]
    return [(r["step"], r["loss"], r.get("data_checksum", 0)) for r in found]


def parsed(line: bytes) -> Any:
    """A line's JSON; None where it is none."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(line)


def same_arrays(one: pathlib.Path, other: pathlib.Path) -> bool:
    """Whether two checkpoints hold equal arrays."""
    import jax

    mine, theirs = (jax.tree.leaves(arrays(path)) for path in (one, other))
    return len(mine) == len(theirs) and all(map(np.array_equal, mine, theirs))


def arrays(checkpoint: pathlib.Path) -> Any:
    """A checkpoint's arrays, as Orbax alone reads them."""
    import jax
    import orbax.checkpoint as ocp

    handler = ocp.PyTreeCheckpointHandler()
    tree = handler.metadata(checkpoint / "state").tree
    wanted = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    return handler.restore(checkpoint / "state", args=ocp.args.PyTreeRestore(restore_args=wanted))


def wrong_continuation(run: Run, workdir: pathlib.Path) -> str | None:
    """What of a continued run is not as in the undisturbed one; its log before it is not looked at."""
    mine, theirs = (records(w / "metrics.jsonl") for w in (workdir, run.continued))
    if mine[-(MORE - STEPS) :] != theirs[-(MORE - STEPS) :]:
        return f"the last steps are {mine[-2:]}, not {theirs[-2:]}"
    last = pathlib.Path("checkpoints", str(MORE))
    return None if same_arrays(workdir / last, run.continued / last) else "other parameters"


def copies(source: pathlib.Path, place: pathlib.Path, count: int) -> Iterator[pathlib.Path]:
    """So many copies of a directory, one after the other, each in a place that no cache knows."""
    for number in range(count):
        copy = place / f"attempt-{number}" / source.name
        shutil.copytree(source, copy)
        yield copy
        shutil.rmtree(copy.parent)
