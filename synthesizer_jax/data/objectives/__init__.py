"""Pre-training objectives on token ids: T5's family, UL2's mixture, masked and full language modeling.

An objective is a frozen dataclass that makes inputs and targets of segments of documents, in NumPy
alone. Its random numbers come from an object (`Draws`), so that training draws them by counters, and
tests can draw those of T5's own functions.
"""

from synthesizer_jax.data.objectives.corruptions import (
    Corruption,
    DropTokens,
    GatheredTokens,
    KeepTokens,
    PermuteTokens,
    RandomTokens,
    RandomTokensOrSentinel,
    SentinelPerSpan,
    SentinelPerToken,
    UniqueSentinels,
)
from synthesizer_jax.data.objectives.denoising import Denoising
from synthesizer_jax.data.objectives.draws import CounterDraws, Draws
from synthesizer_jax.data.objectives.language_modeling import (
    FullLM,
    prefix_lm_pair,
    prefix_lm_row,
)
from synthesizer_jax.data.objectives.masked_lm import MaskedLM, MaskedTokens
from synthesizer_jax.data.objectives.mixture import ObjectiveMixture, ul2
from synthesizer_jax.data.objectives.named import OBJECTIVES
from synthesizer_jax.data.objectives.noise import (
    ChosenTokens,
    IidNoise,
    Noise,
    RandomPrefix,
    RandomSpans,
    RegularSpans,
    SuffixNoise,
)
from synthesizer_jax.data.objectives.objective import (
    ExampleFormat,
    Objective,
    Segment,
    SegmentObjective,
)
from synthesizer_jax.data.objectives.stream import Documents, SegmentStream

__all__ = [
    "OBJECTIVES",
    "ChosenTokens",
    "Corruption",
    "CounterDraws",
    "Denoising",
    "Documents",
    "Draws",
    "DropTokens",
    "ExampleFormat",
    "FullLM",
    "GatheredTokens",
    "IidNoise",
    "KeepTokens",
    "MaskedLM",
    "MaskedTokens",
    "Noise",
    "Objective",
    "ObjectiveMixture",
    "PermuteTokens",
    "RandomPrefix",
    "RandomSpans",
    "RandomTokens",
    "RandomTokensOrSentinel",
    "RegularSpans",
    "Segment",
    "SegmentObjective",
    "SegmentStream",
    "SentinelPerSpan",
    "SentinelPerToken",
    "SuffixNoise",
    "UniqueSentinels",
    "prefix_lm_pair",
    "prefix_lm_row",
    "ul2",
]
