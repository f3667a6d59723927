"""The entry points of attention, `attend` and `attend_with_log_sums`.

Both functions check their arguments, select a route and run the route.

A route is one implementation of attention. All routes compute the same result. Routes differ in the
terms that they support and in the memory that they need. An *obstacle* is a sentence that says why
a route cannot compute a call. Every route has a function that returns its obstacle for a call, or
None if the route can compute the call. `_select_route` computes the obstacles of all routes, and
selects the first route without an obstacle. The obstacles of the other routes are kept for
`explain`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from synthesizer_jax.attention.banded_route import attend_banded
from synthesizer_jax.attention.banded_route import obstacle as banded_obstacle
from synthesizer_jax.attention.explanations import Explanation, explained_platform, log_call
from synthesizer_jax.attention.fused_route import attend_fused
from synthesizer_jax.attention.fused_route import kernel_obstacle as fused_kernel_obstacle
from synthesizer_jax.attention.fused_route import obstacle as fused_obstacle
from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.merging import merge_attention
from synthesizer_jax.attention.mesh_axes import axes_along, match_varying_axes
from synthesizer_jax.attention.packed import (
    MAX_UNPACKING_FACTOR,
    attend_unpacked,
    cover_distances,
    unpacked_lengths,
)
from synthesizer_jax.attention.partition import Partition, partition_by_types
from synthesizer_jax.attention.reference_route import attend_reference, softmax_weights
from synthesizer_jax.attention.static_route import attend_static
from synthesizer_jax.attention.static_route import kernel_obstacle as static_kernel_obstacle
from synthesizer_jax.attention.static_route import obstacle as static_obstacle
from synthesizer_jax.attention.terms import (
    Call,
    LowRank,
    Output,
    Relative,
    Split,
    Static,
    Term,
    Terms,
    logits_dtype,
    no_log_sum,
    repeat_heads,
    stands_alone,
    uses_segment_positions,
)
from synthesizer_jax.base.typing import PyTree

ROUTES: dict[str, Callable[[Call], Output]] = {
    "static": attend_static,
    "fused": attend_fused,
    "banded": attend_banded,
    "reference": attend_reference,
}
"""Maps the name of each route to its function. `_select_route` decides which route runs."""

OBSTACLES: dict[str, Callable[[Call], str | None]] = {
    "static": static_obstacle,
    "fused": fused_obstacle,
    "banded": banded_obstacle,
}
"""Maps the name of each route to a function that returns the route's obstacle, or None.

The table has no entry for the reference route, because the reference route supports every call.
"""

CODE_WITHOUT_KERNELS = {
    "reference": "matrix products",
    "static": "matrix products",
    "fused": "a loop over tiles of logits",
    "banded": "sums of shifted values",
}
"""Describes the code that runs each route if no kernel does, for explanations."""

KERNELS: dict[str, dict[str, Callable[[Call], str | None]]] = {
    "tpu": {
        "static": static_kernel_obstacle,
        "fused": functools.partial(fused_kernel_obstacle, platform="tpu"),
    },
    "gpu": {"fused": functools.partial(fused_kernel_obstacle, platform="gpu")},
}
"""Maps platforms and routes to functions that say why the kernels cannot compute a call.

The platforms have the names that `jax.default_backend` and `explain` use; see `lowering_platform`.
Each function returns None if the kernels can compute the call. Only explanations use this table.
The routes choose between kernels and other code when a program is lowered for a platform.
"""

FEW_LOGITS = 128 * 128
"""The largest number of logits, per head and example, for which the reference route is preferred.

Up to this size, the logits need about as much memory as the queries, keys and values, so the other
routes would save little memory.

