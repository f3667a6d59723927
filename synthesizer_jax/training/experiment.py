"""What a recipe returns: everything a run is made of, typed, frozen, saved as JSON."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Annotated, Literal

import jax

from synthesizer_jax.base.registry import check_fields, register, replace
from synthesizer_jax.base.typing import Choices, Count, NotEmpty, NotNegative, Number, Positive, Rate, Seed
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.vocabularies import Bytes, SentencePiece
from synthesizer_jax.evaluation.config import RANK, Evaluation
from synthesizer_jax.models import Encoder, EncoderDecoder, TextToText, resolve_dtype
from synthesizer_jax.optimizers import Optimizer, OptimizerRule
from synthesizer_jax.primitives.parameters import check_path_pattern
from synthesizer_jax.sharding import MeshShape
from synthesizer_jax.training.adapters import LoRA


@register
@dataclasses.dataclass(frozen=True)
class Training:
    """How long and how.

    Attributes:
      steps: number of optimizer steps.
      optimizer: `AdamW`, `Adafactor` or one of your own, with its schedule.
      rules: learning rates and freezing by paths of parameters; the first rule that matches decides.
      adapters: low-rank updates of kernels, which are trained instead of the parameters of
        `Experiment.init_from`; see `LoRA`. None: the parameters are trained.
      ema: decay of an exponential moving average of the parameters, which is evaluated and used later;
        None: no average. See `step.apply_gradients`.
      z_loss: coefficient of log² Z.
      label_smoothing: T5's label smoothing.
      loss_normalizer: what the summed loss is divided by, see `losses.loss_denominator`.
      micro_batches: gradient accumulation over this many parts of the batch.
      seed: of parameters and dropout; the data's seed is `DataConfig.seed`.
      log_every: steps between lines of ``metrics.jsonl``: the loss is that of the one step, rates are means
        since the line before.
      save_every: steps between checkpoints; the last step is always saved.
      keep_latest: newest checkpoints to keep.
      keep_best: best checkpoints to keep besides, by the evaluation's ``score``.
      writers: where metrics go besides the run's directory, by name: ``wandb``, ``trackio``, ``mlflow``, or
        one of your own, see `runs.writers`.
      profile: the number of finished steps at which a trace for XProf begins, and that at which it ends; it
        is written into ``profile`` in the run's directory. None: no trace.
    """

    steps: Count
    optimizer: Optimizer
    rules: tuple[OptimizerRule, ...] = ()
    adapters: LoRA | None = None
    ema: Rate | None = None
    z_loss: NotNegative = 1e-4
    label_smoothing: Rate = 0.0
    loss_normalizer: Positive | Annotated[str, Choices(("tokens_with_padding",))] | None = None
    micro_batches: Count = 1
    seed: Seed = 0
    log_every: Count = 10
    save_every: Count = 1000
    keep_latest: Count = 2
    keep_best: Number = 1
    writers: tuple[str, ...] = ()
    profile: tuple[Number, Number] | None = None


@register
@dataclasses.dataclass(frozen=True)
class InitRule:
    r"""What a run that starts from a checkpoint does with some of its parameters.

    Attributes:
      pattern: a regular expression for whole paths of parameters, with looped layers, such as
        ``encoder/layers_\d+/.*/table``.
      action: ``restore`` takes the checkpoint's array of the same shape, ``resize`` one of any shape,
        cropped or extended, and ``fresh`` none.
      source: the path in the checkpoint, in which ``\1`` is the pattern's first group; None: the same.
      fill: what fills new entries of a resized array: ``edge``, ``distance`` or ``fresh``; see
        `initial_parameters.resize`.
    """

    pattern: str
    action: Literal["restore", "resize", "fresh"] = "restore"
    source: str | None = None
    fill: Literal["edge", "distance", "fresh"] = "edge"

    def __post_init__(self) -> None:
        check_path_pattern("init_rules", self.pattern)

    @property
    def draws(self) -> bool:
        """Whether the rule makes new random values, which the checkpoint does not hold."""
        return self.action == "fresh" or (self.action == "resize" and self.fill == "fresh")


def find_rule(rules: Sequence[InitRule], path: str) -> tuple[InitRule, re.Match[str]]:
    """Returns the rule that decides about a parameter, and its match of the path with looped layers.

    The first rule that matches decides. If none does, the parameter is restored.
    """
    for rule in (*rules, InitRule(".*")):
        match = re.fullmatch(rule.pattern, path)
        if match is not None:
            return rule, match
    raise AssertionError(f"{path!r} is a path that '.*' does not match")


@register
@dataclasses.dataclass(frozen=True)
class Experiment:
    """A whole run; every field of it and of what it holds is checked when it is made.

    Attributes:
      model: the configured, unbound model; an `Encoder` has one head, `outputs` (with `DataConfig.classes`)
        or `masked_lm`. Its `dtype` may be ``auto``; a run that starts records for which dtype this stands,
        and keeps it.
      data: mixture, lengths, batch, order.
      training: steps and optimizer.
      evaluation: what is measured.
      vocabulary: `Bytes()` or `SentencePiece(path)`; None is the synthetic mixture's own.
      mesh: how devices are arranged.
      init_from: a checkpoint directory (``RUN`` or ``RUN/checkpoints/STEP``) whose parameters a
        fresh run starts from, or to which its adapters belong.
      init_rules: which parameters start otherwise than from those of the same path and shape.
      init_optimizer: whether to go on with the optimizer's state of that checkpoint too. The schedule of
        its learning rate then goes on at the number of updates in that state; the run's own steps count
        from 0.
    """

    model: TextToText | Encoder
    data: DataConfig
    training: Training
    evaluation: Evaluation = Evaluation()
    vocabulary: Bytes | SentencePiece | None = None
    mesh: MeshShape = MeshShape()
    init_from: Annotated[str, NotEmpty()] | None = None
    init_rules: tuple[InitRule, ...] = ()
    init_optimizer: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        _check_head(self)
        if isinstance(self.model, EncoderDecoder) and not self.data.inputs_length:
            raise ValueError(
                "data.inputs_length is 0, and the encoder of an EncoderDecoder reads inputs; set it to a "
                "positive number, or train a LanguageModel"
            )
        if self.training.adapters and getattr(self.training.optimizer, "parameter_scale", False):
            raise ValueError(
                "training.adapters begin at zero, and Adafactor's steps are as small as the parameters; "
                "set training.optimizer.parameter_scale=false, or training.optimizer=AdamW"
            )
        profile, steps = self.training.profile, self.training.steps
        if profile is not None and not profile[0] < profile[1] <= steps:
            raise ValueError(
                f"training.profile is {profile}; it must be two numbers of steps in order, up to "
                f"training.steps, {steps}"
            )
        if self.evaluation.patience is not None and not self.evaluation.every:
            raise ValueError(
                "evaluation.patience counts evaluations, and evaluation.every is 0; set evaluation.every"
            )

    def starting_from(self, source: str | None) -> Experiment:
        """Returns the experiment with all parameters from a checkpoint; None: fresh ones, no adapters."""
        lora = self.training.adapters
        lora = None if source is None or lora is None else replace(lora, base_checksum=None)
        training = replace(self.training, adapters=lora)
        return replace(self, training=training, init_from=source, init_rules=(), init_optimizer=False)

    def draws(self, path: str) -> bool:
        """Returns whether `init_rules` make new random values for a parameter; see `InitRule.draws`.

        Such a parameter is a part of no checkpoint but the run's own. A run with adapters therefore trains
        it whole and saves it with them.

        Args:
          path: the parameter's path, with looped layers.
        """
        return find_rule(self.init_rules, path)[0].draws

    def resolved(self, platform: str | None = None) -> Experiment:
        """Returns the experiment with the dtype of its model resolved; see `resolve_dtype`."""
        return replace(self, model=resolve_dtype(self.model, platform))

    @property
    def example(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Abstract arguments of the model's call, of one example."""
        return self.model.example(self.data.inputs_length, self.data.targets_length)


