"""Damaged checkpoints, from which a run is continued, or which are evaluated and decoded with."""

from __future__ import annotations

import functools
import json
import pathlib
import shutil
from collections.abc import Callable, Iterator

import malformed_run
from malformed_cases import BYTES, Case, Dice, Said, damage_file
from malformed_run import MORE, STEPS, Run, copies

OLD, NEW = str(STEPS - 1), str(STEPS)


def cases(place: pathlib.Path, dice: Dice, count: int) -> Iterator[Case]:
    """Damages of the newest checkpoint for the most part, of the older one, and of both."""
    run = malformed_run.make(place)
    kinds = [*STRUCTURE, *[damage_a_file] * max(1, count - len(STRUCTURE))]
    dice.shuffle(kinds)
    readers = (resumed, resumed, evaluated, generated)
    for number, workdir in enumerate(copies(run.run, place, count)):
        name = kinds[number](workdir / "checkpoints", dice)
        yield dice.choice(readers)(run, workdir, name)


# -- commands ----------------------------------------------------------------------------------------


def resumed(run: Run, workdir: pathlib.Path, name: str) -> Case:
    """The run goes on: what comes out must be what came out of the good one."""

    def check(said: Said) -> str | None:
        mine, theirs = (
            malformed_run.records(w / "metrics.jsonl") for w in (workdir, run.continued)
        )
        if mine != theirs:
            return f"the log says {mine[-3:]}, not {theirs[-3:]}"
        return malformed_run.wrong_continuation(run, workdir)

    command = malformed_run.train(workdir, run.data, MORE)
    return Case(f"{name}; train", command, (str(workdir),), (workdir, run.data), check)


def evaluated(run: Run, workdir: pathlib.Path, name: str) -> Case:
    """`eval` must give what the step that it names has given."""

    def check(said: Said) -> str | None:
        step = malformed_run.evaluated_step(said)
        if step < newest(workdir) and f"step {step} is used" not in said.errors:
            return "not the newest step, without a word"
        same = malformed_run.evaluation(workdir, step) == run.evaluated[step]
        return None if same else f"another evaluation than that of step {step}"

    command = malformed_run.evaluate(workdir, run.data)
    return Case(f"{name}; eval", command, (str(workdir),), (workdir, run.data), check)


def generated(run: Run, workdir: pathlib.Path, name: str) -> Case:
    """`generate` must give what the newest step has given, or the one that it names."""

    def check(said: Said) -> str | None:
        named = [s for s in run.generated if f"step {s} is used" in said.errors]
        step = named[0] if named else newest(workdir)
        same = said.out == run.generated[step]
        return None if same else f"another answer than that of step {step}: {said.out[:80]!r}"

    command = malformed_run.generate(workdir)
    return Case(f"{name}; generate", command, (str(workdir),), (workdir,), check)


def newest(workdir: pathlib.Path) -> int:
    """The largest number that a directory of a checkpoint has for its name."""
    names = (p.name for p in (workdir / "checkpoints").iterdir() if p.is_dir())
    return max(int(n) for n in names if n.isdecimal() and str(int(n)) == n)


# -- damage ------------------------------------------------------------------------------------------

Structure = Callable[[pathlib.Path, Dice], str]


def damage_a_file(checkpoints: pathlib.Path, dice: Dice) -> str:
    """The bytes of any file, of the newest checkpoint mostly, sometimes of both."""
    steps = dice.choice([[NEW], [NEW], [NEW], [OLD], [OLD, NEW]])
    done = []
    for step in steps:
        files = [p for p in all_files(checkpoints / step) if p.stat().st_size]
        path = dice.choice(files)
        done.append(f"{step}: {damage_file(path, dice.choice(BYTES), dice)}")
    return ", ".join(done)


def flip_in_arrays(checkpoints: pathlib.Path, dice: Dice) -> str:
    """A bit of the largest file, which holds the arrays."""
    path = max(all_files(checkpoints / NEW), key=lambda p: p.stat().st_size)
    return f"{NEW}: arrays, {damage_file(path, BYTES[1], dice)}"


def delete_file(checkpoints: pathlib.Path, dice: Dice) -> str:
    """A file is gone."""
    path = dice.choice(all_files(checkpoints / dice.choice([OLD, NEW, NEW])))
    path.unlink()
    return f"without {path.relative_to(checkpoints)}"


def delete_directory(checkpoints: pathlib.Path, dice: Dice) -> str:
    """A directory is gone."""
    found = [p for p in sorted((checkpoints / NEW).rglob("*")) if p.is_dir()]
    path = dice.choice(found)
    shutil.rmtree(path)
    return f"without {path.relative_to(checkpoints)}/"


