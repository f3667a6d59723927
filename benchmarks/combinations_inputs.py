"""Makes the data, the base models and the list of modules for the runs of `combinations.py`."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import pathlib
import shutil
import sys

import numpy as np
from combinations_attempt import Attempt
from combinations_checks import last_line
from combinations_drawing import BASES, RECIPE, draw_combination
from combinations_processes import command, in_child


def make_inputs(root: pathlib.Path) -> None:
    """Makes the data and the base models that do not exist yet."""
    root.mkdir(parents=True, exist_ok=True)
    if not (root / "data.ready").exists():
        shutil.rmtree(root / "data", ignore_errors=True)
        code = in_child(lambda: make_data(root), root / "data.log", 1)
        if code:
            raise SystemExit(f"the data could not be made ({code}): {last_line(root / 'data.log')}")
        (root / "data.ready").touch()
    for base in BASES:
        directory = base_directory(root, base)
        if (directory / "checkpoints" / "1").is_dir():
            continue
        arguments = [
            "train",
            f"{RECIPE}:default:{base}",
            "--workdir",
            str(directory),
            "--quiet",
            "--data-dir",
            str(root / "data"),
            "--set",
            "training.steps=1",
        ]
        log = root / "base.log"
        code = in_child(functools.partial(command, arguments), log, 1)
        if code:
            raise SystemExit(f"the base {base} could not be made ({code}): {last_line(log)}")


def base_directory(root: pathlib.Path, base: str) -> pathlib.Path:
    """Returns the directory of the run of a base model."""
    return root / "bases" / base.replace(":", "-")


def make_data(root: pathlib.Path) -> int:
    """Writes and prepares the data sets, and returns an exit code.

    The function is called in a separate process, because it needs TensorFlow.
    """
    from synthesizer_jax.preparation import synthetic

    data = ["--data-dir", str(root / "data")]
    options = {
        "sentiment": ["--input", "review: {text}", "--target", "{label}", "--labels", "bad,good"],
        "reverse": ["--input", "reverse: {text}", "--target", "{target}"],
        "texts": ["--target", "{text}"],
    }
    for name, rows in make_rows().items():
        files = []
        for split, part in {"train": rows[:400], "validation": rows[400:]}.items():
            path = root / f"{name}-{split}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in part))
            files.append(f"{split}={path}")
        source = ["--from", ",".join(files)]
        code = command(["data", "import", "mine", "--name", name, *source, *options[name], *data])
        code = code or command(["data", "prepare", name, *data])
        if code:
            return code
    synthetic.SIZES = {"train": 400, "validation": 40}
    synthetic.write(root / "data", tasks_of_quickstart())
    return command(["data", "prepare", "synthetic_quickstart", *data])


def make_rows() -> dict[str, list[dict[str, str]]]:
    """Returns the rows of three tasks: sentiment, reversing words, and texts without labels."""
    rows: dict[str, list[dict[str, str]]] = {"sentiment": [], "reverse": [], "texts": []}
    random = np.random.default_rng(0)
    for number in range(480):
        label = ("bad", "good")[number % 2]
        adjective = ("dull", "nice")[number % 2]
        words = [str(word) for word in random.choice(list("abcdefgh"), random.integers(1, 8))]
        rows["sentiment"].append({"text": f"{adjective} film {number}", "label": label})
        rows["reverse"].append({"text": " ".join(words), "target": " ".join(words[::-1])})
        rows["texts"].append({"text": " ".join(words * int(random.integers(1, 4)))})
    return rows


def tasks_of_quickstart() -> tuple[str, ...]:
    """Returns the names of the synthetic tasks that are learned quickly."""
    from synthesizer_jax.tasks.synthetic import MIXTURES, QUICKSTART

    return tuple(MIXTURES[QUICKSTART])


def import_modules(root: pathlib.Path) -> None:
    """Imports all modules that the commands use, so that child processes need not import them.

    A first child process runs some commands and lists its modules in a file.
    """
    file = root / "modules.json"
    place = root / "modules"

    def list_modules() -> int:
        """Runs the commands, and writes the names of the modules that they have imported."""
        base = str(base_directory(root, BASES[0]))
        train = Attempt(draw_combination(0, 0), root, place)
        train.combination.recipe = BASES[0]
        train.combination.settings = ["training.steps=1"]
        code = command(train.arguments("run"))
        code = code or command(["eval", "--workdir", base, "--data-dir", str(root / "data")])
        code = code or command(["export", base, str(place / "exported"), "--to", "stablehlo"])
        ignored = ("_", "recipe_", "tensorflow")
        names = [name for name in sys.modules if not name.startswith(ignored)]
        file.write_text(json.dumps(names))
        return code

    if not file.exists():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        if in_child(list_modules, root / "modules.log", 1):
            raise SystemExit(f"modules cannot be listed: {last_line(root / 'modules.log')}")
    for name in json.loads(file.read_text()):
        if name not in sys.modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
