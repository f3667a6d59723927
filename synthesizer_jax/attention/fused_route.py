"""The fused route computes attention without an array ``[batch, heads, q, k]``.

Neither the forward pass nor the backward pass stores all logits. Only one tile of the logits exists
at a time. In the loop of `fused_loop`, a tile holds all logits of one head and one example. In a
Pallas kernel, a tile holds a part of the logits of one head and one example. For each tile of
logits S, the forward pass computes::

  c = max_k S
  E = exp(S - c)
  l = Σ_k E
  O = (E V) / l

The forward pass keeps the output O and two numbers per row of the logits, c and 1 / l. The backward
pass multiplies queries and keys again, and recomputes the weights ``P = exp(S - c) / l`` (Dao et
al. 2022, FlashAttention, section 3.1)::

  dV = Pᵀ dO
  dP = dO Vᵀ
  δ = Σ_e dO ∘ O
  dS = P ∘ (dP - δ)

FlashAttention keeps only ``log Σ exp(S)``. The fused route keeps c and 1 / l instead, because a
logarithm that is rounded to float32 loses digits if logits are in the hundreds.

The fused route has one implementation for each kind of device:

* TPUs run the Pallas kernels of `fused_tpu`. NVIDIA's GPUs run the Pallas kernels of `fused_gpu`.
* CPUs run the loop of `fused_loop`. Other devices run the same loop if no kernel can take the
  inputs.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp

from synthesizer_jax.attention.derivatives import (
    lowering_platform,
    platform_dependent,
    with_gradient,
)
from synthesizer_jax.attention.explanations import warn_once
from synthesizer_jax.attention.fused_arrays import Biases, FusedInputs, Products, SoftmaxStats
from synthesizer_jax.attention.fused_loop import loop_backward, loop_forward
from synthesizer_jax.attention.packed import with_segment_positions
from synthesizer_jax.attention.terms import (
    Call,
    LowRank,
    Outer,
    Output,
    Relative,
    Static,
    Term,
    Terms,
    clear_padding,
    cut_diagonals,
    no_log_sum,
    uses_segment_positions,
)
from synthesizer_jax.base.typing import PyTree

CHECKPOINT_NAME = "attention"
"""The name that lets a `jax.checkpoint` policy save the output and the residuals of attention."""

_KERNEL_PLATFORMS = ("tpu", "cuda")
"""The platforms that have kernels, by their names in lowering; see `lowering_platform`."""

_GPUS = ("cuda", "rocm")
"""NVIDIA's and AMD's GPUs, by their names in lowering."""

_Term = TypeVar("_Term", bound=Term)


class Options(NamedTuple):
    """The options of an attention call that are known at tracing time.

    Options are hashable, so they can be static arguments of compiled functions.

    Attributes:
      soft_cap: the argument `soft_cap` of `attend`.
      query_offset: `Mask.query_offset` if it is a number, or None if it is an array. Kernels need
        to know the number, so they cannot run if it is None.
      platforms: the platforms whose kernels may run, by their names in lowering. A kernel still
        runs only if it can take the inputs.
    """

    soft_cap: float | None
    query_offset: int | None
    platforms: tuple[str, ...] = _KERNEL_PLATFORMS


def attend_fused(call: Call) -> Output:
    """Returns the attention output ``softmax(Σ terms) · values``, ``[b, q, h, e]``.

    The logits are computed in tiles; see the module's docstring. If `call.returns_log_sums` is
    True, the log sums ``[b, q, h]`` are returned as well.
    """
    inputs = _clear_on_tpus(fused_inputs(call), call.q_length)
    options = fused_options(call)
    platform = lowering_platform(jax.default_backend())

    # Without a kernel, the result is correct but the call is much slower, so the user is warned.
    if platform in _KERNEL_PLATFORMS:
        why = _kernel_obstacle(platform, inputs)
        if why is not None:
            warn_once(
                f"attend: this call runs as a slow loop over the examples on {platform}, because "
                f"no kernel supports it. {why}"
            )

    if call.returns_log_sums:
        return _attend_with_log_sums(call.q_length, options, inputs)

    # `forward` refers to `q_length` instead of `call`, because the functions that `with_gradient`
    # takes must not close over arrays.
    q_length = call.q_length

    def forward(args: tuple[FusedInputs, jax.Array | None]) -> tuple[jax.Array, SoftmaxStats]:
        """Returns the attention output and the softmax statistics of each row."""
        inputs, sinks = args
        out, stats = fused_forward(q_length, options, inputs)
        return (out, stats) if sinks is None else _add_sinks(out, stats, sinks)

    def backward(
        args: tuple[FusedInputs, jax.Array | None],
        out: jax.Array,
        stats: SoftmaxStats,
        dout: jax.Array,
    ) -> tuple[FusedInputs, jax.Array | None]:
        """Returns the cotangents of the inputs and of the sinks."""
        inputs, sinks = args
        # δ = Σ_e dO ∘ O. The effect of the sinks is part of the output O, and therefore also of δ.
        delta = softmax_vjp_delta(out, dout, stats.row_max.dtype)
        cotangents: FusedInputs = fused_backward(options, inputs, stats, delta, dout)
        return cotangents, None if sinks is None else _sinks_gradient(stats, delta, sinks)

    out: jax.Array = with_gradient(forward, backward, name=CHECKPOINT_NAME)((inputs, call.sinks))
    return out


def _attend_with_log_sums(
    q_length: int, options: Options, inputs: FusedInputs
) -> tuple[jax.Array, jax.Array]:
    """Returns the output ``[b, q, h, e]`` and the log sums ``[b, q, h]``.

    The log sum of a row is ``c + log l``, and its derivative with respect to the logits is P. A
    cotangent dL of the log sums therefore adds ``P ∘ dL`` to the cotangent of the logits::

      dS = P ∘ (dP - δ + dL)

    The backward pass is the same as without log sums, except that it gets ``δ - dL`` as δ.
    """

    def forward(inputs: FusedInputs) -> tuple[tuple[jax.Array, jax.Array], SoftmaxStats]:
        """Returns the output and the log sums, and the softmax statistics of each row."""
        out, stats = fused_forward(q_length, options, inputs)
        inverse = stats.inverse_row_sum
        has_keys = inverse > 0
        log_sums = stats.row_max - jnp.log(jnp.where(has_keys, inverse, 1))
        log_sums = jnp.where(has_keys, log_sums, no_log_sum(log_sums.dtype))
        return (out, log_sums[..., 0]), stats

    def backward(
        inputs: FusedInputs,
        results: tuple[jax.Array, jax.Array],
        stats: SoftmaxStats,
        cotangents: tuple[jax.Array, jax.Array],
    ) -> FusedInputs:
        """Returns the cotangents of the inputs."""
        dout, dlog_sums = cotangents
        delta = softmax_vjp_delta(results[0], dout, stats.row_max.dtype)
        # The log sum of a row without keys is a constant.
        dlog_sums = jnp.where(stats.inverse_row_sum > 0, dlog_sums[..., None], 0)
        result: FusedInputs = fused_backward(options, inputs, stats, delta - dlog_sums, dout)
        return result

    results: tuple[jax.Array, jax.Array]
    results = with_gradient(forward, backward, name=CHECKPOINT_NAME)(inputs)
    return results


def fused_inputs(call: Call) -> FusedInputs:
    """Returns the inputs in the form that the implementations of the fused route take.

    The terms are divided into products and biases, and the biases are cut to the numbers of queries
    and keys. In packed rows, the biases are cut to the longest segment, because a bias is then
    looked up by the position in the segment.
    """
    terms = call.terms
    mask = call.mask
    q, k = call.q_length, call.k_length
    offset = mask.query_offset
    positions = None
    if uses_segment_positions(terms, mask):
        q, k = mask.segment_lengths(q, k)
        terms, positions = with_segment_positions(terms, mask)

        # Positions in a segment start at 0, even if the segment begins in the middle of the row.
        offset = 0

    divided = divide_terms(terms)
    assert divided is not None
    products, (tables, diagonals) = divided
    # A table may have more rows and columns than the call has queries and keys. Only the first q
    # rows and k columns are used.
    biases = Biases(
        tuple(Static(term.logits[:, :q, :k]) for term in tables),
        tuple(cut_diagonals(term, q, k, query_offset=offset) for term in diagonals),
    )
    return FusedInputs(products, biases, call.values, mask, positions)


def _clear_on_tpus(inputs: FusedInputs, q_length: int) -> FusedInputs:
    """Returns inputs whose padding is zero in programs for TPUs; see `clear_padding`.

    The kernels for TPUs read padding. The padding is cleared here, outside the hand-written
    gradient, because the backward pass would otherwise clear it again, which costs one more pass
    over the queries, keys and values. The kernels for GPUs load no padding, and the loop over the
    examples clears its tiles itself.
    """
    queries, keys = inputs.mask.clearing_masks(q_length, inputs.values.shape[1])
    if queries is None and keys is None:
        return inputs

    def forward(args: tuple[PyTree, ...]) -> tuple[tuple[Products, jax.Array], tuple[()]]:
        """Returns the products and the values, and no residuals."""
        cleared = platform_dependent(
            *args,
            default=lambda products, values, queries, keys: (products, values),
            tpu=clear_padding,
        )
        return cleared, ()

    def backward(
        inputs: None, out: None, residuals: tuple[()], cotangents: tuple[Products, jax.Array]
    ) -> tuple[PyTree, ...]:
        """Returns the cotangents, in which padding is zero already."""
        del inputs, out, residuals
        return (*cotangents, None, None)

    clear = with_gradient(forward, backward, reads_inputs=False, reads_output=False)
    products, values = clear((inputs.products, inputs.values, queries, keys))
    return inputs._replace(products=products, values=values)


def obstacle(call: Call) -> str | None:
    """Explains why the fused route cannot take a call, or returns None if it can."""
    if any(term.is_weights for term in call.terms):
        return "Banded terms are weights, but this route computes a softmax of logits."
    for term in call.terms:
        if divide_terms((term,)) is None:
            name = type(term).__name__
            return (
                "This route takes only Static, Relative, LowRank and Outer terms, but a term is of "
                f"type {name}."
            )
    return None


def kernel_obstacle(call: Call, platform: str) -> str | None:
    """Explains why the kernels of a platform cannot take a call, or returns None if they can.

    Args:
      call: the attention call.
      platform: ``tpu`` or ``gpu``, which are the names that `explain` uses.
    """
    return _kernel_obstacle(lowering_platform(platform), fused_inputs(call))


def _kernel_obstacle(platform: str, inputs: FusedInputs) -> str | None:
    """Explains why the kernels of a platform cannot take the inputs, or returns None if they can.

    Args:
      platform: ``tpu`` or ``cuda``.
      inputs: the inputs, whose arrays may be abstract.
    """
    if platform == "cuda":
        try:
            importlib.import_module("jax.experimental.pallas.triton")
        except ImportError:
            return (
                f"JAX {jax.__version__} has no module jax.experimental.pallas.triton, which "
                "compiles the kernels for GPUs. Install an older JAX that has the module, such as "
                "0.12."
            )
    return _kernels(platform).obstacle(inputs)


def fused_options(call: Call) -> Options:
    """Returns the options of a call."""
    offset = call.mask.query_offset
    return Options(call.soft_cap, offset if isinstance(offset, int) else None)


class _Kernels(Protocol):
    """The functions that a module with kernels defines, such as `fused_tpu`."""

    def obstacle(self, inputs: FusedInputs) -> str | None:
        """Explains why the kernels cannot take the inputs, or returns None if they can."""

    def forward(
        self, q_length: int, query_offset: int, soft_cap: float | None, inputs: FusedInputs
    ) -> tuple[jax.Array, SoftmaxStats]:
        """Computes the results of `fused_forward`."""

    def backward(
        self,
        query_offset: int,
        soft_cap: float | None,
        inputs: FusedInputs,
        stats: SoftmaxStats,
        delta: jax.Array,
        dout: jax.Array,
    ) -> FusedInputs:
        """Computes the results of `fused_backward`."""


def _kernels(platform: str) -> _Kernels:
    """Returns the module with the kernels of a platform, which is ``tpu`` or ``cuda``.

    The module is imported only when a program for the platform needs it, because the module imports
    Pallas. Importing Pallas takes a third of a second, and programs for CPUs do not need Pallas.
    """
    if platform == "tpu":
        from synthesizer_jax.attention import fused_tpu

        return fused_tpu
    from synthesizer_jax.attention import fused_gpu

    return fused_gpu


def _lazy_kernels(
    options: Options, inputs: FusedInputs, select: Callable[[_Kernels, int], Callable[..., PyTree]]
) -> dict[str, Callable[[], Callable[..., PyTree] | None]]:
    """Returns the argument `kernels` of `platform_dependent`.

    Args:
      options: the options of the call.
      inputs: the inputs of the call.
      select: a function that takes a module with kernels and `Mask.query_offset`, and returns a
        kernel.
    """
    # The returned functions are called when a program is lowered. Traced arrays are no longer valid
    # at that time, so the functions use only shapes and dtypes.
    shapes = shapes_of_inputs(options, inputs)

    def find(platform: str) -> Callable[..., PyTree] | None:
        """Returns the kernel for a platform, or None if the kernels cannot take the inputs."""
        if _kernel_obstacle(platform, shapes) is not None:
            return None
        # If the offset were an array, `_kernel_obstacle` would have returned an obstacle.
        assert options.query_offset is not None
        return select(_kernels(platform), options.query_offset)

    return {platform: functools.partial(find, platform) for platform in options.platforms}


def shapes_of_inputs(options: Options, inputs: FusedInputs) -> FusedInputs:
    """Returns the shapes and dtypes of the inputs, with the mask's offset as a number if known.

    Inside of `jax.jit`, all numbers in `inputs.mask` are traced, but `options` still holds the
    offset as a Python number.
    """
    shapes: FusedInputs = jax.tree.map(jax.typeof, inputs)
    if options.query_offset is None:
        return shapes
    return shapes._replace(mask=dataclasses.replace(shapes.mask, query_offset=options.query_offset))


@functools.partial(jax.jit, static_argnums=(0, 1))
def fused_forward(
    q_length: int, options: Options, inputs: FusedInputs
) -> tuple[jax.Array, SoftmaxStats]:
    """Returns the output ``[b, q, h, e]`` and the softmax statistics of each row.

    The forward pass and the backward pass are separate functions with `jax.jit`, so layers with
    equal shapes are traced only once.
    """
    default = functools.partial(loop_forward, q_length, soft_cap=options.soft_cap)
    # GPUs compute all heads of an example in parallel, unless they have a kernel for these inputs.
    # `platform_dependent` prefers a kernel to other implementations.
    parallel = dict.fromkeys(_GPUS, functools.partial(default, parallel=True))
    kernels = _lazy_kernels(
        options,
        inputs,
        lambda module, offset: functools.partial(
            module.forward, q_length, offset, options.soft_cap
        ),
    )
    results: tuple[jax.Array, SoftmaxStats] = platform_dependent(
        inputs, default=default, kernels=kernels, **parallel
    )
    return results


@functools.partial(jax.jit, static_argnums=0)
def fused_backward(
    options: Options, inputs: FusedInputs, stats: SoftmaxStats, delta: jax.Array, dout: jax.Array
) -> FusedInputs:
    """Returns the cotangents of the inputs of `fused_forward`.

    Args:
      options: the options of the forward pass.
      inputs: the inputs of the forward pass.
      stats: the statistics that the forward pass returned.
      delta: ``Σ_e dout ∘ out``, ``[b, q, h, 1]``, from `softmax_vjp_delta`.
      dout: the cotangent of the output, ``[b, q, h, e]``.
    """
    default = functools.partial(loop_backward, soft_cap=options.soft_cap)
    parallel = dict.fromkeys(_GPUS, functools.partial(default, parallel=True))
    kernels = _lazy_kernels(
        options,
        inputs,
        lambda module, offset: functools.partial(module.backward, offset, options.soft_cap),
    )
    cotangents: FusedInputs = platform_dependent(
        inputs, stats, delta, dout, default=default, kernels=kernels, **parallel
    )
    return cotangents


def _add_sinks(
    out: jax.Array, stats: SoftmaxStats, sinks: jax.Array
) -> tuple[jax.Array, SoftmaxStats]:
    """Adds the effect of the sinks, one additional key per head, to the output and the statistics.

    The value of a sink is zero, so the sink only reduces the weights of the other keys. With
    ``l' = Σ exp(S)``, the weights of the other keys are multiplied by ``l' / (exp(sink) + l')``,
    which is equal to ``sigmoid(log l' - sink)``.

    Args:
      out: the output without sinks, ``[b, q, h, e]``.
      stats: the statistics without sinks.
      sinks: the logits of the additional keys, ``[h]``.
    """
    column = sinks.astype(stats.row_max.dtype)[:, None]
    # `left`, [b, q, h, 1], is the factor by which the weights of the other keys are multiplied. It
    # is computed from log l' = c + log l, where `inverse_row_sum` is 1 / l.
    left = jax.nn.sigmoid(stats.row_max - jnp.log(stats.inverse_row_sum) - column)
    out = (out.astype(left.dtype) * left).astype(out.dtype)
    return out, stats._replace(inverse_row_sum=stats.inverse_row_sum * left)


def _sinks_gradient(stats: SoftmaxStats, delta: jax.Array, sinks: jax.Array) -> jax.Array:
    """Returns the cotangent of the sinks, ``-Σ P · δ`` over queries and examples, ``[h]``.

    P is the weight of the sink. The formula follows from ``dS = P ∘ (dP - δ)``, because dP is zero
    if the value of the sink is zero.
    """
    weights = jnp.exp(
        sinks.astype(delta.dtype)[:, None] - stats.row_max + jnp.log(stats.inverse_row_sum)
    )
    return -jnp.sum(weights * delta, axis=(0, 1, 3)).astype(sinks.dtype)


def divide_terms(terms: Terms) -> tuple[Products, Biases] | None:
    """Divides terms into products and biases.

    Returns:
      The products and the biases, or None if a term is neither a product nor a bias.
    """

    def of_type(cls: type[_Term]) -> tuple[_Term, ...]:
        """Returns the terms of exactly this class.

        Subclasses are left out, because a subclass may compute different logits.
        """
        return tuple(term for term in terms if isinstance(term, cls) and type(term) is cls)

    products = Products(of_type(LowRank), of_type(Outer))
    biases = Biases(of_type(Static), of_type(Relative))
    num_divided = sum(map(len, (*products, *biases)))
    return (products, biases) if num_divided == len(terms) else None


def softmax_vjp_delta(out: jax.Array, g: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns ``δ = Σ_e out ∘ g``, ``[b, q, h, 1]``, which the derivative of the softmax needs.

    The derivative is ``dS = P ∘ (dP - δ)`` with ``δ = Σ_k P ∘ dP``. This sum over the keys k equals
    the sum of ``out ∘ g`` over e. Only the sum over e can be computed without an array of logits.

    Args:
      out: the output, ``[b, q, h, e]``.
      g: the cotangent of the output, ``[b, q, h, e]``.
      dtype: the dtype of the sum.
    """
    return jnp.sum(g.astype(dtype) * out.astype(dtype), axis=-1, keepdims=True)
