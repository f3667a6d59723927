"""All heads at once, as GPUs take them, against the loop that the oracle has judged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax.attention import Mask, attend, blocked, fused
from synthesizer_jax.attention.parts import inner
from tests.attention import cases
from tests.attention.cases import BATCH, EVERY_TERM, HEADS, KEYS, QUERIES, WIDTH

MASKS = {f"cross, {n}": (m, QUERIES) for n, m in cases.cross_masks().items()}
MASKS |= {n: (m, KEYS) for n, m in (cases.self_masks() | cases.packed_masks()).items()}


@pytest.mark.parametrize("name", MASKS)
def test_all_heads_at_once_are_the_loop(name):
    mask, q = MASKS[name]
    terms = cases.make_terms(EVERY_TERM, BATCH, q, KEYS)
    values = cases.normal("values", BATCH, KEYS, HEADS, WIDTH)
    g = cases.normal("cotangent", BATCH, q, HEADS, WIDTH)
    inputs, _ = fused.inputs_of(terms, values, mask, q)
    out, rows = blocked.forward(q, inputs)
    rest = rows, inner(out, g, jnp.float32), g
    expected = out, rows, blocked.backward(inputs, *rest)
    found = (
        *blocked.forward_at_once(q, inputs),
        blocked.backward_at_once(inputs, *rest),
    )
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        np.testing.assert_allclose(x, y, atol=2e-5 * max(1.0, float(np.abs(y).max())))


def test_a_program_for_gpus_multiplies_all_heads_at_once():
    terms = cases.make_terms(("dot_product", "relative"), BATCH, QUERIES, KEYS)
    values = cases.normal("values", BATCH, KEYS, HEADS, WIDTH)

    def loss(values):
        return attend(
            terms, values, mask=Mask(causal=True), q_length=QUERIES, implementation="fused"
        ).sum()

    traced = jax.jit(jax.grad(loss)).trace(values)
    logits = f"tensor<{HEADS}x{QUERIES}x{KEYS}xf32>"
    programs = {p: traced.lower(lowering_platforms=(p,)).as_text() for p in ("cuda", "cpu")}
    assert logits in programs["cuda"]
    assert logits not in programs["cpu"]
    assert f"tensor<{BATCH}x{HEADS}x{QUERIES}x{KEYS}xf32>" not in programs["cuda"]
