"""Draws random combinations of a model and of the settings of its run.

A combination depends only on a seed and on a number, so that `combinations.py` can repeat it.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import combinations_run as recipes
import numpy as np

from synthesizer_jax.data.objectives import OBJECTIVES
from synthesizer_jax.optimizers.optax import OPTIMIZERS

RECIPE = pathlib.Path(recipes.__file__)
"""The file of the recipe that all combinations use."""

DEVICES = 8
"""The number of simulated devices of a run with a mesh."""

STEPS = 6
"""The number of training steps of a run."""

BASES = (
    "encoder_decoder:v:v:gated+bias",
    "encoder_decoder:rv:rv:relu+bias",
    "prefix_lm:grouped:v:gated+bias",
    "text_lm:rotary:v:relu",
    "classifier:frv:v:gated+sinusoidal",
    "masked_lm:talking:v:relu+bias",
)
"""Models that are trained once, so that adapters and `init_from` can use their checkpoints."""

ELEMENTWISE = ("AdamW", "sgd", "adam", "adamax", "rmsprop", "adagrad")
"""Optimizers that update every number separately, so that stacking parameters has no effect."""


@dataclasses.dataclass
class Combination:
    """A combination of a model, the settings of its run, and the uses of the run.

    Attributes:
      recipe: the arguments of the recipe, ``KIND:ENCODER:DECODER:OPTIONS``.
      settings: all other settings as ``path=value``. In these settings, ``{}`` stands for the
        directory of the base models.
      devices: the number of simulated devices.
      saved: whether the run is killed only after its newest checkpoint is complete.
      twin: the name of the second run, which says how it differs from the first run.
      twin_settings: the settings that differ between the second run and the first run.
      generate: the options of `generate`. None means that `generate` is not called.
      batch_sizes: the batch sizes with which texts are generated. All batch sizes must give the
        same texts.
      export: the options of `export`.
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
        """The kind of model that is trained."""
        return self.recipe.split(":")[0]

    @property
    def compares_rows(self) -> bool:
        """Whether the loss is computed again after the examples are arranged in different rows.

        The loss is computed again for all runs with packed rows, and for about half of the other
        runs.
        """
        return self.get("data.pack") == "true" or self.get("data.seed") == "1"

    def get(self, path: str, default: str = "") -> str:
        """Returns the value of a setting. If it is set several times, the last value counts."""
        for setting in reversed(self.settings):
            name, _, value = setting.partition("=")
            if name == path:
                return value
        return default


class Draw:
    """Makes the random choices for one combination."""

    def __init__(self, seed: int, number: int):
        self._random = np.random.default_rng((seed, number))

    def chance(self, probability: float) -> bool:
        """Returns True with the given probability."""
        return bool(self._random.random() < probability)

    def choice(self, options: Sequence[Any]) -> Any:
        """Returns one of several equally likely options."""
        return options[int(self._random.integers(len(options)))]

    def weighted(self, options: Mapping[Any, float]) -> Any:
        """Returns a random key. The probability of a key is proportional to its value."""
        names, weights = list(options), np.asarray(list(options.values()), float)
        return names[int(self._random.choice(len(names), p=weights / weights.sum()))]

    def subset(self, options: Mapping[str, float]) -> list[str]:
        """Returns a random subset of the keys.

        The value of a key is its probability of inclusion.
        """
        return [name for name, probability in options.items() if self.chance(probability)]


