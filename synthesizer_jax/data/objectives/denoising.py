"""Denoising: inputs with noise, and targets from which the text can be restored.

Raffel et al. 2020, sections 3.1.4 and 3.3; the results equal those of T5's `denoise`.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from synthesizer_jax.data.objectives.corruptions import Corruption
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
    """A noise mask, and what becomes of noise in the inputs and of the other tokens in the targets.

    Attributes:
      noise: which tokens are noise.
      inputs: what becomes of noise in the inputs.
      targets: what becomes of all other tokens in the targets.
      documents: number of documents that are concatenated.
      mode: ids before the inputs, such as those of UL2's mode token.
    """

    noise: Noise
    inputs: Corruption
    targets: Corruption
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
            return tokens, tokens + 1 if self.targets.keeps_length else None
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
        reason = f"{self._description()} with inputs_length={form.inputs_length}"
        check_length("targets_length", form.targets_length, needed=targets or 2, reason=reason)
        return tokens

    def example(self, tokens: np.ndarray, draws: Draws, form: ExampleFormat) -> Example:
        """Returns inputs and targets, int32, at most the lengths of `form`.

        Args:
          tokens: ids ``[length]``, at least one.
          draws: random numbers; part 0 is for the mask, 1 for the inputs and 2 for the targets.
          form: lengths and vocabulary.
        """
        noise = self.noise(len(tokens), draws.fork(0))
        inputs = self.inputs(tokens, noise, draws.fork(1), vocab_size=form.vocab_size)
        targets = self.targets(tokens, ~noise, draws.fork(2), vocab_size=form.vocab_size)
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
        inputs = self.inputs.length(marked=noise, unmarked=tokens - noise, spans=spans)
        targets = self.targets.length(marked=tokens - noise, unmarked=noise, spans=spans)
        return inputs + 1, targets + 1

    def _description(self) -> str:
        names = [type(part).__name__ for part in (self.noise, self.inputs, self.targets)]
        return f"Denoising({', '.join(names)})"
