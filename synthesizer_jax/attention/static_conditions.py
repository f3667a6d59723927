"""The conditions under which examples share their softmax, and under which its sums can be trusted.

The matrix products of the static route and its TPU kernels depend on the same conditions.
"""

from __future__ import annotations

from synthesizer_jax.attention.masks import Mask

MIN_ROW_SUM = 2.0**-64
"""The smallest denominator of the softmax that the static route trusts.

If all denominators are at least this large, the weights that an underflow sets to zero sum to less
than 1e-15 of a row for up to 4,096 keys. The division of the cotangent by the denominator cannot
overflow.
"""


def is_separable(mask: Mask) -> bool:
    """Returns whether the real queries of a position may attend to the same keys in every example.

    They may if there is no padding. They also may in causal self-attention with padding at the end,
    because the padding comes after all real queries. In both cases, all examples share the softmax.
    """
    if mask.key_valid is not None or mask.prefix_lengths is not None:
        return False
    _, after = mask.band
    is_causal = after is not None and after <= 0
    return mask.key_lengths is None or (is_causal and mask.self_attention)
