"""Defines when examples can share a softmax, and which row sums the static route can trust.

The matrix products and the TPU kernels of the static route use the definitions in this module.
"""

from __future__ import annotations

from synthesizer_jax.attention.masks import Mask

MIN_ROW_SUM = 2.0**-64
"""The smallest denominator of the softmax that the static route trusts.

An underflow may set small weights to zero. If a denominator is at least `MIN_ROW_SUM`, the lost
weights sum to less than 1e-15 of a row for up to 4,096 keys. The division of a cotangent by a
denominator of at least `MIN_ROW_SUM` cannot overflow.
"""


def is_separable(mask: Mask) -> bool:
    """Returns whether the real queries at a position may attend to the same keys in all examples.

    The result is true if there is no padding and no prefix. The result is also true for causal
    self-attention with padding at the end of rows, because the padding comes after all real
    queries. If the result is true, all examples share the softmax. For packed rows, the result
    describes the unpacked rows, which have padding at the end.
    """
    if mask.key_valid is not None or mask.prefix_lengths is not None:
        return False
    _, after = mask.band
    is_causal = after is not None and after <= 0
    is_padded = mask.key_lengths is not None or mask.key_segments is not None
    return not is_padded or (is_causal and mask.self_attention)
