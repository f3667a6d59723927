"""The TPU kernels, interpreted, against the loop that the oracle has judged; and on TPU compilers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax.attention import Mask, blocked, fused, fused_tpu, static
from synthesizer_jax.attention.blocked import softmax_vjp_delta
from synthesizer_jax.attention.terms import Call
from tests.attention import cases
from tests.attention.cases import BATCH, EVERY_TERM, HEADS, KEYS, QUERIES, WIDTH

SPLIT = 128
"""Rows of the smallest block."""


def both_ways(names, mask, q, k, dtype=jnp.float32):
    """Output, rows and cotangents of the kernels and of the loop."""
    terms = jax.tree.map(lambda x: x.astype(dtype), cases.make_terms(names, BATCH, q, k))
    values = cases.normal("values", BATCH, k, HEADS, WIDTH, dtype=dtype)
    g = cases.normal("cotangent", BATCH, q, HEADS, WIDTH, dtype=dtype)
    inputs, offset = fused.fused_inputs(Call(terms, values, mask, q)), mask.query_offset
    assert fused_tpu.obstacle(inputs) is None
    found = []
    for forward, backward in (
        (
            lambda x: fused_tpu.forward(q, offset, x, interpret=True),
            lambda *x: fused_tpu.backward(offset, *x, interpret=True),
        ),
        (lambda x: blocked.forward(q, x), blocked.backward),
    ):
        out, rows = forward(inputs)
        back = backward(inputs, rows, softmax_vjp_delta(out, g, jnp.float32), g)
        found.append((out, rows.inverse_row_sum, back))
    return found


def check(names, mask, q, k, bound=2e-5):
    (ours, expected) = both_ways(names, mask, q, k)
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        np.testing.assert_allclose(x, y, atol=bound * max(1.0, float(np.abs(y).max())))


def plain(masks):
    """The masks that the kernels take."""
    return {n: m for n, m in masks.items() if m.allowed is None and m.prefix_lengths is None}


@pytest.mark.slow
@pytest.mark.parametrize("name", plain(cases.cross_masks()))
def test_cross_attention(name):
    check(EVERY_TERM, cases.cross_masks()[name], QUERIES, KEYS)


@pytest.mark.slow
@pytest.mark.parametrize("name", plain(cases.self_masks() | cases.packed_masks()))
def test_self_attention(name):
    """In packed rows without terms that look positions up, which come unpacked."""
    mask = (cases.self_masks() | cases.packed_masks())[name]
    names = EVERY_TERM
    if mask.query_segments is not None:
        names = ("dot_product", "relative") if mask.self_attention else ("dot_product",)
    check(names, mask, KEYS, KEYS)


@pytest.mark.parametrize("name", EVERY_TERM)
def test_each_term_alone(name):
    check((name,), cases.cross_masks()["padding"], QUERIES, KEYS)


@pytest.mark.slow
@pytest.mark.parametrize("names", [EVERY_TERM, ("dot_product", "relative")], ids=len)
def test_blocks_of_queries_and_keys(names, monkeypatch):
    """More rows than a tile holds, and not a multiple of it."""
    monkeypatch.setattr(fused_tpu, "TILE", SPLIT * 16)
    lengths = jnp.array([140, 129, 0])
    check(names, Mask(causal=True, key_lengths=lengths, query_lengths=lengths), 140, 140, 1e-4)


def test_bfloat16_is_as_close_as_the_loop():
    names = ("dot_product", "relative", "dense")
    mask = cases.cross_masks()["padding"]
    wide = both_ways(names, mask, QUERIES, KEYS)[1]
    ours, loop = both_ways(names, mask, QUERIES, KEYS, jnp.bfloat16)

    def error(found):
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wide), strict=True)
        return max(
            float(np.abs(np.float32(x) - y).max() / max(1.0, np.abs(y).max())) for x, y in pairs
        )

    assert error(ours) < 1.5 * error(loop) < 0.1


def test_what_the_kernels_do_not_take_runs_the_loop():
    terms = cases.make_terms(("dot_product",), BATCH, QUERIES, KEYS)
    values = cases.normal("values", BATCH, KEYS, HEADS, WIDTH)
    prefix = Mask(causal=True, prefix_lengths=jnp.array([1, 2, 3]))
    pattern = Mask(allowed=cases.holes(1, 1, QUERIES, KEYS))
    step = Mask(causal=True, query_offset=jnp.asarray(3))
    for mask in (prefix, pattern, step):
        assert fused_tpu.obstacle(fused.fused_inputs(Call(terms, values, mask, QUERIES)))


@pytest.mark.parametrize("size", [float(jnp.finfo(jnp.float32).min), 0.0, 3e38])
def test_equal_logits_of_any_size_give_the_mean(size):
    values = cases.normal("values", BATCH, KEYS, HEADS, WIDTH)
    terms = (static(jnp.full((HEADS, QUERIES, KEYS), size)),)
    inputs = fused.fused_inputs(Call(terms, values, Mask(), QUERIES))
    out, _ = fused_tpu.forward(QUERIES, 0, inputs, interpret=True)
    mean = jnp.broadcast_to(values.mean(1, keepdims=True), out.shape)
    np.testing.assert_allclose(out, mean, atol=1e-5)
