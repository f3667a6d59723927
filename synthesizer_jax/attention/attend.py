"""The entry point of attention: checks arguments and selects a route."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from synthesizer_jax.attention.banded import attend_banded
from synthesizer_jax.attention.checks import check, check_weights
from synthesizer_jax.attention.cudnn import attend_cudnn
from synthesizer_jax.attention.cudnn import obstacle as cudnn_obstacle
from synthesizer_jax.attention.explain import Explanation, explain_call
from synthesizer_jax.attention.fused import attend_fused
from synthesizer_jax.attention.fused import kernel_of as fused_kernel_of
from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.packed import DENSER, attend_unpacked, by_position, unpacked_lengths
from synthesizer_jax.attention.partition import (
    Partition,
    axes_along,
    axes_of_type,
    in_auto_mode,
)
from synthesizer_jax.attention.parts import vary_alike
from synthesizer_jax.attention.reference import attend_reference, weigh
from synthesizer_jax.attention.static import attend_static
from synthesizer_jax.attention.static import kernel_of as static_kernel_of
from synthesizer_jax.attention.terms import Banded, LowRank, Outer, Split, Terms

ROUTES = {
    "static": attend_static,
    "fused": attend_fused,
    "banded": attend_banded,
    "cudnn": attend_cudnn,
    "reference": attend_reference,
}

KERNELS = {"static": static_kernel_of, "fused": fused_kernel_of}
"""What runs a route on a platform, and why not kernels."""

SMALL = 128 * 128
"""Up to this many logits per head and example, the logits take about as much memory as queries, keys and
values, so that the reference route is used."""

FEW_SEGMENTS = (
    f"in packed rows it needs Mask.segments, no Mask.allowed, and segments · segment_length² of at most "
    f"{DENSER} times the square of the row's length"
)


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
    """Attention, ``out[b, q, h] = Σ_k softmax_k(Σ terms)[b, h, q, k] · values[b, k, h]``.

    Logits and softmax are float32 or wider. A query that is padding, and one without a key, gets
    zeros and gives no gradient. All routes give the same answer, up to rounding:

    * ``static``, for parameters only (`Static`, `Relative`, parameters' `LowRank`): one softmax for
      all examples; falls back to the fused route where that could lose digits.
    * ``fused``: blocks of one head and example, recomputed in the backward pass.
    * ``banded``, for `Banded` weights: shifts of the values, cost linear in the length.
    * ``cudnn``: cuDNN's attention on NVIDIA GPUs, for float16 and bfloat16 (`attention.cudnn`). ``auto``
      does not choose it, because it has not been measured yet.
    * ``reference``: all logits in memory.

    Derivatives of every order and mode exist on every route. First-order reverse mode is hand-written;
    forward mode and higher orders go block by block too, on all but the reference route, and take longer.

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
    """
    if axes_of_type(AxisType.Explicit):
        return _attend_in_auto_mode(
            terms,
            values,
            mask,
            dropout_key,
            partition=partition,
            q_length=q_length,
            dropout_rate=dropout_rate,
            implementation=implementation,
        )
    terms, values, mask, q_length = check(terms, values, mask, q_length)
    batch, k_length, heads, width = values.shape
    if 0 in (batch, q_length, k_length, heads, width):
        return jnp.zeros((batch, q_length, heads, width), values.dtype)
    values = drop_values(values, dropout_rate, dropout_key)
    if isinstance(terms[0], Split):
        options: Any = {"implementation": implementation, "partition": partition}
        return _attend_groups(terms[0], values, mask, q_length=q_length, **options)
    plan = make_plan(terms, values, mask, q_length, implementation)

    def run(terms: Terms, values: jax.Array, mask: Mask, q_length: int) -> jax.Array:
        route = ROUTES[plan.route]
        function = functools.partial(attend_unpacked, route) if plan.unpack else route
        terms, values, mask = vary_alike(terms, values, mask)
        return function(terms, values, mask=mask, q_length=q_length)

    divide = (
        partition is not None and partition.names and (plan.unpack or plan.route != "reference")
    )
    note(plan, terms, values, mask, q_length, partition if divide else None, run)
    if partition is not None and divide:
        return partition.spread(run, q_length)(terms, values, mask)
    return run(terms, values, mask, q_length)


def note(
    plan: Plan,
    terms: Terms,
    values: jax.Array,
    mask: Mask,
    q_length: int,
    partition: Partition | None,
    run: Callable[..., jax.Array],
) -> None:
    """Explains a call to the log, and to `explain` where that asks."""
    platform = jax.default_backend()
    batch, k_length, heads, _ = values.shape

    def make() -> Explanation:
        kernel, obstacles = "matrix products", dict(plan.obstacles)
        obstacles.setdefault("cudnn", "it runs only where it is asked for, implementation='cudnn'")
        obstacles.pop(plan.route, None)
        if plan.route == "cudnn":
            kernel = "cuDNN"
        if plan.route in KERNELS:
            kernel, why = KERNELS[plan.route](terms, values, mask, q_length, platform)
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

    def kept() -> Any:
        return jax.vjp(lambda *x: run(*x, mask, q_length), terms, values)[1]

    explain_call(make, kept)


def _attend_in_auto_mode(
    terms: Terms,
    values: jax.Array,
    mask: Mask | jax.Array | None,
    dropout_key: jax.Array | None,
    *,
    partition: Partition | None,
    **options: Any,
) -> jax.Array:
    """`attend` where mesh axes are explicit: divided as the types of its arguments say."""
    if partition is None or not partition.names:
        queries = [x for t in terms for x in jax.tree.leaves(t) if x.ndim == 4][:1]
        partition = Partition(
            batch=axes_along(values, 0),
            heads=axes_along(values, 2),
            sequence=axes_along(queries[0], 1) if queries else (),
        )
    spec = PartitionSpec(partition.batch, partition.sequence, partition.heads)

    def call(terms: Terms, values: jax.Array, mask: Any, dropout_key: Any) -> jax.Array:
        return attend(
            terms, values, mask=mask, dropout_key=dropout_key, partition=partition, **options
        )

    return in_auto_mode(call, lambda _: spec)(terms, values, mask, dropout_key)


def attention_weights(
    terms: Terms,
    *,
    mask: Mask | jax.Array | None = None,
    q_length: int | None = None,
    k_length: int | None = None,
) -> jax.Array:
    """The attention weights, for reports.

    Args:
      terms: as in `attend`.
      mask: as in `attend`.
      q_length: number of queries; needed where all terms are `Relative`.
      k_length: number of keys; needed where no term has an axis of keys.

    Returns:
      ``[b or 1, h, q, k]`` float32 or wider; rows sum to one, or to zero where a query is padding
      or sees no key.
    """
    terms, mask, q_length, k_length = check_weights(terms, mask, q_length, k_length)
    return weigh(terms, mask=mask, q_length=q_length, k_length=k_length)


def _attend_groups(
    split: Split, values: jax.Array, mask: Mask, *, q_length: int, **options: Any
) -> jax.Array:
    """`attend` for every group of heads by itself."""
    parts, start = [], 0
    for terms, count in zip(split.groups, split.heads, strict=True):
        part, own = mask.head_group(start, count), values[:, :, start : start + count]
        parts.append(attend(terms, own, mask=part, q_length=q_length, **options))
        start += count
    return jnp.concatenate(parts, axis=2)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How attention is computed.

    Attributes:
      route: a name of `ROUTES`.
      unpack: whether the examples of packed rows become rows of their own first.
      obstacles: why routes cannot run, by name; those that can are left out.
    """

    route: str
    unpack: bool
    obstacles: dict[str, str]


def make_plan(
    terms: Terms, values: jax.Array, mask: Mask, q_length: int, implementation: str = "auto"
) -> Plan:
    """Chooses the route.

    Raises:
      ValueError: `implementation` is unknown, or cannot do what is asked.
    """
    if implementation != "auto" and implementation not in ROUTES:
        raise ValueError(
            f"attend: implementation={implementation!r}; allowed: auto, {', '.join(ROUTES)}"
        )
    k_length, packed = values.shape[1], mask.query_segments is not None
    positional = packed and any(any(by_position(t, mask)) for t in terms)
    lengths = unpacked_lengths(mask, q_length, k_length) if packed else None
    obstacles = _obstacles(terms, mask, positional=positional, unpacks=lengths is not None)
    why_not = FEW_SEGMENTS if positional and lengths is None else cudnn_obstacle(terms, values)
    obstacles |= {"cudnn": why_not} if why_not else {}
    chosen = implementation
    if implementation == "auto":
        q, k = lengths if lengths and positional else (q_length, k_length)
        small = ["reference", "fused"] if q * k <= SMALL else ["fused", "reference"]
        chosen = next(r for r in ("banded", "static", *small) if r not in obstacles)
    if chosen in obstacles:
        raise ValueError(
            f"attend: implementation={implementation!r} is not possible here: {obstacles[chosen]}; "
            "use 'auto'"
        )
    unpack = lengths is not None and (positional or chosen in ("static", "cudnn"))
    return Plan(chosen, unpack and implementation != "reference", obstacles)


def _obstacles(terms: Terms, mask: Mask, *, positional: bool, unpacks: bool) -> dict[str, str]:
    """Why routes cannot run; see `Plan`."""
    packed, few = mask.query_segments is not None, FEW_SEGMENTS
    if any(isinstance(t, Banded) for t in terms):
        weights = "Banded terms are weights without a softmax"
        banded = {"banded": few} if positional and not unpacks else {}
        return {"static": weights, "fused": weights, **banded}
    found = {"banded": "it takes one Banded term, which is weights and not logits"}
    made = [
        t
        for t in terms
        if isinstance(t, Outer) or (isinstance(t, LowRank) and (t.token_queries or t.token_keys))
    ]
    if made:
        found["static"] = f"a {type(made[0]).__name__} term is made from tokens"
    elif mask.allowed is not None:
        found["static"] = "Mask.allowed may differ between examples"
    elif packed and not unpacks:
        found["static"] = few
    return found


def drop_values(values: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """T5's dropout of attention weights, as dropout of whole values; see `attend`.

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