def _check_head(experiment: Experiment) -> None:
    """Raises a `ValueError` where model, data and evaluation are not those of the same kind of model."""
    model, data = experiment.model, experiment.data
    if not isinstance(model, Encoder):
        if data.classes:
            raise ValueError(
                f"data.classes is for an Encoder with model.outputs; {type(model).__name__} models learn "
                "label words as text, set data.classes=[]"
            )
        return
    if (model.outputs is None) != model.masked_lm:
        raise ValueError(
            f"an Encoder is trained with one head, and has model.outputs={model.outputs} and "
            f"model.masked_lm={model.masked_lm}; set one of them, and the other to none or false"
        )
    if (model.outputs or 0) != len(data.classes):
        raise ValueError(
            f"model.outputs is {model.outputs} and data.classes has {len(data.classes)} label words; give "
            "as many label words as the model has outputs"
        )
    if model.masked_lm and any(inputs != targets for inputs, targets in data.shapes):
        raise ValueError(
            f"data.targets_length is {data.targets_length}, and model.masked_lm predicts tokens in the "
            f"places of the inputs; set it to data.inputs_length={data.inputs_length}, also in data.buckets"
        )
    if data.pack:
        raise ValueError(
            "data.pack is true, and an Encoder reads one text a row; set data.pack=false, and data.buckets "
            "for texts of different lengths"
        )
    if experiment.evaluation.method != RANK:
        raise ValueError(
            f"evaluation.method is {experiment.evaluation.method!r}, and an Encoder decodes nothing; set "
            f"evaluation.method={RANK}, which takes the most probable class"
        )
