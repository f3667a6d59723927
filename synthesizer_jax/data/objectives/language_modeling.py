"""Language modeling: of whole texts, and of what follows a prefix."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from synthesizer_jax.data.objectives.draws import Draws
from synthesizer_jax.data.objectives.noise import RandomPrefix
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


@register
@dataclasses.dataclass(frozen=True)
class PrefixLM(SegmentObjective):
    """A prefix of random length is the inputs, the rest the targets (Raffel et al. 2020, section 3.2.3).

    Attributes:
      noise: which tokens are the rest.
      documents: number of documents that are concatenated.
    """

    noise: RandomPrefix = dataclasses.field(default_factory=RandomPrefix)
    documents: int = 1

    def __post_init__(self) -> None:
        check_documents(self.documents)

    def segment_length(self, form: ExampleFormat) -> int:
        """Returns the number of tokens of a segment."""
        check_length("inputs_length", form.inputs_length, needed=2, reason="PrefixLM")
        check_length("targets_length", form.targets_length, needed=2, reason="PrefixLM")
        return form.inputs_length - 1

    def example(self, tokens: np.ndarray, draws: Draws, form: ExampleFormat) -> Example:
        """Returns prefix and rest, int32, at most the lengths of `form`."""
        rest = self.noise(len(tokens), draws.fork(0))
        return (
            trim_and_append_eos(tokens[~rest], form.inputs_length),
            trim_and_append_eos(tokens[rest], form.targets_length),
        )
