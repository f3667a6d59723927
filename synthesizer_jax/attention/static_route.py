"""The static route computes attention whose logits are the same for all examples.

The logits of Random Synthesizers and of position biases consist only of parameters. These logits
have no batch axis, so the static route computes their exponentials once instead of once per
example.

Let S be the logits ``[h, q, k]``, and let c be the maximum of each row over the keys that are real
in at least one example. Let ``E = exp(S - c)``, and let m be 1 for the real keys of an example and
0 for its padding. Then the output of the example is::

  O = E (m ∘ V) / (E m)

E has no batch axis, so numerator and denominator are each one matrix product over the whole batch.
A factor that all entries in a row of E share cancels in the division. All examples may therefore
share c, although the maximum over the real keys may differ between examples.

An underflow, however, does not cancel in the division. If the largest logits of a row belong to
keys that are padding in some example, then E may be zero for all real keys of this example. The
static route therefore checks the denominators of real queries. If a denominator is below
`MIN_ROW_SUM`, the fused route computes the whole call instead. The fused route subtracts the
maximum of every example, so it is exact for logits of any range.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from synthesizer_jax.attention.derivatives import platform_dependent, with_gradient
from synthesizer_jax.attention.fused_arrays import Biases, FusedInputs, Products, SoftmaxStats
from synthesizer_jax.attention.fused_loop import map_heads
from synthesizer_jax.attention.fused_route import (
    CHECKPOINT_NAME,
    Options,
    fused_backward,
    fused_forward,
    fused_inputs,
    fused_options,
    shapes_of_inputs,
    softmax_vjp_delta,
)
from synthesizer_jax.attention.masks import Mask, zero_padding
from synthesizer_jax.attention.reference_route import log_sum_exp, softmax
from synthesizer_jax.attention.static_conditions import MIN_ROW_SUM, is_separable
from synthesizer_jax.attention.terms import (
    Call,
    LowRank,
    Output,
    Relative,
    Static,
    logits_dtype,
    materialize,
    no_log_sum,
)
from synthesizer_jax.base.typing import PyTree


def attend_static(call: Call) -> Output:
    """Returns the attention output ``softmax(Σ terms) · values``, ``[b, q, h, e]``.

    No term may depend on tokens. `obstacle` checks whether the route can take a call. If
    `call.returns_log_sums` is True, the log sums ``[b, q, h]`` are returned as well.
    """
    call = call.cleared()
    q_length = call.q_length
    dtype = call.values.dtype
    if dtype == jnp.float16 and not is_separable(call.mask):
        # The smallest positive float16 is 6e-8, so small entries of E would become zero.
        call = dataclasses.replace(call, values=call.values.astype(jnp.float32))
    inputs = static_inputs(call)
    options = fused_options(call)

    # The fused route replaces the matrix products only if they would lose digits, which is rare.
    # The TPU kernels of the fused route are excluded, because they would almost never run, but
    # would take time to compile.
    options = options._replace(platforms=tuple(p for p in options.platforms if p != "tpu"))
    attend = with_gradient(
        functools.partial(_attend_static_fwd, q_length, options),
        functools.partial(_attend_static_bwd, options),
        name=CHECKPOINT_NAME,
    )
    out: jax.Array = attend(inputs)
    out = out.astype(dtype)
    return (out, _log_sums(q_length, inputs)) if call.returns_log_sums else out


def _log_sums(q_length: int, inputs: FusedInputs) -> jax.Array:
    """Returns the log sums ``[b, q, h]`` of a call whose examples share the softmax.

    The log sums have no batch axis before they are broadcast, so computing the logits once more
    takes little time. JAX differentiates this function itself.
    """
    _, biases, values, mask, _ = inputs
    batch, k_length = values.shape[:2]

    # With `jax.checkpoint`, the backward pass recomputes the logits instead of storing them.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def shared(biases: Biases) -> jax.Array:
        """Returns the log sums ``[h, q]`` that all examples share."""
        band = mask.band_pairs(q_length, k_length)
        return log_sum_exp(
            _logits(q_length, k_length, biases), None if band is None else band[None]
        )

    log_sums = shared(biases).T[None]
    log_sums = jnp.broadcast_to(log_sums, (batch, *log_sums.shape[1:]))
    queries = mask.queries(q_length)
    if queries is None:
        return log_sums
    return jnp.where(queries[..., None], log_sums, no_log_sum(log_sums.dtype))


def static_inputs(call: Call) -> FusedInputs:
    """Returns the inputs of the static route, in the form of the inputs of the fused route.

    The products of parameters are multiplied out and added to the `Static` terms, because the
    static route needs the array of all logits anyway.
    """
    products = tuple(term for term in call.terms if isinstance(term, LowRank))
    if products:
        tables = tuple(term for term in call.terms if isinstance(term, Static))
        rest = tuple(term for term in call.terms if isinstance(term, Relative))
        logits = materialize((*tables, *products), q_length=call.q_length, k_length=call.k_length)
        call = dataclasses.replace(call, terms=(Static(logits[0]), *rest))
    return fused_inputs(call)


def obstacle(call: Call) -> str | None:
    """Explains why the static route cannot take a call, or returns None if it can."""
    if any(term.is_weights for term in call.terms):
        return "Banded terms are weights, but this route computes a softmax of logits."
    if call.soft_cap is not None:
        return "This route does not support soft_cap."
    if call.sinks is not None:
        return "This route does not support sinks."
    for term in call.terms:
        name = type(term).__name__
        if any(a.from_tokens for a in term.arrays()):
            return (
                "This route takes only terms that consist of parameters, but a term of type "
                f"{name} is computed from tokens."
            )
        if type(term) not in (Static, Relative, LowRank):
            return (
                "This route takes only Static, Relative and LowRank terms, but a term is of type "
                f"{name}."
            )
    if call.mask.allowed is not None:
        return "This route does not support Mask.allowed, which may differ between examples."
    if call.returns_log_sums and not is_separable(call.mask):
        return "This route returns log sums only if all examples may attend to the same keys."
    return None


def kernel_obstacle(call: Call) -> str | None:
    """Explains why the static TPU kernels cannot take a call, or returns None if they can."""
    return _kernel_obstacle(call.q_length, static_inputs(call))


def _kernel_obstacle(q_length: int, inputs: FusedInputs) -> str | None:
    """Explains why the static TPU kernels cannot take the inputs, or returns None if they can."""
    # The import is not at the top, because it imports Pallas, which other routes do not need.
    from synthesizer_jax.attention import static_tpu

    return static_tpu.obstacle(q_length, inputs)


_ACCELERATORS = ("cuda", "rocm", "tpu")
"""The platforms that compute all heads at once, by their names in lowering."""


class _Residuals(NamedTuple):
    """The arrays that the forward pass saves if not all examples may attend to the same keys.

    If all examples may attend to the same keys, the forward pass saves no residuals, because it is
    cheap to compute the softmax again.

    Attributes:
      inverse_row_sum: the inverse denominators ``1 / (E m)``, ``[h, q, b]``. If the query is
        padding or may attend to no key, the inverse denominator is 0.
      row_max: the maximum that the fused route subtracted from the logits, ``[h, q, b]``. If
        `is_exact` is true, `row_max` is only a placeholder.
      is_exact: a bool scalar that is true if the matrix products computed the output, and false if
        the denominator of a real query was below `MIN_ROW_SUM`.
    """

    inverse_row_sum: jax.Array
    row_max: jax.Array
    is_exact: jax.Array


_OptionalResiduals: TypeAlias = _Residuals | tuple[()]
_Region: TypeAlias = tuple[jax.Array, jax.Array]
"""A part of a mask that consists of pairs ``[q or 1, k]`` and real keys ``[b, k]``, both bool.

