"""When the examples of a call share their softmax, and when its denominators can be trusted.

The matrix products of the static route and its TPU kernels depend on the same conditions.
"""

from __future__ import annotations

from synthesizer_jax.attention.masks import Mask

MIN_ROW_SUM = 2.0**-64
"""The smallest denominator that the static routes trust.

Weights lost to underflow are then below 1e-15 of a row's sum for up to 4,096 keys, and the division
of the cotangent cannot overflow.
"""


def is_separable(mask: Mask) -> bool:
    """Returns whether the real queries of one position see the same keys in every example.

    They do if there is no padding. They also do in causal self-attention with padding at the end,
    because no real query sees a padded key there. All examples then share the softmax.
    """
    if mask.key_valid is not None or mask.prefix_lengths is not None:
        return False
    _, after = mask.band
    is_causal = after is not None and after <= 0
    return mask.key_lengths is None or (is_causal and mask.self_attention)
