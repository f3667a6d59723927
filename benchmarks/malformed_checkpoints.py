"""Attempts to continue, evaluate and decode with damaged checkpoints."""

from __future__ import annotations

import functools
import json
import pathlib
import shutil
from collections.abc import Callable, Iterator

import malformed_run
from malformed_cases import BYTES, Case, CommandResult, Rng, damage_file
from malformed_run import MORE, STEPS, Run, copies

OLD, NEW = str(STEPS - 1), str(STEPS)


def cases(directory: pathlib.Path, rng: Rng, count: int) -> Iterator[Case]:
    """Yields attempts that mostly damage the newest checkpoint, sometimes the older one or both."""
    run = malformed_run.make_run(directory)
    kinds = [*STRUCTURE, *[damage_a_file] * max(1, count - len(STRUCTURE))]
    rng.shuffle(kinds)
    readers = (continue_case, continue_case, evaluate_case, generate_case)
    for number, workdir in enumerate(copies(run.run, directory, count)):
        name = kinds[number](workdir / "checkpoints", rng)
        yield rng.choice(readers)(run, workdir, name)


# -- commands ----------------------------------------------------------------------------------------


def continue_case(run: Run, workdir: pathlib.Path, name: str) -> Case:
    """Continues the run; the results must be those of the undamaged one."""

    def check(result: CommandResult) -> str | None:
        records, expected = (
            malformed_run.read_records(w / "metrics.jsonl") for w in (workdir, run.continued)
        )
        if records != expected:
            return f"the log says {records[-3:]}, not {expected[-3:]}"
        return malformed_run.wrong_continuation(run, workdir)

    command = malformed_run.train(workdir, run.data, MORE)
    return Case(f"{name}; train", command, (str(workdir),), (workdir, run.data), check)


def evaluate_case(run: Run, workdir: pathlib.Path, name: str) -> Case:
    """`eval` must give the results of the step that it names."""

    def check(result: CommandResult) -> str | None:
        step = malformed_run.evaluated_step(result)
        if step < newest_step(workdir) and f"step {step} is used" not in result.errors:
            return "not the newest step, and not reported"
        same = malformed_run.evaluation(workdir, step) == run.evaluated[step]
        return None if same else f"another evaluation than that of step {step}"

    command = malformed_run.evaluate(workdir, run.data)
    return Case(f"{name}; eval", command, (str(workdir),), (workdir, run.data), check)


def generate_case(run: Run, workdir: pathlib.Path, name: str) -> Case:
    """`generate` must give the output of the newest step, or of the step that it names."""

    def check(result: CommandResult) -> str | None:
        named_steps = [s for s in run.generated if f"step {s} is used" in result.errors]
        step = named_steps[0] if named_steps else newest_step(workdir)
        same = result.out == run.generated[step]
        return None if same else f"another output than that of step {step}: {result.out[:80]!r}"

    command = malformed_run.generate(workdir)
    return Case(f"{name}; generate", command, (str(workdir),), (workdir,), check)


def newest_step(workdir: pathlib.Path) -> int:
    """The largest step among the checkpoints' directories."""
    names = (p.name for p in (workdir / "checkpoints").iterdir() if p.is_dir())
    return max(int(n) for n in names if n.isdecimal() and str(int(n)) == n)


# -- damage ------------------------------------------------------------------------------------------

Structure = Callable[[pathlib.Path, Rng], str]


def damage_a_file(checkpoints: pathlib.Path, rng: Rng) -> str:
    """Damages the bytes of a file, mostly of the newest checkpoint, sometimes of both."""
    steps = rng.choice([[NEW], [NEW], [NEW], [OLD], [OLD, NEW]])
    done = []
    for step in steps:
        files = [p for p in all_files(checkpoints / step) if p.stat().st_size]
        path = rng.choice(files)
        done.append(f"{step}: {damage_file(path, rng.choice(BYTES), rng)}")
    return ", ".join(done)


def flip_in_arrays(checkpoints: pathlib.Path, rng: Rng) -> str:
    """Flips a bit in the largest file, which contains the arrays."""
    path = max(all_files(checkpoints / NEW), key=lambda p: p.stat().st_size)
    return f"{NEW}: arrays, {damage_file(path, BYTES[1], rng)}"


