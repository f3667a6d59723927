"""The undamaged run of `malformed.py` and its results, read with JSON and Orbax only."""

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
from malformed_cases import RECIPE, CommandResult, run_checked

STEPS, MORE = 6, 8
"""The steps of the run, whose last two have checkpoints, and of its continuation."""

TEXT = "the dog sleeps well"


@dataclasses.dataclass
class Run:
    """A run of `reliability_run.py`, with the results of the commands on it.

    Attributes:
      data: the data directory.
      run: the run's directory.
      continued: directory of a copy that is continued.
      generated: the output of `generate`, by step.
      evaluated: the results of `eval`, by step.
    """

    data: pathlib.Path
    run: pathlib.Path
    continued: pathlib.Path
    generated: dict[int, str]
    evaluated: dict[int, Any]


def make_run(directory: pathlib.Path) -> Run:
    """Trains the run, continues a copy of it, and evaluates both checkpoints."""
    from synthesizer_jax.tasks import synthetic

    data, run, continued = directory / "data", directory / "run", directory / "continued"
    synthetic.prepare(data)
    run_checked(train(run, data, STEPS))
    shutil.rmtree(run / "evaluation")
    shutil.copytree(run, continued)
    run_checked(train(continued, data, MORE))
    run_with_results = Run(data, run, continued, {}, {})
    for step in (STEPS - 1, STEPS):
        run_with_results.generated[step] = run_checked(generate(run, "--step", str(step))).out
        run_checked(evaluate(run, data, "--step", str(step)))
        run_with_results.evaluated[step] = evaluation(run, step)
    if len(set(run_with_results.generated.values())) < 2:
        raise SystemExit(
            "the two checkpoints give the same output, so they cannot be distinguished"
        )
    shutil.rmtree(run / "evaluation")
    return run_with_results


def train(workdir: pathlib.Path, data: pathlib.Path, steps: int, *settings: str) -> list[str]:
    """The command that trains or continues the run."""
    common_settings = (f"training.steps={steps}", "mesh.fsdp=1", "training.save_every=5")
    # A large learning rate, so that the output changes with every step.
    common_settings += ("training.optimizer.learning_rate.value=0.05",)
    command = ["train", str(RECIPE), "--workdir", str(workdir), "--data-dir", str(data), "--quiet"]
    return command + [
        argument for setting in (*common_settings, *settings) for argument in ("--set", setting)
    ]


def generate(workdir: pathlib.Path, *options: str) -> list[str]:
    """The command that decodes an example."""
    return ["generate", "--workdir", str(workdir), *options, TEXT]


def evaluate(workdir: pathlib.Path, data: pathlib.Path, *options: str) -> list[str]:
    """The command that evaluates."""
    return ["eval", "--workdir", str(workdir), "--data-dir", str(data), *options]


def evaluation(workdir: pathlib.Path, step: int) -> Any:
    """The results of `eval` for a step."""
    path = workdir / "evaluation" / str(step) / "results.json"
    return json.loads(path.read_text(encoding="utf-8"))


def evaluated_step(result: CommandResult) -> int:
    """The step that the output of `eval` names."""
    match = re.search(r"^step ([\d,]+)", result.out, re.MULTILINE)
    if match is None:
        raise ValueError("eval names no step")
    return int(match[1].replace(",", ""))


def read_records(path: pathlib.Path, kind: str = "train") -> list[tuple[int, float, float]]:
    """The step, loss and data checksum of every line of a metrics file."""
    lines = path.read_bytes().split(b"\n")
    records = [
        r for line in lines if isinstance(r := parse_line(line), dict) and r.get("kind") == kind
    ]
    return [(r["step"], r["loss"], r.get("data_checksum", 0)) for r in records]


def parse_line(line: bytes) -> Any:
    """Parses a line of JSON; None if it is invalid."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(line)


def same_arrays(path: pathlib.Path, other_path: pathlib.Path) -> bool:
    """Whether two checkpoints contain equal arrays."""
    import jax

    arrays, other_arrays = (jax.tree.leaves(read_arrays(p)) for p in (path, other_path))
    return len(arrays) == len(other_arrays) and all(map(np.array_equal, arrays, other_arrays))


def read_arrays(checkpoint: pathlib.Path) -> Any:
    """Reads the arrays of a checkpoint with Orbax."""
    import jax
    import orbax.checkpoint as ocp

    handler = ocp.PyTreeCheckpointHandler()
    tree = handler.metadata(checkpoint / "state").tree
    restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    return handler.restore(
        checkpoint / "state", args=ocp.args.PyTreeRestore(restore_args=restore_args)
    )


def wrong_continuation(run: Run, workdir: pathlib.Path) -> str | None:
    """A difference between the continuation and that of the undamaged run; None if there is none."""
    records, expected = (read_records(w / "metrics.jsonl") for w in (workdir, run.continued))
    if records[-(MORE - STEPS) :] != expected[-(MORE - STEPS) :]:
        return f"the last steps are {records[-2:]}, not {expected[-2:]}"
    last = pathlib.Path("checkpoints", str(MORE))
    return None if same_arrays(workdir / last, run.continued / last) else "other parameters"


def copies(source: pathlib.Path, directory: pathlib.Path, count: int) -> Iterator[pathlib.Path]:
    """Yields copies of a directory, one at a time, each under a new path, so that no cache applies."""
    for number in range(count):
        copy = directory / f"attempt-{number}" / source.name
        shutil.copytree(source, copy)
        yield copy
        shutil.rmtree(copy.parent)
