"""One training step: loss, gradients over micro-batches, update."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from synthesizer_jax.ambient import map_over_batch, mesh_axes
from synthesizer_jax.attention.products import output_product
from synthesizer_jax.models import LOSSES, Encoder, TextToText
from synthesizer_jax.optimizers.rules import RuledOptimizer
from synthesizer_jax.parameters import Variables, apply_method
from synthesizer_jax.training.losses import (
    LossSums,
    chunked_cross_entropy,
    cross_entropy,
    loss_denominator,
)
from synthesizer_jax.training.state import TrainState, apply_gradients
from synthesizer_jax.typing import PyTree

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]

DENSE_LOGITS = 2**22
"""Up to this many logits a batch's loss is computed at once; beyond it in chunks of tokens."""


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
        ``decoder_loss_weights [b, q]``; packed rows also have ``*_segment_ids`` and ``*_positions``. The
        targets of an encoder are classes (q = 1), or tokens (q = k).
      z_loss: coefficient of log² Z.
      label_smoothing: T5's label smoothing.
      dropout_key: None turns dropout off.
      max_segments: most segments of a packed row.
      penalty_weight: the factor of what modules add to the loss, a mean over rows; None: the number of
        real targets. A part of a batch has its share of the whole batch's number here, so that
        parts of equally many rows add up.
    """
    if isinstance(model, Encoder):
        outputs, sown = _encoded(model, variables, batch, dropout_key=dropout_key)
        logits = model.outputs is not None
        kernel = None if logits else apply_method(model.token_projection, variables)
        scale = 1.0
    else:
        outputs, sown = teacher_forced(
            model,
            variables,
            batch,
            collection=LOSSES,
            dropout_key=dropout_key,
            max_segments=max_segments,
        )
        kernel, scale = apply_method(model.output_kernel, variables)
    sums = _cross_entropy(
        outputs, kernel, scale=scale, batch=batch, z_loss=z_loss, label_smoothing=label_smoothing
    )
    penalty = sum(jax.tree.leaves(sown), start=jnp.zeros(()))
    weight = sums.weight if penalty_weight is None else penalty_weight
    return dataclasses.replace(sums, penalty=penalty * weight)


def _cross_entropy(
    outputs: jax.Array,
    kernel: jax.Array | None,
    *,
    scale: float,
    batch: Batch,
    z_loss: float,
    label_smoothing: float,
) -> LossSums:
    """Returns the cross-entropy of a batch's targets, without holding more than `DENSE_LOGITS`."""
    targets, weights = batch["decoder_target_tokens"], batch["decoder_loss_weights"]
    if kernel is not None and targets.size * kernel.shape[1] > DENSE_LOGITS:
        entropy = _sharded_cross_entropy if mesh_axes("batch") else chunked_cross_entropy
        return entropy(
            outputs,
            kernel,
            targets=targets,
            weights=weights,
            scale=scale,
            z_loss=z_loss,
            label_smoothing=label_smoothing,
        )
    if kernel is not None:
        outputs = output_product(outputs * jnp.asarray(scale, outputs.dtype), kernel)
    return cross_entropy(
        outputs, targets, weights=weights, z_loss=z_loss, label_smoothing=label_smoothing
    )


def _sharded_cross_entropy(
    hidden: jax.Array,
    kernel: jax.Array,
    *,
    targets: jax.Array,
    weights: jax.Array,
    scale: float,
    z_loss: float,
    label_smoothing: float,
) -> LossSums:
    """Computes `chunked_cross_entropy` on every device's own rows; the projection is gathered once."""

    def loss_of_rows(
        kernel: jax.Array, hidden: jax.Array, targets: jax.Array, weights: jax.Array
    ) -> LossSums:
        sums = chunked_cross_entropy(
            hidden,
            kernel,
            targets=targets,
            weights=weights,
            scale=scale,
            z_loss=z_loss,
            label_smoothing=label_smoothing,
        )
        return jax.tree.map(lambda x: jnp.asarray(x)[None], sums)

    sums = map_over_batch(loss_of_rows, kernel.astype(hidden.dtype), hidden, targets, weights)
    return jax.tree.map(jnp.sum, sums)


