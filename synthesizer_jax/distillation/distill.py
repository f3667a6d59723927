"""Replaces parts of a trained model and trains the replacements to imitate them.

Bozic et al. 2023 replace the attention of a Transformer by feed-forward networks, which they train
on stored activations. This module runs the teacher and the student in the same compiled step, so no
activations are stored. Any mixer can be replaced by any other mixer.
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
from jax.typing import ArrayLike

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
from synthesizer_jax.primitives.parameters import Variables, abstract_variables, merge_entries
from synthesizer_jax.runs import code
from synthesizer_jax.runs.saved import find_checkpoint
from synthesizer_jax.sharding import gather_to_host, replicate_to_devices, shardings
from synthesizer_jax.tasks.splits import open_stream
from synthesizer_jax.tasks.task_registry import default_data_dir
from synthesizer_jax.training.experiment import Evaluation, Experiment, Training
from synthesizer_jax.training.loop import is_finished
from synthesizer_jax.training.run import run
from synthesizer_jax.training.run_directory import find_dtype, read_recorded, with_vocabulary_path
from synthesizer_jax.training.step import (
    Batch,
    Metrics,
    TrainState,
    apply_gradients,
    teacher_forced,
)
from synthesizer_jax.training.trainer import Trainer

DISTILLATION_FILE = "distillation.json"
"""The file in the student's run that contains the configuration of the distillation."""
FIT_FILE = "fit.json"
"""The file in the student's run that contains the divergences of fitted alignments, in nats."""
FINE_TUNED = "fine_tuned"
"""The subdirectory of a distillation that contains the run which fine-tunes the whole student."""


@register
@dataclasses.dataclass(frozen=True)
class Distillation:
    """The configuration of a distillation.

    The model, the data and the vocabulary are taken from the teacher's run.

    Attributes:
      replace: the replacements.
      training: the number of steps, the optimizer and other settings of the training. Only the
        replacements are trained.
      fit_batches: the number of batches to which static alignments of self-attention, such as
        Random, are fitted before the training; see `distillation.fit`. The batches are from the
        teacher's data. Replacements that cannot be fitted are only initialized, and a message names
        them. If `fit_batches` is 0, nothing is fitted.
      together: whether the student's layers read the student's own activations and are trained
        jointly. Otherwise, every layer reads the teacher's activations and is trained
        independently.
      evaluation: the settings of the evaluation at the end. `None` stands for the settings of the
        teacher's run.
      fine_tune: the settings for training the whole student on the task after the distillation, in
        a separate run. `None` stands for no fine-tuning.
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
      teacher: the teacher, a training run ``RUN`` or a checkpoint ``RUN/checkpoints/STEP``. For
        ``RUN``, the newest checkpoint is used. A resumed distillation uses the checkpoint with
        which it began; see `read_teacher`.
      directory: the directory of the student's run. When the student's run is finished, it does not
        need the teacher.
      data_dir: the directory of the data sets.
      prepare: see `run`.
      visible: whether to show a progress bar.
      user_code: code that is needed to load the student, in addition to the code of the teacher's
        run.

    Returns:
      The experiment of the student.

    Raises:
      ValueError: if the teacher is not an encoder-decoder, if the replacements do not fit the
        teacher, or if the distillation began with a different checkpoint of the teacher.
    """
    teacher_run, _ = find_checkpoint(teacher)
    taught = with_vocabulary_path(read_recorded(teacher_run), teacher_run)
    if not isinstance(taught.model, EncoderDecoder):
        raise ValueError(
            f"{teacher} contains a model of the type {type(taught.model).__name__}, but only "
            "EncoderDecoder models can be distilled."
        )

    # Check everything that a user can get wrong before calling `run`, which prepares data.
    directory = storage_path(str(directory))
    taught = find_dtype(taught, directory)
    finished = is_finished(recipe.training, recipe.evaluation or taught.evaluation, directory)
    began_with, variables = read_teacher(teacher, directory, finished=finished)
    looped = None if variables is None else unroll_variables(taught.model, variables)
    trainer = DistillationTrainer(taught, looped, recipe)
    experiment = trainer.experiment
    options: dict[str, Any] = {
        "data_dir": data_dir,
        "prepare": prepare,
        "visible": visible,
        "user_code": code.recorded_code(teacher_run) + user_code,
    }

    def initialize(_: Trainer) -> TrainState:
        """Returns the first state. Alignments are fitted if the recipe has `fit_batches`."""
        if processes.is_process_zero():
            began_with.save(directory)
        variables = trainer.inherited_variables()
        if recipe.fit_batches:
            variables = _fit(variables, trainer, directory, data_dir=data_dir, visible=visible)
        return trainer.init(variables)

    run(experiment, directory, trainer=trainer, initialize=initialize, **options)
    if processes.is_process_zero():
        content = json.dumps(to_json(recipe), indent=1) + "\n"
        write_atomic(directory / DISTILLATION_FILE, content)

    if recipe.fine_tune is not None:
        fine_tuning = replace(experiment, training=recipe.fine_tune, init_from=str(directory))
        run(fine_tuning, directory / FINE_TUNED, **options)
    return experiment


