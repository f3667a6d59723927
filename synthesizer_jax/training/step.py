"""The state of training and one step: the loss, gradients over micro-batches, and the update."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from synthesizer_jax.attention.terms import cap_logits
from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.mixers.taps import LOSSES
from synthesizer_jax.models import Encoder, Rows, TextToText
from synthesizer_jax.models.trainable import Trainable
from synthesizer_jax.optimizers.rules import RuledOptimizer
from synthesizer_jax.primitives.mesh import map_over_batch, mesh_axes
from synthesizer_jax.primitives.parameters import Variables, apply_method, merge_entries
from synthesizer_jax.primitives.products import output_product
from synthesizer_jax.training.experiment import Training
from synthesizer_jax.training.losses import (
    LossSums,
    chunked_cross_entropy,
    cross_entropy,
    loss_denominator,
)

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]

DENSE_LOGITS = 2**22
"""The largest number of logits for which the loss of a batch is computed at once.

The loss of larger batches is computed in chunks of tokens.
"""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of a run, as a pytree. Every training step returns a new state.

    Attributes:
      step: number of finished steps, an int32 scalar.
      params: the parameters that the run trains and saves, float32; see `Experiment.trainable`.
      constants: variables that are saved but never optimized, such as the tables of Fixed Random.
      opt_state: the state of the optimizer.
      ema: the exponential moving average of the parameters, or an empty dictionary if the run has
        no average.
    """

    step: PyTree
    params: PyTree
    constants: PyTree
    opt_state: PyTree
    ema: PyTree = dataclasses.field(default_factory=dict)

    @property
    def variables(self) -> Variables:
        """The variables for the model's `apply` during training."""
        variables = {"params": self.params}
        if self.constants:
            variables["constants"] = self.constants
        return variables

    @property
    def averaged_variables(self) -> Variables:
        """The variables for evaluation and later use.

        If the run has a moving average of the parameters, the average replaces the parameters.
        """
        return {**self.variables, "params": self.ema or self.params}


def loss_sums(
    model: TextToText | Encoder,
    variables: Variables,
    batch: Batch,
    *,
    z_loss: float,
    label_smoothing: float,
    dropout_key: jax.Array | None = None,
    max_segments: int | None = None,
    penalty_weight: jax.Array | None = None,
) -> LossSums:
    """Returns the loss of a batch, summed over its real targets.

    For a text-to-text model, the targets are tokens, which are predicted with teacher forcing. For
    an `Encoder` with `outputs`, each row has one target, which is its class. For an `Encoder` with
    `masked_lm`, the targets are the masked tokens, which are predicted at their own positions.

    Args:
      model: an unbound model.
      variables: the variables of the model.
      batch: arrays ``encoder_input_tokens [b, k]``, ``decoder_input_tokens [b, q]``,
        ``decoder_target_tokens [b, q]`` and ``decoder_loss_weights [b, q]``. Packed rows also have
        ``*_segment_ids``. The targets of an encoder are classes (q = 1) or tokens (q = k).
      z_loss: coefficient of log² Z.
      label_smoothing: ε of T5's label smoothing.
      dropout_key: random key for dropout. None turns dropout off.
      max_segments: maximum number of segments in a packed row.
      penalty_weight: the factor of the losses that modules add. Each of these losses is averaged
        over the positions of a row, and then over the rows. The default factor is the number of
        real targets in `batch`. For a micro-batch, pass the number of real targets in the whole
        batch, divided by the number of micro-batches.
        The penalties of all micro-batches then add up to the penalty of the whole batch.
    """
    if isinstance(model, Encoder):
        output, sown = _encoder_output(model, variables, batch, dropout_key)
    else:
        states, sown = teacher_forced(
            model,
            variables,
            batch,
            collection=LOSSES,
            dropout_key=dropout_key,
            max_segments=max_segments,
        )
        kernel, scale = apply_method(model.output_kernel, variables)
        output = _Output(states, kernel, scale)
    sums = _output_loss(
        output,
        targets=batch["decoder_target_tokens"],
        weights=batch["decoder_loss_weights"],
        z_loss=z_loss,
        label_smoothing=label_smoothing,
        soft_cap=model.logits_soft_cap,
    )

    # Modules in scanned layers sow one array [layers], and other modules sow scalars.
    penalty = sum(map(jnp.sum, jax.tree.leaves(sown)), start=jnp.zeros(()))
    weight = sums.weight if penalty_weight is None else penalty_weight
    return dataclasses.replace(sums, penalty=penalty * weight)


