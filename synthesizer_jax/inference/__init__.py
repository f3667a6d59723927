"""Greedy and beam decoding, and log-probabilities of given targets."""

from synthesizer_jax.inference.decoding import Decoded, decode
from synthesizer_jax.inference.scoring import score_choices, score_targets

__all__ = ["Decoded", "decode", "score_choices", "score_targets"]
