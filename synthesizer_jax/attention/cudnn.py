"""The cuDNN route: NVIDIA's fused attention kernels, called through `jax.nn.dot_product_attention`.

It runs only where it is asked for, ``implementation="cudnn"``: its calls were lowered for CUDA, but have
never run on a GPU. What the kernels take is from jax 0.10's `jax.nn` and NVIDIA's documentation of cuDNN 9
(Attention):

* `LowRank` terms, concatenated along the rank. Factors that the examples share are copied for every
  example, and their gradients held for every example before they are summed.
* `Static` and `Relative` terms, added up to one float32 bias ``[1, h, q, k]``. Without a `LowRank`
  term the kernels multiply zeros.
* Lengths, `Mask.causal`, and with it `Mask.window`, cost nothing. The other parts of a mask become a bias
  themselves, ``[b or 1, h or 1, q, k]`` in the dtype of the values; added to a bias that the examples
  share, a mask that differs between them makes it ``[b, h, q, k]``.
* Keys and values are padded to the same width, a multiple of 8, and odd lengths by one.

What the kernels return for padding and for rows without keys is never read: those rows are replaced by
zeros, and so are the cotangents that belong to them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from synthesizer_jax.attention import blocked
from synthesizer_jax.attention.derivatives import with_gradient
from synthesizer_jax.attention.fused import inputs_of
from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.parts import Inputs, shared_bias
from synthesizer_jax.attention.terms import LowRank, Relative, Static, Terms, wide

KERNEL: Any = "cudnn"
"""The implementation that `jax.nn.dot_product_attention` is asked for."""

DTYPES = ("float16", "bfloat16")
"""Dtypes that the kernels take."""


def attend_cudnn(terms: Terms, values: jax.Array, *, mask: Mask, q_length: int) -> jax.Array:
    """``softmax(Σ terms) · values`` by cuDNN.

    First-order reverse mode is cuDNN's own, from the row sums of its forward pass. All other derivatives
    are those of `blocked.plain`. Under `jax.vmap` the kernels run once for each mapped element.

    Args:
      terms: terms for q queries and k keys, to which `obstacle` does not object.
      values: ``[b, k, h, e]``.
      mask: which keys a query may see.
      q_length: number of queries.

    Returns:
      ``[b, q, h, e]`` in the values' dtype.
    """
    inputs, _ = inputs_of(terms, values, mask, q_length)
    call = functools.partial(_call, q_length)

    kept_tree: Any = jax.tree.structure(jax.eval_shape(functools.partial(jax.vjp, call), inputs)[1])

    # The kernels' own rules for `jax.vmap` take no mapped bias, nor mapped beside unmapped arrays.
    @sequential_vmap
    def forward(inputs: Inputs) -> tuple[jax.Array, list[jax.Array]]:
        out, pull_back = jax.vjp(call, inputs)
        return out, jax.tree.leaves(pull_back)

    @sequential_vmap
    def backward(inputs: Inputs, out: jax.Array, kept: list[jax.Array], g: jax.Array) -> Inputs:
        (found,) = kept_tree.unflatten(kept)(g)
        return inputs.cotangents(found.products, found.biases, found.values)

    return with_gradient(forward, backward, functools.partial(blocked.plain, q_length))(inputs)


def obstacle(terms: Terms, values: jax.Array) -> str:
    """Why cuDNN cannot compute attention with these terms on this machine; empty if it can."""
    other = [t for t in terms if not isinstance(t, LowRank | Static | Relative)]
    if other:
        return f"cuDNN has no {type(other[0]).__name__} terms, only LowRank, Static and Relative"
    factors = [x for t in terms if isinstance(t, LowRank) for x in (t.queries, t.keys)]
    if values.dtype not in DTYPES:
        return f"cuDNN takes float16 and bfloat16, but the values are {values.dtype}"
    unlike = [x.dtype for x in factors if x.dtype != values.dtype]
    if unlike:
        return f"cuDNN takes one dtype, but a LowRank term is {unlike[0]} and the values are {values.dtype}"
    capability = compute_capability()
    if capability is None or capability < (8, 0):
        return "cuDNN's attention needs an NVIDIA GPU of compute capability 8.0 or above"
    width, widest = _width(terms, values), 256 if capability[0] == 9 else 128
    if width > widest:
        return (
            f"cuDNN takes widths up to {widest} on this GPU, but the values or the ranks of all LowRank "
            f"terms together need {width}"
        )
    return ""


def compute_capability() -> tuple[int, ...] | None:
    """The compute capability of this process's first device; None: it is not an NVIDIA GPU."""
    device: Any = jax.local_devices()[0]
    if "cuda" not in device.client.platform_version:
        return None
    return tuple(int(part) for part in device.compute_capability.split("."))


class MaskArguments(NamedTuple):
    """A mask as arguments of `jax.nn.dot_product_attention`.

    Attributes:
      is_causal: only keys up to the query's position.
      window: how many keys before it a causal query sees; None: all.
      pattern: what neither these nor lengths say, bool ``[b or 1, h or 1, q, k]``; None: nothing.
    """

    is_causal: bool
    window: int | None
    pattern: jax.Array | None