The bound is the same on all platforms. A route is chosen when a function is traced, and the
platform is known only when the program is lowered. On TPUs and GPUs, short sequences therefore run
the matrix products of the reference route, even if a kernel of the fused route supports the call.
"""

FEW_SEGMENTS = (
    "In packed rows, this route needs Mask.segments, and Mask.allowed must be None. Also, segments "
    f"· segment_length² must be at most {MAX_UNPACKING_FACTOR} times the square of the row's "
    "length."
)


def _partition_of_types(terms: Terms, values: jax.Array, **_: PyTree) -> Partition:
    """Returns the explicit mesh axes that divide the examples, heads and queries of a call.

    The mesh axes of examples and heads are read from the type of the values. The mesh axes of
    queries are read from the first array ``[b, q, h, ...]`` of the terms, because the values have
    no axis of queries.
    """
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
    """Computes attention for logits that are a sum of terms.

    The output is ``out[b, q, h] = Σ_k softmax_k(Σ terms)[b, h, q, k] · values[b, k, h]``. For
    example, self-attention with a dot product and a relative position bias ``[h, 2 · length - 1]``
    is::

      terms = (low_rank(queries, keys, token_keys=True), relative(bias, first=1 - length))
      out = attend(terms, values, mask=Mask.padded(lengths))

    Logits and softmax are computed in float32 or wider. The weights are rounded to the dtype of the
    values before the product of weights and values. The output is zero for padding queries and for
    queries that may attend to no key. Queries with a zero output contribute no gradient.

    All routes compute the same output up to rounding:

    * ``static`` takes terms that consist of parameters only: `Static`, `Relative`, and `LowRank` if
      both factors are parameters. This route computes the exponentials of the logits once for all
      examples. If the shared exponentials could lose precision, the static route falls back to the
      fused route.
    * ``fused`` computes the logits of one head and example at a time. The backward pass computes
      the logits again.
    * ``banded`` takes a `Banded` term, whose weights need no softmax. This route adds up shifted
      values, and its cost is linear in the sequence length.
    * ``reference`` takes all terms, and keeps all logits in memory.

    The gradients of all routes except ``reference`` are hand-written. Hand-written gradients
    support only first-order derivatives in reverse mode.

    Args:
      terms: the terms of the logits, for q queries and k keys.
      values: ``[b, k, h, e]``. The number of heads of the values must divide the number of heads of
        the terms. If the values have fewer heads, neighboring heads of the terms share a head of
        the values.
      mask: a `Mask` or an array that says which keys each query may attend to. `Mask.of` converts
        an array to a `Mask`. None allows all keys.
      q_length: the number of queries. This argument is required if no term has an axis of queries,
        for example if all terms are `Relative`.
      dropout_rate: the probability with which a weight is dropped. As in T5, there is one random
        draw for each example, key and head, and all queries share the draw. This dropout is
        equivalent to dropping whole value vectors after the softmax. The remaining value vectors
        are multiplied by ``1 / (1 - dropout_rate)``.
      dropout_key: the PRNG key of the dropout. None turns dropout off.
      soft_cap: replaces each logit x by ``soft_cap · tanh(x / soft_cap)`` (Gemma 2, 2024). None
        leaves the logits unchanged. A soft cap has no effect on the weights of `Banded` terms.
      sinks: ``[h]``, the logit of one additional key for each head. The value vector of this key is
        zero, so that a query can attend to nothing (gpt-oss, 2025). None means that there is no
        additional key. Sinks have no effect on the weights of `Banded` terms.
      implementation: the name of a route, or ``auto`` for the fastest route that supports the call.
      partition: the axes of the surrounding mesh that divide examples, heads and queries. If the
        mesh axes are explicit, None means that the axes are read from the types of the arguments.
        If the mesh axes are automatic, None leaves the partitioning to the compiler.

    Returns:
      The output ``[b, q, h, e]``, in the dtype of the values.

    Raises:
      ValueError: if shapes do not agree, if `soft_cap` or `dropout_rate` is out of range, if
        `implementation` is unknown, or if the requested route cannot compute the call.
      TypeError: if a derivative other than a reverse-mode gradient of first order is taken on a
        route other than ``reference``.
    """
    call = _make_call(terms, values, mask, q_length)
    call = _with_options(call, dropout_rate, dropout_key, soft_cap=soft_cap, sinks=sinks)
    batch, k_length, heads, width = call.values.shape

    # A softmax over an empty axis of keys has no maximum. The output of a query without keys is
    # zero.
    if 0 in (batch, call.q_length, k_length, heads, width):
        return jnp.zeros((batch, call.q_length, heads, width), values.dtype)
    out: jax.Array = _run_groups(call, implementation, partition)
    return out


def _spec_of_pair(
    partition: Partition, results: tuple[jax.Array, jax.Array]
) -> tuple[PartitionSpec, PartitionSpec]:
    """Returns the sharding of outputs ``[b, q, h, e]`` and of log sums ``[b, q, h]``."""
    spec = partition.spec(results[0])
    return spec, spec


@partition_by_types(_partition_of_types, _spec_of_pair)
def attend_with_log_sums(
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
) -> tuple[jax.Array, jax.Array]:
    """Computes attention like `attend`, and the log sum of each row of logits.

    The log sum of a row is ``log Σ_k exp(logits)``.

    With the log sums, `merge_attention` can merge attention over several sets of keys into one
    softmax. Both results can be differentiated. As in `attend`, only the route ``reference``
    has derivatives of higher order. If examples may attend to different keys, terms that consist of
    parameters take the route ``fused`` instead of ``static``.

    Args:
      terms: as in `attend`. `Banded` terms are not allowed, because weights without a softmax have
        no log sum.
      values: as in `attend`.
      mask: as in `attend`.
      q_length: as in `attend`.
      dropout_rate: as in `attend`. Dropout does not change the log sums.
      dropout_key: as in `attend`.
      soft_cap: as in `attend`. The log sums are those of the capped logits.
      sinks: as in `attend`. The log sums include the sinks.
      implementation: as in `attend`.
      partition: as in `attend`.

    Returns:
      The output ``[b, q, h, e]`` in the dtype of the values, and the log sums ``[b, q, h]`` in
      float32 or wider. The log sum of a padding query, and of a query that may attend to no key, is
      the lowest finite number of its dtype.

    Raises:
      ValueError: as in `attend`, or if a term is `Banded`.
      TypeError: as in `attend`.
    """
    call = _make_call(terms, values, mask, q_length)
    call = _with_options(call, dropout_rate, dropout_key, soft_cap=soft_cap, sinks=sinks)
    batch, k_length, heads, _ = call.values.shape
    rows = batch, call.q_length, heads
    if 0 in (*rows, k_length):
        out = jnp.zeros((*rows, values.shape[-1]), values.dtype)
        dtype = logits_dtype(values)
        return out, jnp.full(rows, no_log_sum(dtype), dtype)

    # The sinks are added to the results of the route, so the routes do not need to return log sums
    # with sinks.
    call = dataclasses.replace(call, sinks=None, returns_log_sums=True)
    part: tuple[jax.Array, jax.Array] = _run_groups(call, implementation, partition)
    return part if sinks is None else merge_attention((part,), sinks=sinks)


def _with_options(
    call: Call,
    dropout_rate: float,
    dropout_key: jax.Array | None,
    *,
    soft_cap: float | None,
    sinks: jax.Array | None,
) -> Call:
    """Returns the call with the remaining arguments of `attend`, after checking them."""
    if soft_cap is not None:
        soft_cap = float(soft_cap)
        if not soft_cap > 0.0:
            raise ValueError(
                f"attend: soft_cap is {soft_cap}, but it must be positive. Pass None to leave the "
                "logits as they are."
            )
    heads = call.values.shape[2]
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(
            f"attend: sinks.shape is {sinks.shape}, but it must be ({heads},), one number for each "
            "head."
        )

    # Dropout is applied to the values here, so the routes do not need to implement dropout.
    values = drop_value_vectors(call.values, dropout_rate, dropout_key)
    return dataclasses.replace(call, values=values, soft_cap=soft_cap, sinks=sinks)


def _run_groups(call: Call, implementation: str, partition: Partition | None) -> Any:
    """Runs a route for each group of heads, and concatenates the results along the heads."""
    results = [_run_route(group, implementation, partition) for group in _groups_of_heads(call)]
    if len(results) == 1:
        return results[0]
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=2), *results)


def _make_call(
    terms: Terms, values: jax.Array, mask: Mask | jax.Array | None, q_length: int | None
) -> Call:
    """Checks the arguments of `attend`, and returns a `Call`, which is the input of all routes.

    Shared heads of keys and values are repeated, so that all arrays of a call have the same number
    of heads. The arrays of the mask are broadcast to their full shapes.
    """
    if jnp.ndim(values) != 4:
        raise ValueError(
            f"attend: values.shape is {jnp.shape(values)}, but it must be [batch, k, heads, e]."
        )
    batch, k_length, heads, _ = values.shape
    terms, mask, q_length, _ = _checked(terms, mask, q_length, k_length, batch=batch, heads=heads)

    def repeat_keys(term: Term) -> Term:
        """Returns a `LowRank` term whose keys have as many heads as the queries."""
        if isinstance(term, LowRank):
            return dataclasses.replace(term, keys=repeat_heads(term.keys, term.num_heads))
        return term

    return Call(
        terms=tuple(map(repeat_keys, terms)),
        values=repeat_heads(values, terms[0].num_heads),
        mask=mask,
        q_length=q_length,
    )


def _checked(
    terms: Terms,
    mask: Mask | jax.Array | None,
    q_length: int | None,
    k_length: int | None,
    *,
    batch: int | None = None,
    heads: int | None = None,
) -> tuple[Terms, Mask, int, int]:
    """Returns the checked terms, the mask in its full shapes, and the numbers of queries and keys.

    Sizes that are None are read from the terms and the mask. `attention_weights` has no values, so
    it passes neither `batch` nor `heads`.
    """
    check_terms(terms)
    terms = tuple(map(_as_float, terms))
    mask = Mask.of(mask)

    # If the number of heads of the values divides the number of heads of the terms, several heads
    # of the terms share a head of the values.
    num_heads = terms[0].num_heads
    if heads is None or (heads and num_heads % heads == 0):
        heads = num_heads

    # A length that is None is read from the first term that has an axis of queries or keys.
    for q, k in (term.lengths for term in terms):
        q_length = q if q_length is None else q_length
        k_length = k if k_length is None else k_length
    if q_length is None or k_length is None:
        name, kind = ("q_length", "queries") if q_length is None else ("k_length", "keys")
        raise ValueError(
            f"attention: the number of {kind} is not known, because no term has an axis of {kind}. "
            f"Pass {name}."
        )

    if batch is None:
        mask_batches = [x.shape[0] for x in jax.tree.leaves(mask) if jnp.ndim(x)]
        batch = max([1, *mask_batches, *(term.batch for term in terms)])

    # All terms are checked before a route is chosen, so that an error does not depend on the route.
    sizes = {"batch": batch, "heads": heads, "q_length": q_length, "k_length": k_length}
    mask = mask.broadcast_to(**sizes)
    for term in terms:
        check_term(term, mask, **sizes)
    if mask.query_segments is not None:
        terms = cover_distances(terms, mask, q_length, k_length)
    return terms, mask, q_length, k_length


def _as_float(term: Term) -> Term:
    """Returns the term, with integer logits converted to float32."""
    if not isinstance(term, Static | Relative) or jnp.issubdtype(term.logits.dtype, jnp.inexact):
        return term
    return dataclasses.replace(term, logits=term.logits.astype(jnp.float32))


def _groups_of_heads(call: Call) -> list[Call]:
    """Returns one call for each group of heads that has its own terms.

    A call without a `Split` is returned unchanged. The function calls itself recursively, because a
    group may contain another `Split`.
    """
    # A `Split` cannot be added to other terms, so it is the only term of its call.
    split = call.terms[0]
    if not isinstance(split, Split):
        return [call]

    groups = []
    for terms, start, count in split.slices():
        heads = slice(start, start + count)
        mask = call.mask.take_heads(start, count)
        group = _make_call(terms, call.values[:, :, heads], mask, call.q_length)
        sinks = None if call.sinks is None else call.sinks[heads]
        group = dataclasses.replace(
            group, soft_cap=call.soft_cap, sinks=sinks, returns_log_sums=call.returns_log_sums
        )
        groups += _groups_of_heads(group)
    return groups


def _run_route(call: Call, implementation: str, partition: Partition | None) -> Output:
    """Selects a route, logs the choice, and runs the route.

    If there is a partition, every device runs the route with its own part of the arrays.
    """
    if call.returns_log_sums and any(term.is_weights for term in call.terms):
        raise ValueError(
            "attend_with_log_sums: a term is Banded. Its weights are not made by a softmax, so "
            "they have no log sum. Use terms of logits, such as those of a GaussianBias."
        )
    choice = _select_route(call, implementation)

    def run(call: Call) -> Output:
        """Runs the selected route, on unpacked examples if `choice.unpack` is True."""
        # Inside `jax.shard_map`, all operands of a loop must vary over the same mesh axes.
        (call,) = match_varying_axes(call)
        route = ROUTES[choice.route]
        return attend_unpacked(route, call) if choice.unpack else route(call)

    _log_route(choice, run, call, partition)
    if partition is None or not partition.axis_names:
        return run(call)

    # The compiler can partition the matrix products of the reference route without `shard_map`.
    if choice.route == "reference" and not choice.unpack:
        return run(call)
    return partition.run(run, call)


class _RouteChoice(NamedTuple):
    """The route that was selected for a call.

    Attributes:
      route: the name of the route.
      unpack: whether packed rows are unpacked to one row per example before the route runs.
      obstacles: maps the names of other routes to the reasons why these routes cannot run.
    """

    route: str
    unpack: bool
    obstacles: dict[str, str]


def _select_route(call: Call, implementation: str) -> _RouteChoice:
    """Chooses the route of a call.

    Raises:
      ValueError: if `implementation` is not the name of a route, or names a route that cannot
        compute the call.
    """
    if implementation != "auto" and implementation not in ROUTES:
        *routes, last = ROUTES
        raise ValueError(
            f"attend: implementation is {implementation!r}, but it must be auto, "
            f"{', '.join(routes)} or {last}."
        )
    mask = call.mask
    packed = mask.query_segments is not None
    positional = uses_segment_positions(call.terms, mask)
    # `lengths` holds the numbers of queries and keys of the unpacked rows, or None if the rows
    # cannot be unpacked.
    lengths = unpacked_lengths(mask, call.q_length, call.k_length) if packed else None
    reasons = {name: obstacle(call) for name, obstacle in OBSTACLES.items()}

    # In packed rows, the banded and static routes work only on unpacked examples. The banded route
    # needs unpacked examples if its window depends on the position in a segment. The static route
    # always needs unpacked examples.
    for name, needs_rows in (("banded", positional), ("static", packed)):
        if needs_rows and lengths is None:
            reasons[name] = reasons[name] or FEW_SEGMENTS
    obstacles = {name: why for name, why in reasons.items() if why}

    chosen = implementation
    if implementation == "auto":
        # The banded route is the cheapest, followed by the static route. The number of logits
        # decides between the fused and the reference route. Both of them run on unpacked rows if
        # terms are looked up by the position in a segment; see below.
        q, k = lengths if lengths and positional else (call.q_length, call.k_length)
        by_size = ["reference", "fused"] if q * k <= FEW_LOGITS else ["fused", "reference"]
        chosen = next(r for r in ("banded", "static", *by_size) if r not in obstacles)
    if chosen in obstacles:
        raise ValueError(
            f"attend: implementation={implementation!r} cannot compute this call. "
            f"{obstacles[chosen]} Use implementation='auto'."
        )

    # The fused route can look up positions inside packed rows, tile by tile. Unpacking avoids the
    # lookups, and is faster. The static route runs only on unpacked examples.
    unpack = lengths is not None and (positional or chosen == "static")

    # A caller who asks for the reference route wants the plain definition of attention, for example
    # to test the other routes, including `attend_unpacked`. The packed rows are therefore kept, and
    # positions are looked up in them. If "auto" falls back to the reference route, the caller only
    # wants a fast result, so the rows are unpacked as for the other routes.
    return _RouteChoice(chosen, unpack and implementation != "reference", obstacles)


def _log_route(
    choice: _RouteChoice, run: Callable[[Call], Output], call: Call, partition: Partition | None
) -> None:
    """Writes the choice of a route to the log and to the list that `explain` collects."""
    platform = explained_platform()

    def make() -> Explanation:
        """Returns the explanation of the call, without `kept_bytes`."""
        obstacles = dict(choice.obstacles)
        obstacles.pop(choice.route, None)

        kernel = CODE_WITHOUT_KERNELS[choice.route]
        find_obstacle = KERNELS.get(platform, {}).get(choice.route)
        if find_obstacle is not None:
            why = _kernel_obstacle(choice, call, find_obstacle)
            if why is None:
                kernel = "Pallas kernels"
            else:
                obstacles["kernels"] = why

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
        """Returns the `jax.vjp` function, whose leaves are the arrays for the backward pass."""

        def output(terms: Terms, values: jax.Array) -> Output:
            """Returns the results of the call for the given terms and values."""
            return run(dataclasses.replace(call, terms=terms, values=values))

        return jax.vjp(output, call.terms, call.values)[1]

    log_call(make, residuals)


def _kernel_obstacle(
    choice: _RouteChoice, call: Call, find_obstacle: Callable[[Call], str | None]
) -> str | None:
    """Explains why kernels cannot run on the rows of the route, or returns None if kernels can run.

    The rows are the original rows of the call, or the unpacked rows if `choice.unpack` is True.
    """
    if not choice.unpack:
        return find_obstacle(call)
    found = []

    def route(rows: Call) -> Output:
        """Records the obstacle for the unpacked rows, and runs the route on these rows."""
        found.append(find_obstacle(rows))
        return ROUTES[choice.route](rows)

    # The shapes of the unpacked rows are known only inside of `attend_unpacked`. `jax.eval_shape`
    # traces this function without computing anything.
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
    """Returns the attention weights as one array, for example to plot them.

    Args:
      terms: as in `attend`.
      mask: as in `attend`.
      q_length: the number of queries. This argument is required if no term has an axis of queries.
      k_length: the number of keys. This argument is required if no term has an axis of keys.
      soft_cap: as in `attend`.
      sinks: as in `attend`. The weights of the sinks are not returned.

    Returns:
      The weights ``[b or 1, h, q, k]`` in float32 or wider. The weights of a softmax sum to one for
      each query, minus the weight of the sink if there are sinks. The weights of padding queries,
      and of queries that may attend to no key, are zero.

    Raises:
      ValueError: if shapes do not agree, or if a length is None and no term determines it.
    """
    terms, mask, q_length, k_length = _checked(terms, mask, q_length, k_length)
    return softmax_weights(
        terms, mask=mask, q_length=q_length, k_length=k_length, soft_cap=soft_cap, sinks=sinks
    )


def drop_value_vectors(values: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Drops whole value vectors, which is equivalent to T5's dropout of attention weights.

    Args:
      values: ``[b, k, h, e]``.
      rate: the probability with which a value vector is dropped. The remaining value vectors are
        multiplied by ``1 / (1 - rate)``.
      key: the PRNG key of the dropout. None turns dropout off.

    Returns:
      Values of the same shape and dtype.

    Raises:
      ValueError: if the rate is negative, or 1 or more.
    """
    if not 0.0 <= rate < 1.0:
        raise ValueError(
            f"attend: dropout_rate is {rate}, but it must be at least 0 and less than 1."
        )
    if rate == 0.0 or key is None:
        return values
    keep = jax.random.bernoulli(key, 1.0 - rate, values.shape[:3])  # [b, k, h]

    # With `jax.checkpoint`, the backward pass keeps the array `keep`, [b, k, h], instead of a
    # broadcast mask [b, k, h, e].
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def drop(values: jax.Array, keep: jax.Array) -> jax.Array:
        """Returns the values with zeros for the dropped vectors."""
        return jnp.where(keep[..., None], values / (1.0 - rate), 0)

    return drop(values, keep)


