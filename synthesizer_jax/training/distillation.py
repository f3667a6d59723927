"""Replaces parts of a trained model and trains the replacements to do what the parts did.

Bozic et al. 2023 trained feed-forward networks on dumped activations of a Transformer's attention;
here teacher and student run in one compiled step, and anything can replace anything.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from synthesizer_jax.files import absolute, write_aside
from synthesizer_jax.mixers.base import FORCED, SITES
from synthesizer_jax.models import EncoderDecoder, unroll, unroll_variables
from synthesizer_jax.parameters import abstract_variables
from synthesizer_jax.registry import register, replace, to_json
from synthesizer_jax.sharding import hosts, shardings, spread
from synthesizer_jax.training import code, limits
from synthesizer_jax.training.checkpoints import restore_variables
from synthesizer_jax.training.experiment import Evaluation, Experiment, Training, load_experiment
from synthesizer_jax.training.replacement import Replacement, Site, sites, student_model
from synthesizer_jax.training.run import VOCABULARY_FILE, replace_parameters, run
from synthesizer_jax.training.state import TrainState
from synthesizer_jax.training.step import Batch, Metrics, teacher_forced
from synthesizer_jax.training.trainer import Trainer

DISTILLATION_FILE = "distillation.json"
FINE_TUNED = "fine_tuned"
"""Directory inside a distillation's one for the run that fine-tunes the whole student."""


@register
@dataclasses.dataclass(frozen=True)
class Distillation:
    """What a distillation recipe returns; the rest comes from the teacher's run.

    Attributes:
      replace: the replacements.
      training: steps and optimiser; nothing but the replacements is trained.
      together: False: every layer reads the teacher's activations, so that each learns by itself;
        True: the student's own activations flow on, and all layers learn together.
      evaluation: what is measured at the end; None: what the teacher's run measured.
      fine_tune: afterwards train the whole student on the task for so long, in a run of its own;
        None: do not.
    """

    replace: tuple[Replacement, ...]
    training: Training
    together: bool = False
    evaluation: Evaluation | None = None
    fine_tune: Training | None = None

    def __post_init__(self) -> None:
        limits.check(self)


def distill(
    recipe: Distillation,
    teacher: pathlib.Path,
    directory: pathlib.Path,
    *,
    data_dir: pathlib.Path | None = None,
    visible: bool = True,
    own: code.Code = code.NOTHING,
) -> Experiment:
    """Runs, or continues, a distillation.

    Args:
      recipe: what to replace and how to train.
      teacher: directory of a finished training run.
      directory: the student's run; an ordinary one afterwards, without the teacher.
      data_dir: where data sets lie.
      visible: show a progress bar.
      own: code that later commands need before they can load the student; the teacher's comes with it.

    Returns:
      The student's experiment.

    Raises:
      ValueError: the teacher cannot be changed in that way.
    """
    taught = load_experiment(teacher)
    if not isinstance(taught.model, EncoderDecoder):
        raise ValueError(
            f"{teacher} holds a {type(taught.model).__name__}; distill EncoderDecoders"
        )
    _, variables = restore_variables(teacher / "checkpoints")
    variables = unroll_variables(taught.model, variables)
    experiment = student_of(taught, recipe, teacher)
    trainer = DistillationTrainer(experiment, unroll(taught.model), variables, recipe)
    own = code.recorded(teacher) + own
    options: Any = {"data_dir": data_dir, "visible": visible, "own": own}
    run(experiment, directory, trainer=trainer, initial=inherit(variables), **options)
    if hosts.first():
        text = json.dumps(to_json(recipe), indent=1)
        write_aside(directory / DISTILLATION_FILE, text + "\n")
    if recipe.fine_tune is not None:
        tuned = replace(experiment, training=recipe.fine_tune, init_from=str(directory))
        run(tuned, directory / FINE_TUNED, **options)
    return experiment


def student_of(taught: Experiment, recipe: Distillation, teacher: pathlib.Path) -> Experiment:
    """The teacher's experiment with the student's model and training."""
    vocabulary: Any = taught.vocabulary
    if getattr(vocabulary, "path", None) == VOCABULARY_FILE:
        vocabulary = replace(vocabulary, path=str(absolute(teacher / VOCABULARY_FILE)))
    assert isinstance(taught.model, EncoderDecoder)
    return replace(
        taught,
        model=student_model(taught.model, recipe.replace),
        training=recipe.training,
        evaluation=recipe.evaluation or taught.evaluation,
        vocabulary=vocabulary,
        init_from=None,
    )


def inherit(variables: Any) -> Callable[[TrainState], TrainState]:
    """Puts the teacher's arrays wherever the student has one of the same name and shape."""
    theirs = {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(variables)
    }

    def one(path: Any, mine: jax.Array) -> jax.Array:
        leaf = theirs.get(jax.tree_util.keystr(path))
        if leaf is None or leaf.shape != mine.shape:
            return mine
        # A copy: the state's buffers are given away at every step, the teacher's are not.
        return spread(jnp.copy(leaf), mine.sharding)

    def put(state: TrainState) -> TrainState:
        mine = {"params": state.params, "constants": state.constants}
        mine = jax.tree.map_with_path(one, mine)
        return replace_parameters(state, mine["params"], mine["constants"])

    return put


