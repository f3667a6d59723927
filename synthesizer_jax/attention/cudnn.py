"""The cuDNN route: NVIDIA's fused attention kernels, called through `jax.nn.dot_product_attention`.

It runs only on request, ``implementation="cudnn"``: its calls were lowered for CUDA, but have never run on
a GPU. The requirements of the kernels are taken from `jax.nn` of jax 0.10 and from NVIDIA's documentation
of cuDNN 9 (Attention):

* `LowRank` terms are concatenated along the rank. Factors that the examples share are copied for every
  example, and their gradients are stored for every example before they are summed.
* `Static` and `Relative` terms are added up to one float32 bias ``[1, h, q, k]``. Without a `LowRank`
  term the kernels multiply zeros.
* Lengths, `Mask.causal`, and with it `Mask.window`, have no cost. The other parts of a mask become a bias
  themselves, ``[b or 1, h or 1, q, k]`` in the dtype of the values. If a mask that differs between examples
  is added to a bias that they share, the result is ``[b, h, q, k]``.
* Queries, keys and values are padded to the same width, a multiple of 8, and odd lengths by one.

The output of the kernels for padding and for rows without keys is never read: those rows and their
cotangents are replaced by zeros.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from synthesizer_jax.attention import blocked
from synthesizer_jax.attention.derivatives import with_gradient
from synthesizer_jax.attention.fused import fused_inputs
from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.parts import FusedInputs, Products, divide_terms, sum_biases
from synthesizer_jax.attention.terms import Terms, logits_dtype

KERNEL: Literal["cudnn", "xla"] = "cudnn"
"""The argument `implementation` of `jax.nn.dot_product_attention`."""

DTYPES = ("float16", "bfloat16")
"""The dtypes that the kernels support."""


def attend_cudnn(terms: Terms, values: jax.Array, *, mask: Mask, q_length: int) -> jax.Array:
    """Returns ``softmax(Σ terms) · values``, computed by cuDNN.

    The first-order gradient is computed by cuDNN, from the row sums of its forward pass. All other
    derivatives are those of `blocked.plain_attention`. Under `jax.vmap` the kernels run once for each
    mapped element.

    Args:
      terms: terms for q queries and k keys, for which `obstacle` returns "".
      values: ``[b, k, h, e]``.
      mask: which keys a query may attend to.
      q_length: number of queries.

    Returns:
      ``[b, q, h, e]`` in the values' dtype.
    """
    inputs, _ = fused_inputs(terms, values, mask, q_length=q_length)
    call_cudnn = functools.partial(_call_cudnn, q_length)
    vjp_of_call = jax.eval_shape(functools.partial(jax.vjp, call_cudnn), inputs)[1]
    residuals_treedef = jax.tree.structure(vjp_of_call)

    # The kernels' own batching rules support neither a mapped bias nor mapped beside unmapped arrays.
    @sequential_vmap
    def forward(inputs: FusedInputs) -> tuple[jax.Array, list[jax.Array]]:
        out, vjp = jax.vjp(call_cudnn, inputs)
        return out, jax.tree.leaves(vjp)

    @sequential_vmap
    def backward(
        inputs: FusedInputs, out: jax.Array, residuals: list[jax.Array], dout: jax.Array
    ) -> FusedInputs:
        vjp = jax.tree.unflatten(residuals_treedef, residuals)
        (cotangents,) = vjp(dout)
        return inputs.cotangents(cotangents.products, cotangents.biases, cotangents.values)

    attend = with_gradient(forward, backward, functools.partial(blocked.plain_attention, q_length))
    out: jax.Array = attend(inputs)
    return out


def obstacle(terms: Terms, values: jax.Array) -> str | None:
    """Returns why cuDNN cannot compute attention with these terms on this machine; None: it can."""
    for term in terms:
        divided = divide_terms((term,))
        if divided is None or divided[0].outer:
            return f"cuDNN has no {type(term).__name__} terms, only LowRank, Static and Relative"
    divided = divide_terms(terms)
    assert divided is not None
    products = divided[0]
    factors = [x for term in products.low_rank for x in (term.queries, term.keys)]
    if values.dtype not in DTYPES:
        return f"cuDNN supports float16 and bfloat16, but the values are {values.dtype}"
    other_dtypes = [x.dtype for x in factors if x.dtype != values.dtype]
    if other_dtypes:
        return (
            f"cuDNN needs equal dtypes, but a LowRank term is {other_dtypes[0]} and the values are "
            f"{values.dtype}"
        )
    capability = compute_capability()
    if capability is None or capability < (8, 0):
        return "cuDNN's attention needs an NVIDIA GPU of compute capability 8.0 or above"
    width, max_width = _kernel_width(products, values), 256 if capability[0] == 9 else 128
    if width > max_width:
        return (
            f"cuDNN supports widths up to {max_width} on this GPU, but the values or the ranks of all "
            f"LowRank terms together need {width}"
        )
    return None


def compute_capability() -> tuple[int, ...] | None:
    """Returns the compute capability of this process's first device; None: it is not an NVIDIA GPU."""
    device = jax.local_devices()[0]
    if "cuda" not in device.client.platform_version:
        return None
    return tuple(int(part) for part in device.compute_capability.split("."))


