"""`input_positions`, which Flax's NNX attention hands to its `attention_fn` since 0.12.9."""

import inspect

import jax.numpy as jnp
import pytest
from flax import nnx

import synthesizer_jax as sj
import synthesizer_jax.nnx as snnx
from tests.beside_flax import B, D, H, Q, close, tokens

POSITIONS = jnp.arange(Q) / 4


def moved(query, key, value, *, input_positions, **options):
    """Queries that depend on their positions."""
    shift = input_positions[..., None, None]
    return nnx.dot_product_attention(query + shift, key, value, **options)


@pytest.mark.skipif(
    "input_positions" not in inspect.signature(nnx.MultiHeadAttention.__call__).parameters,
    reason="this Flax has no input_positions; make test-newest has one that does",
)
def test_an_attention_fn_gets_positions():
    x = tokens(0, B, Q, D)
    found, expected, without = (
        layer(H, D, decode=False, attention_fn=moved, rngs=nnx.Rngs(0))(x, input_positions=at)
        for layer, at in (
            (snnx.MultiHeadAttention, POSITIONS),
            (nnx.MultiHeadAttention, POSITIONS),
            (nnx.MultiHeadAttention, 0 * POSITIONS),
        )
    )
    close(found, expected)
    assert jnp.abs(expected - without).max() > 1e-3


def test_an_alignment_takes_no_positions():
    layer = snnx.MultiHeadAttention(H, D, alignment=sj.Random(8), decode=False, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="input_positions are for an attention_fn that takes them"):
        layer(tokens(0, B, Q, D), input_positions=POSITIONS)
