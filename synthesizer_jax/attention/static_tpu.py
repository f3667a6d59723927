"""The Pallas kernels of the static route for TPUs, for logits that all examples share.

The logits have no batch axis, so the kernels compute each exponential once instead of once per
example. Let ``E = exp(S - max)``, and let m be 1 for the real keys of an example and 0 for its
padding. Then::

    O = E (m ∘ V) / E m
    D = dO / E m
    δ = Σ_e O ∘ D
    dS = E ∘ (D (m ∘ V)ᵀ - δ mᵀ)
    dV = m ∘ Eᵀ D

E and dS have no batch axis. The first program of a group of heads computes E and keeps E in vector
memory. All programs of the group then compute only matrix products for their examples. dS is summed
over all examples before it is written.

If the real queries at a position may attend to the same keys in all examples, all examples also
have the same row sums. The kernels then normalize E to the weights P, and need neither m nor δ. The
cotangent of P is summed over the examples first, and the derivative of the softmax is then applied
once to the sum.

`static_tpu_geometry` defines how the work is divided into programs, and which arrays each program
reads. `tpu` contains functions that the kernels of the fused route also use.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from synthesizer_jax.attention import tpu
from synthesizer_jax.attention.fused_arrays import FusedInputs, Products
from synthesizer_jax.attention.kernel_arrays import LabeledArrays
from synthesizer_jax.attention.static_conditions import MIN_ROW_SUM
from synthesizer_jax.attention.static_tpu_geometry import (
    OPERAND_AXES,
    RESIDUAL_AXES,
    Operands,
    Residuals,
    Scratch,
    Tiling,
    examples_per_program,
    flatten_heads,
    heads_per_program,
    make_operands,
    make_scratch,
    make_tiling,
    program_memory,
)
from synthesizer_jax.attention.tpu import (
    BIAS_AXES,
    LOW,
    Bias,
    Ref,
    call_kernel,
    matmul,
    prepare_bias,
    roll_diagonals,
    sum_diagonals,
)

MAX_HEADS = 8
"""The largest number of heads of a program.

A program computes the smallest number of heads that fills whole registers.
"""

MAX_LOGITS = 2**21
"""The largest number of logits of a program, for all of its heads together.

The compiler unrolls the loops over a program's logits. With more logits, compiling takes minutes.
"""


def obstacle(q_length: int, inputs: FusedInputs) -> str | None:
    """Explains why the static TPU kernels cannot take the inputs, or returns None if they can."""
    common = tpu.obstacle(inputs)
    if common is not None:
        return common

    values = inputs.values
    heads = heads_per_program(*values.shape[2:])
    if heads > MAX_HEADS:
        return (
            f"No smaller number than {heads} heads of width {values.shape[3]} fills whole "
            f"registers, but the kernels compute at most {MAX_HEADS} heads together."
        )
    if heads * q_length * values.shape[1] > MAX_LOGITS:
        return (
            f"A program would compute {heads} heads with the logits of {q_length} queries and "
            f"{values.shape[1]} keys, but the kernels compute at most {MAX_LOGITS} logits together."
        )
    if examples_per_program(values, q_length) < 1:
        return (
            f"The logits of {q_length} queries and {values.shape[1]} keys do not fit into the "
            "vector memory."
        )
    return None


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames=("same_keys", "interpret"))
def forward(
    q_length: int,
    query_offset: int,
    inputs: FusedInputs,
    *,
    same_keys: bool,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the attention output, and the inverse denominators of the softmax.

    Args:
      q_length: the number of queries.
      query_offset: `Mask.query_offset`, as a static number.
      inputs: biases, values and mask.
      same_keys: whether the real queries at a position may attend to the same keys in all examples.
      interpret: whether to run the kernel in Python, without a TPU.

    Returns:
      The output ``[b, q, h, e]``, and the inverse denominators ``[h, q, b]``. An inverse
      denominator is 0 if the query is padding or may attend to no key. The second result is None if
      `same_keys` is true.
    """
    values = inputs.values
    tiling = make_tiling(inputs, q_length, query_offset)
    operands = make_operands(tiling, prepare_bias(inputs.biases), inputs, same_keys=same_keys)
    batch, heads, *_ = tiling.shape

    out_shape = jax.ShapeDtypeStruct((batch, q_length, operands.values.shape[2]), values.dtype)
    rows_shape = None
    if not same_keys:
        num_groups = tiling.grid[1]
        shape = (heads, num_groups, tiling.examples, q_length)
        rows_shape = jax.ShapeDtypeStruct(shape, jnp.float32)
    scratch = make_scratch(tiling, operands, backward=False)
    out, inverse_row_sum = call_kernel(
        functools.partial(_forward_kernel, tiling),
        LabeledArrays((operands,), (OPERAND_AXES,)),
        LabeledArrays((out_shape, rows_shape), ("b.l", "hg..")),
        tiling.plan(1, scratch, program_memory(values, q_length)),
        interpret=interpret,
    )

    if inverse_row_sum is not None:
        # [h, b / c, c, q] → [h, q, b]
        inverse_row_sum = inverse_row_sum.reshape(heads, batch, q_length).swapaxes(1, 2)
    return out.reshape(batch, q_length, heads, tiling.width), inverse_row_sum


