"""Trains tiny models with random combinations of settings, and checks how each of them ends.

    python benchmarks/combinations.py --seed 1 --count 100 --directory runs/combinations
    python benchmarks/combinations.py --seed 1 --only 17 --directory runs/combinations

Every combination of a model and of settings depends on the seed and its number alone. It is trained for
three steps and killed by SIGKILL, then continued to its end, evaluated, used and exported. Or the training
refuses it with one sentence, before anything is written. Besides:

- A second run that is not killed reads the same batches and has the same losses. It has the same settings,
  and then all numbers are equal to the last bit; or others that change nothing mathematically (`TWINS`),
  and then they are equal within a tolerance.
- The loss of its first batch is that of the same examples in other rows: of packed examples in rows of
  their own, of other rows in another order and with more padding.
- Averaged parameters (`training.ema`) are those of a formula in NumPy.
- `eval` finds what the run has found at its end.
- `generate` gives the same texts for another size of the batch, as does an exported program.
- A folder of transformers or T5X is converted back to the same parameters.

Anything else is *wrong*, and printed with the command that repeats it. Results are written to
``results-SEED.jsonl`` in the directory as each combination ends; the same command continues there.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import gc
import importlib
import io
import json
import logging
import os
import pathlib
import shlex
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# Programs are compiled much and computed little, see tests/conftest.py.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1",
)

import combinations_run as recipes
import jax
import numpy as np
import report

from synthesizer_jax.cli import main as program
from synthesizer_jax.costs import utilization
from synthesizer_jax.data.objectives import OBJECTIVES
from synthesizer_jax.optimizers.optax import OPTIMIZERS
from synthesizer_jax.runs.metrics import METRICS_FILE, read_metrics
from synthesizer_jax.serving import programs
from synthesizer_jax.training import run as training
from synthesizer_jax.training.adapters import adapted_variables
from synthesizer_jax.training.step import TrainState, loss_sums
from synthesizer_jax.training.trainer import Trainer

RECIPE = pathlib.Path(recipes.__file__)
DEVICES = 8
STEPS = 6
KILL_AT = 4
"""The number of the step before which a run is killed."""

SECONDS = 1800
"""Time limit of a process, of some combinations."""

TEXTS = ["review: nice film 3", "reverse: a b c", "the"]
"""Inputs for which texts are generated."""

BEGINNINGS = ["a b c", "the", "a"]
"""Texts that are continued by models without inputs."""

BASES = (
    "encoder_decoder:v:v:gated+bias",
    "encoder_decoder:rv:rv:relu+bias",
    "prefix_lm:grouped:v:gated+bias",
)
BASES += (
    "text_lm:rotary:v:relu",
    "classifier:frv:v:gated+sinusoidal",
    "masked_lm:talking:v:relu+bias",
)
"""Models of which a checkpoint is made once, for adapters and `init_from`."""

ELEMENTWISE = ("AdamW", "sgd", "adam", "adamax", "rmsprop", "adagrad")
"""Optimizers that update every number of a parameter by itself, whatever it is stacked with."""

ENDS = ("complete", "refused", "wrong")


@dataclasses.dataclass
class Combination:
    """What is drawn.

    Attributes:
      recipe: the arguments of the recipe, ``KIND:ENCODER:DECODER:OPTIONS``.
      settings: ``path=value`` of everything else; ``{}`` is the directory of bases.
      devices: number of simulated devices.
      saved: whether the run is killed after its checkpoint is complete.
      twin: name of the second run, and the settings that it has instead.
      twin_settings: the settings of the second run that differ.
      generate: options of `generate`; None: it is not called.
      batch_sizes: sizes of the batches in which texts are generated, always the same ones.
      export: options of `export`.
    """

    recipe: str
    settings: list[str]
    devices: int
    saved: bool
    twin: str
    twin_settings: list[str]
    generate: list[str] | None
    batch_sizes: list[int]
    export: list[str]

    @property
    def kind(self) -> str:
        """The kind of the model."""
        return self.recipe.split(":")[0]

    @property
    def compares_rows(self) -> bool:
        """Whether the loss is also computed for other rows: if they are packed, or in every second run."""
        return self.get("data.pack") == "true" or self.get("data.seed") == "1"

    def get(self, path: str, default: str = "") -> str:
        """Returns the last value of a setting."""
        values = [
            value for name, _, value in (s.partition("=") for s in self.settings) if name == path
        ]
        return values[-1] if values else default


class Draw:
    """Random choices of a combination."""

    def __init__(self, seed: int, number: int):
        self._random = np.random.default_rng((seed, number))

    def chance(self, probability: float) -> bool:
        """Returns True with a probability."""
        return bool(self._random.random() < probability)

    def choice(self, options: Sequence[Any]) -> Any:
        """Returns one of several things, all equally likely."""
        return options[int(self._random.integers(len(options)))]

    def weighted(self, options: Mapping[Any, float]) -> Any:
        """Returns a key with a probability proportional to its value."""
        names, weights = list(options), np.asarray(list(options.values()), float)
        return names[int(self._random.choice(len(names), p=weights / weights.sum()))]

    def subset(self, options: Mapping[str, float]) -> list[str]:
        """Returns each of the keys with its probability."""
        return [name for name, probability in options.items() if self.chance(probability)]


def draw_combination(seed: int, number: int) -> Combination:
    """Returns the combination of a number."""
    draw = Draw(seed, number)
    start = draw.weighted({"fresh": 0.7, "adapters": 0.15, "init_from": 0.15})
    recipe = draw.choice(BASES) if start != "fresh" else draw_model(draw)
    kind = recipe.split(":")[0]
    settings = [
        *draw_data(draw, kind),
        *draw_structure(draw, recipe, has_base=start != "fresh"),
        *draw_mesh(draw),
    ]
    settings += [*draw_training(draw, kind, start), *draw_evaluation(draw, kind)]
    devices = DEVICES if any(s.startswith("mesh.") for s in settings) else 1
    if start != "fresh":
        settings.append(f"init_from={{}}/{recipe.replace(':', '-')}")
    has_text = kind not in ("classifier", "masked_lm")
    combination = Combination(
        recipe,
        settings,
        devices=devices,
        saved=draw.chance(0.7),
        twin="same",
        twin_settings=[],
        generate=draw_generate(draw) if draw.chance(0.7) and has_text else None,
        batch_sizes=draw.choice([[3], [3], [3, 2]]),
        export=draw_export(draw, kind, start),
    )
    twins = draw_twins(draw, combination, start)
    combination.twin = draw.choice(list(twins))
    combination.twin_settings = twins[combination.twin]
    return combination


def draw_model(draw: Draw) -> str:
    """Returns the arguments of the recipe for a model that is made afresh."""
    kinds = {
        "encoder_decoder": 8,
        "language_model": 2,
        "prefix_lm": 2,
        "text_lm": 3,
        "classifier": 2.5,
    }
    kind = draw.weighted({**kinds, "masked_lm": 2.5})
    encoder = draw.choice(list(recipes.MIXERS))
    decoder = draw.choice([encoder, draw.choice(list(recipes.MIXERS)), "v"])
    words = [draw.choice(["gated", "relu"])]
    positions = draw.weighted({"bias": 4, "sinusoidal": 1, "learned": 1, "": 1})
    sharing = draw.weighted({"": 12, "universal": 1, "halting": 1})
    words += [word for word in (positions, sharing, draw.weighted({"": 9, "capped": 1})) if word]
    return ":".join([kind, encoder, decoder, "+".join(words)])


def draw_data(draw: Draw, kind: str) -> list[str]:
    """Returns settings of the data."""
    settings = [
        f"data.batch_size={draw.choice([8, 16, 16])}",
        f"data.shards={draw.choice([1, 2, 4, 8])}",
    ]
    settings.append(f"data.seed={draw.choice([0, 1])}")
    lengths = recipes.INPUTS, recipes.TARGETS
    if kind == "masked_lm":
        lengths = recipes.INPUTS, recipes.INPUTS
    elif kind == "classifier":
        lengths = recipes.INPUTS, 1
    elif kind == "text_lm":
        lengths = 0, recipes.TARGETS
        settings += draw.choice([[], ["data.objective=full_lm"], ["data.objective=lm"]])
    else:
        mixture = draw.weighted(
            {"sentiment": 2, "reverse": 2, "synthetic_quickstart": 2, "texts": 2}
        )
        settings.append(f"data.mixture={mixture}")
        if mixture == "synthetic_quickstart":
            settings += ["model.vocab_size=1024", "vocabulary=none"]
        if mixture == "texts":
            objective = draw.choice(
                [*(name for name in OBJECTIVES if "lm" not in name), "prefix_lm"]
            )
            settings.append(f"data.objective={objective}")
            settings.append(
                "data.targets_length=32"
            )  # of noise of 0.5 there is as much as of inputs
            lengths = recipes.INPUTS, 32
    if draw.chance(0.45 if kind in ("encoder_decoder", "text_lm") else 0.05):
        settings.append("data.pack=true")
        settings += draw.choice([[], ["data.max_segments=3"]])
    elif draw.chance(0.3):
        inputs, targets = lengths
        shorter = max(1, targets // 2)
        if kind == "masked_lm":
            shorter = inputs // 2
        buckets = [[inputs // 2, shorter], [inputs, shorter]] if kind != "masked_lm" else [[16, 16]]
        settings.append(f"data.buckets={json.dumps(buckets)}")
    if draw.chance(0.1):
        settings.append("data.shuffle=false")
    return settings


def draw_structure(draw: Draw, recipe: str, *, has_base: bool) -> list[str]:
    """Returns settings of the model: of its layers, and the dtype."""
    settings = []
    shared = "universal" in recipe or "halting" in recipe
    for stack in stacks_of(recipe.split(":")[0]):
        if draw.chance(0.05 if shared else 0.35):
            settings.append(f"model.{stack}.scan=true")
        elif not has_base and draw.chance(0.7):
            settings.append(f"model.{stack}.runs.0.repeats=1")  # layers take time to trace
        if draw.chance(0.35):
            policy = draw.choice(["full", "dots", "dots_with_no_batch_dims"])
            settings.append(f"model.{stack}.remat={policy}")
        if draw.chance(0.25):
            settings.append(f"model.{stack}.dropout_rate=0.1")
            settings += draw.choice([[], [f"model.{stack}.elementwise_dropout=true"]])
    if draw.chance(0.3):
        settings.append("model.dtype=bfloat16")
    return settings


def stacks_of(kind: str) -> tuple[str, ...]:
    """Returns the names of a model's stacks."""
    if kind == "encoder_decoder":
        return ("encoder", "decoder")
    return ("encoder",) if kind in ("classifier", "masked_lm") else ("decoder",)


