"""Damages input files of commands at random, and checks how the commands handle them.

    python benchmarks/fuzz.py --seed 1 --attempts 500 --page docs/reliability.md

The script first makes the inputs: a small run, its data, two folders in the format of transformers,
and a file with rows of data. Each attempt copies the inputs and damages one file, either some of
its bytes or one JSON value. Then it runs the command that reads the file in the same process. Some
attempts pass a random `--set` to a command instead of damaging a file. An attempt has one of three
outcomes:

- *error*: the command fails with one line that names the file or the field, and changes nothing.
- *accepted*: the command succeeds.
- *wrong*: the command behaves in any other way. For example, it prints a traceback, prints an error
  that names neither the file nor the field, returns an unexpected exit code, hangs, or fails after
  changing a file. Wrong attempts are printed.
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
# Cache compiled programs of any size, so that every program is compiled only once.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import report

SECONDS = 120
"""The time limit of a command in seconds."""

VALUES = (
    "-1",
    "0",
    "0.5",
    "1e400",
    "nan",
    "null",
    "true",
    "''",
    "[]",
    "{}",
    "[[1,2]]",
    "(1,)",
    "2147483648",
    "1" * 5000,
    "x" * 100,
    "\x1b[31m",
    "../..",
    '{"type":"Nobody"}',
)
"""The values to which fields are set."""

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
    "tokenizer": ("pile_t5/tokenizer*.json", ["convert", "{}/pile_t5", "{}/converted"]),
    "settings": ("", [*TRAIN, "{}/other"]),
}
"""Maps each kind of input to the pattern of its files and the command that reads them.