A pair of a query and a key belongs to the region of an example if both arrays are true. Only the
keys depend on the example, so values can be masked by keys instead of logits.
"""


def _lazy_kernel(
    q_length: int,
    options: Options,
    inputs: FusedInputs,
    select: Callable[[Any, int], Callable[..., PyTree]],
) -> dict[str, Callable[[], Callable[..., PyTree] | None]]:
    """Returns the argument `kernels` of `platform_dependent`. Only TPUs have kernels.

    Args:
      q_length: the number of queries.
      options: the options of the call.
      inputs: the inputs of the call.
      select: a function that takes the module `static_tpu` and `Mask.query_offset`, and returns a
        kernel.
    """
    shapes = shapes_of_inputs(options, inputs)

    def find() -> Callable[..., PyTree] | None:
        """Returns the kernel for TPUs, or None if the kernel cannot take the inputs."""
        if _kernel_obstacle(q_length, shapes) is not None:
            return None
        from synthesizer_jax.attention import static_tpu

        # If the offset were an array, `_kernel_obstacle` would have returned an obstacle.
        assert options.query_offset is not None
        return select(static_tpu, options.query_offset)

    return {"tpu": find}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend_static_fwd(
    q_length: int, options: Options, inputs: FusedInputs
) -> tuple[jax.Array, _OptionalResiduals]:
    """Returns the output ``[b, q, h, e]`` and the residuals.

    The matrix products run first. If the matrix products may have lost digits, the fused route
    computes the result again. On TPUs, kernels compute the matrix products if they can take the
    inputs.
    """
    # If the real queries at a position may attend to the same keys in all examples, the examples
    # also share the denominators of the softmax.
    same_keys = is_separable(inputs.mask)

    # GPUs and TPUs compute all heads at once. CPUs use the default, which computes one head after
    # another.
    matmuls = functools.partial(_matmul_fwd, q_length)
    parallel = dict.fromkeys(_ACCELERATORS, matmuls)
    default = functools.partial(matmuls, parallel=False)
    kernels = _lazy_kernel(
        q_length,
        options,
        inputs,
        lambda module, offset: functools.partial(
            module.forward, q_length, offset, same_keys=same_keys
        ),
    )
    out, inverse_row_sum = platform_dependent(inputs, default=default, kernels=kernels, **parallel)
    if same_keys:
        return out, ()

    # In rows without an allowed key, `inverse_row_sum` is 0, so such rows never make `is_exact`
    # false.
    is_exact = _all_when_mapped(jnp.all(inverse_row_sum < 1 / MIN_ROW_SUM))

    def run_loop() -> tuple[jax.Array, jax.Array, jax.Array]:
        """Computes the output and the row statistics with the fused route."""

        def batch_last(x: jax.Array) -> jax.Array:
            """Transposes statistics ``[b, q, h, 1]`` to ``[h, q, b]``."""
            return x[..., 0].transpose(2, 1, 0)

        out, stats = fused_forward(q_length, options, inputs)
        return out, batch_last(stats.inverse_row_sum), batch_last(stats.row_max)

    # `lax.cond` takes one of two branches at run time. The first branch returns `inverse_row_sum`
    # as a placeholder for `row_max`, because the backward pass does not read `row_max` if
    # `is_exact` is true.
    out, inverse_row_sum, row_max = lax.cond(
        is_exact, lambda: (out, inverse_row_sum, inverse_row_sum), run_loop
    )
    return out, _Residuals(inverse_row_sum, row_max, is_exact)


@functools.partial(jax.jit, static_argnums=0)
def _attend_static_bwd(
    options: Options,
    inputs: FusedInputs,
    out: jax.Array,
    residuals: _OptionalResiduals,
    dout: jax.Array,
) -> FusedInputs:
    """Returns the cotangents of the inputs, with the implementation that computed the output."""

    def run_matmuls(delta: jax.Array | None, inverse_row_sum: jax.Array | None) -> FusedInputs:
        """Computes the cotangents with matrix products, or with kernels on TPUs."""

        def matmuls(
            inputs: FusedInputs,
            out: jax.Array,
            delta: jax.Array | None,
            inverse_row_sum: jax.Array | None,
            dout: jax.Array,
            *,
            parallel: bool = True,
        ) -> FusedInputs:
            """Computes the cotangents with matrix products."""
            del out  # the matrix products read `delta`, which was computed from the output
            return _matmul_bwd(inputs, delta, inverse_row_sum, dout, parallel=parallel)

        def select_kernel(module: Any, offset: int) -> Callable[..., FusedInputs]:
            """Returns the kernel of a module, with the same arguments as `matmuls`."""

            def kernel(
                inputs: FusedInputs,
                out: jax.Array,
                delta: jax.Array | None,
                inverse_row_sum: jax.Array | None,
                dout: jax.Array,
            ) -> FusedInputs:
                """Computes the cotangents with a kernel."""
                del delta  # the kernel computes delta from the output
                cotangents: FusedInputs = module.backward(
                    offset, inputs, out, inverse_row_sum, dout
                )
                return cotangents

            return kernel

        cotangents: FusedInputs = platform_dependent(
            inputs,
            out,
            delta,
            inverse_row_sum,
            dout,
            default=functools.partial(matmuls, parallel=False),
            kernels=_lazy_kernel(dout.shape[1], options, inputs, select_kernel),
            **dict.fromkeys(_ACCELERATORS, matmuls),
        )
        return cotangents

    if not isinstance(residuals, _Residuals):
        return run_matmuls(None, None)

    inverse_row_sum, row_max, is_exact = residuals
    # delta = Σ_e dO ∘ O. If delta were computed inside of `lax.cond`, the output would be an
    # operand of the branches and would stay in memory.
    delta = softmax_vjp_delta(out, dout, row_max.dtype)

    def run_loop() -> FusedInputs:
        """Computes the cotangents with the fused route, from the statistics of its forward pass."""
        rows = (x.transpose(2, 1, 0)[..., None] for x in (row_max, inverse_row_sum))  # [b, q, h, 1]
        return fused_backward(options, inputs, SoftmaxStats(*rows), delta, dout)

    cotangents: FusedInputs = lax.cond(
        _all_when_mapped(is_exact), lambda: run_matmuls(delta, inverse_row_sum), run_loop
    )
    return cotangents


def _matmul_fwd(
    q_length: int, inputs: FusedInputs, *, parallel: bool = True
) -> tuple[jax.Array, jax.Array | None]:
    """Computes the output ``[b, q, h, e]`` by matrix products over the whole batch.

    Args:
      q_length: the number of queries.
      inputs: the result of `static_inputs`, which contains no products.
      parallel: whether all heads are computed at once. CPUs compute one head after another, so that
        the numerators of a head stay in the cache.

    Returns:
      The output, and the inverse denominators ``[h, q, b]``. The second result is None if
      `is_separable` returns true for the mask.
    """
    _, biases, values, mask, _ = inputs
    logits = _logits(q_length, values.shape[1], biases)
    queries = mask.queries(q_length)
    if is_separable(mask):
        # All examples have the same weights P, so O = P V is one matrix product per head. Real
        # queries cannot attend to the padding at the end of a row. The outputs of padding queries
        # are set to zero.
        weights = softmax(logits, mask.band_pairs(*logits.shape[1:]))  # [h, q, k]
        out = jax.vmap(_weighted_sum, (0, 2), 2)(weights, values).astype(values.dtype)
        return zero_padding(out, queries), None

    dtype = logits_dtype(logits, values)
    regions = _regions(mask, q_length, values)

    # `num_keys` is the number of keys that each query may attend to. The row sum cannot replace
    # `num_keys`, because the row sum is also 0 if the denominator of a row with keys underflows.
    num_keys = sum(
        _contract_keys("qk,bk->qb", pairs.astype(dtype), keys, dtype) for pairs, keys in regions
    )
    has_keys = num_keys > 0  # [q, b]
    if queries is not None:
        has_keys = has_keys & queries.T

    def head(
        logits: jax.Array, shared_max: jax.Array, values: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the output ``[b, q, e]`` and the inverse denominators ``[q, b]`` of one head."""
        # E = exp(S - c)
        numerators = _exp_logits(logits, shared_max, regions)
        # l = E m
        row_sum = sum(
            _contract_keys("qk,bk->qb", e.astype(values.dtype), keys, dtype)
            for e, (_, keys) in zip(numerators, regions, strict=True)
        )

        # The bound `MIN_ROW_SUM` keeps the inverse finite. If a row sum is below the bound,
        # `_attend_static_fwd` computes the result again with the fused route.
        inverse_row_sum = jnp.where(has_keys, 1 / jnp.maximum(row_sum, MIN_ROW_SUM), 0)
        # O = E (m ∘ V) / l.
        # The shape of O is [b, q, e].
        out = sum(map(_weighted_sum, numerators, _mask_values(values, regions)))
        return (out * inverse_row_sum.T[..., None]).astype(values.dtype), inverse_row_sum

    args = logits, _shared_max(logits, values, mask), values
    results: tuple[jax.Array, jax.Array] = map_heads(
        head, logits.shape[0], args, (0, 0, 2), (2, 0), parallel=parallel
    )
    return results


