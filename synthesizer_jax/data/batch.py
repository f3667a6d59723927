"""The fields of a batch: their names, shapes and dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

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