``{}`` stands for the directory of all inputs.
"""


class HangError(BaseException):
    """Raised after the time limit.

    The class is derived from `BaseException`, so that commands do not catch the error.
    """


def main() -> None:
    """Runs all attempts and writes the table."""
    parser = report.arguments(__doc__, seed=0, attempts=200)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    args = parser.parse_args()
    counts = {kind: collections.Counter(error=0, accepted=0, wrong=0) for kind in args.kinds}
    lines = []
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        root = pathlib.Path(name)
        # This variable must be set before JAX is imported.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(root / "compiled")
        inputs = make_inputs(root / "inputs")
        for number in range(args.attempts):
            kind = args.kinds[number % len(args.kinds)]
            rng = random.Random(f"{args.seed} {kind} {number}")
            shutil.copytree(inputs, root / "copy")
            damage, outcome, line = attempt(*KINDS[kind], root / "copy", rng)
            shutil.rmtree(root / "copy")
            with contextlib.redirect_stderr(io.StringIO()):
                gc.collect()  # otherwise, Orbax's coroutines would print errors later
            lines.append(f"{kind} {number}: {damage}: {outcome}: {line}")
            counts[kind][outcome if outcome in counts[kind] else "wrong"] += 1
            if outcome not in counts[kind]:
                print(lines[-1], file=sys.stderr, flush=True)
    outcomes = ("error", "accepted", "wrong")
    columns = {"kind": "input", **{name: f"{name}|d" for name in outcomes}}
    section = report.table([{"kind": kind, **found} for kind, found in counts.items()], columns)
    report.write("fuzz", section, result={"attempts": lines}, options=args, facts=report.machine())
    wrong = sum(found["wrong"] for found in counts.values())
    if wrong:
        raise SystemExit(f"{wrong} of {args.attempts} attempts went wrong.")


def make_inputs(directory: pathlib.Path) -> pathlib.Path:
    """Makes the undamaged inputs in a directory, and returns the directory."""
    rows = [{"text": f"the film number {i}", "label": ("bad", "good")[i % 2]} for i in range(40)]
    directory.mkdir(parents=True)
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
    from tests.pretrained.folders import FAMILIES, TINY, make_folder, make_tensors
    from tests.pretrained.tokenizers import write_tokenizer

    config = TINY | FAMILIES["T5 1.1, FLAN-T5"]
    make_folder(directory / "folder", config, make_tensors(config))
    # Pile-T5 is a umT5 with the tokenizer of LLaMA.
    config = TINY | FAMILIES["umT5"] | {"vocab_size": 640, "eos_token_id": 2}
    make_folder(directory / "pile_t5", config, make_tensors(config))
    write_tokenizer(directory / "pile_t5", "LLaMA")
    for kind in ("logs", "data"):
        code, errors = call(KINDS[kind][1], directory, 5 * SECONDS)
        if code:
            raise SystemExit(f"A command failed with undamaged inputs ({code}): {errors}")
    return directory


def attempt(
    pattern: str, command: list[str], directory: pathlib.Path, rng: random.Random
) -> tuple[str, str, str]:
    """Damages an input and runs the command that reads it.

    Args:
      pattern: a glob pattern. One of the matching files is damaged. If the pattern is empty, a
        random `--set` is passed to the command instead.
      command: the command.
      directory: the directory of all inputs.
      rng: the generator of the attempt's random choices.

    Returns:
      A description of the damage, the outcome, and the last line of the command's error output.
    """
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
        # Error messages show the value as `repr` does, with unprintable characters escaped.
        places = [*field.split(".")[-2:], repr(value)[1:-1][:100]]
    before = contents(directory)
    code, errors = call(command, directory)
    lines = [line[:300] for line in errors.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    if code == 0:
        return damage, "accepted", last
    if code != 2 or not last.startswith("error: ") or "Traceback" in errors:
        return damage, f"exit code {code}", last
    if not any(place in last for place in places):
        return damage, "an error without a place", last
    if contents(directory) != before:
        return damage, "something has changed", last
    return damage, "error", last


def draw_path(directory: pathlib.Path, rng: random.Random) -> str:
    """Returns the path of a random field of the experiment."""
    value = json.loads((directory / "run" / "experiment.json").read_text())
    path: list[str] = []
    while isinstance(value, dict | list) and value and (not path or rng.random() < 0.8):
        key = rng.choice(sorted(value) if isinstance(value, dict) else range(len(value)))
        path, value = [*path, str(key)], value[key]
    return ".".join(path)


def contents(directory: pathlib.Path) -> dict[pathlib.Path, bytes]:
    """Returns the contents of all files that must not change when a command fails.

    Logs may grow and lock files may remain, so they are left out.
    """
    files = (p for p in directory.rglob("*") if p.is_file() and p.suffix not in (".lock", ".jsonl"))
    return {path: path.read_bytes() for path in files}


def call(
    command: list[str], directory: pathlib.Path, seconds: int = SECONDS
) -> tuple[int | str, str]:
    """Runs `synthesizer-jax` in this process.

    Returns:
      The exit code, or ``hang`` if the time limit was exceeded, and the command's error output.
    """
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
    """Raises a `HangError` when the signal for the time limit arrives."""
    raise HangError


def damage_file(path: pathlib.Path, rng: random.Random) -> str:
    """Damages a file in place, and returns the kind of damage."""
    data = path.read_bytes()
    kinds = [*BYTES, damage_json] if path.suffix == ".json" else [*BYTES]
    chosen = rng.choice(kinds)
    path.write_bytes(chosen(data, rng))
    return chosen.__name__


def truncate(data: bytes, rng: random.Random) -> bytes:
    """Returns only the beginning of the data."""
    return data[: rng.randrange(len(data))]


def flip_bit(data: bytes, rng: random.Random) -> bytes:
    """Returns the data with one bit flipped."""
    index = rng.randrange(len(data))
    return data[:index] + bytes([data[index] ^ 1 << rng.randrange(8)]) + data[index + 1 :]


def replace_block(data: bytes, rng: random.Random) -> bytes:
    """Returns the data after zeroing, randomizing, deleting or duplicating a block."""
    start = rng.randrange(len(data))
    block = data[start : start + rng.choice([1, 8, 512])]
    new = rng.choice([bytes(len(block)), rng.randbytes(8), b"", block * 2])
    return data[:start] + new + data[start + len(block) :]


def damage_json(data: bytes, rng: random.Random) -> bytes:
    """Returns JSON with one value replaced or removed, at any depth."""
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
    """Yields a pair ``(container, key)`` for every value in JSON."""
    if isinstance(value, dict | list):
        for key, child in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield value, key
            yield from iterate_places(child)


BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (truncate, flip_bit, replace_block)
"""The kinds of damage that any file can have."""


if __name__ == "__main__":
    main()
