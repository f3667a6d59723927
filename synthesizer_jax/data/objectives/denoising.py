"""Span corruption, T5's objective (Raffel et al. 2020, sections 3.1.4 and 3.3)."""

from __future__ import annotations

import dataclasses

import numpy as np

from synthesizer_jax.data.objectives.draws import Draws
from synthesizer_jax.data.objectives.noise import Noise
from synthesizer_jax.data.objectives.objective import (
    GROUP,
    ExampleFormat,
    SegmentObjective,
    check_documents,
    check_length,
    trim_and_append_eos,
)
from synthesizer_jax.data.task_streams import Example
from synthesizer_jax.registry import register


@register
@dataclasses.dataclass(frozen=True)
class Denoising(SegmentObjective):
    """Every span of noise becomes a sentinel in the inputs, and every span between them in the targets.

    The results equal those of T5's `denoise` with `noise_span_to_unique_sentinel` and
    `nonnoise_span_to_unique_sentinel`. Sentinels count down from the last id of the vocabulary,
    ``<extra_id_0>``. As in T5, a segment with more spans than sentinels also uses the ids below them.

    Attributes:
      noise: which tokens are noise.
      documents: number of documents that are concatenated.
      mode: ids before the inputs, such as those of UL2's mode token.
    """

    noise: Noise
    documents: int = GROUP
    mode: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_documents(self.documents)

    def lengths(self, inputs_length: int) -> tuple[int, int | None]:
        """Returns the length of a segment, and that of its targets.

        If the numbers of noise tokens and spans are fixed, it is the largest segment whose inputs
        with EOS fit `inputs_length`; at density 0.5 one token less if the targets are longer than
        the inputs. This is T5's `random_spans_helper`, except that it counts as the mask does, in
        float32 and at least one span: T5's is in float64 and for some lengths a token or two short.
        Otherwise the segment has one token less than the inputs.

        Args:
          inputs_length: largest number of input tokens, including the mode and EOS.

        Returns:
          The number of tokens of a segment, and the largest number of target tokens, including EOS;
          None if that is random.
        """
        available = inputs_length - len(self.mode)
        tokens = available - 1
        if self.noise.counts(tokens) is None:
            return tokens, None
        while self._example_lengths(tokens + 1)[0] <= available:
            tokens += 1
        inputs, targets = self._example_lengths(tokens)
        if self.noise.density == 0.5 and targets > inputs:
            return tokens - 1, targets - 1
        return tokens, targets

    def segment_length(self, form: ExampleFormat) -> int:
        """Returns the number of tokens of a segment.

        Raises:
          ValueError: the inputs have no room for a token, or the targets do not fit.
        """
        reason = f"a mode of {len(self.mode)} ids with EOS and a token"
        needed = len(self.mode) + 2
        check_length("inputs_length", form.inputs_length, needed=needed, reason=reason)
        tokens, targets = self.lengths(form.inputs_length)
        reason = f"{type(self.noise).__name__} with inputs_length={form.inputs_length}"
        check_length("targets_length", form.targets_length, needed=targets or 2, reason=reason)
        return tokens

    def example(self, tokens: np.ndarray, draws: Draws, form: ExampleFormat) -> Example:
        """Returns inputs and targets, int32, at most the lengths of `form`.

        Args:
          tokens: ids ``[length]``, at least one.
          draws: random numbers; part 0 is for the mask.
          form: lengths and vocabulary.
        """
        noise = self.noise(len(tokens), draws.fork(0))
        inputs = replace_spans(tokens, noise, vocab_size=form.vocab_size)
        targets = replace_spans(tokens, ~noise, vocab_size=form.vocab_size)
        inputs = np.concatenate([np.asarray(self.mode, tokens.dtype), inputs])
        return (
            trim_and_append_eos(inputs, form.inputs_length),
            trim_and_append_eos(targets, form.targets_length),
        )

    def _example_lengths(self, tokens: int) -> tuple[int, int]:
        """Returns the numbers of input and target tokens of a segment, with EOS, without the mode."""
        counts = self.noise.counts(tokens)
        assert counts is not None
        noise, spans = counts
        return tokens - noise + spans + 1, noise + spans + 1


def replace_spans(tokens: np.ndarray, marked: np.ndarray, *, vocab_size: int) -> np.ndarray:
    """Returns tokens with every span of marked ones replaced by a sentinel, in descending order.

    Args:
      tokens: ids ``[length]``.
      marked: which tokens to replace, ``[length]``.
      vocab_size: number of ids, including sentinels.
    """
    starts = marked & ~np.concatenate([[False], marked[:-1]])
    sentinels = (vocab_size - np.cumsum(starts)).astype(tokens.dtype)
    return np.where(starts, sentinels, tokens)[~marked | starts]
