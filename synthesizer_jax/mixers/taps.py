"""Flax collections through which distillation reads and replaces values inside of modules."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
from flax.core import DenyList

TAPS = "taps"
"""The collection in which modules sow the values that distillation compares.

Modules sow values only if the collection is mutable.
"""

OVERRIDES = "overrides"
"""The collection of values that replace the values that modules sow in `TAPS`."""

LOGITS = "logits"
"""The collection in which attention layers that sow their weights also sow their logits.

Logits are sown only if the collection is mutable.
"""

LOSSES = "losses"
"""The collection in which modules sow values that are added to the training loss."""

SHARED_BY_COPIES: Any = DenyList(("intermediates", LOGITS, OVERRIDES, TAPS))
"""A filter for `nn.vmap` that selects the collections that the copies of a module share.

The filter selects all collections except the listed ones. The listed collections do not exist
inside of the copies, so the copies sow nothing in them and ignore overrides.
"""


def tap(module: nn.Module, name: str, value: jax.Array) -> jax.Array:
    """Sows a value, or its override if there is one, in `TAPS`, and returns what it has sown."""
    if module.has_variable(OVERRIDES, name):
        value = module.get_variable(OVERRIDES, name)
    sow_tap(module, name, value)
    return value


def sow_tap(module: nn.Module, name: str, value: jax.Array) -> None:
    """Sows a value in `TAPS` if the collection is mutable."""
    if module.is_mutable_collection(TAPS) and not module.is_initializing():
        module.sow(TAPS, name, value, reduce_fn=lambda _, new: new, init_fn=lambda: None)