def draw_mesh(draw: Draw) -> list[str]:
    """Returns settings of the mesh; none for one device."""
    meshes: dict[tuple[str, ...], float] = {
        (): 9,
        ("mesh.data=8",): 1,
        ("mesh.fsdp=2",): 1,
        ("mesh.fsdp=-1", "mesh.data=1"): 1,
        ("mesh.tensor=2",): 1,
        ("mesh.tensor=4", "mesh.fsdp=2"): 1,
        ("mesh.sequence=2",): 1,
        ("mesh.sequence=2", "mesh.tensor=2", "mesh.fsdp=2"): 1,
        ('mesh.extra=[["expert",2]]',): 1,
        ('mesh.extra=[["expert",2]]', "mesh.tensor=2"): 0.5,
        ("mesh.tensor=8",): 0.3,
    }
    return list(draw.weighted(meshes))


def draw_training(draw: Draw, kind: str, start: str) -> list[str]:
    """Returns settings of the training."""
    settings = [f"training.optimizer={json.dumps(draw_optimizer(draw, start))}"]
    if draw.chance(0.35):
        settings.append(f"training.micro_batches={draw.choice([2, 2, 4])}")
    if draw.chance(0.4):
        settings.append(f"training.ema={draw.choice([0.5, 0.9, 0.999])}")
    settings.append(f"training.z_loss={draw.choice([0.0, 1e-4, 1e-2])}")
    if draw.chance(0.3):
        settings.append("training.label_smoothing=0.1")
    if draw.chance(0.3):
        settings.append(f"training.loss_normalizer={draw.choice(['100.0', 'tokens_with_padding'])}")
    settings.append(f"training.seed={draw.choice([0, 1])}")
    settings.append(f"training.save_every={draw.choice([3, 3, 2, 1])}")
    settings.append(f"training.keep_latest={draw.choice([1, 2])}")
    settings.append(f"training.keep_best={draw.choice([0, 1])}")
    if start == "adapters":
        targets = draw.choice([".*/(query|value)/kernel", ".*kernel", ".*/layers_[01]/.*/kernel"])
        adapters = {"type": "LoRA", "rank": draw.choice([2, 4]), "alpha": 8.0, "targets": targets}
        settings.append(f"training.adapters={json.dumps(adapters)}")
    elif draw.chance(0.25):
        settings.append(f"training.rules={json.dumps(draw_rules(draw, kind))}")
    if start == "init_from" and draw.chance(0.4):
        rule = draw.choice(
            [
                {"pattern": "embedding", "action": "fresh"},
                {"pattern": ".*/scale", "action": "fresh"},
                {"pattern": "embedding|logits_kernel", "action": "resize", "fill": "fresh"},
            ]
        )
        settings.append(f"init_rules={json.dumps([{'type': 'InitRule', **rule}])}")
    elif start == "init_from" and draw.chance(0.2):
        settings.append("init_optimizer=true")
    return settings


