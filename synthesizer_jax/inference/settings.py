"""How sequences are decoded: greedily, by beam search, or by sampling."""

from __future__ import annotations

import dataclasses
from typing import Annotated, TypeAlias

from synthesizer_jax.base.registry import check_types, fields_of
from synthesizer_jax.base.typing import Count, Dtype, Length, NotNegative, Number, Positive, Range, Seed

Sequences: TypeAlias = Annotated[int, Range(1, 2**10)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
    """Settings of decoding: greedy by default, by beam search with `beams`, by sampling with `temperature`.

    Lengths count tokens with EOS.

    Attributes:
      max_length: maximum number of decoded tokens.
      min_length: minimum number of decoded tokens: EOS has probability zero at the first
        ``min_length - 1`` positions. 1 allows the empty text.
      relative_length: the maximum of an input of n real tokens is also ``round(relative_length · n) +
        extra_length`` (ties to even), but not less than `min_length`. None: `max_length` alone.
      extra_length: see `relative_length`; Tensor2Tensor decodes with 1 and 100.
      beams: number of beams; 1 is greedy decoding or sampling.
      alpha: exponent of the length penalty ``((5 + n) / 6)^alpha`` by which beam search divides the
        log-probability of a sequence of n tokens (Wu et al. 2016, equation 14; T5 uses 0.6 with 4
        beams).
      temperature: T > 0 samples tokens from ``softmax(logits / T)``; 0 takes the most probable token.
      top_k: samples are drawn from the k most probable tokens (Fan et al. 2018); None: from all.
      top_p: samples are drawn from the smallest set of most probable tokens with at least this
        probability (nucleus sampling, Holtzman et al. 2020, section 3.1); None: from all. The order is
        that of transformers: temperature, then `top_k`, then `top_p` of what remains, then `min_p`.
      min_p: samples are drawn from the tokens with at least this share of the largest probability (Nguyen
        et al. 2024, section 3); None: from all.
      repetition_penalty: divides the logits of tokens that the sequence already holds if they are positive,
        and multiplies them if they are negative (Keskar et al. 2019, CTRL, section 4.1; as in
        transformers). Beam search changes log-probabilities instead, and returns the changed ones. The
        sequence of a `LanguageModel` begins with its input, whose EOS does not count. None: no penalty.
      no_repeat_ngram_size: n; a token that would complete the same n tokens in a row a second time has
        probability zero (Paulus et al. 2018, section 2.5; as in transformers). None: all are allowed.
      stop_strings: a sequence also ends with the token that completes one of these strings in its text;
        texts are cut before the string, which may begin or end within tokens. Scores are those of the
        tokens. `min_length` does not forbid them.
      samples: number of sequences per input: independent samples, or the best of the beams.
      seed: seed of the samples. Sample j of example i depends on the seed, i, j and the model's logits
        alone, neither on the batch nor on devices or the number of samples.
      logits_dtype: dtype of the operands of the output projection; None is the model's. ``"bfloat16"``
        halves the memory traffic of the projection, which dominates a step of small models. The
        logits are float32 in any case.

    Raises:
      ValueError: a value is not allowed, or does not go with another.
    """

    max_length: Length
    min_length: Count = 1
    relative_length: Positive | None = None
    extra_length: Number = 0
    beams: Sequences = 1
    alpha: NotNegative = 0.6
    temperature: NotNegative = 0.0
    top_k: Count | None = None
    top_p: Annotated[float, Range(0, 1, above=True)] | None = None
    min_p: Annotated[float, Range(0, 1, above=True)] | None = None
    repetition_penalty: Positive | None = None
    no_repeat_ngram_size: Length | None = None
    stop_strings: tuple[str, ...] = ()
    samples: Sequences = 1
    seed: Seed = 0
    logits_dtype: Dtype | None = None

    def __post_init__(self) -> None:
        check_types(Decoding, fields_of(self))
        if self.min_length > self.max_length:
            raise ValueError(
                f"min_length is {self.min_length}; allowed: at most max_length, {self.max_length}"
            )
        if self.beams > 1 and self.temperature > 0:
            raise ValueError(
                f"temperature is {self.temperature} with beams {self.beams}; beam search does not "
                "sample: give temperature 0, or beams 1"
            )
        if "" in self.stop_strings:
            raise ValueError("stop_strings holds '', which every text contains; leave it out")
        for name, value in (("top_k", self.top_k), ("top_p", self.top_p), ("min_p", self.min_p)):
            if value is not None and not self.temperature:
                raise ValueError(
                    f"{name} is {value} with temperature 0, which does not sample; give a temperature, "
                    "such as 1"
                )
        if self.samples > self.beams and not self.temperature:
            raise ValueError(
                f"samples is {self.samples} with beams {self.beams} and temperature 0; give a "
                f"temperature, such as 1, or {self.samples} beams or more"
            )