class _Output(NamedTuple):
    """The arrays for the logits of a batch, which are ``scale · states · kernel``.

    Attributes:
      states: ``[b, q, d_model]``, or ``[b, k, d_model + 1]`` for masked tokens. If `kernel` is
        None, the states are the logits ``[b, 1, classes]`` themselves.
      kernel: the output projection ``[d_model, vocab]``, or None.
      scale: the factor of the states.
    """

    states: jax.Array
    kernel: jax.Array | None
    scale: float


def _encoder_output(
    model: Encoder, variables: Variables, batch: Batch, dropout_key: jax.Array | None
) -> tuple[_Output, Variables]:
    """Returns the arrays for an encoder's logits, and the losses that the encoder's modules sow.

    See `loss_sums` for the arguments.
    """
    classifies = model.outputs is not None
    encoded_and_sown: PyTree = model.apply(
        variables,
        batch["encoder_input_tokens"],
        rngs=None if dropout_key is None else {"dropout": dropout_key},
        method=model.__call__ if classifies else model.token_features,
        mutable=[LOSSES],
    )
    encoded, sown = encoded_and_sown
    if classifies:
        return _Output(encoded.outputs[:, None], kernel=None, scale=1.0), sown
    return _Output(encoded, apply_method(model.token_projection, variables), scale=1.0), sown


def _output_loss(
    output: _Output,
    *,
    targets: jax.Array,
    weights: jax.Array,
    z_loss: float,
    label_smoothing: float,
    soft_cap: float | None,
) -> LossSums:
    """Returns the loss of a batch, without the losses that modules add; see `cross_entropy`.

    Large logits are computed in chunks; see `DENSE_LOGITS`.
    """
    states, kernel, scale = output
    if kernel is None or targets.size * kernel.shape[1] <= DENSE_LOGITS:
        logits = states
        if kernel is not None:
            logits = output_product(states * jnp.asarray(scale, states.dtype), kernel)
            logits = cap_logits(logits, soft_cap)
        return cross_entropy(
            logits, targets, weights=weights, z_loss=z_loss, label_smoothing=label_smoothing
        )

    def chunked_loss(
        kernel: jax.Array, states: jax.Array, targets: jax.Array, weights: jax.Array
    ) -> LossSums:
        """Returns the loss of some rows, computed in chunks of tokens."""
        return chunked_cross_entropy(
            states,
            kernel,
            targets=targets,
            weights=weights,
            scale=scale,
            z_loss=z_loss,
            label_smoothing=label_smoothing,
            soft_cap=soft_cap,
        )

    # `mesh_axes("batch")` returns the mesh axes over which the rows of the batch are divided. If
    # there are none, for example on a single device, the loss of all rows is computed together.
    if not mesh_axes("batch"):
        return chunked_loss(kernel, states, targets, weights)

    def loss_of_device(*arrays: jax.Array) -> LossSums:
        """Returns the loss of one device's rows. Each sum has a new axis for the devices."""
        return jax.tree.map(lambda x: jnp.asarray(x)[None], chunked_loss(*arrays))

    # Each device computes the loss of its own rows. No chunk then has rows of several devices, and
    # the kernel is gathered only once. The kernel is cast before it is gathered, so that devices
    # send fewer bytes.
    sums = map_over_batch(loss_of_device, kernel.astype(states.dtype), states, targets, weights)
    return jax.tree.map(jnp.sum, sums)