def draw_optimizer(draw: Draw, start: str) -> dict[str, Any]:
    """Returns an optimizer as JSON."""
    rates: list[Any] = [
        {"type": "Constant", "value": 3e-3, "warmup_steps": draw.choice([0, 4])},
        {"type": "InverseSquareRoot", "factor": 0.01, "warmup_steps": 2},
        {"type": "Noam", "d_model": 16, "warmup_steps": 4, "factor": 0.02},
        {"type": "Linear", "peak": 3e-3, "total_steps": STEPS, "warmup_steps": 2},
        {"type": "Cosine", "peak": 3e-3, "total_steps": STEPS, "final": 1e-4},
        {
            "type": "OptaxSchedule",
            "name": "exponential_decay",
            "arguments": {"init_value": 3e-3, "transition_steps": 2, "decay_rate": 0.5},
        },
        0.002,
    ]
    common = {"learning_rate": draw.choice(rates), "clip_norm": draw.choice([None, 1.0, 0.1])}
    kind = draw.weighted({"AdamW": 4, "Adafactor": 3, "Optax": 5})
    if kind == "AdamW":
        return {"type": kind, **common, "weight_decay": draw.choice([0.0, 0.1])}
    if kind == "Adafactor":
        scale = draw.chance(0.1 if start == "adapters" else 0.6)
        size = draw.choice([4, 128])
        return {"type": kind, **common, "parameter_scale": scale, "min_size": size}
    arguments: list[tuple[str, Any]] = []
    name = draw.choice(sorted(OPTIMIZERS))
    if name in ("sgd", "rmsprop"):
        arguments.append(("momentum", 0.9))
    return {"type": kind, "name": name, **common, "arguments": arguments}


def draw_rules(draw: Draw, kind: str) -> list[dict[str, Any]]:
    """Returns rules of learning rates by path as JSON."""
    stack = stacks_of(kind)[0]
    rules = draw.choice(
        [
            [{"pattern": "embedding", "frozen": True}],
            [{"pattern": ".*/scale", "learning_rate": 0.1}],
            [{"pattern": f"{stack}/layers_0/.*", "frozen": True}],
            [
                {"pattern": f"{stack}/layers_1/.*", "learning_rate": 0.5},
                {"pattern": ".*/scale", "frozen": True},
            ],
        ]
    )
    return [{"type": "OptimizerRule", **rule} for rule in rules]


def draw_evaluation(draw: Draw, kind: str) -> list[str]:
    """Returns settings of the evaluation."""
    decodes = kind not in ("classifier", "masked_lm")
    settings = [f"evaluation.every={draw.choice([0, 0, 0, 2])}"]
    if decodes or draw.chance(0.05):
        settings.append(f"evaluation.method={draw.choice(['rank', 'greedy', 'beam'])}")
    if decodes:
        settings.append(f"evaluation.beams={draw.choice([1, 2, 4])}")
        options = {
            "relative_length=1.5": 0.2,
            "repetition_penalty=1.3": 0.2,
            "no_repeat_ngram_size=2": 0.2,
        }
        options |= {'stop_strings=["a"]': 0.15, "logits_dtype=bfloat16": 0.1, "alpha=0.0": 0.2}
        settings += [f"evaluation.{option}" for option in draw.subset(options)]
    settings.append(f"evaluation.batch_size={draw.choice([3, 8])}")
    if settings[0] == "evaluation.every=2" and draw.chance(0.3):
        settings.append("evaluation.patience=1")
    return settings


def draw_generate(draw: Draw) -> list[str]:
    """Returns options of `generate`."""
    options: list[list[str]] = [
        [],
        ["--beams", "3", "--samples", "2"],
        ["--temperature", "0.8", "--samples", "2", "--seed", "3"],
        ["--temperature", "1.0", "--top-k", "5", "--top-p", "0.9"],
        ["--temperature", "1.0", "--min-p", "0.1", "--repetition-penalty", "1.2"],
    ]
    return [*draw.choice(options), *draw.choice([[], ["--max-length", "6"]])]


def draw_export(draw: Draw, kind: str, start: str) -> list[str]:
    """Returns options of `export`."""
    formats = {"stablehlo": 5.0}
    if kind == "encoder_decoder":
        formats |= {"huggingface": 2, "t5x": 2, "t5x-scanned": 1}
    elif kind != "masked_lm":
        formats |= {"huggingface": 0.5}
    if start == "adapters":
        formats |= {"peft": 3}
    return ["--to", draw.weighted(formats)]


