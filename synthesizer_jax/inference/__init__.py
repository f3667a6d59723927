"""Greedy decoding, beam search and sampling, and log-probabilities of given targets and classes."""

from synthesizer_jax.inference.decoder import Sequences as Sequences
from synthesizer_jax.inference.decoding import Decoded as Decoded
from synthesizer_jax.inference.decoding import decode as decode
from synthesizer_jax.inference.decoding import decode_sequences as decode_sequences
from synthesizer_jax.inference.scoring import encode_tokens as encode_tokens
from synthesizer_jax.inference.scoring import score_choices as score_choices
from synthesizer_jax.inference.scoring import score_classes as score_classes
from synthesizer_jax.inference.scoring import score_masked_tokens as score_masked_tokens
from synthesizer_jax.inference.scoring import score_targets as score_targets
from synthesizer_jax.inference.settings import Decoding as Decoding
