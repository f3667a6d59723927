"""Attempts to decode with a damaged experiment file, and to set invalid values with `--set`."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import malformed_run
from malformed_cases import BYTES, RECIPE, Case, CommandResult, Rng, damage_file, run_checked
from malformed_fields import rule_of, wrong_field
from malformed_run import STEPS, Run, copies

RECIPES = (str(RECIPE), "quickstart", "finetune", "cotrain_glue_super_glue", "replace_attention")


def cases(directory: pathlib.Path, rng: Rng, count: int) -> Iterator[Case]:
    """Yields attempts, a third with files and two thirds with `--set`."""
    files = count // 3
    yield from file_cases(directory, rng, files)
    yield from set_cases(rng, count - files)


# -- experiment.json ---------------------------------------------------------------------------------


def file_cases(directory: pathlib.Path, rng: Rng, count: int) -> Iterator[Case]:
    """Yields attempts to decode with a damaged `experiment.json`."""
    run = malformed_run.make_run(directory)
    original = json.loads((run.run / "experiment.json").read_text(encoding="utf-8"))
    if wrong := wrong_field(original):
        raise SystemExit(f"malformed_fields.py has no rule for {wrong}")
    for workdir in copies(run.run, directory, count):
        path = workdir / "experiment.json"
        damage = rng.choice([damage_bytes, change_leaf, change_leaf, change_leaf, replace_file])
        name = f"experiment.json: {damage(path, rng)}"
        yield generate_case(run, workdir, original, name)


def generate_case(run: Run, workdir: pathlib.Path, original: Any, name: str) -> Case:
    """May succeed only if all fields are valid; the output may differ only if the model does."""

    def check(result: CommandResult) -> str | None:
        data = json.loads((workdir / "experiment.json").read_text(encoding="utf-8"))
        if not isinstance(data, dict) or data.get("type") != "Experiment":
            return "not an experiment"
        if wrong := wrong_field(data):
            return wrong
        same = all(data.get(k) == original[k] for k in ("model", "data", "vocabulary"))
        if same and result.out != run.generated[STEPS]:
            return f"another output, {result.out[:40]!r}"
        return None

    locations = (str(workdir),)
    command = malformed_run.generate(workdir)
    return Case(f"{name}; generate", command, locations, (workdir,), check)


VALUES_IN_FILE: list[Any] = [
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


def damage_bytes(path: pathlib.Path, rng: Rng) -> str:
    """Damages the bytes of the file."""
    return damage_file(path, rng.choice(BYTES), rng)


def change_leaf(path: pathlib.Path, rng: Rng) -> str:
    """Changes, deletes or renames a value at any depth."""
    data = json.loads(path.read_text(encoding="utf-8"))
    location = rng.choice([p for p in paths(data) if p])
    node = data
    for key in location[:-1]:
        node = node[key]
    kind = rng.choice(["value"] * 6 + ["delete", "rename"])
    value = node[location[-1]]
    if kind == "value":
        node[location[-1]] = rng.choice(VALUES_IN_FILE)
        kind = f"is {str(node[location[-1]])[:40]!a}"
    else:
        del node[location[-1]]
        if kind == "rename" and isinstance(node, dict):
            node[f"{location[-1]}x"] = value
    path.write_text(json.dumps(data), encoding="utf-8")
    return f"{'.'.join(map(str, location))} {kind}"


def paths(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the paths of all values."""
    yield path
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from paths(value, (*path, key))


def replace_file(path: pathlib.Path, rng: Rng) -> str:
    """Replaces the file by something else."""
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
    kind = rng.choice(kinds)
    content = path.read_bytes()
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("nowhere")
    elif kind == "two":
        path.write_bytes(content + content)
    elif kind == "utf-16":
        path.write_bytes(content.decode().encode("utf-16"))
    elif kind == "mark":
        path.write_bytes(b"\xef\xbb\xbf" + content)
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


def set_cases(rng: Rng, count: int) -> Iterator[Case]:
    """Yields attempts with `recipes NAME --set path=value`, which shows the resulting fields."""
    before = {
        name: shown_settings(run_checked(["recipes", name, "--json"]).out) for name in RECIPES
    }
    for _ in range(count):
        name = rng.choice(RECIPES)
        if rng.random() < 0.1:
            assignment = rng.choice(ASSIGNMENTS)
        else:
            assignment = f"{rng.choice(sorted(before[name]))}={rng.choice(VALUES)}"
        yield set_case(name, assignment, before[name])


def set_case(recipe: str, assignment: str, before: dict[str, Any]) -> Case:
    """May succeed only if the value is valid, the field has it and no other field has changed."""
    path, _, typed_value = assignment.partition("=")

    def check(result: CommandResult) -> str | None:
        after = shown_settings(result.out)
        if path not in after:
            return f"no field {path!r}"
        expected = parse_value(typed_value)
        class_name = after.get(path.rpartition(".")[0])
        rule = rule_of(str(class_name), path.rpartition(".")[2])
        if rule is None or not (rule(expected) or is_model(path, typed_value)):
            return f"{path} of {typed_value[:60]!r}"
        if (
            not isinstance(expected, dict | list)
            and not is_model(path, typed_value)
            and after[path] != expected
        ):
            return f"{path} is {after[path]!r}"
        other_paths = [p for p in before if not (p == path or p.startswith(f"{path}."))]
        changed = [p for p in other_paths if after.get(p) != before[p]]
        return f"{changed[0]} has changed" if changed else None

    location = path.split(".")[-1] or "--set"
    command = ["recipes", recipe, "--json", "--set", assignment]
    name = f"{pathlib.Path(recipe).stem} --set {assignment[:60]}"
    return Case(name, command, (f"--set {path}", location, "--set"), (), check)


def is_model(path: str, typed_value: str) -> bool:
    """Whether the value is the name of a model."""
    return path == "model" and typed_value.startswith("t5_")


def shown_settings(out: str) -> dict[str, Any]:
    """The fields and values in the output of `recipes --json`."""
    return {row["path"]: parse_value(row["value"]) for row in json.loads(out)["settings"]}


def parse_value(typed_value: str) -> Any:
    """Parses a value of the command line: JSON, none, true, false or a string."""
    try:
        return json.loads(typed_value)
    except (ValueError, RecursionError):
        return {"none": None, "true": True, "false": False}.get(typed_value.lower(), typed_value)
