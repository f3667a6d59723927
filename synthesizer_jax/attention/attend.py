"""The entry point of attention: checks arguments and selects a route."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from synthesizer_jax.attention.banded import attend_banded
from synthesizer_jax.attention.banded import obstacle as banded_obstacle
from synthesizer_jax.attention.explanations import Explanation, explained_platform, log_call
from synthesizer_jax.attention.fused import attend_fused
from synthesizer_jax.attention.fused import kernel_obstacle as fused_kernel_obstacle
from synthesizer_jax.attention.fused import obstacle as fused_obstacle
from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.mesh_axes import axes_along, match_varying_axes
from synthesizer_jax.attention.packed import (
    MAX_UNPACKING_FACTOR,
    attend_unpacked,
    cover_distances,
    unpacked_lengths,
)
from synthesizer_jax.attention.partition import Partition, partition_by_types
from synthesizer_jax.attention.reference import attend_reference, softmax_weights
from synthesizer_jax.attention.static import attend_static
from synthesizer_jax.attention.static import kernel_obstacle as static_kernel_obstacle
from synthesizer_jax.attention.static import obstacle as static_obstacle
from synthesizer_jax.attention.terms import (
    Call,
    LowRank,
    Relative,
    Split,
    Static,
    Term,
    Terms,
    repeat_heads,
    stands_alone,
    uses_segment_positions,
)
from synthesizer_jax.base.typing import PyTree

ROUTES: dict[str, Callable[[Call], jax.Array]] = {
    "static": attend_static,
    "fused": attend_fused,
    "banded": attend_banded,
    "reference": attend_reference,
}
"""Functions by name; `_select_route` has the order in which they are tried."""

OBSTACLES: dict[str, Callable[[Call], str | None]] = {
    "static": static_obstacle,
    "fused": fused_obstacle,
    "banded": banded_obstacle,
}
"""Why a route cannot take a call; None: it can."""

PLAIN = {
    "reference": "matrix products",
    "static": "matrix products",
    "fused": "a loop over blocks of logits",
    "banded": "sums of shifted values",
}
"""What runs a route where there are no kernels, for explanations."""

KERNELS: dict[str, dict[str, Callable[[Call], str | None]]] = {
    "tpu": {
        "static": static_kernel_obstacle,
        "fused": functools.partial(fused_kernel_obstacle, platform="tpu"),
    },
    "gpu": {"fused": functools.partial(fused_kernel_obstacle, platform="gpu")},
}
"""Why the kernels of a platform cannot run a route, for explanations; None: they can.

