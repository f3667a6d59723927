"""The configuration of an evaluation."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import Choices, Count, Dtype, Length, NotNegative, Number, Positive
from synthesizer_jax.inference.settings import Decoding, Sequences

METHODS = ("greedy", "beam", RANK := "rank")


@register
@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What is evaluated during a run, and how `eval` decodes.

    Attributes:
      every: steps between evaluations; 0 evaluates after the last step only.
      method: ``"rank"`` scores every label word, ``"greedy"`` and ``"beam"`` decode; tasks without label
        words are decoded greedily under ``"rank"``.
      beams: of ``"beam"``.
      alpha: see `Decoding`, as the two lengths and what is said of repetition and stop strings, which
        `generate` also takes unless it is given others.
      relative_length: the longest answer to an input is ``relative_length`` times as long, plus
        `extra_length`, but at most `DataConfig.targets_length`; None: that alone.
      extra_length: number of tokens.
      repetition_penalty: see `Decoding`.
      no_repeat_ngram_size: see `Decoding`.
      stop_strings: see `Decoding`.
      max_examples: maximum number of examples per task, whole groups; None is all.
      batch_size: number of examples per compiled batch.
      loss_batches: the held-out teacher-forced loss is computed for at most this many batches of each
        task's labeled examples; 0: it is not computed.
      split: the split to evaluate on.
      logits_dtype: dtype of the output projection when decoding; None: the model's.
      patience: the run stops after this many evaluations in a row without a better ``score`` (see
        `Evaluator.measure`); None: it does all its steps.
      min_improvement: a score is better if it exceeds the best before by more than this.
      save_predictions: whether a run also writes what its model answers for every example, into
        ``evaluation/STEP/TASK.jsonl``; texts alone have no answers.
    """

    every: Number = 0
    method: Annotated[str, Choices(METHODS)] = "rank"
    beams: Sequences = 4
    alpha: NotNegative = 0.6
    relative_length: Positive | None = None
    extra_length: Number = 0
    repetition_penalty: Positive | None = None
    no_repeat_ngram_size: Length | None = None
    stop_strings: tuple[str, ...] = ()
    max_examples: Count | None = None
    batch_size: Length = 64
    loss_batches: Number = 16
    split: str = "validation"
    logits_dtype: Dtype | None = None
    patience: Count | None = None
    min_improvement: NotNegative = 0.0
    save_predictions: bool = True

    def decoding(self, max_length: int, **given: Any) -> Decoding:
        """Returns settings of decoding: those that are given, else these, except beams and dtype."""
        names = ("alpha", "relative_length", "extra_length", "repetition_penalty", "no_repeat_ngram_size")
        own = {name: getattr(self, name) for name in (*names, "stop_strings")}
        return Decoding(max_length=max_length, **own | given)
