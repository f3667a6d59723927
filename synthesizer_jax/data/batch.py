"""The fields of a batch, and how examples fill them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from synthesizer_jax.data.members import Drawn

if TYPE_CHECKING:
    from synthesizer_jax.data.pipeline import DataConfig


class Field(NamedTuple):
    """Shape and dtype of an array of a batch."""

    shape: tuple[int, int]
    dtype: type[np.generic]

    def zeros(self) -> np.ndarray:
        """Returns the field of a batch of padding."""
        return np.zeros(self.shape, self.dtype)


def batch_fields(config: DataConfig, *, rows: int | None = None) -> dict[str, Field]:
    """Returns the fields of a training batch.

    ``encoder_input_tokens`` are ``[rows, inputs_length]``; ``decoder_input_tokens`` (the targets shifted
    right by one), ``decoder_target_tokens`` and ``decoder_loss_weights`` (float32, 1 at real targets) are
    ``[rows, targets_length]``. Packed rows also have ``segment_ids`` (1, 2, …; 0 is padding) and
    ``positions`` (inside the segment) of either side. Tokens are int32, 0 is padding.

    Args:
      config: lengths, batch size and packing.
      rows: number of rows; None: the global batch.
    """
    rows = config.batch_size if rows is None else rows
    encoder = Field((rows, config.inputs_length), np.int32)
    decoder = Field((rows, config.targets_length), np.int32)
    fields = {
        "encoder_input_tokens": encoder,
        "decoder_input_tokens": decoder,
        "decoder_target_tokens": decoder,
        "decoder_loss_weights": decoder._replace(dtype=np.float32),
    }
    if config.pack:
        for name in ("segment_ids", "positions"):
            fields |= {f"encoder_{name}": encoder, f"decoder_{name}": decoder}
    return fields


def assemble_batch(rows: Sequence[Sequence[Drawn]], config: DataConfig) -> dict[str, np.ndarray]:
    """Returns the arrays of rows of examples, which are put one after another.

    Args:
      rows: the examples of every row; a row without examples is padding.
      config: lengths and packing.
    """
    batch = {name: f.zeros() for name, f in batch_fields(config, rows=len(rows)).items()}
    counts = np.array([len(row) for row in rows])
    examples = [example for row in rows for example in row]
    if not examples:
        return batch
    ids, places = _place([e.inputs for e in examples], counts, width=config.inputs_length)
    batch["encoder_input_tokens"].reshape(-1)[places.token] = ids
    _describe_segments(batch, "encoder", places)
    ids, places = _place([e.targets for e in examples], counts, width=config.targets_length)
    batch["decoder_target_tokens"].reshape(-1)[places.token] = ids
    batch["decoder_loss_weights"].reshape(-1)[places.token] = 1
    shifted = np.concatenate([[0], ids[:-1]])
    batch["decoder_input_tokens"].reshape(-1)[places.token] = np.where(places.position, shifted, 0)
    _describe_segments(batch, "decoder", places)
    return batch


class _Places(NamedTuple):
    """Where the tokens of one side of a batch are.

    Attributes:
      token: of every token its index in the flattened batch.
      position: its position in its example.
      segment: the number of its example in its row, from 1.
    """

    token: np.ndarray
    position: np.ndarray
    segment: np.ndarray


def _place(
    sequences: Sequence[np.ndarray], counts: np.ndarray, *, width: int
) -> tuple[np.ndarray, _Places]:
    """Returns the tokens of consecutive sequences and their places.

    Args:
      sequences: token ids.
      counts: numbers of sequences of the rows.
      width: length of a row.
    """
    lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
    starts = np.cumsum(lengths) - lengths
    rows = np.repeat(np.arange(len(counts)), counts)
    first = (np.cumsum(counts) - counts)[rows]
    ids = np.concatenate(sequences)
    position = np.arange(len(ids)) - np.repeat(starts, lengths)
    token = position + np.repeat(rows * width + starts - starts[first], lengths)
    segment = np.repeat(np.arange(len(sequences)) - first + 1, lengths)
    return ids, _Places(token, position, segment)


def _describe_segments(batch: dict[str, np.ndarray], side: str, places: _Places) -> None:
    """Fills segment ids and positions of a side, if the batch has them."""
    if f"{side}_segment_ids" in batch:
        batch[f"{side}_segment_ids"].reshape(-1)[places.token] = places.segment
        batch[f"{side}_positions"].reshape(-1)[places.token] = places.position