def delete_file(checkpoints: pathlib.Path, rng: Rng) -> str:
    """Deletes a file."""
    path = rng.choice(all_files(checkpoints / rng.choice([OLD, NEW, NEW])))
    path.unlink()
    return f"without {path.relative_to(checkpoints)}"


def delete_directory(checkpoints: pathlib.Path, rng: Rng) -> str:
    """Deletes a directory."""
    directories = [p for p in sorted((checkpoints / NEW).rglob("*")) if p.is_dir()]
    path = rng.choice(directories)
    shutil.rmtree(path)
    return f"without {path.relative_to(checkpoints)}/"


def file_for_directory(checkpoints: pathlib.Path, rng: Rng) -> str:
    """Replaces a directory by a file."""
    path = checkpoints / rng.choice([NEW, f"{NEW}/state", f"{NEW}/data", f"{NEW}/contents"])
    shutil.rmtree(path)
    path.write_bytes(b"x")
    return f"{path.relative_to(checkpoints)} is a file"


def directory_for_file(checkpoints: pathlib.Path, rng: Rng) -> str:
    """Replaces a file by a directory."""
    path = rng.choice(all_files(checkpoints / NEW))
    path.unlink()
    path.mkdir()
    return f"{path.relative_to(checkpoints)} is a directory"


def swap_part(checkpoints: pathlib.Path, rng: Rng) -> str:
    """Replaces a part of a step by that of another step."""
    parts = ["state", "data", "contents", "_CHECKPOINT_METADATA", "state/_METADATA"]
    parts += ["state/manifest.ocdbt", "data/stream.json", "state/d"]
    part = rng.choice(parts)
    for to, source in ((NEW, OLD), (OLD, NEW)) if rng.random() < 0.5 else ((NEW, OLD),):
        replace(checkpoints / to / part, checkpoints / source / part)
    return f"{part} of {OLD} in {NEW}"


def swap_steps(checkpoints: pathlib.Path, rng: Rng) -> str:
    """Swaps the names of the two steps."""
    del rng
    (checkpoints / NEW).rename(checkpoints / "aside")
    (checkpoints / OLD).rename(checkpoints / NEW)
    (checkpoints / "aside").rename(checkpoints / OLD)
    return "the steps under one another's names"


def copy_step(checkpoints: pathlib.Path, rng: Rng) -> str:
    """Copies a step to another number, or to a name that is not a number."""
    source = rng.choice([OLD, NEW])
    name = rng.choice(["7", "8", "99", "12345678901234567890", "06", "+7", "７", "6.5", "-6"])
    shutil.copytree(checkpoints / source, checkpoints / name)
    return f"{source} copied as {name}"


def rename_step(checkpoints: pathlib.Path, rng: Rng) -> str:
    """Renames a step."""
    name = rng.choice(["0", "4", "7", "99"])
    (checkpoints / NEW).rename(checkpoints / name)
    return f"{NEW} renamed to {name}"


def leftover(checkpoints: pathlib.Path, rng: Rng) -> str:
    """Adds an incomplete step, as a killed process may leave it."""
    name = rng.choice(
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
    for path in all_files(checkpoints / name)[: rng.choice([3, 100])]:
        path.unlink()
    return f"half of {NEW} as {name}"


def edit_position(checkpoints: pathlib.Path, rng: Rng) -> str:
    """Changes a value in the position of the data."""
    path = rng.choice(sorted((checkpoints / NEW / "data").glob("*.json")))
    data = json.loads(path.read_text(encoding="utf-8"))
    key = rng.choice(sorted(data))
    data[key] = rng.choice(["x", -1, None, [], {}, 2**70, 0, 7, [[0]]])
    path.write_text(json.dumps(data), encoding="utf-8")
    return f"{path.name}: {key} is {data[key]}"


def no_checkpoints(checkpoints: pathlib.Path, rng: Rng) -> str:
    """Deletes the whole directory, or replaces it."""
    shutil.rmtree(checkpoints)
    kind = rng.choice(["gone", "empty", "a file", "a dangling link"])
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
    """The files below a directory, sorted."""
    return [p for p in sorted(directory.rglob("*")) if p.is_file()]


def replace(target: pathlib.Path, source: pathlib.Path) -> None:
    """Replaces a file or directory by a copy of another."""
    if target.is_dir():
        shutil.rmtree(target)
    copy = functools.partial(shutil.copytree if source.is_dir() else shutil.copyfile)
    copy(source, target)