def check_terms(terms: object, name: str = "attend: terms") -> None:
    """Raises an error if an object is not a tuple of terms that can be added.

    Args:
      terms: the object.
      name: the description of the object at the start of the error message.

    Raises:
      TypeError: if the object is not a tuple or a list, or if an entry is not a term.
      ValueError: if there are no terms, or if there are several terms and one of them cannot be
        added to other terms.
    """
    expected = "it must be a tuple of terms, such as (static(logits),)."
    if isinstance(terms, Term):
        raise TypeError(f"{name} is a single {type(terms).__name__} term, but {expected}")
    if not isinstance(terms, tuple | list):
        raise TypeError(f"{name} is of type {type(terms).__name__}, but {expected}")
    for term in terms:
        if isinstance(term, type):
            raise TypeError(f"{name} contains the class {term.__name__}, but {expected}")
        if not isinstance(term, Term):
            raise TypeError(
                f"{name} contains an object of type {type(term).__name__}, but {expected}"
            )
    if not terms:
        raise ValueError(f"{name} is empty, but it must contain at least one term.")
    alone = [term for term in terms if stands_alone(term)]
    if alone and len(terms) > 1:
        raise ValueError(
            f"{name} contains a {type(alone[0]).__name__} term, which cannot be next to other "
            "terms. Add logits to a Split with attention.add, and pass a Banded term by itself."
        )


