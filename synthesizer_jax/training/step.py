"""What training changes, and one step of it: loss, gradients over micro-batches, update."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax

from synthesizer_jax.attention.terms import cap_logits
from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.models import LOSSES, Encoder, Rows, TextToText
from synthesizer_jax.optimizers.rules import RuledOptimizer, merge_entries
from synthesizer_jax.primitives.mesh import map_over_batch, mesh_axes
from synthesizer_jax.primitives.parameters import Variables, apply_method
from synthesizer_jax.primitives.products import output_product
from synthesizer_jax.training.adapters import adapted_variables
from synthesizer_jax.training.experiment import Training
from synthesizer_jax.training.losses import LossSums, chunked_cross_entropy, cross_entropy, loss_denominator

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]

DENSE_LOGITS = 2**22
"""Up to this many logits a batch's loss is computed at once; beyond it in chunks of tokens."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of a run; a pytree.

    Attributes:
      step: number of finished steps, an int32 array.
      params: trainable parameters, float32. In a run with adapters these are the low-rank updates, and the
        parameters that are trained whole (`adapters.trained_variables`).
      constants: saved, never optimized (Fixed Random tables).
      opt_state: the optimizer's state.
      ema: the exponential moving average of the parameters; empty if the run has none.
    """

    step: PyTree
    params: PyTree
    constants: PyTree
    opt_state: PyTree
    ema: PyTree = dataclasses.field(default_factory=dict)

    @property
    def variables(self) -> Variables:
        """What the model's `apply` takes in training."""
        return {"params": self.params, **({"constants": self.constants} if self.constants else {})}

    @property
    def averaged_variables(self) -> Variables:
        """What is evaluated and used later: the variables with the average of the parameters, if any."""
        return {**self.variables, **({"params": self.ema} if self.ema else {})}


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

    These are the tokens of a text-to-text model, teacher-forced; the class of every row of an `Encoder`
    with `outputs`; and of one with `masked_lm` the tokens that are to be predicted in their places.

    Args:
      model: an unbound model.
      variables: its variables.
      batch: ``encoder_input_tokens [b, k]``, ``decoder_input_tokens``, ``decoder_target_tokens`` and
        ``decoder_loss_weights [b, q]``; packed rows also have ``*_segment_ids``. The targets of an encoder
        are classes (q = 1), or tokens (q = k).
      z_loss: coefficient of log² Z.
      label_smoothing: T5's label smoothing.
      dropout_key: None turns dropout off.
      max_segments: most segments of a packed row.
      penalty_weight: the factor of what modules add to the loss, a mean over rows; None: the number of
        real targets. A part of a batch has its share of the whole batch's number here, so that
        parts of equally many rows add up.
    """
    if isinstance(model, Encoder):
        classifies = model.outputs is not None
        encoded: PyTree = model.apply(
            variables,
            batch["encoder_input_tokens"],
            rngs=None if dropout_key is None else {"dropout": dropout_key},
            method=model.__call__ if classifies else model.token_features,
            mutable=[LOSSES],
        )
        states, sown = encoded
        states = states.outputs[:, None] if classifies else states  # class logits [b, 1, classes]
        kernel = None if classifies else apply_method(model.token_projection, variables)
        scale = 1.0
    else:
        states, sown = teacher_forced(
            model, variables, batch, collection=LOSSES, dropout_key=dropout_key, max_segments=max_segments
        )
        kernel, scale = apply_method(model.output_kernel, variables)
    targets, weights = batch["decoder_target_tokens"], batch["decoder_loss_weights"]
    chunked = functools.partial(
        chunked_cross_entropy,
        scale=scale,
        z_loss=z_loss,
        label_smoothing=label_smoothing,
        soft_cap=model.logits_soft_cap,
    )
    if kernel is None or targets.size * kernel.shape[1] <= DENSE_LOGITS:
        logits = states
        if kernel is not None:
            logits = output_product(states * jnp.asarray(scale, states.dtype), kernel)
            logits = cap_logits(logits, model.logits_soft_cap)
        sums = cross_entropy(
            logits, targets, weights=weights, z_loss=z_loss, label_smoothing=label_smoothing
        )
    elif mesh_axes("batch"):  # on every device's own rows; the projection is gathered once
        of_rows = lambda kernel, x, y, w: chunked(x, kernel, targets=y, weights=w)
        parts = map_over_batch(
            lambda *arrays: jax.tree.map(lambda x: jnp.asarray(x)[None], of_rows(*arrays)),
            kernel.astype(states.dtype),
            *(states, targets, weights),
        )
        sums = jax.tree.map(jnp.sum, parts)
    else:
        sums = chunked(states, kernel, targets=targets, weights=weights)
    penalty = sum(map(jnp.sum, jax.tree.leaves(sown)), start=jnp.zeros(()))  # scanned: [layers]
    weight = sums.weight if penalty_weight is None else penalty_weight
    return dataclasses.replace(sums, penalty=penalty * weight)


def teacher_forced(
    model: TextToText,
    variables: Variables,
    batch: Batch,
    *,
    collection: str | Sequence[str],
    dropout_key: jax.Array | None = None,
    max_segments: int | None = None,
) -> tuple[jax.Array, Variables]:
    """Returns the decoder's states of a batch, and what the modules sow in a collection.

    Args:
      model: an unbound model.
      variables: its variables.
      batch: see `loss_sums`.
      collection: `LOSSES`, `TAPS` or ``intermediates``, or several.
      dropout_key: None turns dropout off.
      max_segments: most segments of a packed row.

    Returns:
      ``[b, q, d_model]`` and ``{collection: ...}``.
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
    model: TextToText | Encoder,
    optimizer: RuledOptimizer,
    training: Training,
    *,
    max_segments: int | None = None,
) -> Callable[[TrainState, Batch, jax.Array, Variables], tuple[TrainState, Metrics]]:
    """Returns the function ``(state, batch, key, base) → (state, metrics)``, to be jitted by the caller.

    The base are the variables to which the state's adapters belong, empty if it has none.

    With `Training.micro_batches` the batch is divided into parts whose gradients are added up; the loss is
    normalized over the whole batch, so the result is that of one part.

    Args:
      model: an unbound model.
      optimizer: the optimizer and what it trains.
      training: the loss, its normalizer, the micro-batches and the average of the parameters.
      max_segments: most segments of a packed row.

    Returns:
      Metrics are float32 scalars: ``loss`` (nats per real target, without z-loss), ``z_loss``,
      ``accuracy`` (of the targets), ``tokens`` (real input and target tokens), ``gradient_norm`` (of the
      parameters that are trained), and ``learning_rate`` where it is known. Two runs have the same
      ``data_checksum`` in a step if they read the same batch.
    """
    parts = training.micro_batches

    def step(
        state: TrainState, batch: Batch, key: jax.Array, base: Variables
    ) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(key, state.step)
        weights = batch["decoder_loss_weights"]
        denominator = loss_denominator(weights, training.loss_normalizer)
        trained, num_targets = optimizer.trained(state.params), weights.sum()

        def normalized_loss(trained: PyTree, part: Batch, key: jax.Array) -> tuple[jax.Array, LossSums]:
            variables = {**state.variables, "params": merge_entries(trained, state.params)}
            sums = loss_sums(
                model,
                adapted_variables(variables, base, training.adapters),
                part,
                z_loss=training.z_loss,
                label_smoothing=training.label_smoothing,
                dropout_key=key,
                max_segments=max_segments,
                penalty_weight=num_targets / parts,
            )
            return (sums.total + sums.penalty) / denominator, sums

        gradients_of = functools.partial(jax.grad(normalized_loss, has_aux=True), trained)

        def add_part(total: PyTree, indexed_part: tuple[jax.Array, Batch]) -> tuple[PyTree, None]:
            index, part = indexed_part
            gradients = gradients_of(part, jax.random.fold_in(key, index))
            return jax.tree.map(jnp.add, total, gradients), None

        if parts == 1:
            gradients, sums = gradients_of(batch, key)
        else:
            split = jax.tree.map(lambda x: _split_micro_batches(x, parts), batch)
            first = jax.tree.map(lambda x: x[0], split)
            zeros = jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(gradients_of, first, key)
            )
            gradients, sums = jax.lax.scan(add_part, zeros, (jnp.arange(parts), split))[0]
        gradients = optimizer.mask_gradients(gradients)
        real_targets = jnp.maximum(sums.weight, 1.0)
        tokens = (batch["encoder_input_tokens"] != model.ids.padding).sum() + sums.weight
        metrics = {
            "loss": sums.loss / real_targets,
            "z_loss": sums.z_loss / real_targets,
            "accuracy": sums.correct / real_targets,
            "tokens": tokens.astype(jnp.float32),
            "gradient_norm": optax.tree.norm(gradients),
            "data_checksum": _data_checksum(batch),
            **optimizer.learning_rate(state.opt_state),
        }
        return apply_gradients(state, gradients, optimizer, ema=training.ema), metrics

    return step


