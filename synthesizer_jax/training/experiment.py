"""What a recipe returns: everything a run is made of, typed, frozen, saved as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import typing
from typing import Any

from synthesizer_jax.data.pipeline import DataConfig
from synthesizer_jax.data.vocabularies import Bytes, SentencePiece
from synthesizer_jax.models import TextToText
from synthesizer_jax.registry import fields_of, from_json, register, replace, suggestion, to_json
from synthesizer_jax.sharding import MeshShape
from synthesizer_jax.training.optimizers import Adafactor, AdamW

EXPERIMENT_FILE = "experiment.json"

for _cls in (DataConfig, Bytes, SentencePiece):
    register(_cls)  # data stands alone, so its classes are made known here


@register
@dataclasses.dataclass(frozen=True)
class Training:
    """How long and how.

    Attributes:
      steps: number of optimiser steps.
      optimizer: `AdamW` or `Adafactor`, with its schedule.
      z_loss: coefficient of log² Z.
      label_smoothing: T5's label smoothing.
      loss_normalizer: what the summed loss is divided by, see `losses.loss_denominator`.
      micro_batches: gradient accumulation over this many parts of the batch.
      seed: of parameters and dropout; the data's seed is `DataConfig.seed`.
      log_every: steps between lines of ``metrics.jsonl``.
      save_every: steps between checkpoints; the last step is always saved.
      keep_latest: newest checkpoints to keep.
      keep_best: best checkpoints to keep besides, by the evaluation's mean.
      watchdog_seconds: when nothing has moved for so long, where every thread stands is printed; 0:
        never.
    """

    steps: int
    optimizer: AdamW | Adafactor
    z_loss: float = 1e-4
    label_smoothing: float = 0.0
    loss_normalizer: float | str | None = None
    micro_batches: int = 1
    seed: int = 0
    log_every: int = 10
    save_every: int = 1000
    keep_latest: int = 2
    keep_best: int = 1
    watchdog_seconds: float = 3600.0


@register
@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What is measured while a run goes on, and how `eval` decodes.

    Attributes:
      every: steps between evaluations; 0 evaluates after the last step only.
      method: ``"rank"`` scores every label word, ``"greedy"`` and ``"beam"`` decode; tasks without
        label words are decoded greedily under ``"rank"``.
      max_examples: per task, whole groups; None is all.
      batch_size: examples per compiled batch.
      loss_batches: the held-out teacher-forced loss is taken over at most so many batches of each task's
        labelled examples; 0: it is not.
      split: the split to evaluate on.
      logits_dtype: dtype of the output projection when decoding; None: the model's.
    """

    every: int = 0
    method: str = "rank"
    max_examples: int | None = None
    batch_size: int = 64
    loss_batches: int = 16
    split: str = "validation"
    logits_dtype: str | None = None


@register
@dataclasses.dataclass(frozen=True)
class Experiment:
    """A whole run.

    Attributes:
      model: the configured, unbound model.
      data: mixture, lengths, batch, order.
      training: steps and optimiser.
      evaluation: what is measured.
      vocabulary: `Bytes()` or `SentencePiece(path)`; None is the embedded mixture's own.
      mesh: how devices are arranged.
      init_from: a checkpoint directory (``RUN`` or ``RUN/checkpoints/STEP``) whose parameters a
        fresh run starts from.
    """

    model: TextToText
    data: DataConfig
    training: Training
    evaluation: Evaluation = Evaluation()
    vocabulary: Bytes | SentencePiece | None = None
    mesh: MeshShape = MeshShape()
    init_from: str | None = None


def save_experiment(experiment: Experiment, directory: pathlib.Path) -> None:
    """Writes ``experiment.json``, which is enough to rebuild the model."""
    directory.mkdir(parents=True, exist_ok=True)
    aside = directory / (EXPERIMENT_FILE + ".tmp")
    aside.write_text(json.dumps(to_json(experiment), indent=1) + "\n", encoding="utf-8")
    os.replace(aside, directory / EXPERIMENT_FILE)


def load_experiment(directory: pathlib.Path) -> Experiment:
    """Reads the experiment of a run's directory.

    Raises:
      FileNotFoundError: the directory holds no run.
      ValueError: the file was written by another version or with unknown classes.
    """
    path = directory / EXPERIMENT_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{directory} holds no {EXPERIMENT_FILE}; give the --workdir of a training run"
        )
    return from_json(json.loads(path.read_text(encoding="utf-8")))


def override(obj: Any, assignment: str) -> Any:
    """A copy with one field changed, from ``path.to.field=value``.

    Args:
      obj: an experiment, or any registered object inside it.
      assignment: dots name fields, numbers index tuples; the value is read by the field's type.

    Raises:
      ValueError: an unknown field or a value that does not fit, with a suggestion.
    """
    path, equals, text = assignment.partition("=")
    if not equals:
        raise ValueError(f"--set {assignment!r}: write path.to.field=value")
    return _override(obj, path.split("."), text, path)


def _override(obj: Any, names: list[str], text: str, path: str) -> Any:
    name, rest = names[0], names[1:]
    if isinstance(obj, tuple):
        if not name.isdigit() or int(name) >= len(obj):
            raise ValueError(f"--set {path}: {name!r} is not an index below {len(obj)}")
        index = int(name)
        new = _override(obj[index], rest, text, path) if rest else _parse(text, object, path)
        return (*obj[:index], new, *obj[index + 1 :])
    if not dataclasses.is_dataclass(obj):
        raise ValueError(f"--set {path}: {name!r} is inside a plain value, which has no fields")
    fields = fields_of(obj)
    if name not in fields:
        raise ValueError(
            f"--set {path}: {type(obj).__name__} has no field {name!r}"
            f"{suggestion(name, fields)}; its fields: {', '.join(fields)}"
        )
    if rest:
        return replace(obj, **{name: _override(fields[name], rest, text, path)})
    kind = typing.get_type_hints(type(obj)).get(name, object)
    return replace(obj, **{name: _parse(text, kind, path)})


def _parse(text: str, kind: Any, path: str) -> Any:
    """Reads a command-line value for a field of type `kind`."""
    try:
        value = from_json(json.loads(text))
    except json.JSONDecodeError:
        value = {"none": None, "true": True, "false": False}.get(text.lower(), text)
    options = typing.get_args(kind) if _is_union(kind) else (kind,)
    for option in options:
        if _fits(value, option):
            return float(value) if option is float else value
    names = " or ".join(
        "none" if o is type(None) else getattr(o, "__name__", str(o)) for o in options
    )
    raise ValueError(f"--set {path}={text}: expected {names}")


def _is_union(kind: Any) -> bool:
    import types

    return isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union


def _fits(value: Any, option: Any) -> bool:
    if option is object or option is Any:
        return True
    if option is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if option is int:
        return isinstance(value, int) and not isinstance(value, bool)
    origin = typing.get_origin(option) or option
    return isinstance(origin, type) and isinstance(value, origin)
