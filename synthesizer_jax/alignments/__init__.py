"""Alignments: who attends to whom. One file per variant, and one line in `ALIGNMENTS`."""

from synthesizer_jax.alignments.base import Alignment, AttentionContext
from synthesizer_jax.alignments.bilinear import Bilinear
from synthesizer_jax.alignments.dense import Dense
from synthesizer_jax.alignments.dot_product import DotProduct
from synthesizer_jax.alignments.factorized_dense import FactorizedDense
from synthesizer_jax.alignments.factorized_random import FactorizedRandom
from synthesizer_jax.alignments.gaussian import Gaussian, GaussianBias
from synthesizer_jax.alignments.mixture import Mixture
from synthesizer_jax.alignments.per_head import PerHead
from synthesizer_jax.alignments.random import Random
from synthesizer_jax.alignments.relative_bias import RelativeBias

ALIGNMENTS: dict[str, type[Alignment]] = {
    cls.__name__: cls
    for cls in (
        Bilinear,
        Dense,
        DotProduct,
        FactorizedDense,
        FactorizedRandom,
        Gaussian,
        GaussianBias,
        Mixture,
        PerHead,
        Random,
        RelativeBias,
    )
}

__all__ = ["ALIGNMENTS", "Alignment", "AttentionContext", *ALIGNMENTS]
