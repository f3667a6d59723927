"""`dot_product_attention` against `jax.nn.dot_product_attention`, values and every gradient."""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synthesizer_jax import Linformer, Mask, attend, dot_product_attention, relative_bias
from synthesizer_jax.attention import banded, low_rank, per_example, static
from synthesizer_jax.attention.relative import relative_buckets
from tests.attention.cases import FAST_COMPILE, normal
from tests.attention.oracle import rms_error

B, Q, K, N, H = 3, 7, 11, 4, 5
BOUND = 2e-5

BIASES = {
    "none": None,
    "learned": (1, N, Q, K),
    "without batch axis": (N, Q, K),
    "all heads alike": (Q, K),
    "of keys": (1, N, 1, K),
    "of queries": (1, 1, Q, 1),
    "each example's": (B, N, Q, K),
    "each example's keys": (B, 1, 1, K),
}
MASKS = {
    "none": None,
    "keys": (B, 1, 1, K),
    "keys of all": (K,),
    "queries": (B, 1, Q, 1),
    "pairs": (Q, K),
    "heads": (1, N, Q, K),
    "everything": (B, N, Q, K),
}
ARGUMENTS = {
    "bias": st.sampled_from(list(BIASES)),
    "mask": st.sampled_from(list(MASKS)),
    "kv_heads": st.sampled_from([1, 2, N]),
    "causal": st.booleans(),
    "window": st.sampled_from([None, 2, (3, 0), (0, 4)]),
    "lengths": st.sampled_from([None, (K, 4, 0)]),
    "query_lengths": st.sampled_from([None, (Q, 3, 0)]),
    "scale": st.sampled_from([None, 0.3]),
}

expected_attention = functools.partial(jax.nn.dot_product_attention, implementation="xla")


@contextlib.contextmanager
def fused_at_any_size() -> Iterator[None]:
    attend = importlib.import_module("synthesizer_jax.attention.attend")
    with (
        mock.patch.object(attend, "FEW_LOGITS", 0),
        mock.patch.object(per_example, "FEW_LOGITS", 0),
    ):
        yield


ROUTES = {"reference": contextlib.nullcontext, "fused": fused_at_any_size}


def tokens(
    q: int = Q, k: int = K, n: int = N, kv_heads: int = N, dtype: Any = jnp.float32
) -> tuple[jax.Array, ...]:
    """Query, key, value and a cotangent."""
    return (
        normal("query", B, q, n, H, dtype=dtype),
        normal("key", B, k, kv_heads, H, dtype=dtype),
        normal("value", B, k, kv_heads, H, dtype=dtype),
        normal("cotangent", B, q, n, H, dtype=dtype),
    )


def mask_of(shape: tuple[int, ...] | None) -> np.ndarray | None:
    return None if shape is None else np.random.default_rng(0).random(shape) < 0.6


def sees_a_key(mask, causal, window, lengths, query_lengths) -> np.ndarray:
    """Which queries see a key in some head, bool ``[b, q, n]``, from the definitions."""
    seen = np.ones((B, N, Q, K), bool) if mask is None else np.broadcast_to(mask, (B, N, Q, K))
    query, key = np.arange(Q)[:, None], np.arange(K)
    left, right = (window, window) if isinstance(window, int) else window or (K, K)
    seen = seen & (key >= query - left) & (key <= query + (min(right, 0) if causal else right))
    if lengths is not None:
        seen = seen & (key < np.array(lengths)[:, None, None, None])
    if query_lengths is not None:
        seen = seen & (query < np.array(query_lengths)[:, None, None, None])
    return seen.any(-1).swapaxes(1, 2)


def with_gradients(function: Any, x: Any, bias: Any, **options: Any) -> Any:
    """The output, and the cotangents of query, key, value and bias."""
    *qkv, g = x
    out, back = jax.vjp(lambda *args: function(*args, **options), *qkv, bias)
    return out, back(g)


def check(found: Any, expected: Any, bound: float = BOUND) -> None:
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        atol = bound * max(float(np.abs(y).max()), 0.1)
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=0, atol=atol)


