"""Damages inputs of the command line at random and checks how it handles each of them.

    python benchmarks/fuzz.py --seed 1 --attempts 500 --page docs/reliability.md

A small run, its data, an exported folder and rows of a file are made once. Each attempt damages one of
their files in a copy (bytes, or a value of JSON), or draws a `--set`, and runs the command that reads it in
this process. The command must fail with one line that names the file or the field (*error*), after which
nothing else has changed, or succeed (*accepted*). A traceback, an error without a place, another exit code,
a hang, or a file changed beside a failing command is *wrong*, and is printed.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import io
import json
import logging
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")  # compile everything once

import report

SECONDS = 120
"""Time limit of a command."""

VALUES = (
    *("-1", "0", "0.5", "1e400", "nan", "null", "true", "''", "[]", "{}", "[[1,2]]", "(1,)"),
    *("2147483648", "1" * 5000, "x" * 100, "\x1b[31m", "../..", '{"type":"Nobody"}'),
)
"""What fields are set to."""

READ_RUN = ["generate", "--workdir", "{}/run", "cola sentence: The dog sleep."]
EVALUATE = ["eval", "--workdir", "{}/run", "--data-dir", "{}/data", "--max-examples", "4"]
TRAIN = ["train", "quickstart:random_vanilla", "--quiet", "--data-dir", "{}/data"]
TRAIN += ["--set", "training.steps=2", "--set", "data.batch_size=8"]
TRAIN += ["--set", "evaluation.max_examples=4", "--workdir"]
IMPORT = ["data", "import", "mine", "--name", "reviews", "--from", "train={}/rows.jsonl"]
IMPORT += ["--input", "review: {text}", "--target", "{label}", "--labels", "bad,good"]

KINDS: dict[str, tuple[str, list[str]]] = {
    "rows": ("rows.jsonl", [*IMPORT, "--data-dir", "{}/imported"]),
    "experiment": ("run/*.json", READ_RUN),
    "checkpoint": ("run/checkpoints/**/*", READ_RUN),
    "logs": ("run/*.jsonl", [*TRAIN, "{}/run"]),
    "data": ("data/prepared/*/*/validation/*", EVALUATE),
    "vocabulary": ("run/vocabulary.model", READ_RUN),
    "pretrained": ("folder/*", ["convert", "{}/folder", "{}/converted"]),
    "settings": ("", [*TRAIN, "{}/other"]),
}
"""Patterns of damaged files and the commands that read them; ``{}`` is the directory of all inputs."""


class HangError(BaseException):
    """The time limit is exceeded; a `BaseException`, so that no handler catches it."""


def main() -> None:
    """Runs all attempts and writes the table."""
    parser = report.arguments(__doc__, seed=0, attempts=200)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    args = parser.parse_args()
    counts = {kind: collections.Counter(error=0, accepted=0, wrong=0) for kind in args.kinds}
    lines = []
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        root = pathlib.Path(name)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(root / "compiled")  # before JAX is imported
        inputs = make_inputs(root / "inputs")
        for number in range(args.attempts):
            kind = args.kinds[number % len(args.kinds)]
            rng = random.Random(f"{args.seed} {kind} {number}")
            shutil.copytree(inputs, root / "copy")
            damage, outcome, line = attempt(*KINDS[kind], root / "copy", rng)
            shutil.rmtree(root / "copy")
            with contextlib.redirect_stderr(io.StringIO()):
                gc.collect()  # Orbax's coroutines print their errors when they are collected
            lines.append(f"{kind} {number}: {damage}: {outcome}: {line}")
            counts[kind][outcome if outcome in counts[kind] else "wrong"] += 1
            if outcome not in counts[kind]:
                print(lines[-1], file=sys.stderr, flush=True)
    columns = {"kind": "input"} | {name: f"{name}|d" for name in ("error", "accepted", "wrong")}
    section = report.table([{"kind": kind, **found} for kind, found in counts.items()], columns)
    report.write("fuzz", section, result={"attempts": lines}, options=args, facts=report.machine())
    if wrong := sum(found["wrong"] for found in counts.values()):
        raise SystemExit(f"{wrong} of {args.attempts} attempts went wrong")


def make_inputs(directory: pathlib.Path) -> pathlib.Path:
    """Makes the undamaged inputs."""
    rows = [{"text": f"the film number {i}", "label": ("bad", "good")[i % 2]} for i in range(40)]
    directory.mkdir(parents=True)
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
    from tests.pretrained.folders import FAMILIES, TINY, make_folder, make_tensors

    config = TINY | FAMILIES["T5 1.1, FLAN-T5"]
    (directory / "folder").mkdir()
    make_folder(directory / "folder", config, make_tensors(config))
    for kind in ("logs", "data"):
        code, errors = call(KINDS[kind][1], directory, 5 * SECONDS)
        if code:
            raise SystemExit(f"an undamaged input ended with {code}: {errors}")
    return directory


def attempt(
    pattern: str, command: list[str], directory: pathlib.Path, rng: random.Random
) -> tuple[str, str, str]:
    """Damages an input and runs its command; returns the damage, the outcome and the last line."""
    if pattern:
        files = sorted(p for p in directory.glob(pattern) if p.is_file() and p.stat().st_size)
        path = rng.choice(files)
        damage = f"{damage_file(path, rng)} of {path.relative_to(directory)}"
        folders = [p for p in path.parents if len(p.parts) > len(directory.parts)]
        places = [path.name, *map(str, folders)]
    else:
        field, value = draw_path(directory, rng), rng.choice(VALUES)
        damage = f"{field}={value}"
        command = [*command, "--set", damage]
        places = [*field.split(".")[-2:], repr(value)[1:-1][:100]]  # an error is printable
    before = contents(directory)
    code, errors = call(command, directory)
    last = ([line[:300] for line in errors.splitlines() if line.strip()] or [""])[-1]
    if code == 0:
        return damage, "accepted", last
    if code != 2 or not last.startswith("error: ") or "Traceback" in errors:
        return damage, f"exit code {code}", last
    if not any(place in last for place in places):
        return damage, "an error without a place", last
    return damage, "error" if contents(directory) == before else "something has changed", last


def draw_path(directory: pathlib.Path, rng: random.Random) -> str:
    """Returns a random field of the experiment."""
    value = json.loads((directory / "run" / "experiment.json").read_text())
    path: list[str] = []
    while isinstance(value, dict | list) and value and (not path or rng.random() < 0.8):
        key = rng.choice(sorted(value) if isinstance(value, dict) else range(len(value)))
        path, value = [*path, str(key)], value[key]
    return ".".join(path)


def contents(directory: pathlib.Path) -> dict[pathlib.Path, bytes]:
    """Returns all files; logs of a process may grow, and locks remain."""
    files = (p for p in directory.rglob("*") if p.is_file() and p.suffix not in (".lock", ".jsonl"))
    return {path: path.read_bytes() for path in files}


def call(
    command: list[str], directory: pathlib.Path, seconds: int = SECONDS
) -> tuple[int | str, str]:
    """Runs `synthesizer-jax` in this process; returns exit code or "hang", and the errors."""
    from synthesizer_jax.cli import main as program

    errors, root = io.StringIO(), logging.getLogger()
    argv, handlers = sys.argv, root.handlers
    sys.argv = ["synthesizer-jax", *(part.replace("{}", str(directory)) for part in command)]
    root.handlers = [logging.StreamHandler(errors)]
    signal.signal(signal.SIGALRM, raise_hang)
    signal.alarm(seconds)
    code: int | str = 0
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            program.run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except HangError:
        code = "hang"
    finally:
        signal.alarm(0)
        root.handlers, sys.argv = handlers, argv
    return code, errors.getvalue()


def raise_hang(*_: Any) -> None:
    """Handles the signal that ends a command that hangs."""
    raise HangError


def damage_file(path: pathlib.Path, rng: random.Random) -> str:
    """Damages a file in place and returns how."""
    data = path.read_bytes()
    chosen = rng.choice([*BYTES, *((damage_json,) if path.suffix == ".json" else ())])
    path.write_bytes(chosen(data, rng))
    return chosen.__name__


def truncate(data: bytes, rng: random.Random) -> bytes:
    """Keeps only the beginning."""
    return data[: rng.randrange(len(data))]


def flip_bit(data: bytes, rng: random.Random) -> bytes:
    """Flips a bit."""
    index = rng.randrange(len(data))
    return data[:index] + bytes([data[index] ^ 1 << rng.randrange(8)]) + data[index + 1 :]


def replace_block(data: bytes, rng: random.Random) -> bytes:
    """Replaces a block by zeros, by random bytes, by nothing or by two of it."""
    start = rng.randrange(len(data))
    block = data[start : start + rng.choice([1, 8, 512])]
    new = rng.choice([bytes(len(block)), rng.randbytes(8), b"", block * 2])
    return data[:start] + new + data[start + len(block) :]


def damage_json(data: bytes, rng: random.Random) -> bytes:
    """Replaces or removes a value of JSON, at any depth."""
    value = json.loads(data)
    places = list(iterate_places(value))
    if not places:
        return b"[]"
    container, key = rng.choice(places)
    if rng.random() < 0.3:
        del container[key]
    else:
        container[key] = rng.choice([None, -1, 10**30, 1e-300, "", "../x", [], {}, [[]], True])
    return json.dumps(value).encode()


def iterate_places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields all containers in JSON with their keys."""
    if isinstance(value, dict | list):
        for key, child in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield value, key
            yield from iterate_places(child)


BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (truncate, flip_bit, replace_block)


if __name__ == "__main__":
    main()
