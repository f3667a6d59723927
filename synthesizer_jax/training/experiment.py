"""What a recipe returns: everything a run is made of, typed, frozen, saved as JSON."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re

from synthesizer_jax.data import tasks
from synthesizer_jax.data.pipeline import DataConfig
from synthesizer_jax.data.vocabularies import Bytes, SentencePiece
from synthesizer_jax.files import write_aside
from synthesizer_jax.models import TextToText
from synthesizer_jax.registry import from_json, register, shown, to_json
from synthesizer_jax.sharding import MeshShape
from synthesizer_jax.suggestions import suggestion
from synthesizer_jax.training import code, limits
from synthesizer_jax.training.optimizers import Optimizer

EXPERIMENT_FILE = "experiment.json"

for _cls in (DataConfig, Bytes, SentencePiece):
    register(_cls)  # data stands alone, so its classes are made known here


@register
@dataclasses.dataclass(frozen=True)
class Training:
    """How long and how.

    Attributes:
      steps: number of optimiser steps.
      optimizer: `AdamW`, `Adafactor` or one of your own, with its schedule.
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
    optimizer: Optimizer
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
    """A whole run; every field of it and of what it holds is checked when it is made.

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

    def __post_init__(self) -> None:
        limits.check(self)
        check_split(self.data)


def check_split(data: DataConfig) -> None:
    """Raises a `ValueError` where a known mixture's tasks have no such split."""
    if data.mixture not in (*tasks.MIXTURES, *tasks.TASKS):
        return
    known = {s for name in tasks.members(data.mixture) for s in tasks.definition(name).splits}
    if data.split not in known:
        raise ValueError(
            f"data.split is {data.split!r}{suggestion(data.split, known)}; the tasks of "
            f"{data.mixture!r} have {', '.join(sorted(known))}"
        )


def save_experiment(experiment: Experiment, directory: pathlib.Path) -> None:
    """Writes ``experiment.json``, which is enough to rebuild the model."""
    text = json.dumps(to_json(experiment), indent=1)
    write_aside(directory / EXPERIMENT_FILE, text + "\n")


def check_vocabulary(experiment: Experiment) -> None:
    """Raises a `ValueError` where a run's vocabulary is not a file inside the run."""
    if isinstance(experiment.vocabulary, SentencePiece):
        path = pathlib.PurePath(experiment.vocabulary.path)
        outside = path.is_absolute() or re.match("[a-z]+:/", str(path))
        if outside or ".." in path.parts or "~" in path.parts[:1]:
            raise ValueError(
                f"vocabulary.path is {shown(str(path))}, which lies outside of the run; put the file into "
                "the run's directory and give its name"
            )


def load_experiment(directory: pathlib.Path) -> Experiment:
    """Reads the experiment of a run's directory, with the code of its own that it needs.

    Raises:
      FileNotFoundError: the directory holds no run.
      ValueError: the file is damaged, was written by another version or with unknown classes, or the run
        needs code that this account has not run (`code.require`).
    """
    path = directory / EXPERIMENT_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{directory} holds no {EXPERIMENT_FILE}; give the directory of a training run of this package"
        )
    code.require(directory)
    try:
        found = from_json(json.loads(path.read_text(encoding="utf-8")))
        if not isinstance(found, Experiment):
            raise ValueError(f"it holds {shown(found)}, expected an Experiment")
        check_vocabulary(found)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: it is not JSON ({error.msg})") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: it is not UTF-8 text") from None
    except RecursionError:
        raise ValueError(f"{path}: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return found
