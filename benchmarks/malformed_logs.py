"""Attempts to continue, or report on, a run whose logs are damaged."""

from __future__ import annotations

import gzip
import json
import os
import pathlib
from collections.abc import Iterator

import malformed_run
from malformed_cases import BYTES, Case, CommandResult, Rng, damage_file
from malformed_run import MORE, Run, copies, parse_line

METRICS, EVENTS = "metrics.jsonl", "events.jsonl"


def cases(directory: pathlib.Path, rng: Rng, count: int) -> Iterator[Case]:
    """Yields attempts with damaged bytes, lines or files."""
    run = malformed_run.make_run(directory)
    for workdir in copies(run.run, directory, count):
        path = workdir / rng.choice([METRICS, METRICS, EVENTS])
        damage = rng.choice(
            [damage_bytes, put_line, put_line, replace_value, move_lines, replace_file]
        )
        name = f"{path.name}: {damage(path, rng)}"
        reader = report_case if rng.random() < 0.25 else continue_case
        yield reader(run, workdir, name)


def continue_case(run: Run, workdir: pathlib.Path, name: str) -> Case:
    """Continues the run; readable lines of its log must be preserved."""
    path = workdir / METRICS
    before = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []

    def check(result: CommandResult) -> str | None:
        written = path.read_bytes().split(b"\n")
        lost = [line for line in before if line not in written and is_original(line)]
        if lost:
            return f"a line is lost: {lost[0][:80]!r}"
        unreadable = [
            line
            for line in before
            if line not in written and not isinstance(parse_line(line), dict)
        ]
        if unreadable and "cannot be read" not in result.errors:
            return "lines are dropped silently"
        steps = [r["step"] for line in written if isinstance(r := parse_line(line), dict)]
        if any(not isinstance(s, int) or s > MORE for s in steps):
            return f"steps {steps}"
        return malformed_run.wrong_continuation(run, workdir)

    original = (run.run / METRICS).read_bytes().split(b"\n")[:-1]

    def is_original(line: bytes) -> bool:
        return line in original

    command = malformed_run.train(workdir, run.data, MORE)
    return Case(f"{name}; train", command, (str(workdir),), (workdir, run.data), check)


def report_case(run: Run, workdir: pathlib.Path, name: str) -> Case:
    """Writes a report of the run, which must be complete."""
    page = workdir.parent / "page.html"

    def check(result: CommandResult) -> str | None:
        del result
        is_complete = page.read_text(encoding="utf-8").rstrip().endswith("</html>")
        return None if is_complete else "half a page"

    command = ["report", str(workdir), "--output", str(page)]
    return Case(f"{name}; report", command, (str(workdir),), (workdir.parent,), check)


# -- damage ------------------------------------------------------------------------------------------


def damage_bytes(path: pathlib.Path, rng: Rng) -> str:
    """Damages the bytes of the file."""
    return damage_file(path, rng.choice(BYTES), rng)


LINES: list[bytes] = [
    *(b"", b"\0\0\0", b"   ", b"[]", b"null", b"3", b'"x"', b"{", b"{}", b"}{", b"\r", b"\xef\xbb\xbf"),
    *(b'{"step": \xff\xfe', b'{"kind": "train"}', b'{"step": 5, "k', b"[" * 100_000),
    *(b'{"step": 4, "kind": ' + v + b', "loss": 1.0}' for v in (b"[]", b"{}", b"null", b"7")),
    *(b'{"step": ' + v + b', "kind": "train", "loss": 1.0, "time": 1, "event": "start"}'
      for v in (b'"3"', b"3.0", b"true", b"null", b"-1", b"1e3", b"1" * 30, b"1" * 5000, b"[3]")),
    *(b'{"step": 4, "kind": "eval", "loss": 1.0, "score": ' + v + b"}"
      for v in (b'"x"', b"[]", b"{}", b"true", b"NaN", b"1e999", b"1" * 400, b"-3", b'"7"')),
    *(b'{"step": 4, "event": "end", "time": ' + v + b"}"
      for v in (b'"x"', b"[]", b"NaN", b"1e999", b"1" * 400, b"-3", b"true")),
    *('{"step": 4, "kind": "train", "loss": 1.0, "note": "a\u2028b\u0085"}'.encode(),),
    *(b'{"step": 4, "kind": "eval", "score": 1.0, "a/b/c": ' + v + b"}"
      for v in (b"[1]", b'"$\\\\frac{$"', b"{}", b"1e308")),
]  # fmt: skip


def put_line(path: pathlib.Path, rng: Rng) -> str:
    """Inserts an invalid line, or a record with unusual values."""
    lines = path.read_bytes().splitlines(keepends=True)
    line = rng.choice(LINES)
    index = rng.randrange(len(lines) + 1)
    end = b"" if index == len(lines) and rng.random() < 0.3 else b"\n"
    path.write_bytes(b"".join([*lines[:index], line + end, *lines[index:]]))
    return f"line {index + 1} is {line[:60]!r}"


def replace_value(path: pathlib.Path, rng: Rng) -> str:
    """Changes a value of a record."""
    lines = path.read_bytes().splitlines()
    index = rng.randrange(len(lines))
    record = json.loads(lines[index])
    key = rng.choice(sorted(record))
    values = ["x", None, [], {}, True, -1, 2**80, "\ud800", "1", [[1]], {"step": 1}, 10**400]
    record[key] = rng.choice(values)
    lines[index] = json.dumps(record).encode()
    path.write_bytes(b"\n".join(lines) + b"\n")
    return f"line {index + 1}: {key} is {str(record[key])[:40]!r}"


def move_lines(path: pathlib.Path, rng: Rng) -> str:
    """Reorders, repeats or deletes lines."""
    lines = path.read_bytes().splitlines(keepends=True)
    kind = rng.choice(["shuffled", "doubled", "one gone", "a half", "CRLF"])
    index = rng.randrange(len(lines))
    if kind == "shuffled":
        rng.shuffle(lines)
    elif kind == "doubled":
        lines.insert(index, lines[index])
    elif kind == "one gone":
        del lines[index]
    elif kind == "a half":
        lines[index] = lines[index][: len(lines[index]) // 2]
    else:
        lines = [line.replace(b"\n", b"\r\n") for line in lines]
    path.write_bytes(b"".join(lines))
    return f"lines: {kind}"


def replace_file(path: pathlib.Path, rng: Rng) -> str:
    """Replaces the file by something else."""
    kind = rng.choice(["gone", "a directory", "a pipe", "a dangling link", "gz", "utf-16", "long"])
    data = path.read_bytes()
    path.unlink()
    if kind == "a directory":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a dangling link":
        path.symlink_to("nowhere")
    elif kind == "gz":
        path.write_bytes(gzip.compress(data))
    elif kind == "utf-16":
        path.write_bytes(data.decode().encode("utf-16"))
    elif kind == "long":
        path.write_bytes(data + b'{"step": 5, "kind": "' + b"x" * 2_000_000 + b'"}\n')
    return kind