@jax.named_scope("optimizer")
def apply_gradients(
    state: TrainState, gradients: PyTree, optimizer: RuledOptimizer, *, ema: float | None = None
) -> TrainState:
    """Returns the state after a step.

    The average follows the parameters by ``average + (1 − d) · (params − average)`` with
    ``d = min(ema, (1 + step) / (10 + step))``, as in TensorFlow's ``ExponentialMovingAverage`` with
    ``num_updates``. It starts as the initial parameters. The smaller decay of the first steps forgets them,
    so a bias correction is not needed.

    Args:
      state: the state before it.
      gradients: from `RuledOptimizer.mask_gradients`.
      optimizer: the optimizer.
      ema: decay of the average of the parameters; None: the state has none.
    """
    params, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    average = state.ema
    if ema is not None:
        weight = 1.0 - jnp.minimum(ema, (1.0 + state.step) / (10.0 + state.step))
        average = jax.tree.map(lambda a, p: a + (weight * (p - a)).astype(a.dtype), average, params)
    return dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state, ema=average)


def _data_checksum(batch: Batch) -> jax.Array:
    """Returns a uint32 checksum of a batch's token ids and their positions, the same on every mesh."""
    total = jnp.zeros((), jnp.uint32)
    for name in ("encoder_input_tokens", "decoder_target_tokens"):
        ids = batch[name].astype(jnp.uint32)
        position = jnp.arange(ids.size, dtype=jnp.uint32).reshape(ids.shape)
        # Knuth's multiplier; odd weights keep every bit of an id.
        total = total * 31 + (ids * (position * jnp.uint32(2654435761) * 2 + 1)).sum(dtype=jnp.uint32)
    return total


def _split_micro_batches(x: jax.Array, parts: int) -> jax.Array:
    """Splits ``[batch, ...]`` to ``[parts, batch / parts, ...]``; every part has rows of every device."""
    return x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)
