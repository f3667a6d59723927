"""One training step: loss, gradients over micro-batches, update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from synthesizer_jax.ambient import mesh_axes, over_rows
from synthesizer_jax.models import LOSSES, TextToText
from synthesizer_jax.training.losses import (
    LossSums,
    chunked_cross_entropy,
    cross_entropy,
    loss_denominator,
)
from synthesizer_jax.training.state import TrainState

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]

DENSE_LOGITS = 2**22
"""Up to this many logits a batch's loss is computed at once; beyond it in chunks of tokens."""


def loss_sums(
    model: TextToText,
    variables: dict[str, Any],
    batch: Batch,
    *,
    z_loss: float,
    label_smoothing: float,
    dropout_key: jax.Array | None = None,
    max_segments: int | None = None,
) -> LossSums:
    """Teacher-forced loss of a batch, summed over its real target tokens.

    Args:
      model: an unbound model.
      variables: its variables.
      batch: ``encoder_input_tokens [b, k]``, ``decoder_input_tokens``, ``decoder_target_tokens`` and
        ``decoder_loss_weights [b, q]``; packed rows also have ``*_segment_ids`` and ``*_positions``.
      z_loss: coefficient of log² Z.
      label_smoothing: T5's label smoothing.
      dropout_key: None turns dropout off.
      max_segments: most segments of a packed row.
    """
    hidden, left = teacher_forced(
        model,
        variables,
        batch,
        collection=LOSSES,
        dropout_key=dropout_key,
        max_segments=max_segments,
    )
    penalty = sum(jax.tree.leaves(left), start=jnp.zeros(()))
    projection: Any = model.apply(variables, method="output_kernel")
    kernel, scale = projection
    targets, weights = batch["decoder_target_tokens"], batch["decoder_loss_weights"]
    options: Any = {"weights": weights, "z_loss": z_loss, "label_smoothing": label_smoothing}
    if targets.size * model.vocab_size > DENSE_LOGITS:
        options["scale"] = scale
        entropy = spread_cross_entropy if mesh_axes("batch") else chunked_cross_entropy
        sums = entropy(hidden, kernel, targets=targets, **options)
    else:
        logits = (hidden * jnp.asarray(scale, hidden.dtype)) @ kernel.astype(hidden.dtype)
        sums = cross_entropy(logits, targets, **options)
    return dataclasses.replace(sums, penalty=penalty * sums.weight)


def spread_cross_entropy(
    hidden: jax.Array,
    kernel: jax.Array,
    *,
    targets: jax.Array,
    weights: jax.Array,
    **options: Any,
) -> LossSums:
    """`chunked_cross_entropy` on every device's own rows; the projection is gathered once."""

    def own(kernel: jax.Array, hidden: jax.Array, targets: jax.Array, weights: jax.Array) -> Any:
        sums = chunked_cross_entropy(hidden, kernel, targets=targets, weights=weights, **options)
        return jax.tree.map(lambda x: jnp.asarray(x)[None], sums)

    found = over_rows(own, kernel.astype(hidden.dtype), hidden, targets, weights)
    return jax.tree.map(jnp.sum, found)


def teacher_forced(
    model: TextToText,
    variables: dict[str, Any],
    batch: Batch,
    *,
    collection: str,
    dropout_key: jax.Array | None = None,
    max_segments: int | None = None,
) -> tuple[jax.Array, dict[str, Any]]:
    """The decoder's states of a batch, and what the modules leave in a collection.

    Args:
      model: an unbound model.
      variables: its variables.
      batch: see `loss_sums`.
      collection: `LOSSES` or `SITES`.
      dropout_key: None turns dropout off.
      max_segments: most segments of a packed row.

    Returns:
      ``[b, q, d_model]`` and ``{collection: ...}``.
    """
    found: Any = model.apply(
        variables,
        batch["encoder_input_tokens"],
        batch["decoder_input_tokens"],
        segments=pair(batch, "segment_ids"),
        positions=pair(batch, "positions"),
        max_segments=max_segments,
        rngs=None if dropout_key is None else {"dropout": dropout_key},
        method="hidden",
        mutable=[collection],
    )
    return found


def pair(batch: Batch, suffix: str) -> tuple[jax.Array, jax.Array] | None:
    """The encoder's and the decoder's array of that name, in packed batches."""
    if f"encoder_{suffix}" not in batch:
        return None
    return batch[f"encoder_{suffix}"], batch[f"decoder_{suffix}"]