def compare(route, bias, mask, kv_heads, causal, window, lengths, query_lengths, scale) -> None:
    """Our results are those of `jax.nn`, and zeros where a query sees no key."""
    array = mask_of(MASKS[mask])
    some = sees_a_key(array, causal, window, lengths, query_lengths)[..., None]
    *qkv, g = tokens(kv_heads=kv_heads)
    options = {
        "mask": array,
        "is_causal": causal,
        "local_window_size": window,
        "key_value_seq_lengths": None if lengths is None else jnp.array(lengths),
        "query_seq_lengths": None if query_lengths is None else jnp.array(query_lengths),
        "scale": scale,
    }
    b = None if BIASES[bias] is None else normal("bias", *BIASES[bias])
    with ROUTES[route]():
        found = with_gradients(dot_product_attention, (*qkv, g), b, **options)
    out, gradients = with_gradients(expected_attention, (*qkv, g * some), b, **options)
    check(found, (out * some, gradients))


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
@given(**ARGUMENTS)
@settings(max_examples=8, deadline=None, derandomize=True)
def test_any_arguments(route: str, **arguments: Any) -> None:
    compare(route, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("bias", ["learned", "each example's keys"])
def test_bfloat16(route: str, bias: str) -> None:
    """As far from the result in float32 as the inputs' rounding, the bias' gradient included."""
    half = tokens(kv_heads=2, dtype=jnp.bfloat16)
    b = normal("bias", *BIASES[bias], dtype=jnp.bfloat16)
    with ROUTES[route]():
        found = with_gradients(dot_product_attention, half, b, is_causal=True)
    full, b = jax.tree.map(lambda x: x.astype(jnp.float32), (half, b))
    expected = with_gradients(expected_attention, full, b, is_causal=True)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.dtype == jnp.bfloat16
        assert rms_error(x, np.asarray(y, np.float64)) < 0.01


@pytest.mark.parametrize("shape", [(1, N, 1, K), (B, 1, 1, K)])
def test_a_large_bias_of_keys_is_not_rounded_to_bfloat16(shape: tuple[int, ...]) -> None:
    x = tokens(dtype=jnp.bfloat16)
    b = 300 + normal("bias", *shape)
    found = with_gradients(dot_product_attention, x, b)
    expected = with_gradients(expected_attention, x, b)
    for y, z in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert y.dtype == z.dtype
        assert rms_error(y, np.asarray(z.astype(jnp.float32), np.float64)) < 0.01


def test_the_shared_gradient_of_a_bfloat16_bias_is_summed_in_float32() -> None:
    x = tuple(jnp.tile(y, (16, 1, 1, 1)).astype(jnp.bfloat16) for y in tokens())
    b = normal("bias", 1, 1, Q, K, dtype=jnp.bfloat16)
    with fused_at_any_size():
        _, (*_, found) = with_gradients(dot_product_attention, x, b)
    full, b = jax.tree.map(lambda x: x.astype(jnp.float32), (x, b))
    _, (*_, expected) = with_gradients(expected_attention, full, b)
    assert rms_error(found, np.asarray(expected, np.float64)) < 0.005


def test_long_rows_take_the_fused_route_under_jit() -> None:
    """Shared biases, each example's and T5's together, in rows too long for the reference route."""
    n, length, buckets = 2, 300, 16
    x = tokens(length, length, n, 1)
    pieces = {
        "shared": normal("shared", n, length, length),
        "own": normal("own", B, 1, length, length),
        "keys": normal("keys", B, n, 1, length),
        "table": normal("table", buckets, n),
    }
    options = {"is_causal": True, "local_window_size": 100}
    distance = np.arange(length) - np.arange(length)[:, None]
    bucket = relative_buckets(distance, num_buckets=buckets, max_distance=64, bidirectional=False)

    def ours(q, k, v, p, **options):
        table = relative_bias(p["table"], bidirectional=False, max_distance=64, head_axis=1)
        return dot_product_attention(q, k, v, (p["shared"], p["own"], p["keys"], table), **options)

    def theirs(q, k, v, p, **options):
        bias = p["shared"] + p["own"] + p["keys"] + p["table"][bucket].transpose(2, 0, 1)
        return expected_attention(q, k, v, bias, **options)

    found, expected = (
        jax.jit(functools.partial(with_gradients, f, **options), compiler_options=FAST_COMPILE)(
            x, pieces
        )
        for f in (ours, theirs)
    )
    check(found, expected, 1e-4)


@pytest.mark.parametrize("kind", ["array", "relative", "each example's keys"])
def test_nothing_is_as_large_as_the_logits(kind: str) -> None:
    """A compiled training step holds one block of logits, and a shared bias' gradient once."""
    n, length = 4, 512
    bias, largest = {
        "array": (normal("bias", 1, n, length, length), n * length**2),
        "relative": (normal("table", n, 32), 2 * length**2),
        "each example's keys": (normal("keys", B, 1, 1, length), length**2),
    }[kind]

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
        b = relative_bias(bias) if kind == "relative" else bias
        return (dot_product_attention(q, k, v, b, is_causal=True) ** 2).sum()

    step = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))
    *qkv, _ = tokens(length, length, n, n)
    compiled = step.lower(*qkv, bias).compile()
    shapes = re.findall(r"\b(?:f32|bf16|pred)\[([\d,]+)\]", compiled.as_text())
    assert max(math.prod(map(int, shape.split(","))) for shape in shapes) <= largest
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * B * n * length**2
    for platform in ("cuda", "tpu"):
        program = step.trace(*qkv, bias).lower(lowering_platforms=(platform,)).as_text()
        assert f"{n}x{length}x{length}x" in program or kind != "array"
        assert f"{B}x{n}x{length}x{length}x" not in program