def draw_twins(draw: Draw, combination: Combination, start: str) -> dict[str, list[str]]:
    """Returns settings that change nothing mathematically, by name."""
    settings, twins = combination.settings, dict[str, list[str]]()
    stacks = [f"model.{stack}" for stack in stacks_of(combination.kind)]
    optimizer = json.loads(combination.get("training.optimizer"))
    drops = any(".dropout_rate=" in s for s in settings)
    name = optimizer.get("name", optimizer["type"])
    # The noise of these optimizers depends on the shapes of parameters, not on how they are
    # sharded.
    twins["same"] = []
    policies = {s: combination.get(f"{s}.remat") for s in stacks}
    twins["remat"] = [
        f"{s}.remat={'none' if policies[s] else draw.choice(['full', 'dots'])}" for s in stacks
    ]
    batch = int(combination.get("data.batch_size"))
    parts = int(combination.get("training.micro_batches", "1"))
    if not drops and (parts > 1 or batch >= 2 * combination.devices):
        twins["micro-batches"] = [f"training.micro_batches={1 if parts > 1 else 2}"]
    if combination.devices > 1:
        reset = ["mesh.data=-1", "mesh.fsdp=1", "mesh.tensor=1", "mesh.sequence=1", "mesh.extra=[]"]
        twins["one device"] = reset
        if batch // 2 % parts == 0:
            twins["another mesh"] = [*reset, "mesh.data=2", "mesh.tensor=4"]
    has_rules = bool(combination.get("training.rules"))
    if start == "init_from" and not drops and not has_rules and name in ELEMENTWISE:
        twins["scan"] = [
            f"{s}.scan={str(combination.get(f'{s}.scan') != 'true').lower()}" for s in stacks
        ]
    return twins


class WrongError(Exception):
    """A combination did not end as it should."""


def in_child(function: Callable[[], int], log: pathlib.Path, devices: int) -> int:
    """Calls a function in a forked process, which prints to a file; returns its exit code.

    This process has imported everything, but has not started JAX's devices.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            print_to(log)
            jax.config.update("jax_num_cpu_devices", devices)
            code = function()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -signal.SIGALRM


def print_to(log: pathlib.Path) -> None:
    """Lets this process print to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def command(arguments: Sequence[str]) -> int:
    """Runs the command line in this process and returns its exit code."""
    sys.argv = ["synthesizer-jax", *arguments]
    print("$", shlex.join(sys.argv), flush=True)
    try:
        program.run()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