def _fit(
    variables: Variables,
    trainer: DistillationTrainer,
    directory: pathlib.Path,
    *,
    data_dir: pathlib.Path | None,
    visible: bool,
) -> Variables:
    """Fits all alignments that can be fitted, and reports how far they are from the teacher.

    The KL divergence of every head is written to `FIT_FILE`.

    Args:
      variables: the student's variables.
      trainer: the trainer of the student.
      directory: the directory of the student's run.
      data_dir: the directory of the data sets.
      visible: whether to print a report.

    Returns:
      The student's variables with the fitted alignments.
    """
    layers, others = trainer.fitted_layers()
    reports = []
    if layers:
        variables, divergences = _fit_to_teacher(variables, trainer, layers, data_dir)
        by_layer = {f"{stack}/layers_{i}": kl.tolist() for (stack, i), kl in divergences.items()}
        if processes.is_process_zero():
            write_atomic(directory / FIT_FILE, json.dumps(by_layer, indent=1) + "\n")
        # `heads` is ``[layers, heads]``.
        heads = np.stack(list(divergences.values()))
        reports.append(
            f"Fitted {len(heads)} layers to {trainer.recipe.fit_batches} batches. The divergence "
            f"from the teacher's attention is {heads.mean():.3f} nats per query on average, and "
            f"{heads.max():.3f} for the worst head."
        )
    if others:
        reasons = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in others.items())
        reports.append(
            f"These mixers are not fitted, but trained from their initializers: {reasons}."
        )
    if reports and visible and processes.is_process_zero():
        print(*reports, sep="\n", flush=True)
    return variables


def _fit_to_teacher(
    variables: Variables,
    trainer: DistillationTrainer,
    layers: Mapping[Layer, Attention],
    data_dir: pathlib.Path | None,
) -> tuple[Variables, dict[Layer, np.ndarray]]:
    """Fits the alignments of some layers to the teacher's attention.

    Returns:
      The student's variables with the fitted alignments, and the divergence of every head in nats
      per query, as arrays ``[heads]`` by layer.
    """
    experiment = trainer.experiment
    assert experiment.vocabulary is not None
    data_dir = default_data_dir() if data_dir is None else storage_path(str(data_dir))
    stream = open_stream(
        # The statistics depend on the position in an example, so examples must not be packed. All
        # batches must have the same length, so that their statistics can be added.
        replace(experiment.data, pack=False, buckets=()),
        experiment.vocabulary.build(),
        data_dir=data_dir,
        ids=experiment.model.ids,
        shards=trainer.shards,
    )
    batches = (trainer.shard_batch(next(stream)) for _ in range(trainer.recipe.fit_batches))
    statistics = collect_statistics(trainer.teacher, trainer.variables, batches, layers)
    fitted, divergences = fit_layers(trainer.student, variables["params"], statistics)

    def on_mesh(new: ArrayLike, old: jax.Array) -> jax.Array:
        """Moves a fitted array to the mesh, and returns an array that was not fitted unchanged."""
        if new is old:
            return old
        return replicate_to_devices(new, old.sharding)

    params = jax.tree.map(on_mesh, fitted, variables["params"])
    return {**variables, "params": params}, divergences


