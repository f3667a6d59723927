"""The objectives by name: those of T5's ``objectives/*.gin``, BERT's and UL2's."""

from __future__ import annotations

from synthesizer_jax.data.objectives.corruptions import (
    DropTokens,
    KeepTokens,
    PermuteTokens,
    RandomTokensOrSentinel,
    SentinelPerToken,
    UniqueSentinels,
)
from synthesizer_jax.data.objectives.denoising import Denoising
from synthesizer_jax.data.objectives.language_modeling import FullLM
from synthesizer_jax.data.objectives.masked_lm import MaskedLM
from synthesizer_jax.data.objectives.mixture import ul2
from synthesizer_jax.data.objectives.noise import IidNoise, Noise, RandomPrefix, RandomSpans
from synthesizer_jax.data.objectives.objective import Objective


def _between_sentinels(noise: Noise) -> Denoising:
    return Denoising(noise, UniqueSentinels(), UniqueSentinels())


OBJECTIVES: dict[str, Objective] = {
    "span_2_15_u_u": _between_sentinels(RandomSpans(0.15, mean_span=2.0)),
    "span_3_15_u_u": _between_sentinels(RandomSpans(0.15, mean_span=3.0)),  # T5's choice
    "span_5_15_u_u": _between_sentinels(RandomSpans(0.15, mean_span=5.0)),
    "span_10_15_u_u": _between_sentinels(RandomSpans(0.15, mean_span=10.0)),
    "iid_10_u_u": _between_sentinels(IidNoise(0.1)),
    "iid_15_u_u": _between_sentinels(IidNoise(0.15)),
    "iid_25_u_u": _between_sentinels(IidNoise(0.25)),
    "iid_50_u_u": _between_sentinels(IidNoise(0.5)),
    "iid_15_d_d": Denoising(IidNoise(0.15), DropTokens(), DropTokens()),
    "iid_15_m_f": Denoising(IidNoise(0.15), SentinelPerToken(), KeepTokens()),  # MASS-style
    "iid_15_r10s90_f": Denoising(  # BERT-style
        IidNoise(0.15), RandomTokensOrSentinel(0.1), KeepTokens()
    ),
    "all_permute": Denoising(IidNoise(1.0), PermuteTokens(), KeepTokens(), documents=1),
    "prefix_lm": Denoising(RandomPrefix(0.5), DropTokens(), DropTokens(), documents=1),
    "lm": FullLM(document_eos=False),
    "full_lm": FullLM(),
    "masked_lm": MaskedLM(),
    "ul2": ul2(),
}
"""T5's names are ``pattern_density_inputs_targets`` with the codes of `corruptions`."""
