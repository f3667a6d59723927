"""`attention_fn` beside Flax's `dot_product_attention`."""

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
from synthesizer_jax.attention.functional import Sizes, _of_keys
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
def test_flaxs_own_layers_take_attention_fn(library):
    theirs, _ = LAYERS[library]
    x, y, seen = tokens(0, B, 3, Q, D), tokens(1, B, 3, K, D), pattern(2, B, 3, 1, Q, K)
    table = tokens(3, H, Q, K)
    own = {"linen": nn, "nnx": nnx}[library].dot_product_attention
    for ours, oracle in (
        (attention_fn, own),
        (functools.partial(attention_fn, bias=table), functools.partial(own, bias=table)),
        (functools.partial(attention_fn, bias=static(table)), functools.partial(own, bias=table)),
    ):
        expected, found = (
            applied(theirs(H, attention_fn=f), x, y, mask=seen) for f in (oracle, ours)
        )
        close(found[0], expected[0])


def test_dropout_in_blocks_drops_as_often():
    """More queries than a block has, each block with a draw of its own."""
    rate, length = 0.3, 200
    zeros, ones = jnp.zeros((1, length, 1, 4)), jnp.ones((1, length, 1, 1))
    drop = functools.partial(attention_fn, dropout_rng=jax.random.key(0), dropout_rate=rate)
    kept = drop(zeros, zeros, ones)[0, :, 0, 0]  # the share of weights kept, a number a query
    assert abs(kept.mean() - 1) < 0.01 and 0.01 < kept.std() < 0.1
    both = drop(jnp.tile(zeros, (2, 1, 3, 1)), *(jnp.tile(x, (2, 1, 3, 1)) for x in (zeros, ones)))
    np.testing.assert_allclose(both, both[:1, :, :1].repeat(2, 0).repeat(3, 2), rtol=1e-5)


@pytest.mark.parametrize(
    "shape", [(H, Q, K), (1, 1, 1, K), (B, 1, 1, K), (B, H, 1, K), (B, H, Q, K), (B, 1, Q, 1)]
)
def test_a_bias_is_added_to_the_logits(shape):
    query, key, value = tokens(0, B, Q, H, 4), tokens(1, B, K, H, 4), tokens(2, B, K, H, 3)
    for seen in (None, pattern(3, B, 1, Q, K)):
        expected, found = (
            value_and_gradients(
                functools.partial(f, mask=seen), query, key, value, tokens(4, *shape)
            )
            for f in (nn.dot_product_attention, attention_fn)
        )
        close(found, expected)


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
def test_long_inputs_never_hold_all_weights(options):
    """Neither the weights nor the gradient of a shared bias, for each example."""
    batch, length = 3, 384
    x, table = tokens(0, batch, length, H, 4), tokens(1, H, length, length)
    seen = pattern(2, batch, 1, 1, length)
    loss = lambda x, table: attention_fn(x, x, x, table, seen, **options).sum()
    run = jax.jit(jax.grad(loss, argnums=(0, 1)))
    text = run.lower(x, table).compile().as_text()
    sizes = {np.prod([int(n) for n in m.split(",")]) for m in re.findall(r"\w\[([\d,]+)\]", text)}
    assert max(sizes) < batch * H * length * length
    if not options.get("dropout_rate"):
        theirs = lambda x, table: nn.dot_product_attention(x, x, x, table, seen).sum()
        close(run(x, table), jax.jit(jax.grad(theirs, argnums=(0, 1)))(x, table), 1e-5)


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 6, 2, 4), (2, 5, 4), (2, 5, 4)),
        ((2, 6, 2, 4), (3, 5, 2, 4), (3, 5, 2, 4)),
        ((2, 6, 2, 4), (2, 5, 2, 3), (2, 5, 2, 4)),
        ((2, 6, 2, 4), (2, 5, 2, 4), (2, 6, 2, 4)),
        ((2, 6, 4, 4), (2, 5, 3, 4), (2, 5, 3, 4)),
    ],
)
def test_attention_fn_names_shapes_that_do_not_agree(shapes):
    with pytest.raises(ValueError, match="attention_fn: query"):
        attention_fn(*(jnp.ones(s) for s in shapes))


def test_attention_fn_needs_a_key_for_dropout_and_a_mask_of_one_batch_dimension():
    x = jnp.ones((2, 3, 4, H, 2))
    with pytest.raises(ValueError, match="dropout needs dropout_rng"):
        attention_fn(x, x, x, dropout_rate=0.1)
    with pytest.raises(ValueError, match="give a mask array"):
        attention_fn(x, x, x, mask=sj.Mask(key_lengths=jnp.ones(2, int)))


def test_a_bias_of_keys_is_exact_where_products_round_and_may_be_infinite():
    """The term's keys survive rounding to bfloat16, as in a TPU's matrix product."""
    bias = tokens(0, B, 1, 1, K) * 300
    term = _of_keys(bias, Sizes(B, H, Q, K), jnp.float32)
    rounded = term.keys.astype(jnp.bfloat16).astype(jnp.float32).sum(-1)
    np.testing.assert_allclose(rounded, bias[:, 0, 0, :, None].repeat(H, -1), rtol=1e-6)
    query, key = tokens(1, B, Q, H, 4), tokens(2, B, K, H, 4)
    for nothing in (-jnp.inf, jnp.finfo(jnp.float32).min):
        run = lambda f, low: value_and_gradients(
            functools.partial(f, bias=jnp.zeros((B, 1, 1, K)).at[:, ..., 2:].set(low)),
            query,
            key,
            key,
        )
        close(run(attention_fn, nothing), run(nn.dot_product_attention, nothing))
