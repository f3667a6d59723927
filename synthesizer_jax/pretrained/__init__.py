"""Loads models from runs, folders and the Hugging Face hub, and generates or encodes texts."""

from synthesizer_jax.evaluation.prediction import Generated
from synthesizer_jax.inference import Decoding
from synthesizer_jax.pretrained.loading import Loaded, encode, generate, generate_with_scores, load

__all__ = [
    "Decoding",
    "Generated",
    "Loaded",
    "encode",
    "generate",
    "generate_with_scores",
    "load",
]