def teacher_forced(
    model: TextToText,
    variables: Variables,
    batch: Batch,
    *,
    collection: str | Sequence[str],
    dropout_key: jax.Array | None = None,
    max_segments: int | None = None,
) -> tuple[jax.Array, Variables]:
    """Returns the decoder's states with teacher forcing, and the values that modules sow.

    Args:
      model: an unbound model.
      variables: the variables of the model.
      batch: see `loss_sums`.
      collection: the collections to return: `LOSSES`, `TAPS` or ``intermediates``, or several.
      dropout_key: random key for dropout. None turns dropout off.
      max_segments: maximum number of segments in a packed row.

    Returns:
      The states ``[b, q, d_model]``, and ``{collection: ...}``.
    """
    weights = batch.get("decoder_loss_weights")
    segments = None
    if "encoder_segment_ids" in batch:
        segments = batch["encoder_segment_ids"], batch["decoder_segment_ids"]
    hidden_and_sown: PyTree = model.apply(
        variables,
        batch["encoder_input_tokens"],
        batch["decoder_input_tokens"],
        rows=Rows(segments, None if weights is None else weights != 0, max_segments),
        rngs=None if dropout_key is None else {"dropout": dropout_key},
        method=model.hidden,
        mutable=collection,
    )
    return hidden_and_sown


def make_train_step(
    trainable: Trainable[TextToText | Encoder],
    optimizer: RuledOptimizer,
    training: Training,
    *,
    max_segments: int | None = None,
) -> Callable[[TrainState, Batch, jax.Array, Variables], tuple[TrainState, Metrics]]:
    """Returns the function ``(state, batch, key, base) → (state, metrics)``, not yet jitted.

    `base` holds the variables that adapters modify. Without adapters, `base` is an empty
    dictionary.

    With `Training.micro_batches`, the batch is divided into parts whose gradients are added up. The
    loss is normalized over the whole batch, so the result is the same as without micro-batches,
    except for rounding and dropout.

    Args:
      trainable: the model, and the part of its variables that is trained.
      optimizer: the optimizer, which also knows which parameters are trained.
      training: the settings of the loss, the loss normalizer, micro-batches and the moving average
        of the parameters.
      max_segments: maximum number of segments in a packed row.

    Returns:
      The training step. All metrics are scalars, and all except the checksum are float32:

      - ``loss``: the cross-entropy in nats per real target, without z-loss.
      - ``z_loss``: z-loss per real target.
      - ``accuracy``: the fraction of real targets that are predicted correctly.
      - ``tokens``: number of real input and target tokens.
      - ``gradient_norm``: the norm of the gradient of the trained parameters.
      - ``learning_rate``: the learning rate of the step, if it is known.
      - ``data_checksum``: a uint32 checksum of the batch. If two runs read the same batch in a
        step, their checksums of this step are equal.
    """
    model, parts = trainable.model, training.micro_batches

    def step(
        state: TrainState, batch: Batch, key: jax.Array, base: Variables
    ) -> tuple[TrainState, Metrics]:
        """Computes the gradients of a batch and updates the state."""
        key = jax.random.fold_in(key, state.step)
        weights = batch["decoder_loss_weights"]
        num_targets = weights.sum()
        denominator = loss_denominator(weights, training.loss_normalizer)

        def normalized_loss(
            trained: PyTree, part: Batch, key: jax.Array
        ) -> tuple[jax.Array, LossSums]:
            """Returns the loss of a part of the batch, and the sums for the metrics.

            The loss is divided by the denominator of the whole batch, so that the losses of all
            parts add up to the loss of the batch.
            """
            variables = {**state.variables, "params": merge_entries(trained, state.params)}
            sums = loss_sums(
                model,
                trainable.merge(variables, base),
                part,
                z_loss=training.z_loss,
                label_smoothing=training.label_smoothing,
                dropout_key=key,
                max_segments=max_segments,
                penalty_weight=num_targets / parts,
            )
            return (sums.total + sums.penalty) / denominator, sums

        gradients_of = functools.partial(
            jax.grad(normalized_loss, has_aux=True), optimizer.trained(state.params)
        )
        if parts == 1:
            gradients, sums = gradients_of(batch, key)
        else:
            gradients, sums = _sum_over_parts(gradients_of, batch, key, parts)

        # A scanned stack holds trained and frozen layers in one array, so `gradients` may contain
        # entries of frozen layers. They are set to zero.
        gradients = optimizer.mask_gradients(gradients)
        real_targets = jnp.maximum(sums.weight, 1.0)
        tokens = (batch["encoder_input_tokens"] != model.ids.padding).sum() + sums.weight
        metrics = {
            "loss": sums.loss / real_targets,
            "z_loss": sums.z_loss / real_targets,
            "accuracy": sums.num_correct / real_targets,
            "tokens": tokens.astype(jnp.float32),
            "gradient_norm": optax.tree.norm(gradients),
            "data_checksum": _data_checksum(batch),
            # The method returns a dictionary, which is empty if the learning rate is not known.
            **optimizer.learning_rate(state.opt_state),
        }
        return apply_gradients(state, gradients, optimizer, ema=training.ema), metrics

    return step


