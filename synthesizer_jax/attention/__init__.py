"""The attention core in pure JAX, for users who write their own layers.

Attention logits are a sum of terms, and `attend` computes attention from these terms.
`dot_product_attention` has the arguments of `jax.nn.dot_product_attention`. `explain` reports which
implementation computes each attention call in a function, and why.
"""

from synthesizer_jax.attention.cache import Cache, extend, init_cache
from synthesizer_jax.attention.explanations import Explanation, explain
from synthesizer_jax.attention.functional import dot_product_attention
from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.merging import merge_attention
from synthesizer_jax.attention.partition import Partition
from synthesizer_jax.attention.reference_route import materialize_logits
from synthesizer_jax.attention.relative_table import RelativeTable, relative_bias
from synthesizer_jax.attention.routes import (
    attend,
    attend_with_log_sums,
    attention_weights,
    drop_value_vectors,
)
from synthesizer_jax.attention.terms import (
    Banded,
    LowRank,
    Outer,
    Relative,
    Span,
    Split,
    Static,
    Term,
    Terms,
    add,
    banded,
    low_rank,
    materialize,
    outer,
    relative,
    scale,
    static,
)

__all__ = [
    "Banded",
    "Cache",
    "Explanation",
    "LowRank",
    "Mask",
    "Outer",
    "Partition",
    "Relative",
    "RelativeTable",
    "Span",
    "Split",
    "Static",
    "Term",
    "Terms",
    "add",
    "attend",
    "attend_with_log_sums",
    "attention_weights",
    "banded",
    "dot_product_attention",
    "drop_value_vectors",
    "explain",
    "extend",
    "init_cache",
    "low_rank",
    "materialize",
    "materialize_logits",
    "merge_attention",
    "outer",
    "relative",
    "relative_bias",
    "scale",
    "static",
]