def check_term(
    term: Term, mask: Mask, *, batch: int, heads: int, q_length: int, k_length: int
) -> None:
    """Raises a `ValueError` if a term does not fit the batch, heads, queries and keys of a call."""
    name = f"attend: a term of type {type(term).__name__}"
    if term.num_heads != heads:
        raise ValueError(f"{name} has {term.num_heads} heads, but the values have {heads}.")
    if isinstance(term, Split):
        return  # the groups of a `Split` are checked one by one

    # In packed rows, parameters are looked up by the position in a segment, so a parameter must be
    # at least as long as the longest segment.
    packed = mask.query_segments is not None
    shortest = mask.segment_lengths(q_length, k_length) if packed else (q_length, k_length)
    for own, length, least, positional in zip(
        term.lengths, (q_length, k_length), shortest, term.has_absolute_positions(mask), strict=True
    ):
        if own is not None and own != length and not (packed and positional and own >= least):
            kinds = zip(term.lengths, ("queries", "keys"), strict=True)
            sizes = " and ".join(f"{n} {kind}" for n, kind in kinds if n is not None)
            raise ValueError(
                f"{name} is for {sizes}, but there are {q_length} queries and {k_length} values."
            )
    reached = term.num_keys_reached
    if reached is not None and reached < shortest[1]:
        factors = " · ".join(str(a.x.shape[-1]) for a in term.arrays())
        raise ValueError(
            f"{name} reaches {reached} keys ({factors}), but there are {k_length} values. Use "
            "longer factors."
        )
    for a in term.arrays():
        if a.axes[0] == "b" and a.x.shape[0] not in (1, batch):
            raise ValueError(
                f"{name} contains an array of shape {a.x.shape}, but the values have a batch size "
                f"of {batch}. The first axis of the array must be {batch} or 1."
            )
