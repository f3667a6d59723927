"""This library's attention in Flax Linen's own attention layers."""

from synthesizer_jax.linen.functional import attention_fn
from synthesizer_jax.linen.multi_head import MultiHeadAttention

__all__ = ["MultiHeadAttention", "attention_fn"]
