"""What the fields of an experiment may hold beyond their types, in one table.

A field of one name means the same in every class, so the table goes by name; where a class differs it is
named. Classes of users' own packages are held to their annotated types alone, unless they raise errors.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TypeAlias

from synthesizer_jax.alignments.mixture import WEIGHTS
from synthesizer_jax.attention.attend import ROUTES
from synthesizer_jax.evaluation.prediction import METHODS
from synthesizer_jax.mixers.talking_heads import DYNAMIC
from synthesizer_jax.models.encoder import POOLINGS
from synthesizer_jax.models.layers import ACTIVATIONS
from synthesizer_jax.models.stack import REMAT_POLICIES
from synthesizer_jax.registry import check_types, child_path, fields_of, format_value
from synthesizer_jax.sharding import MESH_AXES

LARGEST = 2**31 - 1
"""Counts and lengths are 32-bit integers on devices."""


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers between two ends.

    Attributes:
      low: the minimum.
      high: the maximum.
      open: which ends do not belong to it: any of ``"low"`` and ``"high"``.
      without: a number between them that does not belong to it.
    """

    low: float
    high: float = math.inf
    open: tuple[str, ...] = ()
    without: int | None = None

    def contains(self, value: object) -> bool:
        """Returns whether a value lies inside."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        above = value > self.low if "low" in self.open else value >= self.low
        below = value < self.high if "high" in self.open else value <= self.high
        return above and below and value != self.without

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"above {self.low}" if "low" in self.open else f"{self.low} or more"
        end = f"{'below ' if 'high' in self.open else ''}{self.high:,}"
        return f"{self.low} to {end}{'' if self.without is None else f', not {self.without}'}"


@dataclasses.dataclass(frozen=True)
class Choices:
    """Some words.

    Attributes:
      words: the words.
    """

    words: tuple[str, ...]

    def contains(self, value: object) -> bool:
        """Returns whether a value is one of them."""
        return value in self.words

    def __str__(self) -> str:
        return ", ".join(map(repr, self.words))


Limit: TypeAlias = Range | Choices

COUNT = Range(1, LARGEST)
LENGTH = Range(1, 2**20)
LAYERS = Range(1, 256)
NUMBER = Range(0, LARGEST)
SIZE = Range(-1, LARGEST, without=0)
SEED = Range(0, 2**32 - 1)
SHARE = Range(0, 1)
RATE = Range(0, 1, open=("high",))
NOT_NEGATIVE = Range(0)
POSITIVE = Range(0, open=("low",))
DTYPES = Choices(("float32", "bfloat16"))


def _all(limit: Limit, names: str) -> dict[str, tuple[Limit, ...]]:
    return dict.fromkeys(names.split(), (limit,))


LIMITS: dict[str, tuple[Limit, ...]] = {
    **_all(COUNT, "steps micro_batches log_every save_every keep_latest total_steps patience"),
    **_all(LENGTH, "batch_size targets_length max_segments shards"),
    **_all(COUNT, "max_examples min_size fan_in"),
    **_all(LENGTH, "vocab_size d_model num_heads head_dim hidden_dim max_length rank outputs"),
    **_all(LENGTH, "num_buckets max_distance width groups projected_length"),
    **_all(LENGTH, "softmax_heads value_heads heads factors"),
    **_all(LAYERS, "repeats"),
    **_all(
        NUMBER,
        "every loss_batches fit_batches keep_best warmup_steps extra_ids token_types layers",
    ),
    "inputs_length": (Range(0, LENGTH.high),),
    **_all(SIZE, " ".join(f"MeshShape.{axis} MeshShape.dcn_{axis}" for axis in MESH_AXES)),
    **_all(SEED, "seed"),
    **_all(SHARE, "label_smoothing init_share"),
    **_all(RATE, "dropout_rate b1 b2 ema"),
    **_all(NOT_NEGATIVE, "min_improvement"),
    **_all(NOT_NEGATIVE, "z_loss watchdog_seconds weight_decay value factor peak final"),
    **_all(NOT_NEGATIVE, "stddev sigma threshold ponder_cost dynamic_scale"),
    **_all(POSITIVE, "eps epsilon clip clip_norm decay_rate ratio"),
    **_all(DTYPES, "dtype logits_dtype"),
    **_all(Choices(METHODS), "method"),
    **_all(Choices(("auto", *ROUTES)), "implementation"),
    **_all(Choices(tuple(REMAT_POLICIES)), "remat"),
    **_all(Choices(tuple(ACTIVATIONS)), "activations"),
    **_all(Choices(WEIGHTS), "weights"),
    **_all(Choices(tuple(DYNAMIC)), "dynamic"),
    **_all(Choices(POOLINGS), "pooling"),
    "loss_normalizer": (POSITIVE, Choices(("tokens_with_padding",))),
    "OptimizerRule.learning_rate": (NOT_NEGATIVE,),
    "FanIn.scale": (NOT_NEGATIVE,),
    "GaussianBias.sigma": (POSITIVE,),
    "SentenceFeedForward.head_dim": (NUMBER,),  # 0 without heads
    "UniversalStack.halting_threshold": (SHARE,),
}
"""By name, or class and name, of a field: what its value, or every entry of its value, must be one of."""

NOT_EMPTY = frozenset({"runs", "parts", "offsets", "activations", "replace"})
"""Tuples that need an entry."""


def check_limits(obj: object, path: str = "") -> None:
    """Raises a `ValueError` that names the first wrong field in a tree of modules and dataclasses.

    Args:
      obj: an experiment, or something in one.
      path: where it stands.
    """
    if isinstance(obj, tuple):
        for i, entry in enumerate(obj):
            check_limits(entry, child_path(path, i))
    if not dataclasses.is_dataclass(obj) or isinstance(obj, type):
        return
    cls, values = type(obj), fields_of(obj)
    check_types(cls, values, path)
    for name, value in values.items():
        _check_limit(cls, name, value, child_path(path, name))
        check_limits(value, child_path(path, name))


def _check_limit(cls: type, name: str, value: object, path: str) -> None:
    """Raises a `ValueError` for a field's value that no limit holds; None and objects have none."""
    if value == () and name in NOT_EMPTY:
        raise ValueError(f"{path} is empty; give it at least one entry")
    limits = limits_of(cls, name)
    for entry in value if isinstance(value, tuple) else (value,):
        plain = isinstance(entry, int | float | str)
        if limits and plain and not any(limit.contains(entry) for limit in limits):
            allowed = " or ".join(map(str, limits))
            raise ValueError(f"{path} is {format_value(value)}; allowed: {allowed}")


def limits_of(cls: type, name: str) -> tuple[Limit, ...]:
    """The limits of a field of one of this package's classes."""
    if cls.__module__.partition(".")[0] != __name__.partition(".")[0]:
        return ()
    return LIMITS.get(f"{cls.__name__}.{name}") or LIMITS.get(name, ())
