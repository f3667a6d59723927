"""Language modeling without inputs, and prefix language modeling on full rows.

Prefix language modeling on segments is a `Denoising` (`OBJECTIVES["prefix_lm"]`).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from synthesizer_jax.data.objectives.draws import Draws
from synthesizer_jax.data.objectives.objective import (
    GROUP,
    ExampleFormat,
    SegmentObjective,
    check_documents,
    check_length,
    trim_and_append_eos,
)
from synthesizer_jax.data.task_streams import Example
from synthesizer_jax.data.vocabularies import PAD
from synthesizer_jax.registry import register


@register
@dataclasses.dataclass(frozen=True)
class FullLM(SegmentObjective):
    """Targets only: the model predicts every token (Raffel et al. 2020, section 3.2.3).

    Attributes:
      documents: number of documents that are concatenated.
      document_eos: whether documents end with EOS and segments do not, as in T5's `full_lm`; False
        is the reverse, as in its ``objectives/lm.gin``.
    """

    makes_inputs: ClassVar[bool] = False
    documents: int = GROUP
    document_eos: bool = True

    def __post_init__(self) -> None:
        check_documents(self.documents)

    def segment_length(self, form: ExampleFormat) -> int:
        """Returns the number of tokens of a segment, which fills the targets."""
        check_length("targets_length", form.targets_length, needed=2, reason="FullLM")
        return form.targets_length - (not self.document_eos)

    def example(self, tokens: np.ndarray, draws: Draws, form: ExampleFormat) -> Example:
        """Returns no inputs, and the tokens as targets, int32."""
        del draws
        inputs = np.zeros(0, np.int32)
        if self.document_eos:
            return inputs, tokens[: form.targets_length].astype(np.int32)
        return inputs, trim_and_append_eos(tokens, form.targets_length)


def prefix_lm_pair(rows: np.ndarray, draws: Draws) -> dict[str, np.ndarray]:
    """Packs two rows into one for an encoder-decoder; T5's `pack_prefix_lm_encoder_decoder`.

    The first row is split at a uniform s in [1, P), the second at P − s, so that the prefixes fill
    the encoder's row and the rests the decoder's.

    Args:
      rows: two rows of documents with EOS, ``[2, P]``; 0 is padding.
      draws: random numbers.

    Returns:
      The fields of a packed row (`batch.batch_fields`), ``[P]``.
    """
    length = rows.shape[1]
    (split,) = draws.integers(1, low=1, high=length).tolist()
    first, second = rows.astype(np.int32)
    targets = np.concatenate([first[split:], second[length - split :]])
    encoder_positions, encoder_segments = _two_segments(split, length)
    decoder_positions, decoder_segments = _two_segments(length - split, length)
    return {
        "encoder_input_tokens": np.concatenate([first[:split], second[: length - split]]),
        "encoder_segment_ids": encoder_segments,
        "encoder_positions": encoder_positions,
        "decoder_input_tokens": np.where(decoder_positions, np.roll(targets, 1), PAD),
        "decoder_target_tokens": targets,
        "decoder_loss_weights": (targets != PAD).astype(np.float32),
        "decoder_segment_ids": decoder_segments,
        "decoder_positions": decoder_positions,
    }


def prefix_lm_row(
    row: np.ndarray, draws: Draws, *, loss_on_prefix: bool = False
) -> dict[str, np.ndarray]:
    """Splits a row into prefix and rest for a decoder; T5's `pack_prefix_lm_decoder_only`.

    Args:
      row: documents with EOS, ``[P]``; 0 is padding.
      draws: random numbers, for a uniform split s in [1, P).
      loss_on_prefix: whether the first s targets have a weight too.

    Returns:
      ``decoder_input_tokens``, ``decoder_target_tokens``, ``decoder_loss_weights`` (float32) and
      ``decoder_causal_attention`` (1 at the s + 1 inputs that all may attend to), ``[P]``.
    """
    (split,) = draws.integers(1, low=1, high=len(row)).tolist()
    positions = np.arange(len(row))
    targets = row.astype(np.int32)
    has_loss = (targets != PAD) & (loss_on_prefix | (positions >= split))
    return {
        "decoder_input_tokens": np.where(positions, np.roll(targets, 1), PAD),
        "decoder_target_tokens": targets,
        "decoder_loss_weights": has_loss.astype(np.float32),
        "decoder_causal_attention": (positions <= split).astype(np.int32),
    }


def _two_segments(boundary: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns positions and segment ids of two segments, the second of which starts at `boundary`."""
    positions = np.arange(length, dtype=np.int32)
    in_second = positions >= boundary
    return positions - boundary * in_second.astype(np.int32), in_second.astype(np.int32) + 1