The routes themselves choose what runs, when a program is lowered for a platform.
"""

FEW_LOGITS = 128 * 128
"""Up to this many logits per head and example, the logits take about as much memory as queries, keys and
values, so that the reference route is used."""

FEW_SEGMENTS = (
    f"in packed rows it needs Mask.segments, no Mask.allowed, and segments · segment_length² of at most "
    f"{MAX_UNPACKING_FACTOR} times the square of the row's length"
)


def _partition_of_types(terms: Terms, values: jax.Array, **_: PyTree) -> Partition:
    """Returns the explicit mesh axes that divide examples, heads and queries."""
    queries = [x for term in terms for x in jax.tree.leaves(term) if x.ndim == 4][:1]
    return Partition(
        batch=axes_along(values, 0),
        heads=axes_along(values, 2),
        sequence=axes_along(queries[0], 1) if queries else (),
    )


@partition_by_types(_partition_of_types)
def attend(
    terms: Terms,
    values: jax.Array,
    *,
    mask: Mask | jax.Array | None = None,
    q_length: int | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    implementation: str = "auto",
    partition: Partition | None = None,
) -> jax.Array:
    """Computes attention, ``out[b, q, h] = Σ_k softmax_k(Σ terms)[b, h, q, k] · values[b, k, h]``.

    Logits and softmax are float32 or wider, rounded to the values' dtype where they multiply the values.
    A query that is padding, and one without a key, gets zeros and gives no gradient. All routes give
    the same answer, up to rounding:

    * ``static``, for parameters only (`Static`, `Relative`, parameters' `LowRank`): one softmax for
      all examples; falls back to the fused route where that could lose digits.
    * ``fused``: blocks of one head and example, recomputed in the backward pass.
    * ``banded``, for `Banded` weights: shifts of the values, cost linear in the length.
    * ``reference``: all logits in memory.

    Gradients are hand-written and first-order only; forward mode and higher orders exist on the reference
    route only.

    Args:
      terms: the terms of the logits, for q queries and k keys.
      values: ``[b, k, h, e]``, or fewer heads, each shared by as many neighboring heads of the terms.
      mask: which keys a query may see; None: all. An array is as in `Mask.of`.
      q_length: number of queries; needed where all terms are `Relative`.
      dropout_rate: probability of dropping a weight. The draw is T5's, one per example, key and
        head, shared by the queries: that is dropout of whole values after the softmax, scaled by
        ``1 / (1 - rate)``.
      dropout_key: key of that draw; None: no dropout.
      soft_cap: logits x become ``soft_cap · tanh(x / soft_cap)`` (Gemma 2, 2024); None: they stay, as
        weights (`Banded`) do.
      sinks: ``[h]``, logits of one more key for each head, whose value is zero, so that a query may attend
        to nothing (gpt-oss, 2025); None: there is none. Weights (`Banded`) have none.
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
    if soft_cap is not None and not (soft_cap := float(soft_cap)) > 0.0:
        raise ValueError(f"attend: soft_cap={soft_cap} must be positive; None caps nothing")

    call = _make_call(terms, values, mask, q_length)
    batch, k_length, heads, width = call.values.shape
    if 0 in (batch, call.q_length, k_length, heads, width):
        return jnp.zeros((batch, call.q_length, heads, width), values.dtype)
    values = drop_value_vectors(call.values, dropout_rate, dropout_key)
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"attend: sinks have shape {sinks.shape}; it must be [{heads}]")
    call = dataclasses.replace(call, values=values, soft_cap=soft_cap, sinks=sinks)
    outputs = [_run_route(group, implementation, partition) for group in _groups_of_heads(call)]
    return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=2)


def _make_call(
    terms: Terms, values: jax.Array, mask: Mask | jax.Array | None, q_length: int | None
) -> Call:
    """Checks the arguments of `attend`, and returns them as the routes take them.

    Heads that are shared are repeated. The mask's arrays have their full shapes.
    """
    if jnp.ndim(values) != 4:
        raise ValueError(f"attend: values have shape {jnp.shape(values)}; it must be [batch, k, heads, e]")
    batch, k_length, heads, _ = values.shape
    terms, mask, q_length, _ = _checked(terms, mask, q_length, k_length, batch=batch, heads=heads)

    def prepare(term: Term) -> Term:
        if isinstance(term, LowRank):
            return dataclasses.replace(term, keys=repeat_heads(term.keys, term.num_heads))
        return term

    return Call(tuple(map(prepare, terms)), repeat_heads(values, terms[0].num_heads), mask, q_length)


def _checked(
    terms: Terms,
    mask: Mask | jax.Array | None,
    q_length: int | None,
    k_length: int | None,
    *,
    batch: int | None = None,
    heads: int | None = None,
) -> tuple[Terms, Mask, int, int]:
    """Returns checked terms, the mask with its full shapes, and the numbers of queries and keys."""
    check_terms(terms)
    terms, mask = tuple(map(_as_float, terms)), Mask.of(mask)
    num_heads = terms[0].num_heads
    if heads is None or (heads and num_heads % heads == 0):  # values' heads may be shared
        heads = num_heads
    for q, k in (term.lengths for term in terms):
        q_length = q if q_length is None else q_length
        k_length = k if k_length is None else k_length
    if q_length is None or k_length is None:
        name = "q_length" if q_length is None else "k_length"
        raise ValueError(f"attention: no term tells how long the rows are; give {name}")
    if batch is None:
        of_mask = [x.shape[0] for x in jax.tree.leaves(mask) if jnp.ndim(x)]
        batch = max([1, *of_mask, *(term.batch for term in terms)])
    sizes = {"batch": batch, "heads": heads, "q_length": q_length, "k_length": k_length}
    mask = mask.broadcast_to(**sizes)
    for term in terms:
        check_term(term, mask, **sizes)
    if mask.query_segments is not None:
        terms = cover_distances(terms, mask, q_length, k_length)
    return terms, mask, q_length, k_length