def draw_combination(seed: int, number: int) -> Combination:
    """Returns the combination that has the given number."""
    draw = Draw(seed, number)
    start = draw.weighted({"fresh": 0.7, "adapters": 0.15, "init_from": 0.15})
    has_base = start != "fresh"
    recipe = draw.choice(BASES) if has_base else draw_model(draw)
    kind = recipe.split(":")[0]
    settings = [
        *draw_data(draw, kind),
        *draw_structure(draw, recipe, has_base=has_base),
        *draw_mesh(draw),
        *draw_training(draw, kind, start),
        *draw_evaluation(draw, kind),
    ]
    if has_base:
        settings.append(f"init_from={{}}/{recipe.replace(':', '-')}")

    has_mesh = any(setting.startswith("mesh.") for setting in settings)
    has_text = kind not in ("classifier", "masked_lm")
    combination = Combination(
        recipe,
        settings,
        devices=DEVICES if has_mesh else 1,
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
    """Returns the arguments of the recipe for a model that does not start from a checkpoint."""
    kind = draw.weighted(
        {
            "encoder_decoder": 8,
            "language_model": 2,
            "prefix_lm": 2,
            "text_lm": 3,
            "classifier": 2.5,
            "masked_lm": 2.5,
        }
    )
    encoder = draw.choice(list(recipes.MIXERS))
    decoder = draw.choice([encoder, draw.choice(list(recipes.MIXERS)), "v"])
    feed_forward = draw.choice(["gated", "relu"])
    positions = draw.weighted({"bias": 4, "sinusoidal": 1, "learned": 1, "": 1})
    sharing = draw.weighted({"": 12, "universal": 1, "halting": 1})
    capped = draw.weighted({"": 9, "capped": 1})
    words = [word for word in (feed_forward, positions, sharing, capped) if word]
    return ":".join([kind, encoder, decoder, "+".join(words)])


def draw_data(draw: Draw, kind: str) -> list[str]:
    """Returns settings of the training data."""
    settings = [
        f"data.batch_size={draw.choice([8, 16, 16])}",
        f"data.shards={draw.choice([1, 2, 4, 8])}",
        f"data.seed={draw.choice([0, 1])}",
    ]
    inputs, targets = recipes.INPUTS, recipes.TARGETS
    if kind == "masked_lm":
        targets = recipes.INPUTS
    elif kind == "classifier":
        targets = 1
    elif kind == "text_lm":
        inputs = 0
        settings += draw.choice([[], ["data.objective=full_lm"], ["data.objective=lm"]])
    else:
        mixture, mixture_settings = draw_mixture(draw)
        settings += mixture_settings
        if mixture == "texts":
            targets = 32

    if draw.chance(0.45 if kind in ("encoder_decoder", "text_lm") else 0.05):
        settings.append("data.pack=true")
        settings += draw.choice([[], ["data.max_segments=3"]])
    elif draw.chance(0.3):
        if kind == "masked_lm":
            buckets = [[16, 16]]
        else:
            shorter = max(1, targets // 2)
            buckets = [[inputs // 2, shorter], [inputs, shorter]]
        settings.append(f"data.buckets={json.dumps(buckets)}")
    if draw.chance(0.1):
        settings.append("data.shuffle=false")
    return settings


def draw_mixture(draw: Draw) -> tuple[str, list[str]]:
    """Returns a mixture for a model with inputs and targets, and the settings of the mixture."""
    mixture = draw.weighted({"sentiment": 2, "reverse": 2, "synthetic_quickstart": 2, "texts": 2})
    settings = [f"data.mixture={mixture}"]
    if mixture == "synthetic_quickstart":
        settings += ["model.vocab_size=1024", "vocabulary=none"]
    if mixture == "texts":
        objectives = [name for name in OBJECTIVES if "lm" not in name]
        settings.append(f"data.objective={draw.choice([*objectives, 'prefix_lm'])}")
        # With a noise density of 0.5, the targets are as long as the inputs.
        settings.append("data.targets_length=32")
    return mixture, settings


def draw_structure(draw: Draw, recipe: str, *, has_base: bool) -> list[str]:
    """Returns settings for the model's layers and for its dtype."""
    settings = []
    shared = "universal" in recipe or "halting" in recipe
    for stack in stacks_of(recipe.split(":")[0]):
        if draw.chance(0.05 if shared else 0.35):
            settings.append(f"model.{stack}.scan=true")
        elif not has_base and draw.chance(0.7):
            settings.append(f"model.{stack}.runs.0.repeats=1")  # tracing more layers takes time
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
    """Returns the names of the stacks, such as ``encoder``, that a kind of model has."""
    if kind == "encoder_decoder":
        return ("encoder", "decoder")
    if kind in ("classifier", "masked_lm"):
        return ("encoder",)
    return ("decoder",)


def draw_mesh(draw: Draw) -> list[str]:
    """Returns settings of the mesh, which are empty for a run on one device."""
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
        settings.append(f"training.adapters={json.dumps(draw_adapters(draw))}")
    elif draw.chance(0.25):
        settings.append(f"training.rules={json.dumps(draw_rules(draw, kind))}")
    if start == "init_from":
        settings += draw_initialization(draw)
    return settings


def draw_adapters(draw: Draw) -> dict[str, Any]:
    """Returns the settings of a run's adapters, in the form of JSON."""
    targets = draw.choice([".*/(query|value)/kernel", ".*kernel", ".*/layers_[01]/.*/kernel"])
    adapters: dict[str, Any] = {
        "type": "LoRA",
        "rank": draw.choice([2, 4]),
        "alpha": 8.0,
        "targets": targets,
    }
    adapters["dora"] = draw.chance(0.3)
    adapters["rank_stabilized"] = draw.chance(0.3)
    if draw.chance(0.3):
        adapters["rules"] = [{"type": "LoRARule", "pattern": targets, "rank": 3}]
    if draw.chance(0.3):
        adapters["whole"] = ".*/scale"
    if draw.chance(0.3):
        adapters["embeddings"] = "embedding"
    elif draw.chance(0.3):
        adapters |= {"tokens": [7, 3], "token_arrays": "embedding"}
    if draw.chance(0.3):
        adapters["base"] = "int8"
    return adapters


def draw_initialization(draw: Draw) -> list[str]:
    """Returns settings for a run that starts from the checkpoint of another run."""
    if draw.chance(0.4):
        rule = draw.choice(
            [
                {"pattern": "embedding", "action": "fresh"},
                {"pattern": ".*/scale", "action": "fresh"},
                {"pattern": "embedding|logits_kernel", "action": "resize", "fill": "fresh"},
            ]
        )
        return [f"init_rules={json.dumps([{'type': 'InitRule', **rule}])}"]
    if draw.chance(0.2):
        return ["init_optimizer=true"]
    return []


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
    name = draw.choice(sorted(OPTIMIZERS))
    arguments: list[tuple[str, Any]] = []
    if name in ("sgd", "rmsprop"):
        arguments.append(("momentum", 0.9))
    return {"type": kind, "name": name, **common, "arguments": arguments}


def draw_rules(draw: Draw, kind: str) -> list[dict[str, Any]]:
    """Returns rules as JSON. The rules choose learning rates by the paths of parameters."""
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
    every = draw.choice([0, 0, 0, 2])
    settings = [f"evaluation.every={every}"]
    if decodes or draw.chance(0.05):
        settings.append(f"evaluation.method={draw.choice(['rank', 'greedy', 'beam'])}")
    if decodes:
        settings.append(f"evaluation.beams={draw.choice([1, 2, 4])}")
        options = {
            "relative_length=1.5": 0.2,
            "repetition_penalty=1.3": 0.2,
            "no_repeat_ngram_size=2": 0.2,
            'stop_strings=["a"]': 0.15,
            "logits_dtype=bfloat16": 0.1,
            "alpha=0.0": 0.2,
        }
        settings += [f"evaluation.{option}" for option in draw.subset(options)]
    settings.append(f"evaluation.batch_size={draw.choice([3, 8])}")
    if every and draw.chance(0.3):
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
        formats.update({"huggingface": 2, "t5x": 2, "t5x-scanned": 1})
    elif kind != "masked_lm":
        formats["huggingface"] = 0.5
    if start == "adapters":
        formats["peft"] = 3
    return ["--to", draw.weighted(formats)]


def draw_twins(draw: Draw, combination: Combination, start: str) -> dict[str, list[str]]:
    """Returns the settings of all possible second runs, by name.

    The settings do not change the result mathematically.
    """
    stacks = [f"model.{stack}" for stack in stacks_of(combination.kind)]
    has_dropout = any(".dropout_rate=" in setting for setting in combination.settings)
    twins: dict[str, list[str]] = {"same": [], "remat": []}
    policies = {stack: combination.get(f"{stack}.remat") for stack in stacks}
    for stack, policy in policies.items():
        other = "none" if policy else draw.choice(["full", "dots"])
        twins["remat"].append(f"{stack}.remat={other}")

    # If a run has dropout, do not change its micro-batches or `scan`, because the dropout masks
    # would change, too.
    batch = int(combination.get("data.batch_size"))
    parts = int(combination.get("training.micro_batches", "1"))
    if not has_dropout and (parts > 1 or batch >= 2 * combination.devices):
        twins["micro-batches"] = [f"training.micro_batches={1 if parts > 1 else 2}"]

    if combination.devices > 1:
        reset = ["mesh.data=-1", "mesh.fsdp=1", "mesh.tensor=1", "mesh.sequence=1", "mesh.extra=[]"]
        twins["one device"] = reset
        if batch // 2 % parts == 0:
            twins["another mesh"] = [*reset, "mesh.data=2", "mesh.tensor=4"]

    # Parameters that are drawn at random depend on `scan`, so change `scan` only in runs that start
    # from a checkpoint.
    optimizer = json.loads(combination.get("training.optimizer"))
    name = optimizer.get("name", optimizer["type"])
    has_rules = bool(combination.get("training.rules"))
    if start == "init_from" and not has_dropout and not has_rules and name in ELEMENTWISE:
        twins["scan"] = []
        for stack in stacks:
            is_scanned = combination.get(f"{stack}.scan") == "true"
            twins["scan"].append(f"{stack}.scan={'false' if is_scanned else 'true'}")
    return twins
