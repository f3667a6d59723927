"""Values that modules show to distillation, and values that distillation puts in their place."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
from flax.core import DenyList

TAPS = "taps"
"""The collection in which modules sow the values that distillation compares, if it is mutable."""

OVERRIDES = "overrides"
"""The collection of values that a module uses instead of those that it would sow in `TAPS`."""

LOGITS = "logits"
"""The collection in which attention that sows its weights also sows its logits if it is mutable."""

LOSSES = "losses"
"""The collection in which modules sow values that are added to a training loss."""

READ_ONLY: Any = DenyList(("intermediates", LOGITS, OVERRIDES, TAPS))
"""A filter for `nn.vmap`: copies of a module share all collections except these."""


def tap(module: nn.Module, name: str, value: jax.Array) -> jax.Array:
    """Sows a value in `TAPS`, and returns the value or, if there is one, its override."""
    if module.has_variable(OVERRIDES, name):
        value = module.get_variable(OVERRIDES, name)
    sow_tap(module, name, value)
    return value


def sow_tap(module: nn.Module, name: str, value: jax.Array) -> None:
    """Sows a value in `TAPS` if that collection is mutable."""
    if module.is_mutable_collection(TAPS) and not module.is_initializing():
        module.sow(TAPS, name, value, reduce_fn=lambda _, new: new, init_fn=lambda: None)
