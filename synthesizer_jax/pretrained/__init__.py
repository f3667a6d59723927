"""Loading a model from a run, a folder or the Hugging Face Hub, and generating text or encoding with it."""

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