@functools.partial(jax.jit, static_argnums=0, static_argnames="interpret")
def backward(
    query_offset: int,
    inputs: FusedInputs,
    out: jax.Array,
    inverse_row_sum: jax.Array | None,
    dout: jax.Array,
    *,
    interpret: bool = False,
) -> FusedInputs:
    """Returns the cotangents of the inputs of `forward`.

    Args:
      query_offset: `Mask.query_offset`, as a static number.
      inputs: the inputs of `forward`.
      out: the output that `forward` returned, ``[b, q, h, e]``.
      inverse_row_sum: the inverse denominators that `forward` returned, ``[h, q, b]`` or None.
      dout: the cotangent of the output, ``[b, q, h, e]``.
      interpret: whether to run the kernel in Python, without a TPU.
    """
    values = inputs.values
    q_length = dout.shape[1]
    tiling = make_tiling(inputs, q_length, query_offset)
    bias, bias_vjp = jax.vjp(prepare_bias, inputs.biases)
    same_keys = inverse_row_sum is None
    operands = make_operands(tiling, bias, inputs, same_keys=same_keys)

    residuals = Residuals(flatten_heads(dout))
    if inverse_row_sum is not None:
        # [h, q, b] → [h, b / c, c, q]
        rows = inverse_row_sum.swapaxes(1, 2)
        rows = rows.reshape(values.shape[2], -1, tiling.examples, q_length)
        residuals = Residuals(flatten_heads(dout), flatten_heads(out), rows)

    scratch = make_scratch(tiling, operands, backward=True)
    # The kernel sums the cotangents of the logits in float32, in the memory of its results.
    sums = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), bias)
    dbias, dvalues = call_kernel(
        functools.partial(_backward_kernel, tiling),
        LabeledArrays((operands, residuals), (OPERAND_AXES, RESIDUAL_AXES)),
        LabeledArrays((sums, operands.values), (BIAS_AXES, "b.l")),
        tiling.plan(2, scratch, program_memory(values, q_length)),
        interpret=interpret,
    )

    dvalues = dvalues.reshape(values.shape)
    if inverse_row_sum is not None:
        # dV = m ∘ Eᵀ D
        real_keys: Any = inputs.mask.keys(values.shape[1])
        dvalues = jnp.where(real_keys[..., None, None], dvalues, 0)
    (dbiases,) = bias_vjp(jax.tree.map(lambda d, x: d.astype(x.dtype), dbias, bias))
    return inputs.cotangents(Products(), dbiases, dvalues)


