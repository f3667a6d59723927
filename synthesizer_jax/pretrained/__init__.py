"""Checkpoints of other libraries, and models from directories, ready to use."""

from synthesizer_jax.evaluation.prediction import Generated as Generated
from synthesizer_jax.inference import Decoding as Decoding
from synthesizer_jax.pretrained.loading import Loaded as Loaded
from synthesizer_jax.pretrained.loading import encode as encode
from synthesizer_jax.pretrained.loading import generate as generate
from synthesizer_jax.pretrained.loading import generate_with_scores as generate_with_scores
from synthesizer_jax.pretrained.loading import load as load
