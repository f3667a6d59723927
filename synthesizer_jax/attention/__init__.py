"""The attention core, pure JAX: terms say what logits are made of, `attend` sums the values."""

from synthesizer_jax.attention.attend import attend, attention_weights
from synthesizer_jax.attention.cache import Cache, extend, init_cache
from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.partition import Partition
from synthesizer_jax.attention.terms import (
    LowRank,
    Outer,
    Relative,
    Span,
    Static,
    Term,
    Terms,
    add,
    low_rank,
    materialise,
    outer,
    relative,
    scale,
    static,
)

__all__ = [
    "Cache",
    "LowRank",
    "Mask",
    "Outer",
    "Partition",
    "Relative",
    "Span",
    "Static",
    "Term",
    "Terms",
    "add",
    "attend",
    "attention_weights",
    "extend",
    "init_cache",
    "low_rank",
    "materialise",
    "outer",
    "relative",
    "scale",
    "static",
]
