"""Damaged logs of a run that goes on, or is reported on."""

from __future__ import annotations

import gzip
import json
import os
import pathlib
from collections.abc import Iterator

import malformed_run
from malformed_cases import BYTES, Case, Dice, Said, damage_file
from malformed_run import MORE, Run, copies, parsed

METRICS, EVENTS = "metrics.jsonl", "events.jsonl"


def cases(place: pathlib.Path, dice: Dice, count: int) -> Iterator[Case]:
    """Damages of bytes, of lines and of the files as such."""
    run = malformed_run.make(place)
    for workdir in copies(run.run, place, count):
        path = workdir / dice.choice([METRICS, METRICS, EVENTS])
        damage = dice.choice([damage_bytes, put_line, put_line, replace_value, move_lines, other])
        name = f"{path.name}: {damage(path, dice)}"
        reader = reported if dice.random() < 0.25 else resumed
        yield reader(run, workdir, name)


def resumed(run: Run, workdir: pathlib.Path, name: str) -> Case:
    """The run goes on; what could be read of its log must stay."""
    path = workdir / METRICS
    before = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []

    def check(said: Said) -> str | None:
        kept = path.read_bytes().split(b"\n")
        lost = [line for line in before if line not in kept and earlier(line)]
        if lost:
            return f"a line is lost: {lost[0][:80]!r}"
        unread = [
            line for line in before if line not in kept and not isinstance(parsed(line), dict)
        ]
        if unread and "cannot be read" not in said.errors:
            return "lines are left out without a word"
        steps = [r["step"] for line in kept if isinstance(r := parsed(line), dict)]
        if any(not isinstance(s, int) or s > MORE for s in steps):
            return f"steps {steps}"
        return malformed_run.wrong_continuation(run, workdir)

    original = (run.run / METRICS).read_bytes().split(b"\n")[:-1]

    def earlier(line: bytes) -> bool:
        return line in original

    command = malformed_run.train(workdir, run.data, MORE)
    return Case(f"{name}; train", command, (str(workdir),), (workdir, run.data), check)


def reported(run: Run, workdir: pathlib.Path, name: str) -> Case:
    """A page of the run: whole, or not there."""
    page = workdir.parent / "page.html"

    def check(said: Said) -> str | None:
        del said
        whole = page.read_text(encoding="utf-8").rstrip().endswith("</html>")
        return None if whole else "half a page"

    command = ["report", str(workdir), "--output", str(page)]
    return Case(f"{name}; report", command, (str(workdir),), (workdir.parent,), check)


# -- damage ------------------------------------------------------------------------------------------


def damage_bytes(path: pathlib.Path, dice: Dice) -> str:
    """Any bytes."""
    return damage_file(path, dice.choice(BYTES), dice)


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


def put_line(path: pathlib.Path, dice: Dice) -> str:
    """A line that is no record, or one of strange values."""
    lines = path.read_bytes().splitlines(keepends=True)
    line = dice.choice(LINES)
    place = dice.randrange(len(lines) + 1)
    end = b"" if place == len(lines) and dice.random() < 0.3 else b"\n"
    path.write_bytes(b"".join([*lines[:place], line + end, *lines[place:]]))
    return f"line {place + 1} is {line[:60]!r}"


def replace_value(path: pathlib.Path, dice: Dice) -> str:
    """Another value in a record."""
    lines = path.read_bytes().splitlines()
    place = dice.randrange(len(lines))
    record = json.loads(lines[place])
    key = dice.choice(sorted(record))
    values = ["x", None, [], {}, True, -1, 2**80, "\ud800", "1", [[1]], {"step": 1}, 10**400]
    record[key] = dice.choice(values)
    lines[place] = json.dumps(record).encode()
    path.write_bytes(b"\n".join(lines) + b"\n")
    return f"line {place + 1}: {key} is {str(record[key])[:40]!r}"


def move_lines(path: pathlib.Path, dice: Dice) -> str:
    """Lines in another order, doubled, or without one."""
    lines = path.read_bytes().splitlines(keepends=True)
    kind = dice.choice(["shuffled", "doubled", "one gone", "a half", "CRLF"])
    place = dice.randrange(len(lines))
    if kind == "shuffled":
        dice.shuffle(lines)
    elif kind == "doubled":
        lines.insert(place, lines[place])
    elif kind == "one gone":
        del lines[place]
    elif kind == "a half":
        lines[place] = lines[place][: len(lines[place]) // 2]
    else:
        lines = [line.replace(b"\n", b"\r\n") for line in lines]
    path.write_bytes(b"".join(lines))
    return f"lines: {kind}"


def other(path: pathlib.Path, dice: Dice) -> str:
    """Something else in the place of the file."""
    kind = dice.choice(["gone", "a directory", "a pipe", "a dangling link", "gz", "utf-16", "long"])
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
