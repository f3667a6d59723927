"""Rotary positions: pairs of features that turn by their position (Su et al. 2021, RoFormer)."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from synthesizer_jax.attention.terms import logits_dtype
from synthesizer_jax.base.registry import check_fields, register
from synthesizer_jax.base.typing import Length, Positive


@register
@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Positions divided by a factor, "position interpolation" (Chen et al. 2023)."""

    factor: Positive

    def __post_init__(self) -> None:
        check_fields(self)

    def slow_down(self, speed: jax.Array, *, base: float) -> jax.Array:
        """Returns the radians per position ``[width / 2]`` of every pair of features, of those without."""
        return speed / self.factor

    @property
    def magnitude(self) -> float:
        """The factor of rotated queries and keys."""
        return 1.0


@register
@dataclasses.dataclass(frozen=True)
class YaRN:
    """Slow pairs are scaled, fast ones are not, and logits grow (Peng et al. 2023, sections 3.2 and 3.4).

    As in the authors' code and in transformers, the share of scaling grows linearly with the number of the
    pair, from the last one below that turns `fast` times in `original_length` to the first one above that
    turns `slow` times; the paper writes it linearly in the number of turns.

    Attributes:
      factor: the scale s: the length to reach, divided by `original_length`.
      original_length: the longest text in training before.
      fast: β of the paper.
      slow: α of the paper.
      attention_factor: factor of rotated queries and keys, 1/√t of the paper; None: 0.1 ln s + 1.
    """

    factor: Positive
    original_length: Length
    fast: Positive = 32.0
    slow: Positive = 1.0
    attention_factor: Positive | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def slow_down(self, speed: jax.Array, *, base: float) -> jax.Array:
        """Returns the radians per position ``[width / 2]`` of every pair of features, of those without."""
        width = 2 * len(speed)
        turns = self.original_length / (2 * math.pi)  # of a pair of one radian per position
        low, high = (
            width * math.log(turns / count) / (2 * math.log(base)) for count in (self.fast, self.slow)
        )
        low, high = max(math.floor(low), 0), min(math.ceil(high), width - 1)
        ramp = (jnp.arange(width // 2, dtype=speed.dtype) - low) / (high - low if high != low else 0.001)
        share = jnp.clip(ramp, 0, 1)
        return speed * (share / self.factor + 1 - share)

    @property
    def magnitude(self) -> float:
        """The factor of rotated queries and keys."""
        return self.attention_factor or 0.1 * math.log(max(self.factor, 1.0)) + 1.0


def rotate(
    x: jax.Array,
    position: int | jax.Array,
    *,
    base: float,
    share: float = 1.0,
    scaling: LinearScaling | YaRN | None = None,
) -> jax.Array:
    """Rotates pairs of features by their position, so that products depend on distances.

    Args:
      x: ``[batch, n, heads, width]``; of the first `share` of the features, rounded down, w in number,
        feature i and ``i + w / 2`` are a pair, and the others stay.
      position: that of the first of the n tokens, or those of all, ``[batch, n]``.
      base: pair i turns by ``base^(-2 i / w)`` radians per position.
      scaling: changes that.

    Raises:
      ValueError: w is zero or odd.
    """
    length, width = x.shape[1], int(x.shape[-1] * share)
    if width % 2 or not width:
        of_share = "" if share == 1 else f" · rotary_share={share}"
        raise ValueError(f"DotProduct: rotary positions need an even head_dim, not {x.shape[-1]}{of_share}")
    dtype = logits_dtype(x)
    speed = base ** (-jnp.arange(0, width, 2, dtype=dtype) / width)  # [w / 2]
    if scaling is not None:
        speed = scaling.slow_down(speed, base=base)
    if jnp.ndim(position) == 0:
        position = (position + jnp.arange(length))[None]
    # [b or 1, n, 1, w / 2]
    angle = jnp.asarray(position, dtype)[..., None, None] * speed[None, None, None]
    first, second = jnp.split(x[..., :width].astype(dtype), 2, axis=-1)  # [b, n, h, w / 2] each
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if scaling is not None and scaling.magnitude != 1.0:
        cos, sin = cos * scaling.magnitude, sin * scaling.magnitude
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([rotated.astype(x.dtype), x[..., width:]], axis=-1)
