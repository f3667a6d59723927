"""Damaged experiment files of a run that is decoded with, and wrong values of `--set`."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import malformed_run
from malformed_cases import BYTES, RECIPE, Case, Dice, Said, damage_file, good
from malformed_fields import rule_of, wrong_field
from malformed_run import STEPS, Run, copies

RECIPES = (str(RECIPE), "quickstart", "finetune", "cotrain_glue_super_glue", "replace_attention")


def cases(place: pathlib.Path, dice: Dice, count: int) -> Iterator[Case]:
    """A third are files; the others are typed."""
    files = count // 3
    yield from saved(place, dice, files)
    yield from typed(dice, count - files)


# -- experiment.json ---------------------------------------------------------------------------------


def saved(place: pathlib.Path, dice: Dice, count: int) -> Iterator[Case]:
    """The file of a run that `generate` reads."""
    run = malformed_run.make(place)
    original = json.loads((run.run / "experiment.json").read_text(encoding="utf-8"))
    if wrong := wrong_field(original):
        raise SystemExit(f"the table of fields does not know {wrong}")
    for workdir in copies(run.run, place, count):
        path = workdir / "experiment.json"
        damage = dice.choice([damage_bytes, change_leaf, change_leaf, change_leaf, put_other])
        name = f"experiment.json: {damage(path, dice)}"
        yield generated(run, workdir, original, name)


def generated(run: Run, workdir: pathlib.Path, original: Any, name: str) -> Case:
    """Accepted where every field is allowed; the answer is another only where the model is."""

    def check(said: Said) -> str | None:
        found = json.loads((workdir / "experiment.json").read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.get("type") != "Experiment":
            return "no experiment"
        if wrong := wrong_field(found):
            return wrong
        same = all(found.get(k) == original[k] for k in ("model", "data", "vocabulary"))
        if same and said.out != run.generated[STEPS]:
            return f"another answer, {said.out[:40]!r}"
        return None

    places = (str(workdir),)
    command = malformed_run.generate(workdir)
    return Case(f"{name}; generate", command, places, (workdir,), check)


LEAVES: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        1.5,
        -0.5,
        2,
        2**31,
        10**22,
        -(2**63),
        1e308,
        "",
        "x",
        "1",
        "none",
    ),
    *(
        float("nan"),
        float("inf"),
        [],
        [1, 2],
        {},
        {"a": 1},
        [[]],
        {"type": "x"},
        {"type": 1},
        {"type": []},
    ),
    *(
        {"type": "Bytes"},
        {"type": "RMSNorm"},
        {"type": "Experiment"},
        {"type": "os.system"},
        "../../x",
    ),
    *({"type": None}, "softmax", "float17", "/etc/passwd", "~/x", "\ud800", "x" * 100_000, "\0"),
]


def damage_bytes(path: pathlib.Path, dice: Dice) -> str:
    """Any bytes."""
    return damage_file(path, dice.choice(BYTES), dice)


def change_leaf(path: pathlib.Path, dice: Dice) -> str:
    """A value, of any depth, is another one, gone, or under another name."""
    data = json.loads(path.read_text(encoding="utf-8"))
    where = dice.choice([p for p in paths(data) if p])
    inside = data
    for key in where[:-1]:
        inside = inside[key]
    kind = dice.choice(["value"] * 6 + ["delete", "rename"])
    old = inside[where[-1]]
    if kind == "value":
        inside[where[-1]] = dice.choice(LEAVES)
        kind = f"is {str(inside[where[-1]])[:40]!a}"
    else:
        del inside[where[-1]]
        if kind == "rename" and isinstance(inside, dict):
            inside[f"{where[-1]}x"] = old
    path.write_text(json.dumps(data), encoding="utf-8")
    return f"{'.'.join(map(str, where))} {kind}"


def paths(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values."""
    yield path
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from paths(value, (*path, key))


def put_other(path: pathlib.Path, dice: Dice) -> str:
    """Something else in the place of the file."""
    kinds = [
        "null",
        "[]",
        "{}",
        '"x"',
        "3",
        "[" * 100_000,
        '{"a":' * 5_000,
        "pipe",
        "directory",
        "link",
    ]
    kinds += ['{"type": "Experiment"}', '{"type": "Training", "steps": 1}', "two", "utf-16", "mark"]
    kind = dice.choice(kinds)
    old = path.read_bytes()
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("nowhere")
    elif kind == "two":
        path.write_bytes(old + old)
    elif kind == "utf-16":
        path.write_bytes(old.decode().encode("utf-16"))
    elif kind == "mark":
        path.write_bytes(b"\xef\xbb\xbf" + old)
    else:
        path.write_text(kind, encoding="utf-8")
    return kind[:40]


