"""Attention with lengths that `jax.export` leaves open."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from synthesizer_jax.attention import Mask, attend, relative_bias


def test_relative_bias_is_the_same_at_every_length():
    table = jax.random.normal(jax.random.key(0), (2, 8))

    def attention(values):
        bias = relative_bias(table, bidirectional=False, max_distance=16)
        n = values.shape[1]
        return attend(
            (bias.term(n, n),),
            values,
            mask=Mask(causal=True),
            q_length=n,
            implementation="reference",
        )

    b, n = export.symbolic_shape("b, n")
    values = jax.ShapeDtypeStruct((b, n, 2, 3), jnp.float32)
    program = export.export(jax.jit(attention), platforms=("cpu", "cuda", "tpu"))(values)
    for shape in ((1, 1), (2, 7), (3, 40)):
        x = jax.random.normal(jax.random.key(1), (*shape, 2, 3))
        np.testing.assert_allclose(program.call(x), attention(x), rtol=1e-6, atol=1e-6)
