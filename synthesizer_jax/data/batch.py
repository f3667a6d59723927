"""The fields of a batch, and how examples fill them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from synthesizer_jax.data.task_streams import DrawnExample
from synthesizer_jax.data.vocabularies import PAD

if TYPE_CHECKING:
    from synthesizer_jax.data.config import DataConfig


def batch_fields(config: DataConfig, *, lengths: tuple[int, int] | None = None) -> dict[str, np.ndarray]:
    """Returns the fields of a training batch of padding, which take no memory.

    ``encoder_input_tokens`` are ``[rows, inputs_length]``, without elements if there are no inputs;
    ``decoder_input_tokens`` (the targets shifted right by one), ``decoder_target_tokens`` and
    ``decoder_loss_weights`` (float32, 0 at padding and at targets that an objective
    leaves out) are ``[rows, targets_length]``. Packed rows also have the ``segment_ids`` of either side:
    1, 2, …; 0 is padding. Tokens are int32, 0 is padding.

    Args:
      config: lengths, batch size and packing.
      lengths: numbers of input and target tokens of a row; None: the full lengths.
    """
    row = assemble_batch([()], config, lengths=lengths)
    return {k: np.broadcast_to(x, (config.batch_size, x.shape[1])) for k, x in row.items()}


def assemble_batch(
    rows: Sequence[Sequence[DrawnExample]], config: DataConfig, *, lengths: tuple[int, int] | None = None
) -> dict[str, np.ndarray]:
    """Returns the arrays of rows of examples, which are put one after another; see `batch_fields`.

    Args:
      rows: the examples of every row; a row without examples is padding.
      config: lengths and packing.
      lengths: numbers of input and target tokens of a row; None: the full lengths.
    """
    inputs, targets = lengths or (config.inputs_length, config.targets_length)
    encoder_tokens, encoder_segments = _lay_out([[e.inputs for e in row] for row in rows], inputs)
    target_tokens, target_segments = _lay_out([[e.targets for e in row] for row in rows], targets)
    decoder_inputs = np.zeros_like(target_tokens)
    continues = target_segments[:, 1:] == target_segments[:, :-1]  # every example begins with 0
    decoder_inputs[:, 1:] = np.where(continues, target_tokens[:, :-1], 0)
    # A class may have the number of padding.
    predicted = target_segments > 0 if config.classes else target_tokens != PAD
    batch = {
        "encoder_input_tokens": encoder_tokens,
        "decoder_input_tokens": decoder_inputs,
        "decoder_target_tokens": target_tokens,
        "decoder_loss_weights": predicted.astype(np.float32),
    }
    if config.pack:
        batch["encoder_segment_ids"] = encoder_segments
        batch["decoder_segment_ids"] = target_segments
    return batch


def _lay_out(rows: Sequence[Sequence[np.ndarray]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Puts the sequences of every row one after another, and padding after them.

    Returns token ids, and the sequences' numbers in the row, from 1; both are ``[rows, width]`` and int32,
    padding is 0.
    """
    padding = np.zeros(width, np.int32)
    pieces: list[np.ndarray] = []
    numbers: list[int] = []
    for row in rows:
        pieces += row
        numbers += range(1, len(row) + 1)
        pieces.append(padding[: width - sum(map(len, row))])
        numbers.append(0)
    segments = np.repeat(np.array(numbers, np.int32), [len(piece) for piece in pieces])
    shape = (len(rows), width)
    return np.concatenate(pieces).reshape(shape), segments.reshape(shape)