def teacher_forced(
    model: TextToText,
    variables: Variables,
    batch: Batch,
    *,
    collection: str,
    dropout_key: jax.Array | None = None,
    max_segments: int | None = None,
) -> tuple[jax.Array, Variables]:
    """Returns the decoder's states of a batch, and what the modules sow in a collection.

    Args:
      model: an unbound model.
      variables: its variables.
      batch: see `loss_sums`.
      collection: `LOSSES`, `TAPS` or ``intermediates``.
      dropout_key: None turns dropout off.
      max_segments: most segments of a packed row.

    Returns:
      ``[b, q, d_model]`` and ``{collection: ...}``.
    """
    weights = batch.get("decoder_loss_weights")
    hidden_and_sown: PyTree = model.apply(
        variables,
        batch["encoder_input_tokens"],
        batch["decoder_input_tokens"],
        segments=_encoder_and_decoder_arrays(batch, "segment_ids"),
        positions=_encoder_and_decoder_arrays(batch, "positions"),
        counted=None if weights is None else weights != 0,
        max_segments=max_segments,
        rngs=None if dropout_key is None else {"dropout": dropout_key},
        method=model.hidden,
        mutable=[collection],
    )
    return hidden_and_sown


def _encoded(
    model: Encoder, variables: Variables, batch: Batch, *, dropout_key: jax.Array | None
) -> tuple[jax.Array, Variables]:
    """Returns what the loss of an encoder is computed of, and the losses that its modules sow.

    Returns:
      ``[b, 1, classes]`` logits; without such a head ``[b, k, d_model + 1]`` for `token_projection`.
    """
    classifies = model.outputs is not None
    found: PyTree = model.apply(
        variables,
        batch["encoder_input_tokens"],
        rngs=None if dropout_key is None else {"dropout": dropout_key},
        method=model.__call__ if classifies else model.token_features,
        mutable=[LOSSES],
    )
    encoded, sown = found
    return (encoded.outputs[:, None] if classifies else encoded), sown


def _encoder_and_decoder_arrays(batch: Batch, suffix: str) -> tuple[jax.Array, jax.Array] | None:
    """Returns the encoder's and the decoder's array of that name, if the rows are packed."""
    if f"encoder_{suffix}" not in batch:
        return None
    return batch[f"encoder_{suffix}"], batch[f"decoder_{suffix}"]


class _Normalizers(NamedTuple):
    """What the losses of all parts of a batch are normalized by.

    Attributes:
      denominator: what the summed loss is divided by.
      num_targets: number of real target tokens of the whole batch.
    """

    denominator: jax.Array | float
    num_targets: jax.Array


_Gradients: TypeAlias = Callable[
    [TrainState, Batch, jax.Array, _Normalizers], tuple[PyTree, LossSums]
]