@jax.named_scope("optimizer")
def apply_gradients(
    state: TrainState, gradients: PyTree, optimizer: RuledOptimizer, *, ema: float | None = None
) -> TrainState:
    """Returns the state after an update of the parameters and of their moving average.

    The average is updated to ``average + (1 − d) · (params − average)``. The decay is
    ``d = min(ema, (1 + step) / (10 + step))``, as in TensorFlow's ``ExponentialMovingAverage`` with
    ``num_updates``. The average starts as a copy of the initial parameters. No bias correction is
    needed, because the decay is small in the first steps and the average forgets the initial
    parameters quickly.

    Args:
      state: the state before the step.
      gradients: gradients from `RuledOptimizer.mask_gradients`.
      optimizer: the optimizer.
      ema: decay of the average of the parameters. None means that the state has no average.
    """
    params, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    average = state.ema
    if ema is not None:
        weight = 1.0 - jnp.minimum(ema, (1.0 + state.step) / (10.0 + state.step))
        average = jax.tree.map(lambda a, p: a + (weight * (p - a)).astype(a.dtype), average, params)
    return dataclasses.replace(
        state, step=state.step + 1, params=params, opt_state=opt_state, ema=average
    )


def _data_checksum(batch: Batch) -> jax.Array:
    """Returns a uint32 checksum of the token ids of a batch and their positions.

    The checksum is computed with integers only, so it is the same on every mesh.
    """
    total = jnp.zeros((), jnp.uint32)
    for name in ("encoder_input_tokens", "decoder_target_tokens"):
        ids = batch[name].astype(jnp.uint32)
        position = jnp.arange(ids.size, dtype=jnp.uint32).reshape(ids.shape)
        # 2654435761 is the multiplier of Knuth's multiplicative hash. The factor of each token id
        # is odd, because multiplying an id by an odd number modulo 2³² loses no bit of the id.
        total = total * 31 + (ids * (position * jnp.uint32(2654435761) * 2 + 1)).sum(
            dtype=jnp.uint32
        )
    return total


def _sum_over_parts(
    function: Callable[[Batch, jax.Array], PyTree], batch: Batch, key: jax.Array, parts: int
) -> PyTree:
    """Returns the sum of a function's results over the micro-batches of a batch.

    Args:
      function: a function of a part of the batch and a random key.
      batch: the batch.
      key: a random key, from which a separate key is derived for every part.
      parts: number of parts into which the batch is divided.
    """
    # The total starts as zeros with the shapes and dtypes of the results of one part.
    split = jax.tree.map(lambda x: _split_micro_batches(x, parts), batch)
    first = jax.tree.map(lambda x: x[0], split)
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, first, key)
    )

    def add_part(total: PyTree, indexed_part: tuple[jax.Array, Batch]) -> tuple[PyTree, None]:
        """Adds the result of a part to the total."""
        index, part = indexed_part
        result = function(part, jax.random.fold_in(key, index))
        return jax.tree.map(jnp.add, total, result), None

    total, _ = jax.lax.scan(add_part, zeros, (jnp.arange(parts), split))
    return total


def _split_micro_batches(x: jax.Array, parts: int) -> jax.Array:
    """Reshapes ``[batch, ...]`` to ``[parts, batch / parts, ...]``.

    Each part takes every `parts`-th row. Every device holds consecutive rows of the batch, so each
    part contains rows of every device.
    """
    return x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)