def test_one_example_without_batch_axis_and_vmap() -> None:
    q, k, v, _ = tokens(kv_heads=2)
    bias = normal("bias", N, Q, K)
    expected = expected_attention(q, k, v, bias[None], is_causal=True)
    one = functools.partial(dot_product_attention, is_causal=True)
    check(one(q[0], k[0], v[0], bias), expected[0])
    check(jax.vmap(one, (0, 0, 0, None))(q, k, v, bias), expected)
    nested = jax.vmap(one, (None, None, None, 0))(q, k, v, jnp.stack([bias, bias + 1])[:, None])
    check(nested, jnp.stack([expected, expected]))


def test_a_traced_scale_is_learned() -> None:
    q, k, v, g = tokens()

    def loss(function: Any, scale: jax.Array) -> jax.Array:
        return (function(q, k, v, scale=scale) * g).sum()

    found, expected = (
        jax.grad(functools.partial(loss, f))(0.3) for f in (dot_product_attention, jax_scaled)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def jax_scaled(q: jax.Array, k: jax.Array, v: jax.Array, *, scale: jax.Array) -> jax.Array:
    return expected_attention(q * scale, k, v, scale=1.0)


def test_terms_and_masks_of_this_library() -> None:
    q, k, v, _ = tokens()
    table, mixed = normal("table", N, Q, K), normal("mixed", B, Q, N, K)
    factors = normal("left", B, Q, N, 2), normal("right", B, K, N, 2)
    total = table + jnp.einsum("bqnr,bknr->bnqk", *factors) + mixed.transpose(0, 2, 1, 3)
    lengths = jnp.array([K, 4, 2])
    mask = Mask(causal=True, key_lengths=lengths)
    expected = expected_attention(q, k, v, total, is_causal=True, key_value_seq_lengths=lengths)
    bias = (static(table), low_rank(*factors, token_keys=True), mixed.transpose(0, 2, 1, 3))
    for route in ROUTES.values():
        with route():
            check(dot_product_attention(q, k, v, bias, mask), expected)


def test_minus_infinity_hides_a_key() -> None:
    """Additive masks: of some keys, for all examples and for each."""
    x = tokens()
    for shape in ((1, 1, Q, K), (B, 1, 1, K), (B, N, Q, K)):
        seen = mask_of(shape)
        seen[..., 0] = True
        bias = jnp.where(seen, 0.0, -jnp.inf)
        expected = with_gradients(expected_attention, x, jnp.zeros(shape), mask=seen)
        for route in ROUTES.values():
            with route():
                check(with_gradients(dot_product_attention, x, bias), expected)


@pytest.mark.parametrize("low", [-1e4, -1e30, -np.inf])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_any_low_number_hides_a_key(dtype, low) -> None:
    """Additive padding masks, in every dtype."""
    q, k, v, g = (x.astype(jnp.float32) for x in tokens(dtype=dtype))
    bias = jnp.zeros((B, 1, 1, K)).at[:, ..., 6:].set(low)

    def products(attention, dtype, bias, **options):
        def loss(q):
            inputs = (x.astype(dtype) for x in (q, k, v))
            return (attention(*inputs, bias, **options).astype(jnp.float32) * g).sum()

        return jax.value_and_grad(loss)(q)

    mask = jnp.arange(K) < 6
    expected = products(expected_attention, jnp.float32, None, mask=mask)
    with fused_at_any_size():
        found = jax.jit(lambda b: products(dot_product_attention, dtype, b))(bias)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0.02, atol=1e-4 if dtype == jnp.float32 else 0.05)


def test_integer_biases() -> None:
    *qkv, g = tokens()
    for shape in ((1, N, Q, K), (B, 1, 1, K), (B, 1, Q, K)):
        bias = jnp.round(normal("bias", *shape)).astype(jnp.int32)
        answers = []
        for b, attention in ((bias, dot_product_attention), (bias + 0.0, expected_attention)):
            with fused_at_any_size():
                out, back = jax.vjp(lambda *x: attention(*x, b), *qkv)  # noqa: B023
                answers.append((out, back(g)))
        check(*answers)


