"""The settings of decoding, which can be greedy, by beam search, or by sampling."""

from __future__ import annotations

import dataclasses
from typing import Annotated, TypeAlias

from synthesizer_jax.base.registry import check_types, fields_of
from synthesizer_jax.base.typing import (
    Count,
    Dtype,
    Length,
    NotNegative,
    Number,
    Positive,
    Range,
    Seed,
)

Sequences: TypeAlias = Annotated[int, Range(1, 2**10)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
    """Settings of decoding.

    Decoding is greedy by default. If `beams` is larger than 1, decoding uses beam search. If
    `temperature` is larger than 0, decoding uses sampling. Lengths count tokens, including EOS.

    Attributes:
      max_length: maximum number of decoded tokens.
      min_length: minimum number of decoded tokens. EOS has probability zero at the first
        ``min_length - 1`` positions. With a minimum length of 1, the output may be the empty text,
        which consists only of EOS.
      relative_length: an additional limit that depends on the length of the input. For an input
        with n real tokens, the limit is ``round(relative_length · n) + extra_length`` tokens, but
        at least `min_length`. Ties are rounded to even. None means that only `max_length` limits
        the number of tokens.
      extra_length: see `relative_length`. Tensor2Tensor uses a `relative_length` of 1 and an
        `extra_length` of 100.
      beams: number of beams. With 1 beam, decoding is either greedy or by sampling.
      alpha: exponent of the length penalty ``((5 + n) / 6)^alpha`` (Wu et al. 2016, equation 14).
        Beam search divides the log-probability of a sequence of n tokens by the length penalty. T5
        uses an exponent of 0.6 with 4 beams.
      temperature: a temperature T > 0 samples tokens from ``softmax(logits / T)``. A temperature of
        0 takes the most probable token.
      top_k: number of most probable tokens to draw from (Fan et al. 2018). None means all tokens.
      top_p: total probability of the tokens to draw from. Tokens are drawn from the smallest set of
        most probable tokens whose total probability is at least `top_p` (nucleus sampling, Holtzman
        et al. 2020, section 3.1). None means all tokens. As in transformers, the temperature is
        applied first, then `top_k`, then `top_p` to the remaining tokens, and then `min_p`.
      min_p: smallest probability of the tokens to draw from, as a share of the largest probability
        (Nguyen et al. 2024, section 3). None means all tokens.
      repetition_penalty: a number that changes the logits of tokens that are already in the
        sequence (Keskar et al. 2019, CTRL, section 4.1). As in transformers, positive logits are
        divided by the penalty, and negative logits are multiplied by the penalty. Beam search
        changes log-probabilities instead of logits, and returns the changed log-probabilities. The
        sequence of a `LanguageModel` begins with its input, but the EOS of the input does not
        count. None means no penalty.
      no_repeat_ngram_size: the length n of sequences that must not be repeated (Paulus et al. 2018,
        section 2.5). As in transformers, a token has probability zero if it would complete a
        sequence of n tokens that has occurred before. None means that all repetitions are allowed.
      stop_strings: strings that end a sequence. A sequence ends with the token that completes a
        stop string in its text. Texts are cut before the stop string, which may begin or end within
        a token. Scores include all tokens of the sequence. `min_length` does not forbid stop
        strings.
      samples: number of sequences per input, either independent samples or the best beams.
      seed: seed of the samples. Sample j of example i depends only on the seed, i, j and the
        model's logits. The samples do not depend on the batch, the devices or the number of
        samples.
      logits_dtype: dtype of the factors of the output projection. None means the model's dtype.
        ``"bfloat16"`` halves the memory traffic of the projection, which takes most of the time of
        a decoding step of small models. The logits are always float32.

    Raises:
      ValueError: if a value is not allowed, or cannot be combined with another value.
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
                f"min_length is {self.min_length}, but it must be at most max_length, which is "
                f"{self.max_length}."
            )
        if self.beams > 1 and self.temperature > 0:
            raise ValueError(
                f"temperature is {self.temperature} and beams is {self.beams}, but beam search "
                "does not sample. Set temperature to 0, or beams to 1."
            )
        if "" in self.stop_strings:
            raise ValueError("stop_strings contains '', which every text contains. Leave it out.")
        for name, value in (("top_k", self.top_k), ("top_p", self.top_p), ("min_p", self.min_p)):
            if value is not None and not self.temperature:
                raise ValueError(
                    f"{name} is {value}, but temperature is 0, so nothing is sampled. Set a "
                    "temperature, such as 1."
                )
        if self.samples > self.beams and not self.temperature:
            raise ValueError(
                f"samples is {self.samples}, but beams is {self.beams} and temperature is 0. Set a "
                f"temperature, such as 1, or use {self.samples} beams or more."
            )
