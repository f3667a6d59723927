"""Compares outputs and gradients of `dot_product_attention` with those of `jax.nn`'s function."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax import Mask, dot_product_attention, relative_bias
from synthesizer_jax.attention import functional, low_rank, routes, static
from synthesizer_jax.attention.relative_table import relative_buckets
from tests.attention.cases import FAST_COMPILE, normal
from tests.attention.oracle import close, rms_error

B, Q, K, N, H = 3, 7, 11, 4, 5
check = functools.partial(close, bound=2e-5, least=0.1)
fast_jit = functools.partial(jax.jit, compiler_options=FAST_COMPILE)
expected_attention = functools.partial(jax.nn.dot_product_attention, implementation="xla")


@contextlib.contextmanager
def fused_at_any_size() -> Iterator[None]:
    with mock.patch.object(routes, "FEW_LOGITS", 0), mock.patch.object(functional, "FEW_LOGITS", 0):
        yield


ROUTES = {"reference": contextlib.nullcontext, "fused": fused_at_any_size}


def tokens(
    q: int = Q, k: int = K, n: int = N, kv_heads: int = N, dtype: Any = jnp.float32
) -> tuple[jax.Array, ...]:
    """Returns a random query, key and value, and a random cotangent of the output."""
    shapes = {"query": (q, n), "key": (k, kv_heads), "value": (k, kv_heads), "cotangent": (q, n)}
    return tuple(normal(name, B, *shape, H, dtype=dtype) for name, shape in shapes.items())


def mask_of(shape: tuple[int, ...] | None) -> np.ndarray | None:
    return None if shape is None else np.random.default_rng(0).random(shape) < 0.6


def sees_a_key(mask, is_causal, local_window_size, lengths) -> np.ndarray:
    """Returns which queries see at least one key, bool ``[b, q, n]``.

    The result follows the definitions of the arguments in JAX's documentation.
    """
    seen = np.ones((B, N, Q, K), bool) if mask is None else np.broadcast_to(mask, (B, N, Q, K))
    query = np.arange(Q)[:, None]
    key = np.arange(K)
    window = local_window_size
    left, right = (window, window) if isinstance(window, int) else window or (K, K)
    seen = seen & (key >= query - left) & (key <= query + (min(right, 0) if is_causal else right))
    for position, length in zip((query, key), lengths, strict=True):
        if length is not None:
            seen = seen & (position < np.array(length)[:, None, None, None])
    return seen.any(-1).swapaxes(1, 2)


def with_gradients(function: Any, x: Any, bias: Any, **options: Any) -> Any:
    """Returns the output, and the cotangents of query, key, value and bias."""

    def run(x, bias):
        *qkv, g = x
        out, back = jax.vjp(lambda *args: function(*args, **options), *qkv, bias)
        return out, back(g)

    return fast_jit(run)(x, bias)


@pytest.mark.parametrize(
    ("route", "bias", "mask", "kv_heads", "options", "lengths"),
    [
        ("fused", (1, N, Q, K), (B, 1, 1, K), 1, {"is_causal": True}, (None, None)),
        ("fused", (N, Q, K), (K,), 2, {"local_window_size": 2}, ((Q, 3, 0), None)),
        ("fused", (Q, K), (B, 1, Q, 1), N, {"local_window_size": (3, 0)}, (None, (K, 4, 0))),
        ("fused", (1, N, 1, K), (1, N, Q, K), N, {"scale": 0.3}, ((Q, 3, 0), (K, 4, 0))),
        ("fused", (B, N, Q, K), (Q, K), 2, {"is_causal": True}, (None, (K, 4, 0))),
        ("fused", (B, 1, 1, K), (B, N, Q, K), 1, {"local_window_size": (0, 4)}, (None, None)),
        ("fused", (1, 1, Q, 1), None, N, {"is_causal": True}, ((Q, 3, 0), None)),
        ("reference", (B, N, Q, K), (B, N, Q, K), 2, {"is_causal": True}, (None, (K, 4, 0))),
        ("reference", None, (B, 1, Q, 1), N, {"local_window_size": 2}, ((Q, 3, 0), None)),
    ],
)
def test_arguments_mean_what_they_mean_in_jax(route, bias, mask, kv_heads, options, lengths):
    """All arguments have the same meaning as in JAX.

    There is one difference: our output is zero for a query that sees no key.
    """
    array = mask_of(mask)
    (q_lengths, k_lengths) = lengths
    band = {"is_causal": False, "local_window_size": None} | options
    some = sees_a_key(array, band["is_causal"], band["local_window_size"], lengths)[..., None]
    *qkv, g = tokens(kv_heads=kv_heads)
    options = options | {
        "mask": array,
        "key_value_seq_lengths": None if k_lengths is None else jnp.array(k_lengths),
        "query_seq_lengths": None if q_lengths is None else jnp.array(q_lengths),
    }
    b = None if bias is None else normal("bias", *bias)
    with ROUTES[route]():
        found = with_gradients(dot_product_attention, (*qkv, g), b, **options)
    out, gradients = with_gradients(expected_attention, (*qkv, g * some), b, **options)
    check(found, (out * some, gradients))


@pytest.mark.parametrize("shape", [(1, N, 1, K), (B, 1, 1, K)])
def test_a_large_bias_of_keys_is_not_rounded_to_bfloat16(shape: tuple[int, ...]) -> None:
    x = tokens(dtype=jnp.bfloat16)
    b = 300 + normal("bias", *shape)
    found = with_gradients(dot_product_attention, x, b)
    expected = with_gradients(expected_attention, x, b)
    for y, z in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert y.dtype == z.dtype
        assert rms_error(y, np.asarray(z.astype(jnp.float32), np.float64)) < 0.01


def test_long_rows_take_the_fused_route() -> None:
    """Long sequences use the fused route.

    The bias is the sum of a shared bias, a bias for each example, and T5's bias.
    """
    n, length, buckets = 2, 140, 16
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

    check(*(with_gradients(f, x, pieces, **options) for f in (ours, theirs)), bound=1e-4)


@pytest.mark.parametrize("kind", ["array", "relative", "each example's keys"])
def test_no_array_is_as_large_as_the_logits(kind: str) -> None:
    """A compiled training step holds only one tile of logits, and one gradient of a shared bias."""
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
    # Since version 0.12 of jax, Pallas needs to know the kind of GPU.
    chip = jax.sharding.AbstractDevice("NVIDIA H100", None, "gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=chip)):
        traced = step.trace(*qkv, bias)
    for platform in ("cuda", "tpu"):
        program = traced.lower(lowering_platforms=(platform,)).as_text()
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


def test_terms_and_masks_of_this_library_and_a_traced_scale() -> None:
    q, k, v, _ = tokens()
    table, mixed = normal("table", N, Q, K), normal("mixed", B, N, Q, K)
    factors = normal("left", B, Q, N, 2), normal("right", B, K, N, 2)
    total = table + jnp.einsum("bqnr,bknr->bnqk", *factors) + mixed
    lengths = jnp.array([K, 4, 2])
    mask = Mask(causal=True, key_lengths=lengths)
    expected = expected_attention(
        0.3 * q, k, v, total, is_causal=True, key_value_seq_lengths=lengths, scale=1.0
    )
    bias = (static(table), low_rank(*factors, token_keys=True), mixed)
    for route in ROUTES.values():
        with route():

            def call(scale):
                """Calls `dot_product_attention` with a traced scale."""
                return dot_product_attention(q, k, v, bias, mask, scale=scale)

            check(fast_jit(call)(0.3), expected)


@pytest.mark.parametrize(("dtype", "low"), [("float16", -1e30), ("float32", -np.inf)])
@pytest.mark.parametrize("shape", [(B, 1, 1, K), (B, N, Q, K)])
def test_a_low_bias_hides_a_key(shape, dtype, low) -> None:
    """A very low bias hides a key, either for all examples or for one example."""
    x = tokens(dtype=dtype)
    seen = mask_of(shape)
    seen[..., 0] = True
    wide = tuple(y.astype(jnp.float32) for y in x)
    expected = with_gradients(expected_attention, wide, jnp.zeros(shape), mask=seen)
    with fused_at_any_size():
        found = with_gradients(dot_product_attention, x, jnp.where(seen, 0.0, low))
    for y, z in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(y, z, rtol=0.02, atol=1e-4 if dtype == "float32" else 0.05)


def test_integer_biases() -> None:
    x = tokens()
    for shape in ((1, N, Q, K), (B, 1, 1, K), (B, 1, Q, K)):
        bias = jnp.round(normal("bias", *shape)).astype(jnp.int32)
        with fused_at_any_size():
            found = fast_jit(dot_product_attention)(*x[:3], bias)
        check(found, expected_attention(*x[:3], bias + 0.0))


def test_a_step_with_t5s_bias() -> None:
    """In a decoding step, T5's bias starts at the offset of the mask, which may be traced."""
    q, k, v, _ = tokens(q=K, k=K)
    table = relative_bias(normal("table", N, 8), bidirectional=False, max_distance=10)
    whole = dot_product_attention(q, k, v, table, Mask(causal=True))

    def step(at: Any) -> jax.Array:
        new = jax.lax.dynamic_slice_in_dim(q, at, 1, axis=1)
        return dot_product_attention(new, k, v, table, Mask(causal=True, query_offset=at))

    np.testing.assert_allclose(step(9), whole[:, 9:10], atol=1e-5)
    traced = jax.jit(step)
    for at in (0, 9, K - 1):
        np.testing.assert_allclose(traced(at), whole[:, at : at + 1], atol=1e-5)


