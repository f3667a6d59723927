"""Lengths that are known when a function is traced, or symbolic, as in `jax.export`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim


def arange(start: int, end: int) -> np.ndarray | jax.Array:
    """Returns the integers from `start` up to, but without, `end`.

    They are NumPy's where both are known, so that what is computed from them is a constant; where one
    is symbolic they are traced.
    """
    symbolic = is_symbolic_dim(start) or is_symbolic_dim(end)
    return jnp.arange(start, end) if symbolic else np.arange(start, end)
