"""The loop over all heads at once, which GPUs run, against the loop over heads that CPUs run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax.attention import Mask, attend, blocked, fused
from synthesizer_jax.attention.blocked import softmax_vjp_delta
from synthesizer_jax.attention.terms import Call
from tests.attention import cases
from tests.attention.cases import BATCH, EVERY_TERM, HEADS, KEYS, QUERIES, WIDTH

MASKS = {f"cross, {n}": (m, QUERIES) for n, m in cases.cross_masks().items()}
MASKS |= {n: (m, KEYS) for n, m in (cases.self_masks() | cases.packed_masks()).items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKS)
def test_all_heads_at_once_give_the_same_results(name: str) -> None:
    mask, q_length = MASKS[name]
    terms = cases.make_terms(EVERY_TERM, BATCH, q_length, KEYS)
    values = cases.normal("values", BATCH, KEYS, HEADS, WIDTH)
    dout = cases.normal("cotangent", BATCH, q_length, HEADS, WIDTH)
    inputs = fused.fused_inputs(Call(terms, values, mask, q_length))
    out, stats = blocked.forward(q_length, inputs)
    backward_args = stats, softmax_vjp_delta(out, dout, jnp.float32), dout
    expected = out, stats, blocked.backward(inputs, *backward_args)
    actual = (
        *blocked.forward_all_heads(q_length, inputs),
        blocked.backward_all_heads(inputs, *backward_args),
    )
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        np.testing.assert_allclose(x, y, atol=2e-5 * max(1.0, float(np.abs(y).max())))


def test_gpu_programs_multiply_all_heads_at_once() -> None:
    terms = cases.make_terms(("dot_product", "relative"), BATCH, QUERIES, KEYS)
    values = cases.normal("values", BATCH, KEYS, HEADS, WIDTH)

    def loss(values: jax.Array) -> jax.Array:
        return attend(
            terms, values, mask=Mask(causal=True), q_length=QUERIES, implementation="fused"
        ).sum()

    traced = jax.jit(jax.grad(loss)).trace(values)
    logits_type = f"tensor<{HEADS}x{QUERIES}x{KEYS}xf32>"
    programs = {p: traced.lower(lowering_platforms=(p,)).as_text() for p in ("cuda", "cpu")}
    assert logits_type in programs["cuda"]
    assert logits_type not in programs["cpu"]
    assert f"tensor<{BATCH}x{HEADS}x{QUERIES}x{KEYS}xf32>" not in programs["cuda"]