class Attempt:
    """Everything that is done with a combination, in a directory of its own."""

    def __init__(self, combination: Combination, root: pathlib.Path, place: pathlib.Path):
        self.combination, self.root, self.place = combination, root, place
        self.notes = dict[str, Any]()
        self.end, self.reason = "refused", ""

    @property
    def texts(self) -> list[str]:
        """What texts are generated for."""
        return BEGINNINGS if self.combination.kind == "text_lm" else TEXTS

    @property
    def has_twin_alone(self) -> bool:
        """Whether the second run needs another number of devices, and so a process of its own."""
        return self.combination.twin == "one device"

    def arguments(self, workdir: str, extra: Sequence[str] = ()) -> list[str]:
        """Returns the command that trains."""
        settings = [*self.combination.settings, *extra]
        bases = str(self.root / "bases")
        return [
            *("train", f"{RECIPE}:default:{self.combination.recipe}"),
            *(
                "--workdir",
                str(self.place / workdir),
                "--data-dir",
                str(self.root / "data"),
                "--quiet",
            ),
            *(word for s in settings for word in ("--set", s.replace("{}", bases))),
        ]

    def called(self, name: str, function: Callable[[], int]) -> None:
        """Calls a function in this process, with its output in a log, and keeps its code; see `check`."""
        print_to(self.place / f"{name}.log")
        try:
            code = function()
        except Exception:
            traceback.print_exc()
            code = 70
        sys.stdout.flush()
        sys.stderr.flush()
        (self.place / f"{name}.code").write_text(str(code))

    def check(self, name: str, ended: int) -> None:
        """Raises a `WrongError` unless a function succeeded, in a process that ended with a code."""
        log, code = self.place / f"{name}.log", self.place / f"{name}.code"
        if not code.exists():
            raise WrongError(f"{name} was not done in a process that ended with {ended}; see {log}")
        if code.read_text() != "0":
            raise WrongError(f"{name} ended with {code.read_text()}: {last_line(log)}")
        if "Traceback" in log.read_text(errors="replace"):
            raise WrongError(f"{name} printed a traceback; see {log}")

    def check_killed(self, ended: int) -> bool:
        """Returns whether the training was killed, or ended before; False if it was refused."""
        log, code = self.place / "killed.log", self.place / "killed.code"
        if ended != -signal.SIGKILL:
            raise WrongError(f"the process to be killed ended with {ended}; see {log}")
        if not code.exists() or (
            code.read_text() == "0" and self.combination.get("evaluation.patience")
        ):
            return True
        check_refusal(int(code.read_text()), log)
        if written := tree_of(self.place) - {log, code}:
            raise WrongError(
                f"refused, but wrote {sorted(map(str, written))[:3]}: {last_line(log)}"
            )
        self.notes["refusal"] = last_line(log)
        return False

    def wait_until_saved(self) -> None:
        """Waits for the checkpoint of the steps so far, if the combination asks for it."""
        every = int(self.combination.get("training.save_every"))
        newest = (KILL_AT - 1) // every * every
        path = self.place / "killed" / "checkpoints" / str(newest)
        end = time.monotonic() + 20
        while self.combination.saved and not path.is_dir() and time.monotonic() < end:
            time.sleep(0.01)

    def train_twin(self) -> int:
        """Trains the second run without interruption, and checks its first batch and its averages.

        It evaluates nothing, unless that decides when it stops.
        """
        states, step = list[Any](), Trainer.step

        def watching_step(trainer: Trainer, state: TrainState, batch: Any) -> Any:
            if not states:
                if self.combination.compares_rows:
                    compare_rows(trainer, state, batch)
                states.append(host(state.params))
            state, metrics = step(trainer, state, batch)
            states.append(host(state.params))
            if state.ema:
                compare_average(states, host(state.ema), trainer.experiment.training.ema)
            return state, metrics

        with (
            mock.patch.object(Trainer, "step", watching_step),
            mock.patch.dict(os.environ, {program.TRACEBACK: "1"}),
            contextlib.ExitStack() as stack,
        ):
            if not self.combination.get("evaluation.patience"):
                stack.enter_context(
                    mock.patch.object(training, "evaluate_state", return_value={"score": 0.0})
                )
            return command(self.arguments("twin", self.combination.twin_settings))

    def compare_with_twin(self) -> None:
        """Compares what both runs have logged."""
        twin = self.combination.twin
        ours, theirs = (self.records(name) for name in ("killed", "twin"))
        if [r["step"] for r in ours] != [r["step"] for r in theirs]:
            raise WrongError(
                f"steps {[r['step'] for r in ours]} and {[r['step'] for r in theirs]} of {twin}"
            )
        if [r["data_checksum"] for r in ours] != [r["data_checksum"] for r in theirs]:
            raise WrongError(f"another batch in {twin}")
        low = self.combination.get("model.dtype") == "bfloat16"
        worst = 0.0
        for a, b in zip(ours, theirs, strict=True):
            for name in ("loss", "z_loss", "gradient_norm", "learning_rate"):
                x, y = a.get(name) or 0.0, b.get(name) or 0.0
                difference = abs(x - y) / max(abs(x), abs(y), 1e-3)
                tolerance = (
                    0.0 if twin == "same" else 0.05 if low else 2e-4 if a["step"] == 1 else 5e-3
                )
                if name == "gradient_norm":
                    tolerance *= 4
                worst = max(worst, difference if name == "loss" else 0.0)
                if not difference <= tolerance:
                    raise WrongError(f"{name} of step {a['step']}: {x} and {y} in {twin}")
        self.notes["difference"] = worst

    def records(self, workdir: str) -> list[dict[str, Any]]:
        """Returns what a run has logged of its steps."""
        records = read_metrics(self.place / workdir / METRICS_FILE)
        return [record for record in records if record["kind"] == "train"]

    def results(self, workdir: str) -> Any:
        """Returns the results of a run's last evaluation."""
        files = (self.place / workdir / "evaluation").glob("*/results.json")
        newest = max(files, key=lambda path: int(path.parent.name))
        return json.loads(newest.read_text())

    def continue_and_use(self) -> int:
        """Continues the run, evaluates it, generates texts with it and exports it, in this process."""
        combination, place = self.combination, self.place
        run = str(place / "killed")
        commands = {
            "train": self.arguments("killed"),
            "eval": ["eval", "--workdir", run, "--data-dir", str(self.root / "data")],
        }
        if combination.generate is not None:
            generate = ["generate", "--workdir", run, *combination.generate, *self.texts]
            for size in combination.batch_sizes:
                output = ["--batch-size", str(size), "--output", str(place / f"texts-{size}")]
                commands[f"generate in batches of {size}"] = [*generate, *output]
        exported = place / "exported"
        commands["export"] = ["export", run, str(exported), *combination.export]
        results = []
        for name, arguments in commands.items():
            errors = io.StringIO()
            with captured_errors(errors):
                code = command(arguments)
            print(errors.getvalue(), flush=True)
            with (place / "codes.jsonl").open("a") as file:
                last = ([line for line in errors.getvalue().splitlines() if line] or [""])[-1]
                file.write(json.dumps([name, code, last, "Traceback" in errors.getvalue()]) + "\n")
            if name in ("train", "eval") and code:
                return 0
            if name in ("train", "eval"):
                results.append(self.results("killed"))
        compare_results(results[1], results[0], "eval")
        if exported.exists():
            self.check_export(exported)
        return 0

    def check_codes(self) -> None:
        """Raises a `WrongError` unless commands have succeeded, or refused what they cannot do."""
        for line in (self.place / "codes.jsonl").read_text().splitlines():
            name, code, last, raised = json.loads(line)
            refused = code == 2 and is_sentence(last) and name not in ("train", "eval")
            if raised or not (code == 0 or refused):
                raise WrongError(f"{name} ended with {code}: {last}")
            if refused:
                self.notes[f"{name.split()[0]} refused"] = last
        written = [self.place / f"texts-{size}" for size in self.combination.batch_sizes]
        texts = {path.read_text() for path in written if path.exists()}
        if len(texts) > 1:
            raise WrongError(
                f"generate {self.combination.generate}: by size of batch {sorted(texts)}"
            )

    def check_export(self, exported: pathlib.Path) -> None:
        """Compares what was exported with the run."""
        import synthesizer_jax as sj
        from synthesizer_jax.models import unroll_variables

        kind = self.combination.export[1]
        run = str(self.place / "killed")
        if kind == "peft":
            return
        if kind != "stablehlo":
            ours = sj.load(run)
            options = ["--vocabulary", "bytes"] if kind.startswith("t5x") else []
            converted = self.place / "converted"
            if command(["convert", str(exported), str(converted), *options]):
                raise WrongError("what was exported is not converted back")
            theirs = sj.load(str(converted))
            compare_trees(
                unroll_variables(theirs.model, theirs.variables)["params"],
                unroll_variables(ours.model, ours.variables)["params"],
                0.0,
                "exported parameters",
            )
            return
        if self.combination.generate != []:
            return
        from synthesizer_jax.serving.load import Model

        found = [" ".join(text.splitlines()) for text in Model(exported).generate(self.texts)]
        written = (self.place / f"texts-{self.combination.batch_sizes[0]}").read_text().splitlines()
        # Programs may continue a text for longer than the command, which fills a row of training.
        continues = self.combination.kind == "text_lm"
        same = all(
            x.startswith(y) if continues else x == y for x, y in zip(found, written, strict=True)
        )
        if not same:
            raise WrongError(f"the exported program generates {found}, not {written}")