def file_for_directory(checkpoints: pathlib.Path, dice: Dice) -> str:
    """A directory has become a file."""
    path = checkpoints / dice.choice([NEW, f"{NEW}/state", f"{NEW}/data", f"{NEW}/contents"])
    shutil.rmtree(path)
    path.write_bytes(b"x")
    return f"{path.relative_to(checkpoints)} is a file"


def directory_for_file(checkpoints: pathlib.Path, dice: Dice) -> str:
    """A file has become a directory."""
    path = dice.choice(all_files(checkpoints / NEW))
    path.unlink()
    path.mkdir()
    return f"{path.relative_to(checkpoints)} is a directory"


def swap_part(checkpoints: pathlib.Path, dice: Dice) -> str:
    """A part of another step."""
    parts = ["state", "data", "contents", "_CHECKPOINT_METADATA", "state/_METADATA"]
    parts += ["state/manifest.ocdbt", "data/stream.json", "state/d"]
    part = dice.choice(parts)
    for to, source in ((NEW, OLD), (OLD, NEW)) if dice.random() < 0.5 else ((NEW, OLD),):
        replace(checkpoints / to / part, checkpoints / source / part)
    return f"{part} of {OLD} in {NEW}"


def swap_steps(checkpoints: pathlib.Path, dice: Dice) -> str:
    """The two steps under one another's names."""
    del dice
    (checkpoints / NEW).rename(checkpoints / "aside")
    (checkpoints / OLD).rename(checkpoints / NEW)
    (checkpoints / "aside").rename(checkpoints / OLD)
    return "the steps under one another's names"


def copy_step(checkpoints: pathlib.Path, dice: Dice) -> str:
    """A copy under another number, or under no number."""
    source = dice.choice([OLD, NEW])
    name = dice.choice(["7", "8", "99", "12345678901234567890", "06", "+7", "７", "6.5", "-6"])
    shutil.copytree(checkpoints / source, checkpoints / name)
    return f"{source} copied as {name}"


def rename_step(checkpoints: pathlib.Path, dice: Dice) -> str:
    """Another number."""
    name = dice.choice(["0", "4", "7", "99"])
    (checkpoints / NEW).rename(checkpoints / name)
    return f"{NEW} renamed to {name}"


def leftover(checkpoints: pathlib.Path, dice: Dice) -> str:
    """What a killed process may leave, or a careless hand."""
    name = dice.choice(
        [
            "7",
            "7.orbax-checkpoint-tmp",
            f"{NEW}.unreadable",
            "7.tmp",
            "tmp",
            "8.orbax-checkpoint-tmp-1",
        ]
    )
    source = checkpoints / NEW
    shutil.copytree(source, checkpoints / name)
    for path in all_files(checkpoints / name)[: dice.choice([3, 100])]:
        path.unlink()
    return f"half of {NEW} as {name}"


def edit_position(checkpoints: pathlib.Path, dice: Dice) -> str:
    """A value of the data's position, changed by hand."""
    path = dice.choice(sorted((checkpoints / NEW / "data").glob("*.json")))
    data = json.loads(path.read_text(encoding="utf-8"))
    key = dice.choice(sorted(data))
    data[key] = dice.choice(["x", -1, None, [], {}, 2**70, 0, 7, [[0]]])
    path.write_text(json.dumps(data), encoding="utf-8")
    return f"{path.name}: {key} is {data[key]}"


def no_checkpoints(checkpoints: pathlib.Path, dice: Dice) -> str:
    """The whole directory is gone, or something else."""
    shutil.rmtree(checkpoints)
    kind = dice.choice(["gone", "empty", "a file", "a dangling link"])
    if kind == "empty":
        checkpoints.mkdir()
    elif kind == "a file":
        checkpoints.write_bytes(b"")
    elif kind == "a dangling link":
        checkpoints.symlink_to("nowhere")
    return f"checkpoints/ is {kind}"


STRUCTURE: list[Structure] = [
    *[flip_in_arrays] * 30,
    *[delete_file] * 16,
    *[delete_directory] * 8,
    *[file_for_directory] * 6,
    *[directory_for_file] * 8,
    *[swap_part] * 16,
    *[swap_steps] * 3,
    *[copy_step] * 14,
    *[rename_step] * 6,
    *[leftover] * 8,
    *[edit_position] * 12,
    *[no_checkpoints] * 8,
]


def all_files(directory: pathlib.Path) -> list[pathlib.Path]:
    """The files below a directory, in order."""
    return [p for p in sorted(directory.rglob("*")) if p.is_file()]


def replace(target: pathlib.Path, source: pathlib.Path) -> None:
    """Puts a copy of a file or directory in the place of another."""
    if target.is_dir():
        shutil.rmtree(target)
    copy = functools.partial(shutil.copytree if source.is_dir() else shutil.copyfile)
    copy(source, target)