# -- --set -------------------------------------------------------------------------------------------

VALUES = (
    *("", "x", "-1", "0", "1", "2", "0.5", "1.5", "-0.1", "1.0", "none", "null", "true", "false"),
    *("None", "True", "NaN", "Infinity", "-Infinity", "1e400", "1e-320", "1" + "0" * 22, "-2"),
    *("2147483648", "4294967296", "-0.0", "[]", "[1, 2]", "{}", "[[[[", "{", '{"type": "x"}'),
    *('{"type": 1}', '{"type": []}', '{"type": "RMSNorm"}', '{"type": "Bytes"}', "١", "²", " 1"),
    *('{"type": "Experiment"}', '"1"', "1_000", "0x10", "1 ", "1,5", "1e3", "softmax", "float17"),
    *("float64", "int8", "bfloat16", "foo", "os.system", "../../x", "x" * 5_000, "[" * 100_000),
    *("rank", "nope", "gelu", '["gelu"]', '["x"]', "full", "t5_1_1_tiny", "1" * 5_000, "\udcff"),
)

ASSIGNMENTS = (
    *(
        "training.stepz=1",
        "training",
        "",
        "=",
        "=1",
        "training.steps",
        "training.steps.x=1",
        "..=1",
    ),
    *("model.encoder.runs.9.repeats=1", "model.encoder.runs.-1.repeats=1", "type=x", ".=", "x=1"),
    *(
        "model.encoder.runs.0.0=1",
        "model.encoder.runs.²=1",
        "Training.steps=1",
        "model=t5_1_1_tinyy",
    ),
    *("training..steps=1", " training.steps=1", "training.steps=1=2", "model=", "model.name=x"),
    *("training.__class__=1", "model.parent=x", "model.encoder.runs.x=1"),
)


def typed(dice: Dice, count: int) -> Iterator[Case]:
    """`recipes NAME --set path=value` shows what was understood."""
    before = {name: shown(good(["recipes", name, "--json"]).out) for name in RECIPES}
    for _ in range(count):
        name = dice.choice(RECIPES)
        if dice.random() < 0.1:
            assignment = dice.choice(ASSIGNMENTS)
        else:
            assignment = f"{dice.choice(sorted(before[name]))}={dice.choice(VALUES)}"
        yield assigned(name, assignment, before[name])


def assigned(recipe: str, assignment: str, before: dict[str, Any]) -> Case:
    """Accepted where the field says what was typed, the others what they said, and the rules allow it."""
    path, _, given = assignment.partition("=")

    def check(said: Said) -> str | None:
        after = shown(said.out)
        if path not in after:
            return f"no field {path!r}"
        wanted = read(given)
        class_name = after.get(path.rpartition(".")[0])
        rule = rule_of(str(class_name), path.rpartition(".")[2])
        if rule is None or not (rule(wanted) or is_model(path, given)):
            return f"{path} of {given[:60]!r}"
        if (
            not isinstance(wanted, dict | list)
            and not is_model(path, given)
            and after[path] != wanted
        ):
            return f"{path} is {after[path]!r}"
        others = [p for p in before if not (p == path or p.startswith(f"{path}."))]
        changed = [p for p in others if after.get(p) != before[p]]
        return f"{changed[0]} has changed" if changed else None

    where = path.split(".")[-1] or "--set"
    command = ["recipes", recipe, "--json", "--set", assignment]
    name = f"{pathlib.Path(recipe).stem} --set {assignment[:60]}"
    return Case(name, command, (f"--set {path}", where, "--set"), (), check)


def is_model(path: str, given: str) -> bool:
    """Whether a model was named."""
    return path == "model" and given.startswith("t5_")


def shown(out: str) -> dict[str, Any]:
    """Fields and values that `recipes --json` shows."""
    return {row["path"]: read(row["value"]) for row in json.loads(out)["settings"]}


def read(given: str) -> Any:
    """What a text on the command line says: JSON, none, true or false, or itself."""
    try:
        return json.loads(given)
    except (ValueError, RecursionError):
        return {"none": None, "true": True, "false": False}.get(given.lower(), given)