class DistillationTrainer(Trainer):
    """Trains the replacements in a student to produce the teacher's activations.

    The student's experiment is the teacher's experiment with a different model and different
    settings of training and evaluation. Every step gets the teacher's variables as an argument, so
    the saved state does not contain them. The teacher's variables may be `None` if no training
    steps are left.
    """

    def __init__(
        self,
        taught: Experiment,
        variables: Variables | None,
        recipe: Distillation,
        devices: list[jax.Device] | None = None,
    ):
        """Builds the student and puts the teacher's variables on the mesh.

        Args:
          taught: the experiment of the teacher.
          variables: the teacher's variables, with looped layers. `None` is allowed if no training
            steps are left.
          recipe: the configuration of the distillation.
          devices: the devices to use. `None` stands for all devices.

        Raises:
          ValueError: if the recipe uses micro-batches or adapters, or if its replacements do not
            fit the teacher.
        """
        if recipe.training.micro_batches != 1:
            raise ValueError(
                f"training.micro_batches is {recipe.training.micro_batches}, but a distillation "
                "does not support micro-batches. Set training.micro_batches=1."
            )
        if recipe.training.adapters is not None:
            raise ValueError(
                "training.adapters is set, but a distillation trains whole replacements. Leave "
                "training.adapters out."
            )

        # The experiment of a run has a specific dtype, but the dtype of an experiment from a recipe
        # may still be "auto".
        taught = taught.resolved(None if devices is None else devices[0].platform)
        assert isinstance(taught.model, EncoderDecoder)
        self.teacher = unroll(taught.model)
        self.recipe = recipe
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
        """The teacher's variables, sharded over the mesh.

        Raises:
          ValueError: if the trainer was built without the teacher's variables.
        """
        if self._variables is None:
            raise ValueError(
                "The newest checkpoint of the distillation cannot be read, so it is not finished "
                "and needs its teacher. But the teacher's checkpoint with which it began is gone. "
                "Put one of the two checkpoints back."
            )
        return self._variables

    def inherited_variables(self) -> Variables:
        """Returns the variables with which the student starts.

        The student starts with copies of the teacher's arrays. If the teacher has no array with the
        same path and shape, the student's array is newly initialized. In merged attention, a
        new alignment of the memory starts as a copy of the alignment that the teacher shares.
        """
        of_teacher = dict(jax.tree.leaves_with_path(self.variables))
        shared = jax.tree_util.DictKey("align")
        separate = jax.tree_util.DictKey("cross_align")

        def inherited(path: KeyPath, fresh: jax.Array) -> jax.Array:
            """Returns a copy of the teacher's array if its shape fits, or else the new array."""
            array = of_teacher.get(path)
            if array is None:
                array = of_teacher.get(tuple(shared if key == separate else key for key in path))
            if array is None or array.shape != fresh.shape:
                return fresh
            # The arrays are copied because every step donates the buffers of the student's state,
            # but the teacher's buffers are needed in later steps.
            return replicate_to_devices(jnp.copy(gather_to_host(array)), fresh.sharding)

        return jax.tree.map_with_path(inherited, self.init().variables)

    def fitted_layers(self) -> tuple[dict[Layer, Attention], dict[str, list[str]]]:
        """Returns the mixers that can be fitted to the teacher's attention, and all others.

        Returns:
          The student's attention in the layers that can be fitted, and the names of all other
          replaced mixers, such as ``encoder/layers_0/attention``. The names are grouped by the
          reason why the mixers cannot be fitted.
        """
        fitted: dict[Layer, Attention] = {}
        others: dict[str, list[str]] = {}
        for pair in self.tap_pairs:
            index = int(pair.layer.removeprefix("layers_"))
            teacher = blocks_of(self.teacher, pair.stack)[index].self_mixer
            student = blocks_of(self.student, pair.stack)[index].self_mixer
            if pair.mixer != STACKS[pair.stack]:
                reason = "only self-attention can be fitted"
            elif not isinstance(student, Attention):
                reason = f"{type(student).__name__} has no alignment"
            elif not isinstance(teacher, Attention):
                reason = f"the teacher's {type(teacher).__name__} is not an Attention"
            elif teacher.reads_memory or student.reads_memory:
                reason = "attention that shares its softmax with the memory cannot be fitted"
            elif teacher.num_heads != student.num_heads:
                reason = f"{student.num_heads} heads replace {teacher.num_heads}"
            elif not is_static(student.alignment):
                reason = (
                    f"{type(student.alignment).__name__} is not made of trained logits of positions"
                )
            else:
                fitted[pair.stack, index] = student
                continue
            others.setdefault(reason, []).append(f"{pair.stack}/{pair.layer}/{pair.mixer}")
        return fitted, others

    def step_flops(self) -> None:
        """Returns `None`, because the number of FLOPs is not known.

        A step runs parts of two models and trains only some of the parameters.
        """

    @property
    def rules(self) -> tuple[OptimizerRule, ...]:
        """The experiment's rules, after a rule that freezes everything except the replacements."""
        replaced = sorted({f"{pair.stack}/{pair.layer}/{pair.mixer}" for pair in self.tap_pairs})
        # The pattern matches all paths that do not begin with the path of a replaced mixer.
        others = f"(?!(?:{'|'.join(replaced)})/).*"
        return (OptimizerRule(others, frozen=True), *self.experiment.training.rules)

    @property
    def arguments(self) -> tuple[PyTree, ...]:
        """The teacher's variables, which are the only additional argument of a step."""
        return (self.variables,)

    @property
    def abstract_arguments(self) -> tuple[PyTree, ...]:
        """The same as `arguments`, because the teacher's variables already exist on the mesh."""
        return self.arguments

    def make_step(self) -> Callable[..., tuple[TrainState, Metrics]]:
        """Returns the training step.

        The step is a function ``(state, batch, key, teacher's variables) → (state, metrics)``.
        """

        def step(
            state: TrainState, batch: Batch, key: jax.Array, teacher_variables: PyTree
        ) -> tuple[TrainState, Metrics]:
            """Trains the replacements on one batch. The key is not used: there is no dropout."""
            del key
            target = jax.lax.stop_gradient(self.activations(self.teacher, teacher_variables, batch))

            def loss_fn(trained: PyTree) -> tuple[jax.Array, jax.Array]:
                """Returns the loss, and the unexplained share of the target's variance."""
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
        """Returns the mean squared error, and its ratio to the variance of the target.

        Both results are scalars, averaged over positions and over replaced mixers.
        """
        if not self.recipe.together:
            # Every replaced mixer reads the teacher's inputs, and the decoder reads the output of
            # the teacher's encoder.
            names = ["encoded", *(pair.inputs for pair in self.tap_pairs)]
            overrides = {name: target[name] for name in names}
            variables = {**variables, OVERRIDES: traverse_util.unflatten_dict(overrides, sep="/")}

        activations = self.activations(self.student, variables, batch)
        not_padding = {
            "encoder": batch["encoder_input_tokens"] != self.student.ids.padding,
            "decoder": batch["decoder_loss_weights"] > 0,
        }
        errors = []
        ratios = []
        for pair in self.tap_pairs:
            x, y = _to_compare(target, activations, pair)
            error, ratio = squared_error(x, y, not_padding[pair.stack])
            errors.append(error)
            ratios.append(ratio)
        return jnp.stack(errors).mean(), jnp.stack(ratios).mean()

    def activations(
        self, model: EncoderDecoder, variables: PyTree, batch: Batch
    ) -> dict[str, jax.Array]:
        """Returns the values that a model sows in the collection `TAPS`, by path.

        The model runs with teacher forcing and without dropout.
        """
        data = self.experiment.data
        segments = data.segments_per_row if data.pack else None
        _, sown = teacher_forced(model, variables, batch, collection=TAPS, max_segments=segments)
        return traverse_util.flatten_dict(sown[TAPS], sep="/")


