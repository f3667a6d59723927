"""Mixers: whole token-mixing sub-layers, ``[batch, length, d_model]`` in and out."""

import flax.linen as nn

from synthesizer_jax.mixers.attention import Attention, NewCache

MIXERS: dict[str, type[nn.Module]] = {"Attention": Attention}

__all__ = ["MIXERS", "Attention", "NewCache"]
