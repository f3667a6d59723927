"""The entry point of attention: checks arguments and selects a route."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from synthesizer_jax.attention.banded import attend_banded
from synthesizer_jax.attention.banded import obstacle as banded_obstacle
from synthesizer_jax.attention.checks import check_arguments, check_weights
from synthesizer_jax.attention.explanations import Explanation, explained_platform, log_call
from synthesizer_jax.attention.fused import attend_fused
from synthesizer_jax.attention.fused import obstacle as fused_obstacle
from synthesizer_jax.attention.fused import select_kernel as select_fused_kernel
from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.packed import (
    DENSER,
    attend_unpacked,
    has_absolute_positions,
    unpacked_lengths,
)
from synthesizer_jax.attention.partition import (
    Partition,
    Route,
    axes_along,
    axes_of_type,
    in_auto_mode,
)
from synthesizer_jax.attention.parts import match_varying_axes
from synthesizer_jax.attention.reference import attend_reference, softmax_weights
from synthesizer_jax.attention.static import attend_static
from synthesizer_jax.attention.static import obstacle as static_obstacle
from synthesizer_jax.attention.static import select_kernel as select_static_kernel
from synthesizer_jax.attention.terms import Split, Terms
from synthesizer_jax.typing import PyTree

ROUTES = {
    "static": attend_static,
    "fused": attend_fused,
    "banded": attend_banded,
    "reference": attend_reference,
}

OBSTACLES: dict[str, Callable[[Terms, Mask], str | None]] = {
    "static": static_obstacle,
    "fused": fused_obstacle,
    "banded": banded_obstacle,
}
"""Why a route cannot take terms and a mask; None: it can."""

KERNELS = {"static": select_static_kernel, "fused": select_fused_kernel}
"""What runs a route on a platform, and why not kernels."""

FEW_LOGITS = 128 * 128
"""Up to this many logits per head and example, the logits take about as much memory as queries, keys and
values, so that the reference route is used."""

FEW_SEGMENTS = (
    f"in packed rows it needs Mask.segments, no Mask.allowed, and segments · segment_length² of at most "
    f"{DENSER} times the square of the row's length"
)


_Arguments: TypeAlias = tuple[Terms, jax.Array, Mask | jax.Array | None, jax.Array | None]
"""Terms, values, mask and key of the dropout."""


def attend(
    terms: Terms,
    values: jax.Array,
    *,
    mask: Mask | jax.Array | None = None,
    q_length: int | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    implementation: str = "auto",
    partition: Partition | None = None,
) -> jax.Array:
    """Computes attention, ``out[b, q, h] = Σ_k softmax_k(Σ terms)[b, h, q, k] · values[b, k, h]``.

    Logits and softmax are float32 or wider. A query that is padding, and one without a key, gets
    zeros and gives no gradient. All routes give the same answer, up to rounding:

    * ``static``, for parameters only (`Static`, `Relative`, parameters' `LowRank`): one softmax for
      all examples; falls back to the fused route where that could lose digits.
    * ``fused``: blocks of one head and example, recomputed in the backward pass.
    * ``banded``, for `Banded` weights: shifts of the values, cost linear in the length.
    * ``reference``: all logits in memory.

    Gradients are hand-written, and of first order; forward mode and higher orders exist on the reference
    route only.

    Args:
      terms: the terms of the logits, for q queries and k keys.
      values: ``[b, k, h, e]``.
      mask: which keys a query may see; None: all. An array is as in `Mask.of`.
      q_length: number of queries; needed where all terms are `Relative`.
      dropout_rate: probability of dropping a weight. The draw is T5's, one per example, key and
        head, shared by the queries: that is dropout of whole values after the softmax, scaled by
        ``1 / (1 - rate)``.
      dropout_key: key of that draw; None: no dropout.
      implementation: a route, or ``auto`` for the fastest.
      partition: the axes of the surrounding mesh that divide examples, heads and queries; None: where
        mesh axes are explicit, as the types of the arguments say; otherwise the compiler decides.

    Returns:
      ``[b, q, h, e]`` in the values' dtype.

    Raises:
      ValueError: for shapes that do not agree, an unknown `implementation`, or one that cannot do
        what is asked.
      TypeError: for derivatives other than gradients, on a route other than ``reference``.
    """
    if axes_of_type(AxisType.Explicit):
        return _attend_in_auto_mode(
            terms,
            values,
            mask,
            dropout_key=dropout_key,
            partition=partition,
            q_length=q_length,
            dropout_rate=dropout_rate,
            implementation=implementation,
        )
    terms, values, mask, q_length = check_arguments(terms, values, mask, q_length=q_length)
    batch, k_length, heads, width = values.shape
    if 0 in (batch, q_length, k_length, heads, width):
        return jnp.zeros((batch, q_length, heads, width), values.dtype)
    values = drop_value_vectors(values, dropout_rate, dropout_key)
    if isinstance(terms[0], Split):
        return _attend_groups(
            terms[0],
            values,
            mask,
            q_length=q_length,
            implementation=implementation,
            partition=partition,
        )
    plan = _select_route(terms, values, mask, q_length=q_length, implementation=implementation)

    def run(terms: Terms, values: jax.Array, mask: Mask, *, q_length: int) -> jax.Array:
        route = ROUTES[plan.route]
        function = functools.partial(attend_unpacked, route) if plan.unpack else route
        terms, values, mask = match_varying_axes(terms, values, mask)
        return function(terms, values, mask=mask, q_length=q_length)

    if partition and (not partition.axis_names or (plan.route == "reference" and not plan.unpack)):
        partition = None  # the compiler divides the reference route itself
    _log_route(plan, run, terms, values=values, mask=mask, q_length=q_length, partition=partition)
    if partition is not None:
        return partition.shard_route(run, q_length)(terms, values, mask)
    return run(terms, values, mask, q_length=q_length)


def _log_route(
    plan: _RouteChoice,
    run: Route,
    terms: Terms,
    *,
    values: jax.Array,
    mask: Mask,
    q_length: int,
    partition: Partition | None,
) -> None:
    """Explains a call to the log, and to `explain`."""
    platform = explained_platform()
    batch, k_length, heads, _ = values.shape

    def make() -> Explanation:
        kernel, obstacles = "matrix products", dict(plan.obstacles)
        obstacles.pop(plan.route, None)
        if plan.route in KERNELS:
            kernel, why = KERNELS[plan.route](
                terms, values, mask, q_length=q_length, platform=platform
            )
            obstacles |= {"kernels": why} if why else {}
        divided = {} if partition is None else dataclasses.asdict(partition)
        return Explanation(
            route=plan.route,
            kernel=kernel,
            platform=platform,
            shape=(batch, q_length, k_length, heads),
            unpacked=plan.unpack,
            divided={name: axes for name, axes in divided.items() if axes},
            kept_bytes=None,
            obstacles=obstacles,
        )

    def residuals() -> PyTree:
        return jax.vjp(lambda t, v: run(t, v, mask, q_length=q_length), terms, values)[1]

    log_call(make, residuals)


def _attend_in_auto_mode(
    terms: Terms,
    values: jax.Array,
    mask: Mask | jax.Array | None,
    *,
    dropout_key: jax.Array | None,
    q_length: int | None,
    dropout_rate: float,
    implementation: str,
    partition: Partition | None,
) -> jax.Array:
    """Computes `attend` where mesh axes are explicit, partitioned as the types of its arguments say."""
    if partition is None or not partition.axis_names:
        queries = [x for t in terms for x in jax.tree.leaves(t) if x.ndim == 4][:1]
        partition = Partition(
            batch=axes_along(values, 0),
            heads=axes_along(values, 2),
            sequence=axes_along(queries[0], 1) if queries else (),
        )
    spec = PartitionSpec(partition.batch, partition.sequence, partition.heads)

    def call(arguments: _Arguments) -> jax.Array:
        terms, values, mask, dropout_key = arguments
        return attend(
            terms,
            values,
            mask=mask,
            q_length=q_length,
            dropout_rate=dropout_rate,
            dropout_key=dropout_key,
            implementation=implementation,
            partition=partition,
        )

    return in_auto_mode(call, lambda _: spec)((terms, values, mask, dropout_key))


def attention_weights(
    terms: Terms,
    *,
    mask: Mask | jax.Array | None = None,
    q_length: int | None = None,
    k_length: int | None = None,
) -> jax.Array:
    """Returns the attention weights, for reports.

    Args:
      terms: as in `attend`.
      mask: as in `attend`.
      q_length: number of queries; needed where all terms are `Relative`.
      k_length: number of keys; needed where no term has an axis of keys.

    Returns:
      ``[b or 1, h, q, k]`` float32 or wider; rows sum to one, or to zero where a query is padding
      or sees no key.
    """
    terms, mask, q_length, k_length = check_weights(terms, mask, q_length, k_length=k_length)
    return softmax_weights(terms, mask=mask, q_length=q_length, k_length=k_length)


def _attend_groups(
    split: Split,
    values: jax.Array,
    mask: Mask,
    *,
    q_length: int,
    implementation: str,
    partition: Partition | None,
) -> jax.Array:
    """Computes `attend` for every group of heads by itself."""
    parts = [
        attend(
            terms,
            values[:, :, start : start + count],
            mask=mask.take_heads(start, count),
            q_length=q_length,
            implementation=implementation,
            partition=partition,
        )
        for terms, start, count in split.slices()
    ]
    return jnp.concatenate(parts, axis=2)


@dataclasses.dataclass(frozen=True)
class _RouteChoice:
    """How attention is computed.

    Attributes:
      route: a name of `ROUTES`.
      unpack: whether the examples of packed rows become rows of their own first.
      obstacles: why routes cannot run, by name; those that can are left out.
    """

    route: str
    unpack: bool
    obstacles: dict[str, str]


def _select_route(
    terms: Terms, values: jax.Array, mask: Mask, *, q_length: int, implementation: str = "auto"
) -> _RouteChoice:
    """Chooses the route.

    Raises:
      ValueError: `implementation` is unknown, or cannot do what is asked.
    """
    if implementation != "auto" and implementation not in ROUTES:
        raise ValueError(
            f"attend: implementation={implementation!r}; allowed: auto, {', '.join(ROUTES)}"
        )
    k_length, packed = values.shape[1], mask.query_segments is not None
    positional = has_absolute_positions(terms, mask)
    lengths = unpacked_lengths(mask, q_length, k_length) if packed else None
    obstacles = _obstacles(terms, mask, positional=positional, unpacks=lengths is not None)
    chosen = implementation
    if implementation == "auto":
        q, k = lengths if lengths and positional else (q_length, k_length)
        small = ["reference", "fused"] if q * k <= FEW_LOGITS else ["fused", "reference"]
        chosen = next(r for r in ("banded", "static", *small) if r not in obstacles)
    if chosen in obstacles:
        raise ValueError(
            f"attend: implementation={implementation!r} is not possible here: {obstacles[chosen]}; "
            "use 'auto'"
        )
    unpack = lengths is not None and (positional or chosen == "static")
    return _RouteChoice(chosen, unpack and implementation != "reference", obstacles)


def _obstacles(terms: Terms, mask: Mask, *, positional: bool, unpacks: bool) -> dict[str, str]:
    """Returns why routes cannot run, see `_RouteChoice`."""
    obstacles = {name: obstacle(terms, mask) for name, obstacle in OBSTACLES.items()}
    packed = mask.query_segments is not None
    if not obstacles["banded"] and positional and not unpacks:
        obstacles["banded"] = FEW_SEGMENTS
    if not obstacles["static"] and packed and not unpacks:
        obstacles["static"] = FEW_SEGMENTS
    return {name: why for name, why in obstacles.items() if why}


def drop_value_vectors(values: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Drops whole value vectors, T5's dropout of attention weights; see `attend`.

    Args:
      values: ``[b, k, h, e]``.
      rate: probability of dropping a value; the others are multiplied by ``1 / (1 - rate)``.
      key: of the draw; None: no dropout.
    """
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"attend: dropout_rate={rate}; it must be at least 0 and below 1")
    if rate == 0.0 or key is None:
        return values
    keep = jax.random.bernoulli(key, 1.0 - rate, values.shape[:3])
    return jnp.where(keep[..., None], values / (1.0 - rate), 0)