def _as_float(term: Term) -> Term:
    """Returns the term with integer logits as float32."""
    if not isinstance(term, Static | Relative) or jnp.issubdtype(term.logits.dtype, jnp.inexact):
        return term
    return dataclasses.replace(term, logits=term.logits.astype(jnp.float32))


def _groups_of_heads(call: Call) -> list[Call]:
    """Returns a call for every group of heads that has terms of its own."""
    (split, *_), values = call.terms, call.values
    if not isinstance(split, Split):
        return [call]
    groups = []
    for terms, start, count in split.slices():
        mask = call.mask.take_heads(start, count)
        part = values[:, :, start : start + count]
        group = _make_call(terms, part, mask, call.q_length)
        sinks = None if call.sinks is None else call.sinks[start : start + count]
        group = dataclasses.replace(group, soft_cap=call.soft_cap, sinks=sinks)
        groups += _groups_of_heads(group)
    return groups


def _run_route(call: Call, implementation: str, partition: Partition | None) -> jax.Array:
    """Selects a route, explains it, and runs it, on every device's part if there is a partition."""
    choice = _select_route(call, implementation)

    def run(call: Call) -> jax.Array:
        (call,) = match_varying_axes(call)
        route = ROUTES[choice.route]
        return attend_unpacked(route, call) if choice.unpack else route(call)

    _log_route(choice, run, call, partition)
    if partition and (not partition.axis_names or (choice.route == "reference" and not choice.unpack)):
        partition = None  # the compiler divides the reference route itself
    return run(call) if partition is None else partition.run(run, call)


class _RouteChoice(NamedTuple):
    """A route, whether packed rows are unpacked first, and why routes cannot run, by name."""

    route: str
    unpack: bool
    obstacles: dict[str, str]


def _select_route(call: Call, implementation: str) -> _RouteChoice:
    """Chooses the route, or raises a `ValueError` if `implementation` is unknown or impossible here."""
    if implementation != "auto" and implementation not in ROUTES:
        raise ValueError(f"attend: implementation={implementation!r}; allowed: auto, {', '.join(ROUTES)}")
    mask, packed = call.mask, call.mask.query_segments is not None
    positional = uses_segment_positions(call.terms, mask)
    lengths = unpacked_lengths(mask, call.q_length, call.k_length) if packed else None
    reasons = {name: obstacle(call) for name, obstacle in OBSTACLES.items()}
    for name, needs_rows in (("banded", positional), ("static", packed)):
        if needs_rows and lengths is None:
            reasons[name] = reasons[name] or FEW_SEGMENTS
    obstacles = {name: why for name, why in reasons.items() if why}
    chosen = implementation
    if implementation == "auto":
        q, k = lengths if lengths and positional else (call.q_length, call.k_length)
        small = ["reference", "fused"] if q * k <= FEW_LOGITS else ["fused", "reference"]
        chosen = next(r for r in ("banded", "static", *small) if r not in obstacles)
    if chosen in obstacles:
        raise ValueError(
            f"attend: implementation={implementation!r} is not possible here: {obstacles[chosen]}; "
            "use 'auto'"
        )
    unpack = lengths is not None and (positional or chosen == "static")
    return _RouteChoice(chosen, unpack and implementation != "reference", obstacles)


def _log_route(
    choice: _RouteChoice, run: Callable[[Call], jax.Array], call: Call, partition: Partition | None
) -> None:
    """Explains a call to the log, and to `explain`."""
    platform = explained_platform()

    def make() -> Explanation:
        kernel, obstacles = PLAIN[choice.route], dict(choice.obstacles)
        obstacles.pop(choice.route, None)
        if (find_obstacle := KERNELS.get(platform, {}).get(choice.route)) is not None:
            if why := _find_in_rows(choice, call, find_obstacle):
                obstacles["kernels"] = why
            else:
                kernel = "Pallas kernels"
        divided = {} if partition is None else dataclasses.asdict(partition)
        batch, k_length, heads, _ = call.values.shape
        return Explanation(
            route=choice.route,
            kernel=kernel,
            platform=platform,
            shape=(batch, call.q_length, k_length, heads),
            unpacked=choice.unpack,
            divided={name: axes for name, axes in divided.items() if axes},
            obstacles=obstacles,
        )

    def residuals() -> PyTree:
        of = lambda terms, values: run(dataclasses.replace(call, terms=terms, values=values))
        return jax.vjp(of, call.terms, call.values)[1]

    log_call(make, residuals)