class DistillationTrainer(Trainer):
    """Steps that move a student's replacements towards a teacher's activations.

    Args:
      experiment: the student's.
      teacher: the teacher's model, looped.
      variables: its variables, looped; they are an argument of every step and never saved.
      recipe: what is replaced.
      devices: None uses all devices.
    """

    def __init__(
        self,
        experiment: Experiment,
        teacher: EncoderDecoder,
        variables: Any,
        recipe: Distillation,
        devices: list[jax.Device] | None = None,
    ):
        if experiment.training.micro_batches != 1:
            raise ValueError("distillation has no micro-batches; set training.micro_batches=1")
        self.teacher, self.recipe = teacher, recipe
        self.sites = tuple(sites(teacher, recipe.replace))
        super().__init__(experiment, devices)
        shapes, axes = abstract_variables(teacher, *self.tokens)
        self.variables = jax.tree.map(spread, variables, shardings(axes, shapes, self.mesh))

    def step_flops(self) -> None:
        """Unknown: parts of two models run, and only some parameters have a gradient."""

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The teacher's variables."""
        return (self.variables,)

    def make_step(self) -> Callable[..., tuple[TrainState, Metrics]]:
        """The function ``(state, batch, key, teacher) → (state, metrics)``."""

        def step(
            state: TrainState, batch: Batch, key: jax.Array, teacher: Any
        ) -> tuple[TrainState, Metrics]:
            del key
            found = jax.lax.stop_gradient(self.activations(self.teacher, teacher, batch))

            def objective(params: Any) -> tuple[jax.Array, jax.Array]:
                variables = {**state.variables, "params": params}
                return self.distance(variables, batch, found)

            (loss, relative), gradients = jax.value_and_grad(objective, has_aux=True)(state.params)
            gradients = self.only_replaced(gradients, jax.tree.map(jnp.zeros_like, gradients))
            updates, opt_state = self.optimizer.update(gradients, state.opt_state, state.params)
            params = self.only_replaced(optax.apply_updates(state.params, updates), state.params)
            metrics = {
                "loss": loss,
                "unexplained": relative,
                "tokens": (batch["encoder_input_tokens"] != 0).sum().astype(jnp.float32)
                + batch["decoder_loss_weights"].sum(),
                "gradient_norm": optax.tree.norm(gradients),
            }
            new = TrainState(
                step=state.step + 1,
                params=params,
                constants=state.constants,
                opt_state=opt_state,
            )
            return new, metrics

        return step

    def distance(self, variables: Any, batch: Batch, teacher: Any) -> tuple[jax.Array, jax.Array]:
        """Mean squared error over real positions and sites, and the share of the variance it is."""
        forced = None if self.recipe.together else self.forced(teacher)
        if forced is not None:
            variables = {**variables, FORCED: forced}
        model: Any = self.model
        student = self.activations(model, variables, batch)
        real = {
            "encoder": batch["encoder_input_tokens"] != 0,
            "decoder": batch["decoder_loss_weights"] > 0,
        }
        errors, shares = [], []
        for place in self.sites:
            one, other = compared(teacher, student, place)
            error, share = squared_error(one, other, real[place.stack])
            errors.append(error)
            shares.append(share)
        return jnp.stack(errors).mean(), jnp.stack(shares).mean()

    def activations(self, model: EncoderDecoder, variables: Any, batch: Batch) -> Any:
        """What a model leaves at its sites in a teacher-forced pass without dropout."""
        data = self.experiment.data
        segments = data.segments_per_row if data.pack else None
        _, found = teacher_forced(model, variables, batch, collection=SITES, max_segments=segments)
        return found[SITES]

    def forced(self, teacher: Any) -> Any:
        """The teacher's inputs at every site, and its encoder's output."""
        given: dict[str, Any] = {"encoded": teacher["encoded"]}
        for place in self.sites:
            layer = given.setdefault(place.stack, {}).setdefault(place.layer, {})
            layer[place.inputs] = teacher[place.stack][place.layer][place.inputs]
        return given

    def only_replaced(self, new: Any, old: Any) -> Any:
        """`new` for the parameters of the replacements, `old` for all others."""
        trained = {(place.stack, place.layer, place.mixer) for place in self.sites}

        def one(path: Any, x: jax.Array, y: jax.Array) -> jax.Array:
            names = tuple(key.key for key in path[:3])
            return x if names in trained else y

        return jax.tree.map_with_path(one, new, old)


def compared(teacher: Any, student: Any, place: Site) -> tuple[jax.Array, jax.Array]:
    """The two arrays to compare."""
    for path in place.outputs:
        found = [look_up(tree[place.stack][place.layer], path) for tree in (teacher, student)]
        if all(x is not None for x in found) and found[0].shape == found[1].shape:
            return found[0], found[1]
    raise ValueError(f"{place.stack}/{place.layer}: teacher and student have nothing to compare")


def look_up(tree: Any, path: tuple[str, ...]) -> Any:
    """An entry of nested dictionaries; None: it is not there."""
    for name in path:
        tree = tree.get(name, {})
    return None if isinstance(tree, dict) else tree


def squared_error(
    target: jax.Array, found: jax.Array, real: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Mean squared error ``[b, n, …]`` over the real positions ``[b, n]``, also as a share.

    The share is of the target's own variance over positions: 1 is no better than its mean.
    """
    flat = [x.reshape(*real.shape, -1).astype(jnp.float32) for x in (target, found)]
    weight = real[..., None].astype(jnp.float32)
    count = jnp.maximum(weight.sum(), 1.0)
    error = (weight * jnp.square(flat[1] - flat[0])).sum() / (count * flat[0].shape[-1])
    mean = (weight * flat[0]).sum((0, 1)) / count
    variance = (weight * jnp.square(flat[0] - mean)).sum() / (count * flat[0].shape[-1])
    return error, error / jnp.maximum(variance, 1e-30)