def _matmul_bwd(
    inputs: FusedInputs,
    delta: jax.Array | None,
    inverse_row_sum: jax.Array | None,
    dout: jax.Array,
    *,
    parallel: bool = True,
) -> FusedInputs:
    """Returns the cotangents of the inputs, computed by matrix products over the whole batch.

    Let ``l = E m`` be the denominators, and ``P = (E ∘ m) / l`` the weights of an example. All
    examples share the logits, so the cotangent dS of the logits is a sum over the examples::

      dV = Pᵀ dO = m ∘ Eᵀ (dO / l)
      dS = Σ_b P ∘ (dP - delta) = E ∘ (Σ_b (dO / l) (m ∘ V)ᵀ - Σ_b m delta / l)

    Both sums over the examples b are matrix products. The first product contracts the axes b and e,
    and the second product contracts the axis b. No array has all three axes for examples, queries
    and keys.

    Args:
      inputs: the result of `static_inputs`, which contains no products.
      delta: ``Σ_e dO ∘ O``, ``[b, q, h, 1]``, or None if `is_separable` returns true for the mask.
      inverse_row_sum: ``1 / l``, ``[h, q, b]``, or None if `delta` is None.
      dout: the cotangent dO of the output, ``[b, q, h, e]``.
      parallel: the argument `parallel` of `_matmul_fwd`.
    """
    _, biases, values, mask, _ = inputs
    make_logits = functools.partial(_logits, dout.shape[1], values.shape[1])
    logits, logits_vjp = jax.vjp(make_logits, biases)
    if delta is None or inverse_row_sum is None:
        dout = zero_padding(dout, mask.queries(dout.shape[1]))
        band = mask.band_pairs(*logits.shape[1:])

        # The weights P have no batch axis. The cotangent of P is summed over all examples before it
        # goes through the derivative of the softmax, so no example needs a delta.
        weights, softmax_vjp = jax.vjp(lambda x: softmax(x, band), logits)
        # dP = Σ_b dO Vᵀ
        # dV = Pᵀ dO
        products = jax.vmap(_weighted_sum_vjp, (0, 2, 2), (0, 2))
        dweights, dvalues = products(weights, values, dout)
        # dS = P ∘ (dP - Σ_k P ∘ dP)
        (dlogits,) = softmax_vjp(dweights)
    else:
        scaled_delta = delta[..., 0].transpose(2, 1, 0) * inverse_row_sum  # [h, q, b]
        args = (
            logits,
            _shared_max(logits, values, mask),
            values,
            inverse_row_sum,
            scaled_delta,
            dout,
        )
        head = functools.partial(_head_cotangents, _regions(mask, dout.shape[1], values))
        axes = 0, 0, 2, 0, 0, 2
        dlogits, dvalues = map_heads(head, logits.shape[0], args, axes, (0, 2), parallel=parallel)

    # `logits_vjp` distributes dS [h, q, k] to the terms. For `Relative` terms, `logits_vjp` sums dS
    # along the diagonals.
    (dbiases,) = logits_vjp(dlogits)
    return inputs.cotangents(Products(), dbiases, dvalues)


