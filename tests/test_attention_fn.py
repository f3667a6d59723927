"""`attention_fn` against Flax's `dot_product_attention`."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import synthesizer_jax as sj
from synthesizer_jax import attention_fn
from synthesizer_jax.attention import relative, static
from synthesizer_jax.attention.functional import LogitsShape, _key_bias
from tests.beside_flax import (
    LAYERS,
    B,
    D,
    H,
    K,
    Q,
    applied,
    close,
    pattern,
    tokens,
    value_and_gradients,
)


@pytest.mark.parametrize("library", LAYERS)
def test_flaxs_layers_with_attention_fn(library):
    make_flax_layer, _ = LAYERS[library]
    x, y, mask = tokens(0, B, 3, Q, D), tokens(1, B, 3, K, D), pattern(2, B, 3, 1, Q, K)
    table = tokens(3, H, Q, K)
    flax_attention = {"linen": nn, "nnx": nnx}[library].dot_product_attention
    for attention, oracle in (
        (attention_fn, flax_attention),
        (
            functools.partial(attention_fn, bias=table),
            functools.partial(flax_attention, bias=table),
        ),
        (
            functools.partial(attention_fn, bias=static(table)),
            functools.partial(flax_attention, bias=table),
        ),
    ):
        expected, actual = (
            applied(make_flax_layer(H, attention_fn=f), x, y, mask=mask)
            for f in (oracle, attention)
        )
        close(actual[0], expected[0])


def test_dropout_in_blocks_has_the_same_rate():
    """With more queries than a block has, every block draws its own mask."""
    rate, length = 0.3, 200
    zeros, ones = jnp.zeros((1, length, 1, 4)), jnp.ones((1, length, 1, 1))
    drop = functools.partial(attention_fn, dropout_rng=jax.random.key(0), dropout_rate=rate)
    kept_share = drop(zeros, zeros, ones)[0, :, 0, 0]  # per query
    assert abs(kept_share.mean() - 1) < 0.01 and 0.01 < kept_share.std() < 0.1
    batched = drop(
        jnp.tile(zeros, (2, 1, 3, 1)), *(jnp.tile(x, (2, 1, 3, 1)) for x in (zeros, ones))
    )
    np.testing.assert_allclose(batched, batched[:1, :, :1].repeat(2, 0).repeat(3, 2), rtol=1e-5)


@pytest.mark.parametrize(
    "shape", [(H, Q, K), (1, 1, 1, K), (B, 1, 1, K), (B, H, 1, K), (B, H, Q, K), (B, 1, Q, 1)]
)
def test_a_bias_is_added_to_the_logits(shape):
    query, key, value = tokens(0, B, Q, H, 4), tokens(1, B, K, H, 4), tokens(2, B, K, H, 3)
    for mask in (None, pattern(3, B, 1, Q, K)):
        expected, actual = (
            value_and_gradients(
                functools.partial(f, mask=mask), query, key, value, tokens(4, *shape)
            )
            for f in (nn.dot_product_attention, attention_fn)
        )
        close(actual, expected)


def test_a_bias_may_be_a_term():
    columns, query, key = tokens(0, H, Q + K - 1), tokens(1, B, Q, H, 4), tokens(2, B, K, H, 4)
    table = np.stack([[columns[:, Q - 1 + k - q] for k in range(K)] for q in range(Q)], 0)
    expected = nn.dot_product_attention(query, key, key, jnp.asarray(table).transpose(2, 0, 1))
    term = relative(columns, first=1 - Q)
    for bias in (term, (term,)):
        for options in ({}, {"precision": "highest"}):
            close(attention_fn(query, key, key, bias, **options), expected)


@pytest.mark.parametrize(
    "options",
    [{}, {"dropout_rng": jax.random.key(0), "dropout_rate": 0.1}, {"precision": "highest"}],
    ids=["plain", "dropout", "precision"],
)
def test_long_inputs_need_no_array_of_all_weights(options):
    """Neither the weights nor the gradients of a shared bias exist for every example at once."""
    batch, length = 3, 384
    x, table = tokens(0, batch, length, H, 4), tokens(1, H, length, length)
    mask = pattern(2, batch, 1, 1, length)
    loss = lambda x, table: attention_fn(x, x, x, table, mask, **options).sum()
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))
    hlo = gradients.lower(x, table).compile().as_text()
    sizes = {np.prod([int(n) for n in m.split(",")]) for m in re.findall(r"\w\[([\d,]+)\]", hlo)}
    assert max(sizes) < batch * H * length * length
    if not options.get("dropout_rate"):
        flax_loss = lambda x, table: nn.dot_product_attention(x, x, x, table, mask).sum()
        close(gradients(x, table), jax.jit(jax.grad(flax_loss, argnums=(0, 1)))(x, table), 1e-5)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 6, 2, 4), (2, 5, 4), (2, 5, 4)), "same rank"),
        (((2, 6, 2, 4), (3, 5, 2, 4), (3, 5, 2, 4)), "batch dims must match"),
        (((2, 6, 2, 4), (2, 5, 2, 3), (2, 5, 2, 4)), "depths must match"),
        (((2, 6, 2, 4), (2, 5, 2, 4), (2, 6, 2, 4)), "lengths must match"),
        (((2, 6, 4, 4), (2, 5, 3, 4), (2, 5, 3, 4)), "must be a multiple"),
    ],
)
def test_shapes_that_do_not_agree_are_errors_with_the_words_of_flax(shapes, message):
    with pytest.raises(ValueError, match=f"attention_fn: query.*{message}"):
        attention_fn(*(jnp.ones(s) for s in shapes))


def test_missing_dropout_rng_and_masks_with_several_batch_dimensions_are_errors():
    x = jnp.ones((2, 3, 4, H, 2))
    with pytest.raises(ValueError, match="dropout needs dropout_rng"):
        attention_fn(x, x, x, dropout_rate=0.1)
    with pytest.raises(ValueError, match="pass a mask array"):
        attention_fn(x, x, x, mask=sj.Mask(key_lengths=jnp.ones(2, int)))


def test_a_bias_of_keys_is_exact_in_bfloat16_and_may_be_infinite():
    """The keys of the term are split such that rounding to bfloat16, as on TPUs, is exact."""
    bias = tokens(0, B, 1, 1, K) * 300
    term = _key_bias(bias, LogitsShape(B, H, Q, K), jnp.float32)
    rounded = term.keys.astype(jnp.bfloat16).astype(jnp.float32).sum(-1)
    np.testing.assert_allclose(rounded, bias[:, 0, 0, :, None].repeat(H, -1), rtol=1e-6)
    query, key = tokens(1, B, Q, H, 4), tokens(2, B, K, H, 4)
    for nothing in (-jnp.inf, jnp.finfo(jnp.float32).min):
        gradients = lambda f, low: value_and_gradients(
            functools.partial(f, bias=jnp.zeros((B, 1, 1, K)).at[:, ..., 2:].set(low)),
            query,
            key,
            key,
        )
        close(gradients(attention_fn, nothing), gradients(nn.dot_product_attention, nothing))