def mask_arguments(mask: Mask, q_length: int, k_length: int, *, biased: bool) -> MaskArguments:
    """The parts of a mask besides its lengths.

    A window beside a bias goes into it, as cuDNN before 9.10.2 has no windows with a bias.
    """
    from_start = isinstance(mask.query_offset, int) and mask.query_offset == 0
    separate = from_start and mask.prefix_lengths is None and not mask.counts_in_segments
    causal = separate and (mask.causal or mask.ahead == 0) and (mask.ahead or 0) >= 0
    rest = dataclasses.replace(mask, key_lengths=None, query_lengths=None)
    if causal:
        rest = dataclasses.replace(rest, causal=False, ahead=None)
    window = None
    if causal and mask.window is not None and mask.window > 0 and not biased:
        others = dataclasses.replace(rest, window=None)
        if others.pairs(q_length, k_length) is None:
            rest, window = others, mask.window - 1
    return MaskArguments(causal, window, rest.pairs(q_length, k_length))


def _call(q_length: int, inputs: Inputs) -> jax.Array:
    """The output ``[b, q, h, e]`` of one call of cuDNN, differentiable once and in reverse mode.

    `jnp.where` on an argument puts zeros into its cotangent, on the output into the kernels' cotangent.
    """
    products, biases, values, mask, _ = inputs
    batch, k_length, heads, own_width = values.shape
    pairs, keys = mask.pairs(q_length, k_length), mask.keys(k_length)
    rows = None if pairs is None else pairs.any(axis=-1).swapaxes(1, 2)
    bias = shared_bias(biases, q_length=q_length)
    is_causal, window, pattern = mask_arguments(mask, q_length, k_length, biased=bias is not None)
    if bias is not None:
        bias = bias[None] if pairs is None else jnp.where(pairs.any(0, keepdims=True), bias, 0)
    q, k = (n + n % 2 for n in (q_length, k_length))
    given = mask.key_lengths is not None or mask.query_lengths is not None
    lengths: tuple[Any, Any] = (None, None)
    if given or window is not None or k > k_length:
        lengths = _lengths(mask, rows, (batch, q_length, k_length))
    queries = _only(_factor(products, "queries", values, q_length), rows)
    width = _width(products, values)
    out = jax.nn.dot_product_attention(
        _padded(queries, (batch, q, heads, width)),
        _padded(_only(_factor(products, "keys", values, k_length), keys), (batch, k, heads, width)),
        _padded(_only(values, keys), (batch, k, heads, width)),
        None if bias is None else _padded(bias, (1, heads, q, k)),
        None if pattern is None else _padded(pattern, (*pattern.shape[:2], q, k)),
        scale=1.0,
        is_causal=is_causal,
        query_seq_lengths=lengths[0],
        key_value_seq_lengths=lengths[1],
        local_window_size=None if window is None else (window, 0),
        implementation=KERNEL,
    )
    return _only(out[:, :q_length, :, :own_width], rows)


def _lengths(
    mask: Mask, rows: jax.Array | None, sizes: tuple[int, int, int]
) -> tuple[jax.Array, jax.Array]:
    """Numbers of queries and keys of every example, int32 ``[b]``.

    None is zero, and queries behind the last one with a key do not count, so that the kernels meet no
    row without keys: what they do there is not documented.

    Args:
      mask: with its lengths.
      rows: which queries see a key, bool ``[b or 1, q, h or 1]``; None: all do.
      sizes: numbers of examples, queries and keys.
    """
    batch, q_length, k_length = sizes
    queries, keys = jnp.asarray(q_length), jnp.asarray(k_length)
    if rows is not None:
        place = jnp.arange(1, q_length + 1)
        queries = jnp.max(jnp.where(rows.any(axis=-1), place, 1), axis=-1)
    if mask.key_lengths is not None:
        keys = jnp.clip(mask.key_lengths, 1, k_length)
    queries, keys = (jnp.broadcast_to(x.astype(jnp.int32), (batch,)) for x in (queries, keys))
    return queries, keys


def _factor(products: Terms, name: str, values: jax.Array, length: int) -> jax.Array:
    """The queries or the keys of all `LowRank` terms, ``[b, length, h, Σ ranks]``."""
    batch, _, heads, _ = values.shape

    def of_all_examples(x: jax.Array) -> jax.Array:
        if x.shape[0] == batch:
            return x
        # By way of float32, in which the gradient is then summed.
        return jnp.broadcast_to(x.astype(wide(x)), (batch, *x.shape[1:])).astype(x.dtype)

    parts = [of_all_examples(getattr(term, name)) for term in products]
    empty = jnp.zeros_like(values, shape=(batch, length, heads, 0))
    return jnp.concatenate([*parts, empty], axis=-1)


def _width(terms: Terms, values: jax.Array) -> int:
    """The width of queries, keys and values: a multiple of 8."""
    rank = sum(t.queries.shape[-1] for t in terms if isinstance(t, LowRank))
    return -(-max(rank, values.shape[-1]) // 8) * 8


def _only(x: jax.Array, real: jax.Array | None) -> jax.Array:
    """``[b, n, h, r]``, zero where `real`, ``[b or 1, n]`` or ``[b or 1, n, h or 1]``, is false."""
    if real is None:
        return x
    return jnp.where(real.reshape(real.shape + (1,) * (4 - real.ndim)), x, 0)


def _padded(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The array with zeros behind it in every axis."""
    return jnp.pad(x, [(0, n - own) for own, n in zip(x.shape, shape, strict=True)])