def _forward_kernel(
    tiling: Tiling, refs: Operands, out: Ref, inverse_row_sum: Ref, scratch: Scratch
) -> None:
    """Computes the output and the inverse denominators of a program's heads and examples.

    `out` has the shape ``[c, q, heads · e]``. `inverse_row_sum` has the shape ``[heads, c, q]``, or
    is None.
    """
    _fill_scratch(tiling, refs, scratch, None)
    real_queries: Ref = None if refs.real_queries is None else refs.real_queries[...].T  # [q, c]

    def write_result(head: int, inverse_sum: jax.Array | None) -> None:
        """Writes the output of one head.

        The shape of `inverse_sum` is ``[q, c]``. If `inverse_sum` is None, the output is not
        scaled.
        """
        values = _examples_in_columns(tiling, refs.values, head)  # [k, c · e]
        weighted_sum = matmul(scratch.weights[head], values, axes=(1, 0))  # [q, c · e]
        for example in range(tiling.examples):
            part = weighted_sum[:, tiling.columns_of(example)]  # [q, e]
            if inverse_sum is not None:
                part = part * inverse_sum[:, example : example + 1]
            out[example, :, tiling.lanes_of(head)] = part.astype(out.dtype)

    if refs.real_keys is None:
        # The weights have already been normalized. Only the rows of padding queries are multiplied
        # by 0.
        for head in range(tiling.heads):
            write_result(head, real_queries)
        return

    real_keys = refs.real_keys[...].astype(out.dtype)  # [c, k]
    for head in range(tiling.heads):
        # One matrix product computes the denominators E m of all examples, [q, c].
        row_sum = matmul(scratch.weights[head], real_keys, axes=(1, 1))
        inverse_sum = real_queries / jnp.maximum(row_sum, MIN_ROW_SUM)
        write_result(head, inverse_sum)
        inverse_row_sum[head] = inverse_sum.T


def _backward_kernel(
    tiling: Tiling,
    refs: Operands,
    residuals: Residuals,
    dbias: Bias,
    dvalues: Ref,
    scratch: Scratch,
) -> None:
    """Computes the cotangent of the values, and adds up the cotangent of the bias.

    `dvalues` has the shape ``[c, k, heads · e]``. The arrays of `dbias` have the shapes of a
    program's tiles of the bias. They stay in vector memory until the program of the last group of
    examples has written them.
    """
    # The sum of dS over the examples is the cotangent of the table. Without a table, the sum is in
    # scratch memory, because only the sums along its diagonals are a result.
    dlogits_sum = scratch.dlogits_sum if dbias.table is None else dbias.table
    _fill_scratch(tiling, refs, scratch, dlogits_sum)

    for head in range(tiling.heads):
        # [k, c · e]
        dvalues_in_columns = _add_examples(tiling, refs, residuals, head, scratch, dlogits_sum)
        for example in range(tiling.examples):
            part = dvalues_in_columns[:, tiling.columns_of(example)]
            dvalues[example, :, tiling.lanes_of(head)] = part.astype(dvalues.dtype)

    @pl.when(pl.program_id(1) == tiling.grid[1] - 1)
    def _() -> None:
        for head in range(tiling.heads):
            _finish_dbias(tiling, refs, dbias, head, scratch, dlogits_sum)


def _finish_dbias(
    tiling: Tiling, refs: Operands, dbias: Bias, head: int, scratch: Scratch, dlogits_sum: Ref
) -> None:
    """Computes the cotangent of one head's bias from the sum over all examples."""
    if refs.real_keys is None:
        # Before this step, `dlogits_sum` is P ∘ dP. The derivative of the softmax is
        # dS = P ∘ dP - P Σ_k P ∘ dP.
        dweights = dlogits_sum[head]
        weights = scratch.weights[head].astype(jnp.float32)
        dlogits_sum[head] -= weights * jnp.sum(dweights, axis=1, keepdims=True)
    if dbias.diagonals is not None:
        _, _, rows, _ = tiling.shape
        count = dbias.diagonals.shape[2]
        dlogits = dlogits_sum.at[head]  # [q, k]
        dbias.diagonals[head] = sum_diagonals(dlogits, 0, rows=rows, count=count)