@contextlib.contextmanager
def captured_errors(errors: io.StringIO) -> Iterator[None]:
    """Context manager that keeps what is printed as an error."""
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, [logging.StreamHandler(errors)]
    try:
        with contextlib.redirect_stderr(errors):
            yield
    finally:
        root.handlers = handlers


def host(tree: Any) -> Any:
    """Returns copies of arrays as NumPy's, which later steps do not reuse."""
    return jax.tree.map(lambda x: np.array(jax.device_get(x)), tree)


def compare_trees(found: Any, expected: Any, tolerance: float, what: str) -> None:
    """Raises a `WrongError` if trees of arrays differ by more than a relative tolerance."""
    ours, theirs = (dict(jax.tree.leaves_with_path(tree)) for tree in (found, expected))
    if ours.keys() != theirs.keys():
        names = sorted(jax.tree_util.keystr(path) for path in ours.keys() ^ theirs.keys())
        raise WrongError(f"{what}: {', '.join(names[:4])} in one of them alone")
    for path, x in ours.items():
        x, y = np.asarray(x, np.float64), np.asarray(theirs[path], np.float64)
        if x.shape != y.shape or not np.all(np.abs(x - y) <= tolerance * (1e-2 + np.abs(y))):
            raise WrongError(f"{what}: {jax.tree_util.keystr(path)} differs")


def compare_average(states: Sequence[Any], found: Any, decay: float | None) -> None:
    """Compares the average of the parameters with the formula of `step.apply_gradients`."""
    assert decay is not None
    average = jax.tree.map(lambda x: x.astype(np.float64), states[0])
    for number, params in enumerate(states[1:]):
        weight = 1 - min(decay, (1 + number) / (10 + number))
        average = jax.tree.map(lambda a, p, w=weight: a + w * (p - a), average, params)
    compare_trees(found, average, 1e-5, f"average of step {len(states) - 1}")


def compare_rows(trainer: Trainer, state: TrainState, batch: Any) -> None:
    """Compares the loss of a batch with that of the same examples in other rows."""
    experiment, model = trainer.experiment, trainer.experiment.model
    device = jax.local_devices()[0]
    lora = experiment.training.adapters
    variables = adapted_variables(host(state.variables), host(trainer.base), lora)
    batch = host(batch)
    is_packed = "encoder_segment_ids" in batch
    other = unpacked(batch) if is_packed else repadded(batch, model.ids.padding)

    def losses(batch: Any, max_segments: int | None) -> list[float]:
        with jax.default_device(device):
            sums = jax.jit(
                lambda variables, batch: loss_sums(
                    model,
                    variables,
                    batch,
                    z_loss=experiment.training.z_loss,
                    label_smoothing=experiment.training.label_smoothing,
                    max_segments=max_segments,
                )
            )(variables, batch)
        return [float(x) for x in (sums.loss, sums.z_loss, sums.weight)]

    segments = experiment.data.segments_per_row if is_packed else None
    found, expected = losses(batch, segments), losses(other, None)
    # A ponder cost is a mean over rows, and no part of these numbers.
    tolerance = 0.03 if "bfloat16" in str(model.dtype) else 2e-4
    if not np.allclose(found, expected, rtol=tolerance, atol=1e-3):
        how = "packed rows" if is_packed else "more padding and another order"
        raise WrongError(
            f"loss, z-loss and tokens of a batch: {found}, otherwise {expected} ({how})"
        )


