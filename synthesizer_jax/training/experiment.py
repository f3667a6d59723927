"""The configuration of a run, which a recipe returns. It is typed, immutable and saved as JSON."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Annotated, Literal

import jax

from synthesizer_jax.base.registry import check_fields, register, replace
from synthesizer_jax.base.typing import (
    Choices,
    Count,
    NotEmpty,
    NotNegative,
    Number,
    Positive,
    Rate,
    Seed,
)
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.tokenizer_json import AnyVocabulary
from synthesizer_jax.evaluation.config import RANK, Evaluation
from synthesizer_jax.models import Encoder, EncoderDecoder, TextToText, resolve_dtype
from synthesizer_jax.models.lora import LoRA
from synthesizer_jax.models.trainable import Trainable
from synthesizer_jax.optimizers import Optimizer, OptimizerRule
from synthesizer_jax.primitives.parameters import check_path_pattern
from synthesizer_jax.sharding import MeshShape


@register
@dataclasses.dataclass(frozen=True)
class Training:
    """The settings of training, such as the number of steps, the optimizer and the loss.

    Attributes:
      steps: number of optimizer steps.
      optimizer: `AdamW`, `Adafactor` or your own optimizer, including its learning rate schedule.
      rules: learning rates and freezing by paths of parameters. The first rule that matches a path
        applies to its parameter.
      adapters: low-rank updates of kernels; see `LoRA`. The run trains these adapters instead of
        the parameters of `Experiment.init_from`. None means that the parameters themselves are
        trained.
      ema: decay of an exponential moving average of the parameters; see `step.apply_gradients`. The
        average is evaluated, and everything that loads the trained model later uses the average.
        None means no average.
      z_loss: coefficient of log² Z.
      label_smoothing: ε of T5's label smoothing.
      loss_normalizer: the number by which the summed loss is divided; see
        `losses.loss_denominator`.
      micro_batches: number of parts into which a batch is divided for gradient accumulation.
      seed: the seed of the initial parameters and of dropout. The seed of the data is
        `DataConfig.seed`.
      log_every: number of steps between lines of ``metrics.jsonl``. Each line contains the loss of
        a single step. The rates in a line are means since the previous line.
      save_every: number of steps between checkpoints. The last step is always saved.
      keep_latest: number of newest checkpoints to keep.
      keep_best: number of additional checkpoints to keep. The checkpoints with the best ``score``
        of the evaluation are kept.
      writers: names of services that also receive the metrics: ``wandb``, ``trackio``, ``mlflow``,
        or your own writer; see `runs.writers`.
      profile: a pair of step numbers. A trace for XProf starts after the first number of steps and
        ends after the second. The trace is written to the folder ``profile`` in the run directory.
        None means no trace.
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
    r"""A rule that says how a run that starts from a checkpoint initializes some of its parameters.

    Attributes:
      pattern: a regular expression that must match the whole path of a parameter. An example is
        ``encoder/layers_\d+/.*/table``. Paths have the form of looped layers, even if the model
        scans its layers.
      action: ``restore`` takes the checkpoint's array, which must have the same shape. ``resize``
        takes an array with the same number of dimensions, and crops or extends this array.
        ``fresh`` draws new values.
      source: the path of the array in the checkpoint. In this path, ``\1`` stands for the first
        group of the pattern. None means the same path as in the model.
      fill: the values of new entries of a resized array, which are ``edge``, ``distance`` or
        ``fresh``; see `origins.resize`.
    """

    pattern: str
    action: Literal["restore", "resize", "fresh"] = "restore"
    source: str | None = None
    fill: Literal["edge", "distance", "fresh"] = "edge"

    def __post_init__(self) -> None:
        check_path_pattern("init_rules", self.pattern)

    @property
    def draws(self) -> bool:
        """Whether the rule draws random values that the checkpoint does not contain."""
        return self.action == "fresh" or (self.action == "resize" and self.fill == "fresh")


def find_rule(rules: Sequence[InitRule], path: str) -> tuple[InitRule, re.Match[str]]:
    """Returns the rule that applies to a parameter, and the match of its pattern with the path.

    The first rule whose pattern matches applies. If no pattern matches, the parameter is restored.
    The path has the form of looped layers.
    """
    for rule in (*rules, InitRule(".*")):
        match = re.fullmatch(rule.pattern, path)
        if match is not None:
            return rule, match
    raise AssertionError(f"{path!r} is a path that '.*' does not match")