def _add_examples(
    tiling: Tiling,
    refs: Operands,
    residuals: Residuals,
    head: int,
    scratch: Scratch,
    dlogits_sum: Ref,
) -> jax.Array:
    """Adds dS of one head and a program's examples to `dlogits_sum`.

    Returns:
      The cotangents of the values of the program's examples, ``[k, c · e]``.
    """
    # `inverse_sum` has the shape [q, c] and contains 1 / (E m) of each example. If E is normalized,
    # `inverse_sum` is 1 for real queries and 0 for padding queries. If E is normalized and all
    # queries are real, `inverse_sum` is None.
    inverse_sum: Ref = None
    if residuals.inverse_row_sum is not None:
        inverse_sum = residuals.inverse_row_sum[head].T
    elif refs.real_queries is not None:
        inverse_sum = refs.real_queries[...].T

    # D = dO / E m.
    # The shape of D is [q, c · e].
    lanes = tiling.lanes_of(head)
    examples = range(tiling.examples)
    parts = [residuals.dout[example, :, lanes].astype(jnp.float32) for example in examples]
    if inverse_sum is not None:
        parts = [part * inverse_sum[:, n : n + 1] for n, part in enumerate(parts)]
    scaled_dout = jnp.concatenate(parts, axis=1)
    rounded_dout = scaled_dout.astype(refs.values.dtype)

    # dE = D (m ∘ V)ᵀ - δ mᵀ.
    # The shape of dE is [q, k]. The columns of D and V contain all examples of the program, so the
    # matrix product also sums over these examples.
    values = _examples_in_columns(tiling, refs.values, head)
    dweights = matmul(rounded_dout, values, axes=(1, 1))
    if residuals.inverse_row_sum is not None:
        # δ = Σ_e O ∘ D for each example.
        # The shape of δ is [q, c].
        out = _examples_in_columns(tiling, residuals.out, head)
        products = scaled_dout * out.astype(jnp.float32)  # [q, c · e]
        deltas = []
        for example in examples:
            part = products[:, tiling.columns_of(example)]  # [q, e]
            deltas.append(part.sum(axis=1, keepdims=True))
        dweights -= matmul(jnp.concatenate(deltas, axis=1), refs.real_keys[...], axes=(1, 0))

    # dS = E ∘ dE
    dlogits_sum[head] += scratch.weights[head].astype(jnp.float32) * dweights
    # dV = Eᵀ D
    return matmul(scratch.transposed[head], rounded_dout, axes=(1, 0))


def _fill_scratch(tiling: Tiling, refs: Operands, scratch: Scratch, dlogits_sum: Ref) -> None:
    """Computes the weights of a group of heads, and sets the sums of their cotangents to zero.

    Only the first program of a group of heads computes the weights. In all other programs, the
    function does nothing. `dlogits_sum` is None in the forward kernel.
    """

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        for head in range(tiling.heads):
            # The backward kernel does not need the memory of the sums yet, so it expands the
            # diagonals there.
            tile = scratch.tile if dlogits_sum is None else dlogits_sum.at[head]
            weights = _shared_weights(tiling, refs, head, tile)
            scratch.weights[head] = weights.astype(scratch.weights.dtype)
            if dlogits_sum is not None:
                scratch.transposed[head] = weights.T.astype(scratch.transposed.dtype)
                dlogits_sum[head] = jnp.zeros_like(weights)


def _shared_weights(tiling: Tiling, refs: Operands, head: int, tile: Ref) -> jax.Array:
    """Returns the weights that all examples share for one head, ``[q, k]`` float32.

    `Scratch.weights` describes the weights.

    Args:
      tiling: the division of the work into programs.
      refs: references to the operands.
      head: the index of the head among the heads of the program.
      tile: memory ``[q, k]`` in which diagonals are expanded.
    """
    bias = refs.bias
    shape = tiling.shape[2:]
    parts = [] if bias.table is None else [bias.table[head].astype(jnp.float32)]
    if bias.diagonals is not None:
        roll_diagonals(tile, bias.diagonals[head], 0, rows=shape[0])
        parts.append(tile[...])
    logits = functools.reduce(jnp.add, parts)  # [q, k]

    query = lax.broadcasted_iota(jnp.int32, shape, 0) + tiling.offset
    key = lax.broadcasted_iota(jnp.int32, shape, 1)
    rules = tiling.mask.band_rules(query, key)
    if rules:
        logits = jnp.where(functools.reduce(jnp.logical_and, rules), logits, -jnp.inf)

    # In a row without an allowed key, the maximum is -inf. `LOW` replaces this maximum, because
    # -inf - (-inf) would be NaN.
    row_max = jnp.max(logits, axis=1, keepdims=True)
    weights = jnp.exp(logits - jnp.maximum(row_max, LOW))
    if refs.real_keys is None:
        weights /= jnp.maximum(jnp.sum(weights, axis=1, keepdims=True), MIN_ROW_SUM)
    return weights


def _examples_in_columns(tiling: Tiling, x: Ref, head: int) -> jax.Array:
    """Returns one head of a tile ``[c, n, heads · e]`` as ``[n, c · e]``.

    The columns of the result contain the examples side by side.
    """
    lanes = tiling.lanes_of(head)
    return jnp.concatenate([x[example, :, lanes] for example in range(tiling.examples)], axis=1)
