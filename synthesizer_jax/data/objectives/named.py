"""The objectives by name: T5's with the names of its ``objectives/*.gin``, BERT's and UL2's."""

from __future__ import annotations

from synthesizer_jax.data.objectives.denoising import Denoising
from synthesizer_jax.data.objectives.language_modeling import FullLM, PrefixLM
from synthesizer_jax.data.objectives.masked_lm import MaskedLM
from synthesizer_jax.data.objectives.mixture import ul2
from synthesizer_jax.data.objectives.noise import IidNoise, RandomSpans
from synthesizer_jax.data.objectives.objective import Objective

OBJECTIVES: dict[str, Objective] = {
    "span_2_15_u_u": Denoising(RandomSpans(0.15, mean_span=2.0)),
    "span_3_15_u_u": Denoising(RandomSpans(0.15, mean_span=3.0)),  # T5's choice
    "span_5_15_u_u": Denoising(RandomSpans(0.15, mean_span=5.0)),
    "span_10_15_u_u": Denoising(RandomSpans(0.15, mean_span=10.0)),
    "iid_15_u_u": Denoising(IidNoise(0.15)),
    "prefix_lm": PrefixLM(),
    "lm": FullLM(document_eos=False),
    "full_lm": FullLM(),
    "masked_lm": MaskedLM(),
    "ul2": ul2(),
}
"""T5's names are ``span_LENGTH_DENSITY_INPUTS_TARGETS``; u is a sentinel of its own for every span."""