def unpacked(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the examples of packed rows, each in a row of its own."""
    rows = collections.defaultdict[str, list[np.ndarray]](list)
    sides = {"encoder_input_tokens": "encoder"}
    sides |= {
        f"decoder_{name}": "decoder" for name in ("input_tokens", "target_tokens", "loss_weights")
    }
    for row in range(len(batch["decoder_target_tokens"])):
        for segment in range(1, int(batch["decoder_segment_ids"][row].max()) + 1):
            for name, side in sides.items():
                values = batch[name][row]
                inside = batch[f"{side}_segment_ids"][row] == segment
                part = values[inside]
                rows[name].append(np.pad(part, (0, len(values) - len(part))))
    return {name: np.stack(parts) for name, parts in rows.items()}


def repadded(batch: dict[str, np.ndarray], padding: int) -> dict[str, np.ndarray]:
    """Returns the same rows from the last to the first, with more padding at their ends."""
    other = {}
    is_class = batch["decoder_target_tokens"].shape[1] == 1
    for name, values in batch.items():
        fill = 0 if name.endswith("weights") else padding
        no_more = values.shape[1] == 0 or (is_class and name.startswith("decoder"))
        more = 0 if no_more else 3
        if values.ndim == 2:
            values = np.pad(values, ((0, 0), (0, more)), constant_values=fill)
        other[name] = values[::-1]
    return other


def compare_results(found: Any, expected: Any, what: str, path: str = "") -> None:
    """Raises a `WrongError` if results of an evaluation differ by more than rounding."""
    if isinstance(expected, dict) and isinstance(found, dict) and found.keys() == expected.keys():
        for name, value in expected.items():
            compare_results(found[name], value, what, f"{path}.{name}")
    elif isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        for number, value in enumerate(expected):
            compare_results(found[number], value, what, f"{path}.{number}")
    elif isinstance(expected, float) and isinstance(found, float):
        if not np.isclose(found, expected, rtol=1e-5, equal_nan=True):
            raise WrongError(f"{what}: {path} is {found}, and was {expected}")
    elif found != expected:
        raise WrongError(f"{what}: {path} is {found}, and was {expected}")


def last_line(log: pathlib.Path) -> str:
    """Returns the last line of a log."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:1500] if lines else ""


def is_sentence(line: str) -> bool:
    """Whether an error is one line that the program wrote itself."""
    return line.startswith("error: ") and program.TRACEBACK not in line


def check_refusal(code: int, log: pathlib.Path) -> None:
    """Raises a `WrongError` unless a command has refused its settings in one line."""
    text, last = log.read_text(errors="replace"), last_line(log)
    if code != 2 or "Traceback" in text or not is_sentence(last):
        raise WrongError(f"training ended with {code}: {last}")


def tree_of(directory: pathlib.Path) -> set[pathlib.Path]:
    """Returns all files except locks."""
    return {p for p in directory.rglob("*") if p.is_file() and p.suffix != ".lock"}


def make_inputs(root: pathlib.Path) -> None:
    """Makes data and bases where they are missing."""
    root.mkdir(parents=True, exist_ok=True)
    if not (root / "data.ready").exists():
        shutil.rmtree(root / "data", ignore_errors=True)
        if code := in_child(lambda: make_data(root), root / "data.log", 1):
            raise SystemExit(f"the data could not be made ({code}): {last_line(root / 'data.log')}")
        (root / "data.ready").touch()
    for base in BASES:
        directory = root / "bases" / base.replace(":", "-")
        if not (directory / "checkpoints" / "1").is_dir():
            arguments = [
                "train",
                f"{RECIPE}:default:{base}",
                "--workdir",
                str(directory),
                "--quiet",
            ]
            arguments += ["--data-dir", str(root / "data"), "--set", "training.steps=1"]
            log = root / "base.log"
            if code := in_child(functools.partial(command, arguments), log, 1):
                raise SystemExit(f"the base {base} could not be made ({code}): {last_line(log)}")


def import_modules(root: pathlib.Path) -> None:
    """Imports what the commands import, once instead of in every child, and traces a small function."""
    file = root / "modules.json"
    place = root / "modules"

    def list_modules() -> int:
        base = root / "bases" / BASES[0].replace(":", "-")
        train = Attempt(draw_combination(0, 0), root, place)
        train.combination.recipe, train.combination.settings = BASES[0], ["training.steps=1"]
        code = command(train.arguments("run"))
        code = code or command(["eval", "--workdir", str(base), "--data-dir", str(root / "data")])
        code = code or command(["export", str(base), str(place / "exported"), "--to", "stablehlo"])
        names = [
            name for name in sys.modules if not name.startswith(("_", "recipe_", "tensorflow"))
        ]
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


def make_data(root: pathlib.Path) -> int:
    """Writes and prepares the data sets, with TensorFlow."""
    from synthesizer_jax.preparation import synthetic

    data = ["--data-dir", str(root / "data")]
    rows: dict[str, list[dict[str, str]]] = {"sentiment": [], "reverse": [], "texts": []}
    random = np.random.default_rng(0)
    for number in range(480):
        label = ("bad", "good")[number % 2]
        words = [str(word) for word in random.choice(list("abcdefgh"), random.integers(1, 8))]
        rows["sentiment"].append(
            {"text": f"{('dull', 'nice')[number % 2]} film {number}", "label": label}
        )
        rows["reverse"].append({"text": " ".join(words), "target": " ".join(words[::-1])})
        rows["texts"].append({"text": " ".join(words * int(random.integers(1, 4)))})
    formats = {
        "sentiment": ["--input", "review: {text}", "--target", "{label}", "--labels", "bad,good"],
        "reverse": ["--input", "reverse: {text}", "--target", "{target}"],
        "texts": ["--target", "{text}"],
    }
    for name, options in formats.items():
        files = []
        for split, part in {"train": rows[name][:400], "validation": rows[name][400:]}.items():
            path = root / f"{name}-{split}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in part))
            files.append(f"{split}={path}")
        imported = [
            "data",
            "import",
            "mine",
            "--name",
            name,
            "--from",
            ",".join(files),
            *options,
            *data,
        ]
        if code := command(imported) or command(["data", "prepare", name, *data]):
            return code
    synthetic.SIZES = {"train": 400, "validation": 40}
    synthetic.write(root / "data", recipes_of_quickstart())
    return command(["data", "prepare", "synthetic_quickstart", *data])


def recipes_of_quickstart() -> tuple[str, ...]:
    """Returns the tasks of the synthetic mixture that is learned soon."""
    from synthesizer_jax.tasks.synthetic import MIXTURES, QUICKSTART

    return tuple(MIXTURES[QUICKSTART])


def kill_all(attempts: Sequence[Attempt]) -> int:
    """Trains in this process until it is killed in the middle of all runs.

    The runs are nested: when one has come to the step before which it is killed, the next one starts.
    Most of the time would be taken by starting if every run had a process of its own.
    """
    step = Trainer.step

    def start(index: int) -> None:
        for number in range(index, len(attempts)):
            one, steps = attempts[number], list[int]()

            def killing_step(
                trainer: Trainer,
                state: Any,
                batch: Any,
                number: int = number,
                one: Attempt = one,
                steps: list[int] = steps,
            ) -> Any:
                steps.append(1)
                if len(steps) == KILL_AT:
                    one.wait_until_saved()
                    start(number + 1)
                return step(trainer, state, batch)

            Trainer.step = killing_step  # type: ignore[method-assign]
            one.called("killed", functools.partial(command, one.arguments("killed")))
        os.kill(os.getpid(), signal.SIGKILL)

    start(0)
    return 1


def continue_all(attempts: Sequence[Attempt]) -> int:
    """Continues runs that were killed, uses them and trains the second runs."""
    for one in attempts:
        one.called("resumed", one.continue_and_use)
        if not one.has_twin_alone:
            one.called("twin", one.train_twin)
        gc.collect()
    return 0


def train_twins(attempts: Sequence[Attempt]) -> int:
    """Trains second runs on one device."""
    for one in attempts:
        one.called("twin", one.train_twin)
    return 0


def attempt_group(numbers: Sequence[int], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Does everything with some combinations of as many devices; returns their results."""
    attempts = []
    for number in numbers:
        place = args.directory / f"{args.seed}-{number}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        attempts.append(Attempt(draw_combination(args.seed, number), args.directory, place))
    devices, log = attempts[0].combination.devices, args.directory / f"{args.seed}-{numbers[0]}.log"
    began = time.monotonic()

    def keep_right(check: Callable[[Attempt], bool], left: Sequence[Attempt]) -> list[Attempt]:
        """Returns what is left after a check, whose errors are kept."""
        kept = []
        for one in left:
            try:
                if check(one):
                    kept.append(one)
            except WrongError as error:
                one.end, one.reason = "wrong", str(error)
        return kept

    def check_used(one: Attempt) -> bool:
        one.check("resumed", ended)
        one.check_codes()
        return True

    def check_twin(one: Attempt) -> bool:
        one.check("twin", ended)
        one.compare_with_twin()
        one.end = "complete"
        return True

    ended = in_child(functools.partial(kill_all, attempts), log, devices)
    left = keep_right(lambda one: one.check_killed(ended), attempts)
    if left:
        ended = in_child(functools.partial(continue_all, left), log, devices)
        left = keep_right(check_used, left)
    if alone := [one for one in left if one.has_twin_alone]:
        in_child(functools.partial(train_twins, alone), log, 1)
    keep_right(check_twin, left)
    seconds = round((time.monotonic() - began) / len(numbers), 1)
    results = []
    for number, one in zip(numbers, attempts, strict=True):
        if one.end != "wrong" and not args.keep:
            shutil.rmtree(one.place)
        found = {"number": number, "end": one.end, "reason": one.reason, "seconds": seconds}
        results.append({**found, **one.notes, **dataclasses.asdict(one.combination)})
    log.unlink()
    return results


def make_groups(numbers: Sequence[int], args: argparse.Namespace) -> list[list[int]]:
    """Returns the numbers in groups of as many devices, the smallest numbers first."""
    groups, open_groups = list[list[int]](), dict[int, list[int]]()
    for number in numbers:
        devices = draw_combination(args.seed, number).devices
        group = open_groups.get(devices)
        if group is None or len(group) == args.together:
            group = open_groups[devices] = []
            groups.append(group)
        group.append(number)
    return groups


def main() -> None:
    """Runs all combinations that have no result yet, and writes the table."""
    parser = report.arguments(__doc__, seed=0, count=100, jobs=1, together=4)
    parser.add_argument("--only", type=int, nargs="+", help="the numbers to run, again")
    parser.add_argument("--directory", type=pathlib.Path, default=pathlib.Path("runs/combinations"))
    parser.add_argument("--keep", action="store_true", help="keep the runs of all combinations")
    parser.add_argument("--show", action="store_true", help="only show what would be drawn")
    args = parser.parse_args()
    args.directory = args.directory.resolve()
    if args.show:
        for number in args.only or range(args.count):
            print(number, json.dumps(dataclasses.asdict(draw_combination(args.seed, number))))
        return
    jax.config.update("jax_compilation_cache_dir", str(args.directory / "compiled"))
    utilization.SIDE["cpu"] = 64  # the matrix product that every run measures
    programs.PLATFORMS = ("cpu",)  # type: ignore[assignment]  # of exported programs
    make_inputs(args.directory)
    import_modules(args.directory)
    file = args.directory / f"results-{args.seed}.jsonl"
    gc.freeze()
    gc.set_threshold(50_000)  # tracing makes many objects that live on
    finished = read_results(file)
    left = args.only or [number for number in range(args.count) if number not in finished]
    groups, workers = make_groups(left, args), []
    for job in range(args.jobs):
        if (pid := os.fork()) == 0:
            for group in groups[job :: args.jobs]:
                for result in attempt_group(group, args):
                    with file.open("a") as lines:
                        lines.write(json.dumps(result) + "\n")
                    print(
                        result["number"],
                        result["end"],
                        f"{result['seconds']} s",
                        result["twin"],
                        flush=True,
                    )
                    if result["end"] == "wrong":
                        print(
                            f"  {result['reason']}\n  {again(args, result['number'])}", flush=True
                        )
            os._exit(0)
        workers.append(pid)
    for pid in workers:
        os.waitpid(pid, 0)
    finished = read_results(file)
    results = [finished[number] for number in range(args.count) if number in finished]
    if args.only:
        return
    report.write(
        "combinations",
        summary(results),
        result={"combinations": results},
        options=args,
        facts=report.machine(),
    )
    wrong = [result for result in results if result["end"] == "wrong"]
    for result in wrong:
        print(f"{again(args, result['number'])}\n  {result['reason']}", file=sys.stderr)
    if wrong or len(results) < args.count:
        raise SystemExit(f"{len(wrong)} of {len(results)} combinations went wrong")


def again(args: argparse.Namespace, number: int) -> str:
    """Returns the command that repeats a combination."""
    script = pathlib.Path(__file__).name
    return f"python benchmarks/{script} --seed {args.seed} --only {number} --directory {args.directory}"


def read_results(path: pathlib.Path) -> dict[int, dict[str, Any]]:
    """Returns the last result of every combination, by number."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {result["number"]: result for result in map(json.loads, lines)}


def summary(results: Sequence[Mapping[str, Any]]) -> str:
    """Returns the tables: how combinations ended by kind of model, and what they were compared with."""
    rows = []
    for kind in dict.fromkeys(result["recipe"].split(":")[0] for result in results):
        group = [result for result in results if result["recipe"].split(":")[0] == kind]
        counts = collections.Counter(result["end"] for result in group)
        rows.append({"kind": kind, **{end: counts[end] for end in ENDS}})
    columns = {"kind": "model"} | {end: f"{end}|d" for end in ENDS}
    pairs = []
    for twin in sorted({result["twin"] for result in results}):
        group = [r["difference"] for r in results if r["twin"] == twin and r["end"] == "complete"]
        if group:
            pairs.append({"twin": twin, "runs": len(group), "largest": max(group)})
    heads = {
        "twin": "second run",
        "runs": "runs|d",
        "largest": "largest relative difference of a loss|.1e",
    }
    return report.table(rows, columns) + "\n\n" + report.table(pairs, heads)


if __name__ == "__main__":
    main()
