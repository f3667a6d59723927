"""Alignments: who attends to whom. One line each in `ALIGNMENTS`."""

from synthesizer_jax.alignments.base import Alignment, AttentionContext
from synthesizer_jax.alignments.gaussian import Gaussian, GaussianBias
from synthesizer_jax.alignments.mixture import Mixture, PerHead
from synthesizer_jax.alignments.relative_bias import ALiBi, RelativeBias
from synthesizer_jax.alignments.synthesizers import (
    Bilinear,
    Dense,
    DotProduct,
    FactorizedDense,
    FactorizedRandom,
    Random,
)

__all__ = [
    "ALIGNMENTS",
    "ALiBi",
    "Alignment",
    "AttentionContext",
    "Bilinear",
    "Dense",
    "DotProduct",
    "FactorizedDense",
    "FactorizedRandom",
    "Gaussian",
    "GaussianBias",
    "Mixture",
    "PerHead",
    "Random",
    "RelativeBias",
]

ALIGNMENTS: dict[str, type[Alignment]] = {
    name: globals()[name] for name in __all__ if name not in ("ALIGNMENTS", "Alignment", "AttentionContext")
}
"""All of them by name."""
