"""Masked language modeling for encoders (Devlin et al. 2019, section 3.1 and appendix A.1)."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from synthesizer_jax.data.objectives.draws import Draws
from synthesizer_jax.data.objectives.noise import ChosenTokens, Noise
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

RESERVED = 3
"""Padding, EOS and unknown: ids that are never drawn as random tokens."""


class MaskedTokens(NamedTuple):
    """Tokens ``[length]`` as the encoder reads them, the original ones, and where they count.

    Attributes:
      inputs: ids with mask tokens and random tokens.
      targets: the original ids.
      weights: float32, 1 at chosen tokens and 0 elsewhere.
    """

    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


@register
@dataclasses.dataclass(frozen=True)
class MaskedLM(SegmentObjective):
    """Chosen tokens become the mask token, a random one, or remain; the encoder predicts them.

    Attributes:
      noise: which tokens are chosen: a fixed number (BERT), or each by itself (`IidNoise`).
      mask_share: probability that a chosen token becomes the mask token.
      random_share: probability that it becomes a random token of the vocabulary.
      mask_id: id of the mask token; None is the last one of the vocabulary, ``<extra_id_0>``.
      documents: number of documents that are concatenated.
    """

    noise: Noise = dataclasses.field(default_factory=ChosenTokens)
    mask_share: float = 0.8
    random_share: float = 0.1
    mask_id: int | None = None
    documents: int = GROUP

    def __post_init__(self) -> None:
        check_documents(self.documents)
        shares = self.mask_share, self.random_share
        if min(shares) < 0 or sum(shares) > 1:
            raise ValueError(
                f"mask_share is {shares[0]} and random_share {shares[1]}; allowed: 0 or more, "
                "together at most 1"
            )

    def mask(self, tokens: np.ndarray, draws: Draws, *, vocab_size: int) -> MaskedTokens:
        """Returns the masked tokens.

        Args:
          tokens: ids ``[length]``, at least one.
          draws: random numbers; part 0 is for the choice, 1 for the replacements.
          vocab_size: number of ids, including sentinels.
        """
        chosen = self.noise(len(tokens), draws.fork(0))
        replacements = draws.fork(1)
        uniform = replacements.uniform(len(tokens))
        mask_id = vocab_size - 1 if self.mask_id is None else self.mask_id
        is_mask = chosen & (uniform < self.mask_share)
        is_random = chosen & ~is_mask & (uniform < self.mask_share + self.random_share)
        random = replacements.integers(len(tokens), low=RESERVED, high=vocab_size)
        inputs = np.where(is_random, random.astype(tokens.dtype), tokens)
        inputs = np.where(is_mask, tokens.dtype.type(mask_id), inputs)
        return MaskedTokens(inputs, tokens, chosen.astype(np.float32))

    def segment_length(self, form: ExampleFormat) -> int:
        """Returns the number of tokens of a segment.

        Raises:
          ValueError: the targets are shorter than the inputs.
        """
        check_length("inputs_length", form.inputs_length, needed=2, reason="MaskedLM")
        needed = form.inputs_length
        reason = f"MaskedLM with inputs_length={needed}"
        check_length("targets_length", form.targets_length, needed=needed, reason=reason)
        return form.inputs_length - 1

    def example(self, tokens: np.ndarray, draws: Draws, form: ExampleFormat) -> Example:
        """Returns inputs and targets of equal length, int32; targets without weight are padding."""
        inputs, targets, weights = self.mask(tokens, draws, vocab_size=form.vocab_size)
        inputs = trim_and_append_eos(inputs, form.inputs_length)
        targets = np.where(weights, targets, PAD)[: len(inputs) - 1]
        return inputs, np.append(targets, PAD).astype(np.int32)