def _logits(q_length: int, k_length: int, biases: Biases) -> jax.Array:
    """Returns the sum of the biases, ``[h, q, k]`` in float32 or wider."""
    terms = (*biases.tables, *biases.diagonals)
    return materialize(terms, q_length=q_length, k_length=k_length)[0]


def _head_cotangents(
    regions: list[_Region],
    logits: jax.Array,
    shared_max: jax.Array,
    values: jax.Array,
    inverse_row_sum: jax.Array,
    scaled_delta: jax.Array,
    dout: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the cotangents of one head's logits ``[q, k]`` and values ``[b, k, e]``.

    The docstring of `_matmul_bwd` contains the formulas. Both cotangents are sums over the regions
    of the mask. `scaled_delta` is ``delta / l``, ``[q, b]``.
    """
    # dO / l
    scaled_dout = dout.astype(inverse_row_sum.dtype) * inverse_row_sum.T[..., None]
    # m ∘ V
    masked_values, mask_values_vjp = jax.vjp(lambda v: _mask_values(v, regions), values)
    # E = exp(S - c)
    numerators = _exp_logits(logits, shared_max, regions)
    dlogits = []
    dmasked_values = []
    for e, v, (_, keys) in zip(numerators, masked_values, regions, strict=True):
        # dE = Σ_b (dO / l) (m ∘ V)ᵀ
        # d(m ∘ V) = Eᵀ (dO / l)
        de, dv = _weighted_sum_vjp(e, v, scaled_dout)
        # dS = E ∘ (dE - Σ_b m delta / l).
        # The shape of dS is [q, k].
        delta = _contract_keys("qb,bk->qk", scaled_delta, keys, e.dtype)
        dlogits.append(e * (de - delta))
        dmasked_values.append(dv)
    # dV = m ∘ d(m ∘ V)
    (dvalues,) = mask_values_vjp(dmasked_values)
    return functools.reduce(operator.add, dlogits).astype(logits.dtype), dvalues


def _regions(mask: Mask, q_length: int, values: jax.Array) -> list[_Region]:
    """Returns the regions of the mask, which are products of pairs and real keys.

    Pairs have the shape ``[q or 1, k]``, and keys have the shape ``[b, k]``. A mask with a prefix
    is a sum of two regions. The first region contains the pairs that `causal` and `window` allow.
    The second region contains the pairs that only the prefix allows. The regions do not overlap, so
    the numerators and the denominators of both regions can be added.
    """
    batch, k_length = values.shape[:2]
    keys = mask.keys(k_length)
    keys = jnp.ones((batch, k_length), bool) if keys is None else keys
    band = mask.band_pairs(q_length, k_length)
    prefix = mask.prefix(k_length)  # [b, k]
    if band is None:
        return [(jnp.ones((1, k_length), bool), keys)]
    if prefix is None:
        return [(band, keys)]
    only_by_prefix = ~band & prefix.any(axis=0)[None]  # [q, k]
    return [(band, keys), (only_by_prefix, keys & prefix)]


def _shared_max(logits: jax.Array, values: jax.Array, mask: Mask) -> jax.Array:
    """Returns the maximum c of each row over the pairs in any region, ``[h, q, 1]``."""
    regions = _regions(mask, logits.shape[1], values)
    in_any_region = functools.reduce(operator.or_, (pairs for pairs, _ in regions))
    lowest = jnp.finfo(logits.dtype).min
    return jnp.max(logits, axis=-1, keepdims=True, where=in_any_region[None], initial=lowest)


def _exp_logits(
    logits: jax.Array, shared_max: jax.Array, regions: list[_Region]
) -> list[jax.Array]:
    """Returns ``exp(S - c)`` of a head for each region, ``[q, k]``, with zeros outside the region.

    The maximum c is `shared_max`.
    """
    lowest = jnp.finfo(logits.dtype).min
    return [jnp.exp(jnp.where(pairs, logits - shared_max, lowest)) for pairs, _ in regions]


def _contract_keys(spec: str, x: jax.Array, keys: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns the einsum of an array and boolean keys, accumulated in the given dtype."""
    return jnp.einsum(spec, x, keys.astype(x.dtype), preferred_element_type=dtype)


def _mask_values(values: jax.Array, regions: list[_Region]) -> list[jax.Array]:
    """Returns a head's values ``[b, k, e]`` for each region, with zeros for keys outside of it."""
    return [jnp.where(keys[..., None], values, 0) for _, keys in regions]


def _weighted_sum(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Computes a weighted sum of values as one matrix product, if all examples share the weights.

    The shape of the values is ``[b, k, e]``, the shape of the weights is ``[q, k]``, and the shape
    of the result is ``[b, q, e]``. The examples become columns of the right factor, so one product
    computes all examples. The weights are rounded to the dtype of the values. The result is float32
    or wider.
    """
    # [q, k] · [k, b e] → [q, b e]
    out = _matmul(weights.astype(values.dtype), _in_columns(values), (1, 0))
    return out.reshape(out.shape[0], -1, values.shape[2]).swapaxes(0, 1)


def _weighted_sum_vjp(
    weights: jax.Array, values: jax.Array, dout: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the cotangents of the weights ``[q, k]`` and values ``[b, k, e]`` of `_weighted_sum`.

    Args:
      weights: the weights ``[q, k]``, which all examples share.
      values: the values ``[b, k, e]``.
      dout: the cotangent of the result of `_weighted_sum`, ``[b, q, e]``.
    """
    dout = _in_columns(dout.astype(values.dtype))  # [q, b e]
    # dV = Wᵀ dO
    dvalues = _matmul(weights.astype(values.dtype), dout, (0, 0))  # [k, b e]
    dvalues = dvalues.reshape(dvalues.shape[0], -1, values.shape[2]).swapaxes(0, 1)
    # dW = Σ_b dO Vᵀ
    dweights = _matmul(dout, _in_columns(values), (1, 1))  # [q, k]
    return dweights.astype(weights.dtype), dvalues.astype(values.dtype)


def _in_columns(x: jax.Array) -> jax.Array:
    """Reshapes ``[b, n, e]`` to ``[n, b e]``, which puts the examples side by side."""
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)


def _matmul(x: jax.Array, y: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Contracts one axis of x with one axis of y, and returns the product in float32 or wider."""
    dims = ((axes[:1], axes[1:]), ((), ()))
    return lax.dot_general(x, y, dims, preferred_element_type=logits_dtype(x, y))


@custom_vmap
def _all_when_mapped(flag: jax.Array) -> jax.Array:
    """Returns the flag. Under `jax.vmap`, returns whether the flags of all mapped calls are true.

    If the flag of a `lax.cond` is mapped, JAX replaces the `cond` by a `select`, which computes
    both branches for all calls. With a flag that all calls share, the cond computes only one
    branch.
    """
    return flag


@_all_when_mapped.def_vmap
def _all_when_mapped_vmap(size: int, mapped: list[bool], flag: jax.Array) -> tuple[jax.Array, bool]:
    return _all_when_mapped(jnp.all(flag, axis=0)), False