def test_a_step_with_t5s_bias() -> None:
    """The bias counts from the mask's offset, known or traced."""
    q, k, v, _ = tokens(q=K, k=K)
    table = relative_bias(normal("table", N, 8), bidirectional=False, max_distance=10)
    whole = dot_product_attention(q, k, v, table, Mask(causal=True))

    def step(at: Any) -> jax.Array:
        new = jax.lax.dynamic_slice_in_dim(q, at, 1, axis=1)
        return dot_product_attention(new, k, v, table, Mask(causal=True, query_offset=at))

    np.testing.assert_allclose(step(9), whole[:, 9:10], atol=1e-5)
    for at in (0, 9, K - 1):
        np.testing.assert_allclose(jax.jit(step)(at), whole[:, at : at + 1], atol=1e-5)


@pytest.mark.parametrize("first", [-3, 0])
def test_weights_of_a_window_see_as_far_ahead_as_the_mask(first: int) -> None:
    terms = (banded(jnp.abs(normal("taps", 1, 1, N, 6)), first=first, normalize=True),)
    values = normal("value", B, K, N, H)
    distance = np.arange(K) - np.arange(K)[:, None]
    pairs = (distance <= 2) & (distance > -2)
    mask = Mask(window=(1, 2))
    found = attend(terms, values, mask=mask, q_length=K)
    expected = attend(terms, values, mask=Mask(allowed=pairs[None, None]), q_length=K)
    check(found, expected)
    with pytest.raises(ValueError, match="no causal form"):
        layer = Linformer(2, 2, max_length=K, projected_length=2)
        layer.init(jax.random.key(0), jnp.ones((1, K, 4)), mask=Mask(window=(None, 2)))


def test_layouts_of_a_relative_table() -> None:
    q, k, v, _ = tokens()
    table = normal("table", N, 32)
    x = dot_product_attention(q, k, v, relative_bias(table))
    y = jax.jit(dot_product_attention)(q, k, v, relative_bias(table.T, head_axis=1))
    np.testing.assert_allclose(x, y, atol=1e-6)
    with pytest.raises(ValueError, match=r"has 32 heads, but the query 4.*head_axis=1"):
        dot_product_attention(q, k, v, relative_bias(table.T))
    with pytest.raises(ValueError, match=r"shape \(32,\) and head_axis=0"):
        relative_bias(table[0])


def zeros(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.zeros(shape, dtype)


QUERY, KEY = zeros(B, Q, N, H), zeros(B, K, N, H)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((QUERY, KEY[0], KEY), {}, "give .batch, length, heads, width."),
        ((QUERY, KEY.astype(jnp.bfloat16), KEY), {}, "float32, bfloat16 and float32; cast them"),
        ((QUERY.astype(int),) * 3, {}, "same floating-point dtype"),
        ((QUERY, KEY, KEY[:, 1:]), {}, "must agree in batch, length and heads"),
        ((QUERY[1:], KEY, KEY), {}, "must agree in batch and width"),
        ((QUERY, KEY[:, :, :3], KEY[:, :, :3]), {}, "4 heads must be a multiple of the 3 heads"),
        ((QUERY, KEY, KEY, zeros(N, K, Q)), {}, r"bias has shape .4, 11, 7.; it must broadcast"),
        ((QUERY, KEY, KEY, zeros(1, B, N, Q, K)), {}, "bias has shape"),
        ((QUERY, KEY, KEY, zeros(Q, K, dtype=bool)), {}, "bias has dtype bool; give it as mask"),
        ((QUERY, KEY, KEY, None, zeros(Q, K)), {}, "mask has dtype float32; it must be bool"),
        ((QUERY, KEY, KEY, None, zeros(B, Q, K, dtype=bool)), {}, "mask has shape"),
        ((QUERY, KEY, KEY, None, Mask(causal=True)), {"is_causal": True}, "beside other masks"),
        ((QUERY, KEY, KEY), {"key_value_seq_lengths": zeros(B)}, "one integer for each of the 3"),
        ((QUERY, KEY, KEY), {"query_seq_lengths": [Q]}, "query_seq_lengths is int32.1,"),
        ((QUERY, KEY, KEY), {"local_window_size": -1}, "must not be negative"),
        ((QUERY, KEY, KEY), {"scale": zeros(N)}, "it must be a scalar"),
    ],
)
def test_errors(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dot_product_attention(*arguments, **options)


def test_packed_rows_and_a_bias_of_each_example_do_not_go_together() -> None:
    segments = jnp.ones((B, K), int)
    mask = Mask(key_segments=segments, segments=1).for_self_attention()
    with pytest.raises(ValueError, match="packed rows"):
        dot_product_attention(KEY, KEY, KEY, zeros(B, N, K, K), mask)


def test_a_mask_of_another_batch_beside_a_bias_of_each_example() -> None:
    q, k, v, _ = tokens()
    message = re.escape("Mask.key_lengths has shape (2,); it must be [batch or 1=3]")
    with pytest.raises(ValueError, match=message):
        mask = Mask(key_lengths=jnp.array([3, 4]))
        dot_product_attention(q, k, v, normal("bias", B, N, Q, K), mask)