def make_train_step(
    model: TextToText | Encoder,
    optimizer: RuledOptimizer,
    *,
    ema: float | None = None,
    z_loss: float = 1e-4,
    label_smoothing: float = 0.0,
    loss_normalizer: float | str | None = None,
    micro_batches: int = 1,
    max_segments: int | None = None,
) -> Callable[[TrainState, Batch, jax.Array], tuple[TrainState, Metrics]]:
    """Returns the function ``(state, batch, key) → (state, metrics)``, to be jitted by the caller.

    Args:
      model: an unbound model.
      optimizer: the optimizer and what it trains.
      ema: decay of the average of the parameters; None: the state has none.
      z_loss: coefficient of log² Z, T5: 1e-4.
      label_smoothing: T5's label smoothing.
      loss_normalizer: what the summed loss is divided by, see `losses.loss_denominator`.
      micro_batches: the batch is divided into this many parts whose gradients are added up; the loss
        is normalized over the whole batch, so the result is that of one part.
      max_segments: most segments of a packed row.

    Returns:
      Metrics are float32 scalars: ``loss`` (nats per real target, without z-loss), ``z_loss``,
      ``accuracy`` (of the targets), ``tokens`` (real input and target tokens),
      ``gradient_norm`` (of the parameters that are trained); and ``data_checksum``, by which two runs tell
      that they read the same.
    """

    def objective(
        trained: PyTree, state: TrainState, batch: Batch, key: jax.Array, normalizers: _Normalizers
    ) -> tuple[jax.Array, LossSums]:
        params = optimizer.merge(trained, state.params)
        sums = loss_sums(
            model,
            {**state.variables, "params": params},
            batch,
            z_loss=z_loss,
            label_smoothing=label_smoothing,
            dropout_key=key,
            max_segments=max_segments,
            penalty_weight=normalizers.num_targets / micro_batches,
        )
        return (sums.total + sums.penalty) / normalizers.denominator, sums

    gradients_of = jax.grad(objective, has_aux=True)

    def step(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(key, state.step)
        weights = batch["decoder_loss_weights"]
        normalizers = _Normalizers(loss_denominator(weights, loss_normalizer), weights.sum())
        gradients, sums = _accumulate_gradients(
            functools.partial(gradients_of, optimizer.trained(state.params)),
            state,
            batch,
            key=key,
            normalizers=normalizers,
            micro_batches=micro_batches,
        )
        gradients = optimizer.mask_gradients(gradients)
        state = apply_gradients(state, gradients, optimizer, ema=ema)
        return state, _metrics(batch, sums, gradients)

    return step


def _accumulate_gradients(
    gradients_of: _Gradients,
    state: TrainState,
    batch: Batch,
    *,
    key: jax.Array,
    normalizers: _Normalizers,
    micro_batches: int,
) -> tuple[PyTree, LossSums]:
    """Returns gradients and loss sums of a batch, added up over its parts."""
    if micro_batches == 1:
        return gradients_of(state, batch, key, normalizers)

    def add_part(
        total: tuple[PyTree, LossSums], indexed_part: tuple[jax.Array, Batch]
    ) -> tuple[tuple[PyTree, LossSums], None]:
        index, part = indexed_part
        part_key = jax.random.fold_in(key, index)
        gradients = gradients_of(state, part, part_key, normalizers)
        return jax.tree.map(jnp.add, total, gradients), None

    parts = jax.tree.map(lambda x: _split_micro_batches(x, micro_batches), batch)
    first = jax.tree.map(lambda x: x[0], parts)
    shapes = jax.eval_shape(gradients_of, state, first, key, normalizers)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.scan(add_part, zeros, (jnp.arange(micro_batches), parts))[0]


def _metrics(batch: Batch, sums: LossSums, gradients: PyTree) -> Metrics:
    """Returns the metrics of a step; see `make_train_step`."""
    num_targets = jnp.maximum(sums.weight, 1.0)
    tokens = (batch["encoder_input_tokens"] != 0).sum() + sums.weight
    return {
        "loss": sums.loss / num_targets,
        "z_loss": sums.z_loss / num_targets,
        "accuracy": sums.correct / num_targets,
        "tokens": tokens.astype(jnp.float32),
        "gradient_norm": optax.tree.norm(gradients),
        "data_checksum": _data_checksum(batch),
    }


def _data_checksum(batch: Batch) -> jax.Array:
    """Returns a uint32 checksum of a batch's token ids and their positions, the same on every mesh."""
    total = jnp.zeros((), jnp.uint32)
    for name in ("encoder_input_tokens", "decoder_target_tokens"):
        ids = batch[name].astype(jnp.uint32)
        position = jnp.arange(ids.size, dtype=jnp.uint32).reshape(ids.shape)
        # Knuth's multiplier; odd weights keep every bit of an id.
        total = total * 31 + (ids * (position * jnp.uint32(2654435761) * 2 + 1)).sum(
            dtype=jnp.uint32
        )
    return total


def _split_micro_batches(x: jax.Array, parts: int) -> jax.Array:
    """Splits ``[batch, ...]`` to ``[parts, batch / parts, ...]``; every part has rows of every device."""
    return x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)
