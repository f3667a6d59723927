"""Rotary positions, which rotate pairs of features by their position (Su et al. 2021, RoFormer)."""

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
    """Divides rotary positions by a factor (position interpolation, Chen et al. 2023).

    Attributes:
      factor: the number by which positions are divided.
    """

    factor: Positive

    def __post_init__(self) -> None:
        check_fields(self)

    def slow_down(self, speed: jax.Array, *, base: float) -> jax.Array:
        """Returns the scaled angular speed of every pair of features, ``[width / 2]``.

        Args:
          speed: the angular speed of every pair before scaling, in radians per position,
            ``[width / 2]``.
          base: the base of the rotary positions, which this class does not use.
        """
        return speed / self.factor

    @property
    def magnitude(self) -> float:
        """The factor by which rotated queries and keys are multiplied."""
        return 1.0


@register
@dataclasses.dataclass(frozen=True)
class YaRN:
    """Slows down the pairs of features that rotate slowly, and makes the logits larger.

    YaRN is described by Peng et al. 2023, sections 3.2 and 3.4. Pairs that turn at least `fast`
    times in `original_length` positions keep their speed. Pairs that turn at most `slow` times are
    slowed down by `factor`. Pairs that turn between `slow` and `fast` times are slowed down
    partially.

    In the paper, the slowdown between `slow` and `fast` is linear in the number of turns. In
    `YaRN`, as in the authors' code and in transformers, the slowdown is linear in the index of the
    pair. The linear ramp starts at the last index before the pair that turns `fast` times. The ramp
    ends at the first index after the pair that turns `slow` times.

    Attributes:
      factor: the new maximum length divided by `original_length`, which the paper calls s.
      original_length: the length of the longest text in the original training.
      fast: the number of turns from which pairs keep their speed, which the paper calls β.
      slow: the number of turns up to which pairs are slowed down fully, which the paper calls α.
      attention_factor: the factor by which rotated queries and keys are multiplied, which the paper
        calls 1/√t. None means ``0.1 ln(s) + 1``, where s is `factor`.
    """

    factor: Positive
    original_length: Length
    fast: Positive = 32.0
    slow: Positive = 1.0
    attention_factor: Positive | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def slow_down(self, speed: jax.Array, *, base: float) -> jax.Array:
        """Returns the scaled angular speed of every pair of features, ``[width / 2]``.

        Args:
          speed: the angular speed of every pair before scaling, in radians per position,
            ``[width / 2]``.
          base: the base of the rotary positions.
        """
        width = 2 * len(speed)
        # `turns` is the number of turns of a pair that rotates by one radian per position.
        turns = self.original_length / (2 * math.pi)

        def index_of(count: float) -> float:
            """Returns the index i of the pair that turns `count` times.

            The index is the solution i of ``count = turns · base^(-2 i / width)``.
            """
            return width * math.log(turns / count) / (2 * math.log(base))

        low = max(math.floor(index_of(self.fast)), 0)
        high = min(math.ceil(index_of(self.slow)), width - 1)

        # Pairs up to index `low` keep their speed, pairs from `high` on are slowed down fully, and
        # all other pairs are slowed down partially.
        distance = high - low if high != low else 0.001
        ramp = (jnp.arange(width // 2, dtype=speed.dtype) - low) / distance
        share = jnp.clip(ramp, 0, 1)
        return speed * (share / self.factor + 1 - share)

    @property
    def magnitude(self) -> float:
        """The factor by which rotated queries and keys are multiplied."""
        return self.attention_factor or 0.1 * math.log(max(self.factor, 1.0)) + 1.0


def rotate(
    x: jax.Array,
    position: int | jax.Array,
    *,
    base: float,
    share: float = 1.0,
    scaling: LinearScaling | YaRN | None = None,
) -> jax.Array:
    """Rotates pairs of features by their position, so that dot products depend on distances.

    The function rotates the first w features, where w is `share` times the number of features,
    rounded down. Features i and ``i + w / 2`` form a pair. The features from index w on do not
    change.

    Args:
      x: queries or keys, ``[batch, n, heads, width]``.
      position: the position of the first of the n tokens, or the positions of all n tokens,
        ``[batch, n]``.
      base: pair i turns by ``base^(-2 i / w)`` radians per position.
      share: the share of the features that is rotated.
      scaling: changes the speed of the pairs and the magnitude of the result. None means no change.

    Returns:
      An array with the shape and dtype of `x`.

    Raises:
      ValueError: if w is zero or odd.
    """
    length = x.shape[1]
    width = int(x.shape[-1] * share)
    if width % 2 or not width:
        raise ValueError(
            f"DotProduct: head_dim is {x.shape[-1]} and rotary_share is {share}, so {width} "
            "features would be rotated. Their number must be even and greater than 0."
        )
    dtype = logits_dtype(x)
    speed = base ** (-jnp.arange(0, width, 2, dtype=dtype) / width)  # [w / 2]
    if scaling is not None:
        speed = scaling.slow_down(speed, base=base)
    if jnp.ndim(position) == 0:
        position = (position + jnp.arange(length))[None]  # [1, n]
    # [b or 1, n, 1, w / 2]
    angle = jnp.asarray(position, dtype)[..., None, None] * speed[None, None, None]
    first, second = jnp.split(x[..., :width].astype(dtype), 2, axis=-1)  # [b, n, h, w / 2] each
    cos = jnp.cos(angle)
    sin = jnp.sin(angle)
    if scaling is not None and scaling.magnitude != 1.0:
        cos = cos * scaling.magnitude
        sin = sin * scaling.magnitude
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([rotated.astype(x.dtype), x[..., width:]], axis=-1)