class _MaskArguments(NamedTuple):
    """A mask as arguments of `jax.nn.dot_product_attention`.

    Attributes:
      is_causal: whether queries attend only to keys up to their position.
      window: how many keys before its position a causal query attends to; None: all.
      pattern: the parts of the mask that neither these nor lengths express, bool
        ``[b or 1, h or 1, q, k]``; None: there are none.
    """

    is_causal: bool
    window: int | None
    pattern: jax.Array | None


def _mask_arguments(mask: Mask, q_length: int, k_length: int, *, has_bias: bool) -> _MaskArguments:
    """Returns a mask without its lengths as arguments of `jax.nn.dot_product_attention`.

    If there is a bias, a window becomes part of it, as cuDNN before 9.10.2 does not support both.
    """
    starts_at_zero = isinstance(mask.query_offset, int) and mask.query_offset == 0
    is_plain = starts_at_zero and mask.prefix_lengths is None and not mask.counts_in_segments
    causal = is_plain and (mask.causal or mask.ahead == 0) and (mask.ahead or 0) >= 0
    remaining = dataclasses.replace(mask, key_lengths=None, query_lengths=None)
    if causal:
        remaining = dataclasses.replace(remaining, causal=False, ahead=None)
    window = None
    if causal and mask.window is not None and mask.window > 0 and not has_bias:
        without_window = dataclasses.replace(remaining, window=None)
        if without_window.pairs(q_length, k_length) is None:
            remaining, window = without_window, mask.window - 1
    return _MaskArguments(causal, window, remaining.pairs(q_length, k_length))