def _to_compare(
    target: dict[str, jax.Array], activations: dict[str, jax.Array], pair: TapPair
) -> tuple[jax.Array, jax.Array]:
    """Returns the activations of the teacher and of the student that are compared for a mixer.

    The function uses the first of `pair.outputs` that has the same shape in both models.

    Raises:
      ValueError: if no output has the same shape in both models.
    """
    for path in pair.outputs:
        x = target.get(path)
        y = activations.get(path)
        if x is not None and y is not None and x.shape == y.shape:
            return x, y
    raise ValueError(
        f"The teacher and the student have no activations of the same shape to compare in "
        f"{pair.stack}/{pair.layer}."
    )


def squared_error(
    target: jax.Array, output: jax.Array, not_padding: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the mean squared error of an output, and its ratio to the variance of the target.

    Padding is ignored. If the output at every position is the mean of the target over positions,
    the ratio is 1.

    Args:
      target: the target ``[b, n, …]``.
      output: the output ``[b, n, …]``.
      not_padding: a boolean array ``[b, n]`` that is false for padding.

    Returns:
      Two scalars in float32.
    """
    # The target and the output are reshaped to ``[b, n, features]``.
    shape = (*not_padding.shape, -1)
    target = target.reshape(shape).astype(jnp.float32)
    output = output.reshape(shape).astype(jnp.float32)
    weight = not_padding[..., None].astype(jnp.float32)
    count = jnp.maximum(weight.sum(), 1.0)
    error = (weight * jnp.square(output - target)).sum() / (count * target.shape[-1])

    mean = (weight * target).sum((0, 1)) / count  # [features].
    # `variance` is the variance of each feature over positions, averaged over features.
    variance = (weight * jnp.square(target - mean)).sum() / (count * target.shape[-1])
    return error, error / jnp.maximum(variance, 1e-30)