def _find_in_rows(
    choice: _RouteChoice, call: Call, find_obstacle: Callable[[Call], str | None]
) -> str | None:
    """Returns the obstacle of the rows that the route runs on: those of the call, or its unpacked ones."""
    if not choice.unpack:
        return find_obstacle(call)
    found = []

    def route(rows: Call) -> jax.Array:
        found.append(find_obstacle(rows))
        return ROUTES[choice.route](rows)

    jax.eval_shape(functools.partial(attend_unpacked, route), call)
    return found[0]


def attention_weights(
    terms: Terms,
    *,
    mask: Mask | jax.Array | None = None,
    q_length: int | None = None,
    k_length: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Returns the attention weights, for reports.

    Args:
      terms: as in `attend`.
      mask: as in `attend`.
      q_length: number of queries; needed where all terms are `Relative`.
      k_length: number of keys; needed where no term has an axis of keys.
      soft_cap: as in `attend`.
      sinks: as in `attend`; their weights are left out.

    Returns:
      ``[b or 1, h, q, k]`` float32 or wider; rows sum to one, less the sink's weight, or to zero where a
      query is padding or sees no key.
    """
    terms, mask, q_length, k_length = _checked(terms, mask, q_length, k_length)
    return softmax_weights(
        terms, mask=mask, q_length=q_length, k_length=k_length, soft_cap=soft_cap, sinks=sinks
    )


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

    @functools.partial(jax.checkpoint, prevent_cse=False)  # keeps [b, k, h], not [b, k, h, e]
    def drop(values: jax.Array, keep: jax.Array) -> jax.Array:
        return jnp.where(keep[..., None], values / (1.0 - rate), 0)

    return drop(values, keep)


def check_terms(terms: object, *, of: str = "terms are", remedy: str = "return") -> None:
    """Raises a `TypeError` or a `ValueError` unless an object, which a message is `of`, is terms."""
    example = f"{remedy} a tuple of terms, such as (static(logits),)"
    if isinstance(terms, Term):
        raise TypeError(f"attend: {of} a bare {type(terms).__name__}; {example}")
    if not isinstance(terms, tuple | list):
        raise TypeError(f"attend: {of} of type {type(terms).__name__}; {example}")
    for term in terms:
        if isinstance(term, type):
            raise TypeError(f"attend: a term is the class {term.__name__}, not an object; {example}")
        if not isinstance(term, Term):
            raise TypeError(f"attend: a term is of type {type(term).__name__}; {example}")
    if not terms:
        raise ValueError("attend: terms are empty; give at least one")
    alone = [term for term in terms if stands_alone(term)]
    if alone and len(terms) > 1:
        raise ValueError(f"attend: a {type(alone[0]).__name__} term stands alone; see terms.add")


def check_term(term: Term, mask: Mask, *, batch: int, heads: int, q_length: int, k_length: int) -> None:
    """Raises a `ValueError` for a term that does not fit batch, heads, queries and keys."""
    name = f"attend: a {type(term).__name__} term"
    if term.num_heads != heads:
        raise ValueError(f"{name} is for {term.num_heads} heads, but the values have {heads}")
    if isinstance(term, Split):
        return  # its groups are checked one by one
    packed = mask.query_segments is not None
    shortest = mask.segment_lengths(q_length, k_length) if packed else (q_length, k_length)
    for own, length, least, positional in zip(
        term.lengths, (q_length, k_length), shortest, term.has_absolute_positions(mask), strict=True
    ):
        if own is not None and own != length and not (packed and positional and own >= least):
            q, k = term.lengths
            raise ValueError(
                f"{name} is for {q} queries and {k} keys, but there are {q_length} queries and "
                f"{k_length} values"
            )
    reached = term.num_keys_reached
    if reached is not None and reached < shortest[1]:
        factors = " · ".join(str(a.x.shape[-1]) for a in term.arrays())
        raise ValueError(
            f"{name} reaches {factors} keys, but there are {k_length} values; make its factors longer"
        )
    for a in term.arrays():
        if a.axes[0] == "b" and a.x.shape[0] not in (1, batch):
            raise ValueError(
                f"{name} holds an array of shape {a.x.shape}, but the values have batch {batch}"
            )