def _call_cudnn(q_length: int, inputs: FusedInputs) -> jax.Array:
    """Returns the output ``[b, q, h, e]`` of one call of cuDNN; it has a first-order gradient only.

    A `jnp.where` on an argument zeros that argument's cotangent, one on the output zeros the cotangent
    that the kernels get.
    """
    products, biases, values, mask, _ = inputs
    batch, k_length, heads, out_width = values.shape
    pairs, keys = mask.pairs(q_length, k_length), mask.keys(k_length)
    has_keys = None if pairs is None else pairs.any(axis=-1).swapaxes(1, 2)
    bias = sum_biases(biases, q_length=q_length)
    has_bias = bias is not None
    is_causal, window, pattern = _mask_arguments(mask, q_length, k_length, has_bias=has_bias)
    if bias is not None:
        bias = bias[None] if pairs is None else jnp.where(pairs.any(0, keepdims=True), bias, 0)
    q, k = (n + n % 2 for n in (q_length, k_length))
    has_lengths = mask.key_lengths is not None or mask.query_lengths is not None
    query_lengths, key_lengths = None, None
    if has_lengths or window is not None or k > k_length:
        sizes = batch, q_length, k_length
        query_lengths, key_lengths = _sequence_lengths(mask, has_keys, sizes)
    query = _concatenate_factors([t.queries for t in products.low_rank], values, q_length)
    query = _zero_where_masked(query, has_keys)
    width = _kernel_width(products, values)
    out = jax.nn.dot_product_attention(
        _pad_to(query, (batch, q, heads, width)),
        _pad_to(
            _zero_where_masked(
                _concatenate_factors([t.keys for t in products.low_rank], values, k_length), keys
            ),
            (batch, k, heads, width),
        ),
        _pad_to(_zero_where_masked(values, keys), (batch, k, heads, width)),
        None if bias is None else _pad_to(bias, (1, heads, q, k)),
        None if pattern is None else _pad_to(pattern, (*pattern.shape[:2], q, k)),
        scale=1.0,
        is_causal=is_causal,
        query_seq_lengths=query_lengths,
        key_value_seq_lengths=key_lengths,
        local_window_size=None if window is None else (window, 0),
        implementation=KERNEL,
    )
    return _zero_where_masked(out[:, :q_length, :, :out_width], has_keys)


def _sequence_lengths(
    mask: Mask, has_keys: jax.Array | None, sizes: tuple[int, int, int]
) -> tuple[jax.Array, jax.Array]:
    """Returns the numbers of queries and keys of every example, int32 ``[b]``.

    The behavior of the kernels for rows without keys is not documented. Hence no length is below 1, and
    queries after the last one that has a key are not counted.

    Args:
      mask: the mask with its lengths.
      has_keys: which queries attend to any key, bool ``[b or 1, q, h or 1]``; None: all.
      sizes: numbers of examples, queries and keys.
    """
    batch, q_length, k_length = sizes
    query_lengths, key_lengths = jnp.asarray(q_length), jnp.asarray(k_length)
    if has_keys is not None:
        ends = jnp.arange(1, q_length + 1)[None]
        query_lengths = jnp.max(jnp.where(has_keys.any(axis=-1), ends, 1), axis=-1)
    if mask.key_lengths is not None:
        key_lengths = jnp.clip(mask.key_lengths, 1, k_length)
    query_lengths, key_lengths = (
        jnp.broadcast_to(x.astype(jnp.int32), (batch,)) for x in (query_lengths, key_lengths)
    )
    return query_lengths, key_lengths


def _concatenate_factors(factors: Sequence[jax.Array], values: jax.Array, length: int) -> jax.Array:
    """Returns the queries or the keys of all `LowRank` terms, ``[b, length, h, Σ ranks]``."""
    batch, _, heads, _ = values.shape

    def broadcast_batch(x: jax.Array) -> jax.Array:
        if x.shape[0] == batch:
            return x
        # The cast to float32 makes the gradient a sum in float32.
        return jnp.broadcast_to(x.astype(logits_dtype(x)), (batch, *x.shape[1:])).astype(x.dtype)

    parts = [broadcast_batch(x) for x in factors]
    empty = jnp.zeros_like(values, shape=(batch, length, heads, 0))
    return jnp.concatenate([*parts, empty], axis=-1)


def _kernel_width(products: Products, values: jax.Array) -> int:
    """Returns the common width of queries, keys and values, a multiple of 8."""
    rank = sum(term.queries.shape[-1] for term in products.low_rank)
    return -(-max(rank, values.shape[-1]) // 8) * 8


def _zero_where_masked(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Returns ``[b, n, h, r]``, zero where `mask`, ``[b or 1, n]`` or ``[b or 1, n, h or 1]``, is false."""
    if mask is None:
        return x
    return jnp.where(mask.reshape(mask.shape + (1,) * (4 - mask.ndim)), x, 0)


def _pad_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns the array with zeros appended along every axis."""
    return jnp.pad(x, [(0, new - old) for old, new in zip(x.shape, shape, strict=True)])
