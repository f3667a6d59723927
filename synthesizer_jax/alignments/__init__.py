"""Alignments: who attends to whom. One line each in `ALIGNMENTS`."""

from synthesizer_jax.alignments.base import Alignment as Alignment
from synthesizer_jax.alignments.base import AttentionContext as AttentionContext
from synthesizer_jax.alignments.gaussian import Gaussian as Gaussian
from synthesizer_jax.alignments.gaussian import GaussianBias as GaussianBias
from synthesizer_jax.alignments.mixture import Mixture as Mixture
from synthesizer_jax.alignments.mixture import PerHead as PerHead
from synthesizer_jax.alignments.relative_bias import ALiBi as ALiBi
from synthesizer_jax.alignments.relative_bias import RelativeBias as RelativeBias
from synthesizer_jax.alignments.rotary import LinearScaling as LinearScaling
from synthesizer_jax.alignments.rotary import YaRN as YaRN
from synthesizer_jax.alignments.synthesizers import Bilinear as Bilinear
from synthesizer_jax.alignments.synthesizers import Dense as Dense
from synthesizer_jax.alignments.synthesizers import DotProduct as DotProduct
from synthesizer_jax.alignments.synthesizers import FactorizedDense as FactorizedDense
from synthesizer_jax.alignments.synthesizers import FactorizedRandom as FactorizedRandom
from synthesizer_jax.alignments.synthesizers import Random as Random

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
"""All of them by name."""