@register
@dataclasses.dataclass(frozen=True)
class Experiment:
    """The complete configuration of a run.

    All fields, including the fields of nested objects, are checked when an experiment is
    constructed.

    Attributes:
      model: the configured, unbound model. An `Encoder` must have exactly one head: `outputs` (with
        `DataConfig.classes`) or `masked_lm`. If the model's `dtype` is ``auto``, a new run records
        the default dtype of its devices, and uses the recorded dtype when it continues.
      data: the mixture of tasks, sequence lengths, batch size and order of the examples.
      training: the number of steps, the optimizer and the loss.
      evaluation: the settings of the evaluation, such as how often the run is evaluated.
      vocabulary: `Bytes()`, `SentencePiece(path)` or `Tokenizer(path)`. None is only possible for
        synthetic mixtures, which have their own vocabulary.
      mesh: the shape of the mesh of devices.
      init_from: a run or one of its checkpoints (``RUN`` or ``RUN/checkpoints/STEP``). A new run
        starts from the parameters of this checkpoint. If the run has adapters, the adapters modify
        this checkpoint.
      init_rules: exceptions for parameters that do not start as the array with the same path and
        shape in `init_from`.
      init_optimizer: whether to also restore the optimizer state of the checkpoint in `init_from`.
        The learning rate schedule then continues at the number of updates in the restored state,
        although the run counts its own steps from 0.
    """

    model: TextToText | Encoder
    data: DataConfig
    training: Training
    evaluation: Evaluation = Evaluation()
    vocabulary: AnyVocabulary | None = None
    mesh: MeshShape = MeshShape()
    init_from: Annotated[str, NotEmpty()] | None = None
    init_rules: tuple[InitRule, ...] = ()
    init_optimizer: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        _check_head(self)
        if isinstance(self.model, EncoderDecoder) and not self.data.inputs_length:
            raise ValueError(
                "data.inputs_length is 0, but the encoder of an EncoderDecoder needs inputs. Set "
                "it to a positive number, or train a LanguageModel."
            )
        if self.training.adapters and getattr(self.training.optimizer, "parameter_scale", False):
            raise ValueError(
                "training.adapters begin at zero, but Adafactor makes its steps proportional to "
                "the size of the parameters, so the adapters would hardly change. Set "
                "training.optimizer.parameter_scale=false, or training.optimizer=AdamW."
            )
        profile = self.training.profile
        steps = self.training.steps
        if profile is not None and not profile[0] < profile[1] <= steps:
            raise ValueError(
                f"training.profile is {profile}, but it must be two numbers of steps, of which the "
                f"first is smaller and the second is at most training.steps ({steps})."
            )
        if self.evaluation.patience is not None and not self.evaluation.every:
            raise ValueError(
                "evaluation.patience is set, but evaluation.every is 0, so there are no "
                "evaluations to count. Set evaluation.every."
            )

    def starting_from(self, source: str | None) -> Experiment:
        """Returns the experiment with all parameters restored from another checkpoint.

        `init_rules`, `init_optimizer` and the checksum of the adapters' base are reset, because
        they belong to the old checkpoint. If `source` is `None`, the parameters are initialized
        randomly and there are no adapters.
        """
        adapters = self.training.adapters
        if source is None:
            adapters = None
        elif adapters is not None:
            adapters = replace(adapters, base_checksum=None)
        training = replace(self.training, adapters=adapters)
        return replace(
            self, training=training, init_from=source, init_rules=(), init_optimizer=False
        )

    def draws(self, path: str) -> bool:
        """Returns whether `init_rules` draw new values for a parameter; see `InitRule.draws`.

        The new values that a rule draws are saved only in the checkpoints of the run itself. A run
        with adapters therefore trains the whole parameter and saves it with the adapters.

        Args:
          path: the path of the parameter, in the form of looped layers.
        """
        return find_rule(self.init_rules, path)[0].draws

    def resolved(self, platform: str | None = None) -> Experiment:
        """Returns the experiment with the model dtype ``auto`` replaced; see `resolve_dtype`."""
        return replace(self, model=resolve_dtype(self.model, platform))

    @property
    def example(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the arguments of the model's call, for one example."""
        return self.model.example(self.data.inputs_length, self.data.targets_length)

    @property
    def trainable(self) -> Trainable[TextToText | Encoder]:
        """The variables that the run trains: the adapters, or all variables if it has no adapters.

        Raises:
          ValueError: the adapters do not fit the model; see `adapters.Adapted`.
        """
        lora = self.training.adapters
        if lora is None:
            return Trainable(self.model, self.example)
        # The module is imported here, because runs without adapters do not need it.
        from synthesizer_jax.models.adapters import Adapted

        return Adapted(self.model, self.example, lora, is_new=self.draws)


def _check_head(experiment: Experiment) -> None:
    """Raises a `ValueError` if model, data and evaluation are for different kinds of models."""
    model = experiment.model
    data = experiment.data
    if not isinstance(model, Encoder):
        if data.classes:
            raise ValueError(
                "data.classes is only for an Encoder with model.outputs, but the model is of the "
                f"type {type(model).__name__}, which learns label words as text. Set "
                "data.classes=[]."
            )
        return

    if (model.outputs is None) != model.masked_lm:
        raise ValueError(
            "An Encoder is trained with exactly one head, but model.outputs is "
            f"{model.outputs} and model.masked_lm is {model.masked_lm}. Set one of them, and set "
            "the other to none or false."
        )
    if (model.outputs or 0) != len(data.classes):
        raise ValueError(
            f"model.outputs is {model.outputs}, but data.classes has {len(data.classes)} label "
            "words. Give as many label words as the model has outputs."
        )
    if model.masked_lm and any(inputs != targets for inputs, targets in data.shapes):
        raise ValueError(
            f"data.targets_length is {data.targets_length}, but a model with model.masked_lm "
            "predicts tokens at the positions of the inputs. Set it to data.inputs_length "
            f"({data.inputs_length}), and do the same in data.buckets."
        )
    if data.pack:
        raise ValueError(
            "data.pack is true, but an Encoder reads one text per row. Set data.pack=false. If "
            "texts have different lengths, use data.buckets."
        )
    if experiment.evaluation.method != RANK:
        raise ValueError(
            f"evaluation.method is {experiment.evaluation.method!r}, but an Encoder does not "
            f"decode. Set evaluation.method={RANK}, which takes the most probable class."
        )
