"""Greedy decoding, beam search, sampling, and the scoring of given targets and classes."""

from synthesizer_jax.inference.decoder import Sequences
from synthesizer_jax.inference.decoding import Decoded, decode, decode_sequences
from synthesizer_jax.inference.scoring import (
    encode_tokens,
    score_choices,
    score_classes,
    score_masked_tokens,
    score_targets,
)
from synthesizer_jax.inference.settings import Decoding

__all__ = [
    "Decoded",
    "Decoding",
    "Sequences",
    "decode",
    "decode_sequences",
    "encode_tokens",
    "score_choices",
    "score_classes",
    "score_masked_tokens",
    "score_targets",
]
