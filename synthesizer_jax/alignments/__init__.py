"""Alignments, which compute the attention logits from tokens and positions."""

from synthesizer_jax.alignments.base import Alignment, AttentionContext
from synthesizer_jax.alignments.dense import Dense, FactorizedDense
from synthesizer_jax.alignments.dot_product import Bilinear, DotProduct
from synthesizer_jax.alignments.gaussian import Gaussian, GaussianBias
from synthesizer_jax.alignments.mixture import Mixture, PerHead
from synthesizer_jax.alignments.random import FactorizedRandom, Random
from synthesizer_jax.alignments.relative_bias import ALiBi, RelativeBias
from synthesizer_jax.alignments.rotary import LinearScaling, YaRN

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
    "LinearScaling",
    "Mixture",
    "PerHead",
    "Random",
    "RelativeBias",
    "YaRN",
]

_CLASSES: tuple[type[Alignment], ...] = (
    ALiBi,
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
ALIGNMENTS = {cls.__name__: cls for cls in _CLASSES}
"""The alignment classes of this package, by name."""
