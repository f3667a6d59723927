"""`input_positions`, which Flax's NNX attention passes to its `attention_fn` since 0.12.9."""

import inspect

import jax.numpy as jnp
import pytest
from flax import nnx

import synthesizer_jax as sj
import synthesizer_jax.nnx as snnx
from tests.beside_flax import B, D, H, Q, close, tokens

POSITIONS = jnp.arange(Q) / 4


def attention_with_positions(query, key, value, *, input_positions, **options):
    """Attention whose queries depend on their positions."""
    offset = input_positions[..., None, None]
    return nnx.dot_product_attention(query + offset, key, value, **options)


@pytest.mark.skipif(
    "input_positions" not in inspect.signature(nnx.MultiHeadAttention.__call__).parameters,
    reason="requires a newer Flax; run make test-newest",
)
def test_an_attention_fn_receives_positions():
    x = tokens(0, B, Q, D)
    actual, expected, with_zeros = (
        layer(H, D, decode=False, attention_fn=attention_with_positions, rngs=nnx.Rngs(0))(
            x, input_positions=at
        )
        for layer, at in (
            (snnx.MultiHeadAttention, POSITIONS),
            (nnx.MultiHeadAttention, POSITIONS),
            (nnx.MultiHeadAttention, 0 * POSITIONS),
        )
    )
    close(actual, expected)
    assert jnp.abs(expected - with_zeros).max() > 1e-3


def test_positions_with_an_alignment_are_an_error():
    layer = snnx.MultiHeadAttention(H, D, alignment=sj.Random(8), decode=False, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="input_positions require an attention_fn that takes them"):
        layer(tokens(0, B, Q, D), input_positions=POSITIONS)
