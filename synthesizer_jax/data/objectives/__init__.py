"""Pre-training objectives on token ids: span corruption, UL2's mixture, masked, prefix and full LM.

An objective is a frozen dataclass that makes inputs and targets of segments of documents, in NumPy
alone. Its random numbers come from an object (`Draws`), so that training draws them by counters, and
tests can draw those of T5's own functions.
"""

from synthesizer_jax.data.objectives.denoising import Denoising
from synthesizer_jax.data.objectives.draws import CounterDraws, Draws
from synthesizer_jax.data.objectives.language_modeling import FullLM, PrefixLM
from synthesizer_jax.data.objectives.masked_lm import MaskedLM, MaskedTokens
from synthesizer_jax.data.objectives.mixture import ObjectiveMixture, ul2
from synthesizer_jax.data.objectives.named import OBJECTIVES
from synthesizer_jax.data.objectives.noise import (
    ChosenTokens,
    IidNoise,
    Noise,
    RandomPrefix,
    RandomSpans,
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
    "CounterDraws",
    "Denoising",
    "Documents",
    "Draws",
    "ExampleFormat",
    "FullLM",
    "IidNoise",
    "MaskedLM",
    "MaskedTokens",
    "Noise",
    "Objective",
    "ObjectiveMixture",
    "PrefixLM",
    "RandomPrefix",
    "RandomSpans",
    "Segment",
    "SegmentObjective",
    "SegmentStream",
    "SuffixNoise",
    "ul2",
]