def make_train_step(
    model: TextToText,
    optimizer: optax.GradientTransformation,
    *,
    z_loss: float = 1e-4,
    label_smoothing: float = 0.0,
    loss_normalizer: float | str | None = None,
    micro_batches: int = 1,
    max_segments: int | None = None,
) -> Callable[[TrainState, Batch, jax.Array], tuple[TrainState, Metrics]]:
    """The function ``(state, batch, key) → (state, metrics)``, to be jitted by the caller.

    Args:
      model: an unbound model.
      optimizer: optax transformation.
      z_loss: coefficient of log² Z, T5: 1e-4.
      label_smoothing: T5's label smoothing.
      loss_normalizer: what the summed loss is divided by, see `losses.loss_denominator`.
      micro_batches: the batch is cut into this many parts whose gradients are added up; the loss is
        normalised over the whole batch, so the result is that of one part.
      max_segments: most segments of a packed row.

    Returns:
      Metrics are float32 scalars: ``loss`` (nats per real target token, without z-loss), ``z_loss``,
      ``accuracy`` (of teacher-forced tokens), ``tokens`` (real input and target tokens),
      ``gradient_norm``; and ``data_checksum``, by which two runs tell that they read the same.
    """

    def objective(
        params: Any, state: TrainState, batch: Batch, key: jax.Array, denominator: jax.Array
    ) -> tuple[jax.Array, LossSums]:
        variables = {**state.variables, "params": params}
        sums = loss_sums(
            model,
            variables,
            batch,
            z_loss=z_loss,
            label_smoothing=label_smoothing,
            dropout_key=key,
            max_segments=max_segments,
        )
        return (sums.total + sums.penalty) / denominator, sums

    gradient = jax.grad(objective, has_aux=True)

    def accumulated(
        state: TrainState, batch: Batch, key: jax.Array, denominator: jax.Array
    ) -> tuple[Any, LossSums]:
        if micro_batches == 1:
            return gradient(state.params, state, batch, key, denominator)

        def body(carry: Any, part: Any) -> tuple[Any, None]:
            index, micro = part
            found = gradient(
                state.params, state, micro, jax.random.fold_in(key, index), denominator
            )
            return jax.tree.map(jnp.add, carry, found), None

        parts = jax.tree.map(lambda x: interleave(x, micro_batches), batch)
        first = jax.tree.map(lambda x: x[0], parts)
        shapes = jax.eval_shape(gradient, state.params, state, first, key, denominator)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.scan(body, zeros, (jnp.arange(micro_batches), parts))[0]

    def step(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(key, state.step)
        denominator = loss_denominator(batch["decoder_loss_weights"], loss_normalizer)
        gradients, sums = accumulated(state, batch, key, denominator)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        new = TrainState(
            step=state.step + 1,
            params=optax.apply_updates(state.params, updates),
            constants=state.constants,
            opt_state=opt_state,
        )
        tokens = (batch["encoder_input_tokens"] != 0).sum() + sums.weight
        metrics = {
            "loss": sums.loss / jnp.maximum(sums.weight, 1.0),
            "z_loss": sums.z_loss / jnp.maximum(sums.weight, 1.0),
            "accuracy": sums.correct / jnp.maximum(sums.weight, 1.0),
            "tokens": tokens.astype(jnp.float32),
            "gradient_norm": optax.tree.norm(gradients),
            "data_checksum": data_checksum(batch),
        }
        return new, metrics

    return step


def data_checksum(batch: Batch) -> jax.Array:
    """A number, uint32, made of a batch's token ids and their places; the same on every mesh."""
    total = jnp.zeros((), jnp.uint32)
    for name in ("encoder_input_tokens", "decoder_target_tokens"):
        ids = batch[name].astype(jnp.uint32)
        place = jnp.arange(ids.size, dtype=jnp.uint32).reshape(ids.shape)
        # Knuth's multiplier; odd weights keep every bit of an id.
        total = total * 31 + (ids * (place * jnp.uint32(2654435761) * 2 + 1)).sum(dtype=jnp.uint32)
    return total


def interleave(x: jax.Array, parts: int) -> jax.Array:
    """``[batch, ...]`` to ``[parts, batch / parts, ...]``, every part with rows of every device."""
    return x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)
