"""Defines the configuration of an evaluation."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import Choices, Count, Dtype, Length, NotNegative, Number, Positive
from synthesizer_jax.inference.settings import Decoding, Sequences

METHODS = ("greedy", "beam", RANK := "rank")
"""The names of the methods by which a model answers."""


@register
@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Configures what is evaluated during a run, and how the command `eval` decodes.

    The command `generate` also uses the settings from `alpha` to `extra_length` and from
    `repetition_penalty` to `stop_strings`. Options on the command line override these settings.

    Attributes:
      every: number of steps between evaluations. With 0, the model is evaluated only after the last
        step.
      method: ``"rank"`` computes the probability of every label word and chooses the most probable
        label word. Tasks without label words are decoded greedily. ``"greedy"`` and ``"beam"``
        decode the answers to all tasks.
      beams: number of beams if the method is ``"beam"``.
      alpha: exponent of the length penalty; see `Decoding`.
      relative_length: limits an answer to ``relative_length`` times the number of input tokens plus
        `extra_length`, but at most to `DataConfig.targets_length`. None means that only
        `DataConfig.targets_length` limits an answer.
      extra_length: number of tokens; see `relative_length`.
      repetition_penalty: see `Decoding`.
      no_repeat_ngram_size: see `Decoding`.
      stop_strings: see `Decoding`.
      max_examples: maximum number of examples per task. The maximum may be exceeded to complete the
        last group of examples, such as the answers to one question. None means all examples.
      batch_size: number of examples per compiled batch.
      loss_batches: the teacher-forced loss is computed for at most this many batches of each task's
        labeled examples. With 0, the loss is not computed.
      split: the split of the data sets to evaluate on.
      logits_dtype: dtype of the factors of the output projection when decoding. None means the
        model's dtype.
      patience: the run stops if ``score`` has not improved for this number of evaluations in a row
        (see `Evaluator.measure`). None means that the run never stops early.
      min_improvement: a score counts as improved if it exceeds the best previous score by more than
        `min_improvement`.
      save_predictions: whether a run also writes the model's answer to every example, into
        ``evaluation/STEP/TASK.jsonl``. Examples that consist only of a text have no answers.
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
        """Returns settings of decoding.

        All settings are copied from this configuration, except the number of beams and the dtype of
        the logits.

        Args:
          max_length: maximum number of decoded tokens.
          **given: settings of `Decoding` that override the settings of this configuration.
        """
        names = (
            "alpha",
            "relative_length",
            "extra_length",
            "repetition_penalty",
            "no_repeat_ngram_size",
        )
        own = {name: getattr(self, name) for name in (*names, "stop_strings")}
        return Decoding(max_length=max_length, **own | given)
