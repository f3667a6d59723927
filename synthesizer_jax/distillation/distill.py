"""Replaces parts of a trained model and trains the replacements to imitate them.

Bozic et al. 2023 train feed-forward networks on stored activations of a Transformer's attention. Here
teacher and student run in the same compiled step, and any mixer can be replaced by any other.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util

from synthesizer_jax.base.files import storage_path, write_atomic
from synthesizer_jax.base.registry import check_fields, register, replace, to_json
from synthesizer_jax.base.typing import KeyPath, NotEmpty, Number, PyTree
from synthesizer_jax.distillation.fit import collect_statistics, fit_layers, is_static
from synthesizer_jax.distillation.replacement import (
    STACKS,
    Layer,
    Replacement,
    TapPair,
    blocks_of,
    student_model,
    tap_pairs,
)
from synthesizer_jax.distillation.teacher import read_teacher
from synthesizer_jax.hosts import processes
from synthesizer_jax.mixers import Attention
from synthesizer_jax.mixers.taps import OVERRIDES, TAPS
from synthesizer_jax.models import EncoderDecoder, unroll, unroll_variables
from synthesizer_jax.optimizers import OptimizerRule
from synthesizer_jax.optimizers.rules import merge_entries
from synthesizer_jax.primitives.parameters import Variables, abstract_variables
from synthesizer_jax.runs import code
from synthesizer_jax.runs.saved import find_checkpoint
from synthesizer_jax.sharding import gather_to_host, replicate_to_devices, shardings
from synthesizer_jax.tasks.splits import open_stream
from synthesizer_jax.tasks.task_registry import default_data_dir
from synthesizer_jax.training.experiment import Evaluation, Experiment, Training
from synthesizer_jax.training.loop import is_finished
from synthesizer_jax.training.run import run
from synthesizer_jax.training.run_directory import find_dtype, read_recorded, with_vocabulary_path
from synthesizer_jax.training.step import Batch, Metrics, TrainState, apply_gradients, teacher_forced
from synthesizer_jax.training.trainer import Trainer

DISTILLATION_FILE = "distillation.json"
FIT_FILE = "fit.json"
FINE_TUNED = "fine_tuned"
"""Subdirectory of a distillation for the run that fine-tunes the whole student."""


@register
@dataclasses.dataclass(frozen=True)
class Distillation:
    """The configuration of a distillation; model, data and vocabulary are those of the teacher's run.

    Attributes:
      replace: the replacements.
      training: number of steps, optimizer, etc.; only the replacements are trained.
      fit_batches: number of batches of the teacher's data to which static alignments of self-attention,
        such as Random, are fitted before the training, see `distillation.fit`; replacements that cannot be
        fitted are named. 0: all start from their initializers.
      together: whether the student's layers read the student's own activations and are trained jointly;
        otherwise every layer reads the teacher's activations and is trained independently.
      evaluation: the evaluation at the end; None: that of the teacher's run.
      fine_tune: training of the whole student on the task afterwards, in a run of its own; None: no
        fine-tuning.
    """

    replace: Annotated[tuple[Replacement, ...], NotEmpty()]
    training: Training
    fit_batches: Number = 0
    together: bool = False
    evaluation: Evaluation | None = None
    fine_tune: Training | None = None

    def __post_init__(self) -> None:
        check_fields(self)


def distill(
    recipe: Distillation,
    teacher: pathlib.Path,
    directory: pathlib.Path,
    *,
    data_dir: pathlib.Path | None = None,
    prepare: Callable[[Experiment, pathlib.Path], None] | None = None,
    visible: bool = True,
    user_code: code.Code = code.NOTHING,
) -> Experiment:
    """Runs or continues a distillation.

    Args:
      recipe: the replacements and their training.
      teacher: a training run, ``RUN`` or ``RUN/checkpoints/STEP``; of ``RUN`` the newest checkpoint. A
        distillation that continues takes the checkpoint with which it began, see `read_teacher`.
      directory: directory of the student's run, which does not depend on the teacher afterwards.
      data_dir: directory of the data sets.
      prepare: see `run`.
      visible: whether to show a progress bar.
      user_code: code that is needed to load the student, besides that of the teacher's run.

    Returns:
      The student's experiment.

    Raises:
      ValueError: the teacher is not an encoder-decoder, the replacements do not fit it, or the distillation
        began with another checkpoint.
    """
    teacher_run, _ = find_checkpoint(teacher)
    taught = with_vocabulary_path(read_recorded(teacher_run), teacher_run)
    if not isinstance(taught.model, EncoderDecoder):
        raise ValueError(
            f"{teacher} contains a {type(taught.model).__name__}; only EncoderDecoder models can be "
            "distilled"
        )
    # What a user can have got wrong comes before `run`, which prepares data.
    directory = storage_path(str(directory))
    taught = find_dtype(taught, directory)
    finished = is_finished(recipe.training, recipe.evaluation or taught.evaluation, directory)
    began_with, variables = read_teacher(teacher, directory, finished=finished)
    looped = None if variables is None else unroll_variables(taught.model, variables)
    trainer = DistillationTrainer(taught, looped, recipe)
    experiment = trainer.experiment
    first = processes.is_process_zero()
    options: dict[str, Any] = {
        "data_dir": data_dir,
        "prepare": prepare,
        "visible": visible,
        "user_code": code.recorded_code(teacher_run) + user_code,
    }

    def say(text: str) -> None:
        if first and visible:
            print(text, flush=True)

    def initialize(_: Trainer) -> TrainState:
        if first:
            began_with.save(directory)
        variables = trainer.inherited_variables()
        if not recipe.fit_batches:
            return trainer.init(variables)
        layers, others = trainer.fitted_layers()
        if layers:
            variables, divergences = _fit(variables, trainer, layers, data_dir)
            heads = np.stack(list(divergences.values()))
            if first:
                by_layer = {f"{stack}/layers_{i}": kl.tolist() for (stack, i), kl in divergences.items()}
                write_atomic(directory / FIT_FILE, json.dumps(by_layer, indent=1) + "\n")
            say(
                f"fitted {len(heads)} layers to {recipe.fit_batches} batches: the teacher's attention "
                f"diverges by {heads.mean():.3f} nats per query (worst head {heads.max():.3f})"
            )
        if others:
            reasons = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in others.items())
            say(f"not fitted, but trained from their initializers: {reasons}")
        return trainer.init(variables)

    run(experiment, directory, trainer=trainer, initial=initialize, **options)
    if first:
        content = json.dumps(to_json(recipe), indent=1) + "\n"
        write_atomic(directory / DISTILLATION_FILE, content)
    if recipe.fine_tune is not None:
        fine_tuning = replace(experiment, training=recipe.fine_tune, init_from=str(directory))
        run(fine_tuning, directory / FINE_TUNED, **options)
    return experiment


def _fit(
    variables: Variables,
    trainer: DistillationTrainer,
    layers: Mapping[Layer, Attention],
    data_dir: pathlib.Path | None,
) -> tuple[Variables, dict[Layer, np.ndarray]]:
    """Returns variables with alignments fitted to the teacher's attention, and every head's divergence."""
    experiment = trainer.experiment
    assert experiment.vocabulary is not None
    stream = open_stream(
        replace(experiment.data, pack=False, buckets=()),
        experiment.vocabulary.build(),
        data_dir=default_data_dir() if data_dir is None else storage_path(str(data_dir)),
        ids=experiment.model.ids,
        shards=trainer.shards,
    )
    batches = (trainer.shard_batch(next(stream)) for _ in range(trainer.recipe.fit_batches))
    statistics = collect_statistics(trainer.teacher, trainer.variables, batches, layers)
    fitted, divergences = fit_layers(trainer.student, variables["params"], statistics)
    keep = lambda new, old: old if new is old else replicate_to_devices(new, old.sharding)
    return {**variables, "params": jax.tree.map(keep, fitted, variables["params"])}, divergences


class DistillationTrainer(Trainer):
    """Trains the replacements in a student to produce a teacher's activations.

    The student's experiment is the teacher's, but for model, training and evaluation. The teacher's
    variables, unrolled, are an argument of every step, not part of the state. They may be None if the
    student takes no more steps.
    """

    def __init__(
        self,
        taught: Experiment,
        variables: Variables | None,
        recipe: Distillation,
        devices: list[jax.Device] | None = None,
    ):
        if recipe.training.micro_batches != 1:
            raise ValueError("distillation does not support micro-batches; set training.micro_batches=1")
        if recipe.training.adapters is not None:
            raise ValueError("distillation trains whole replacements; leave training.adapters out")
        assert isinstance(taught.model, EncoderDecoder)
        self.teacher, self.recipe = unroll(taught.model), recipe
        self.student = student_model(self.teacher, recipe.replace)
        self.tap_pairs = tuple(tap_pairs(self.teacher, recipe.replace))
        experiment = replace(
            taught,
            model=self.student,
            training=recipe.training,
            evaluation=recipe.evaluation or taught.evaluation,
        )
        super().__init__(experiment.starting_from(None), devices)
        self._variables: Variables | None = None
        if variables is not None:
            shapes, axes = abstract_variables(self.teacher, *self.example)
            layout = shardings(axes, shapes, self.mesh)
            self._variables = jax.tree.map(replicate_to_devices, variables, layout)

    @property
    def variables(self) -> Variables:
        """The teacher's variables, over the mesh.

        Raises:
          ValueError: they are not there.
        """
        if self._variables is None:
            raise ValueError(
                "the distillation is not finished, because its newest checkpoint cannot be read, and the "
                "teacher's checkpoint with which it began is gone; put one of them back"
            )
        return self._variables

    def inherited_variables(self) -> Variables:
        """Returns the teacher's arrays, and fresh ones where it has none of the same path and shape."""
        of_teacher = dict(jax.tree.leaves_with_path(self.variables))

        def inherited(path: KeyPath, fresh: jax.Array) -> jax.Array:
            array = of_teacher.get(path)
            if array is None or array.shape != fresh.shape:
                return fresh
            # A copy, because every step donates the state's buffers but needs the teacher's.
            return replicate_to_devices(jnp.copy(gather_to_host(array)), fresh.sharding)

        return jax.tree.map_with_path(inherited, self.init().variables)

    def fitted_layers(self) -> tuple[dict[Layer, Attention], dict[str, list[str]]]:
        """Returns the replacements that can be fitted to the teacher's attention, and the others.

        Returns:
          The attention of the student's layers that can be fitted, and the names of the other replaced
          mixers, such as ``encoder/layers_0/attention``, by the reason why they cannot be.
        """
        fitted: dict[Layer, Attention] = {}
        others: dict[str, list[str]] = {}
        for pair in self.tap_pairs:
            layer = pair.stack, int(pair.layer.removeprefix("layers_"))
            old, new = (blocks_of(model, pair.stack)[layer[1]] for model in (self.teacher, self.student))
            teacher, student = old.self_mixer, new.self_mixer
            if pair.mixer != STACKS[pair.stack]:
                reason = "cross-attention"
            elif not isinstance(student, Attention):
                reason = f"{type(student).__name__} has no alignment"
            elif not isinstance(teacher, Attention):
                reason = f"the teacher's {type(teacher).__name__} is no Attention"
            elif teacher.num_heads != student.num_heads:
                reason = f"{student.num_heads} heads in place of {teacher.num_heads}"
            elif not is_static(student.alignment):
                reason = f"{type(student.alignment).__name__} is not made of trained logits of positions"
            else:
                fitted[layer] = student
                continue
            others.setdefault(reason, []).append(f"{pair.stack}/{pair.layer}/{pair.mixer}")
        return fitted, others

    def step_flops(self) -> None:
        """Not known: the step runs parts of two models and trains only some parameters."""

    @property
    def rules(self) -> tuple[OptimizerRule, ...]:
        """The experiment's, after one that freezes all but the replacements."""
        replaced = sorted({f"{p.stack}/{p.layer}/{p.mixer}" for p in self.tap_pairs})
        others = f"(?!(?:{'|'.join(replaced)})/).*"
        return (OptimizerRule(others, frozen=True), *self.experiment.training.rules)

    @property
    def arguments(self) -> tuple[PyTree, ...]:
        """The teacher's variables."""
        return (self.variables,)

    def make_step(self) -> Callable[..., tuple[TrainState, Metrics]]:
        """Returns ``(state, batch, key, variables of the teacher) → (state, metrics)``."""

        def step(
            state: TrainState, batch: Batch, key: jax.Array, teacher_variables: PyTree
        ) -> tuple[TrainState, Metrics]:
            del key
            target = jax.lax.stop_gradient(self.activations(self.teacher, teacher_variables, batch))

            def loss_fn(trained: PyTree) -> tuple[jax.Array, jax.Array]:
                params = merge_entries(trained, state.params)
                return self._loss({**state.variables, "params": params}, batch, target)

            gradients_of = jax.value_and_grad(loss_fn, has_aux=True)
            (loss, unexplained), gradients = gradients_of(self.optimizer.trained(state.params))
            gradients = self.optimizer.mask_gradients(gradients)
            inputs = batch["encoder_input_tokens"] != self.student.ids.padding
            metrics = {
                "loss": loss,
                "unexplained": unexplained,
                "tokens": inputs.sum().astype(jnp.float32) + batch["decoder_loss_weights"].sum(),
                "gradient_norm": optax.tree.norm(gradients),
                **self.optimizer.learning_rate(state.opt_state),
            }
            ema = self.experiment.training.ema
            return apply_gradients(state, gradients, self.optimizer, ema=ema), metrics

        return step

    def _loss(
        self, variables: PyTree, batch: Batch, target: dict[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """The mean squared error over positions and taps, and its ratio to the target's variance."""
        if not self.recipe.together:
            # Every layer reads the teacher's inputs, and the teacher's encoder's output.
            names = ["encoded", *(pair.inputs for pair in self.tap_pairs)]
            overrides = {name: target[name] for name in names}
            variables = {**variables, OVERRIDES: traverse_util.unflatten_dict(overrides, sep="/")}
        activations = self.activations(self.student, variables, batch)
        not_padding = {
            "encoder": batch["encoder_input_tokens"] != self.student.ids.padding,
            "decoder": batch["decoder_loss_weights"] > 0,
        }
        pairs = [
            squared_error(*_to_compare(target, activations, pair), not_padding[pair.stack])
            for pair in self.tap_pairs
        ]
        errors, ratios = zip(*pairs, strict=True)
        return jnp.stack(errors).mean(), jnp.stack(ratios).mean()

    def activations(self, model: EncoderDecoder, variables: PyTree, batch: Batch) -> dict[str, jax.Array]:
        """Returns, by path, what a model sows in `TAPS` in a teacher-forced pass without dropout."""
        data = self.experiment.data
        segments = data.segments_per_row if data.pack else None
        _, sown = teacher_forced(model, variables, batch, collection=TAPS, max_segments=segments)
        return traverse_util.flatten_dict(sown[TAPS], sep="/")


def _to_compare(
    target: dict[str, jax.Array], activations: dict[str, jax.Array], pair: TapPair
) -> tuple[jax.Array, jax.Array]:
    """Returns the first of a tap's outputs that teacher and student have in the same shape."""
    for path in pair.outputs:
        x, y = target.get(path), activations.get(path)
        if x is not None and y is not None and x.shape == y.shape:
            return x, y
    raise ValueError(
        f"{pair.stack}/{pair.layer}: teacher and student have no activations of the same shape"
    )


def squared_error(
    target: jax.Array, output: jax.Array, not_padding: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the mean squared error of ``[b, n, …]`` over the positions ``[b, n]`` that are not padding.

    Also returns its ratio to the variance of the target over positions: 1 for the target's mean.
    """
    shape = (*not_padding.shape, -1)
    target, output = (x.reshape(shape).astype(jnp.float32) for x in (target, output))
    weight = not_padding[..., None].astype(jnp.float32)
    count = jnp.maximum(weight.sum(), 1.0)
    error = (weight * jnp.square(output - target)).sum() / (count * target.shape[-1])
    mean = (weight * target).sum((0, 1)) / count
    variance = (weight * jnp.square(target - mean)).sum() / (count * target.shape[-1])
    return error, error / jnp.maximum(variance, 1e-30)