def zeros(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.zeros(shape, dtype)


QUERY, KEY = zeros(B, Q, N, H), zeros(B, K, N, H)
PACKED = Mask(key_segments=jnp.ones((B, K), int), segments=1).for_self_attention()


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((QUERY, KEY[0], KEY), {}, "but all three must be .batch, length, heads, width."),
        ((QUERY, KEY.astype(jnp.bfloat16), KEY), {}, "'bfloat16', 'float32'.. Cast them"),
        ((QUERY.astype(int),) * 3, {}, "same floating-point dtype"),
        ((QUERY, KEY, KEY[:, 1:]), {}, "Key and value need the same length"),
        ((QUERY[1:], KEY, KEY), {}, "All three need the same batch size"),
        ((QUERY, KEY[:, :, :3], KEY[:, :, :3]), {}, "must divide the number of heads of the query"),
        (
            (QUERY, KEY, KEY, zeros(N, K, Q)),
            {},
            r"bias has shape .4, 11, 7., but it must broadcast",
        ),
        ((QUERY, KEY, KEY, zeros(1, B, N, Q, K)), {}, "bias has shape"),
        (
            (QUERY, KEY, KEY, zeros(Q, K, dtype=bool)),
            {},
            "bias has dtype bool. Pass",
        ),
        ((QUERY, KEY, KEY, None, zeros(Q, K)), {}, "mask has dtype float32, but it must be bool"),
        ((QUERY, KEY, KEY, None, zeros(B, Q, K, dtype=bool)), {}, "mask has shape"),
        (
            (QUERY, KEY, KEY, None, Mask(causal=True)),
            {"is_causal": True},
            "mask is a Mask, so is_causal",
        ),
        (
            (QUERY, KEY, KEY),
            {"key_value_seq_lengths": zeros(B)},
            "dtype float32, but it must be integer",
        ),
        (
            (QUERY, KEY, KEY),
            {"query_seq_lengths": [Q, Q]},
            r"has shape .2,., but it must be .batch",
        ),
        ((QUERY, KEY, KEY), {"scale": zeros(N)}, "it must be a scalar"),
        ((QUERY, KEY, KEY, relative_bias(zeros(32, N))), {}, "has 32 heads, but .* head_axis=1"),
        (
            (QUERY, KEY, KEY, None, Mask.padded(jnp.array([Q, 3]))),
            {},
            "made for self-attention, but there are 7 queries and 11 keys. .* also pass `queries`",
        ),
        (
            (KEY, KEY, KEY, zeros(B, N, K, K), PACKED),
            {},
            "packed rows do not support a separate bias",
        ),
    ],
)
def test_wrong_arguments_of_the_function_are_errors(
    arguments: Any, options: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dot_product_attention(*arguments, **options)
