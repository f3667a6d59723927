"""Flax Linen's own attention layers with the attention functions of this package.

`attention_fn` replaces the attention function of Flax's layers. `MultiHeadAttention` is Flax's
`MultiHeadAttention` with an optional alignment.
"""

from synthesizer_jax.linen.functional import attention_fn
from synthesizer_jax.linen.multi_head import MultiHeadAttention

__all__ = ["MultiHeadAttention", "attention_fn"]
