"""What attention imports and runs on each platform, also if JAX has no Triton."""

import sys

import jax
import jax.numpy as jnp
import pytest

from synthesizer_jax.attention import attend, explain, low_rank, relative
from tests.attention.cases import BATCH, HEADS, KEYS, WIDTH
from tests.environment import python

LONG = """
import sys
import jax, jax.numpy as jnp
from synthesizer_jax import attention

def loss(x, table):
    dot_product = attention.low_rank(x, x, token_keys=True)
    y = attention.attend((dot_product,), x)
    return attention.attend((attention.static(table),), y).sum()

x, table = jnp.ones((2, 256, 2, 8)), jnp.ones((2, 256, 256))
for call in attention.explain(loss, x, table):
    print(call.route)
jax.grad(loss, (0, 1))(x, table)
jax.jit(jax.vmap(jax.grad(loss), (0, None)))(x[None], table)
print(*(name for name in sys.modules if name.startswith("jax.experimental.pallas")))
"""


def test_attention_on_a_cpu_does_not_import_pallas() -> None:
    assert python("-c", LONG).stdout.splitlines() == ["fused", "static", ""]


@pytest.fixture
def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes ``import jax.experimental.pallas.triton`` fail, as in a JAX that has removed it."""
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)


def loss(q, table):
    """Returns a sum of outputs that depends on queries, keys, values and a bias."""
    bias = () if table is None else (relative(table, first=1 - KEYS),)
    terms = (low_rank(q, q + 1, token_keys=True), *bias)
    return attend(terms, q, implementation="fused").astype(jnp.float32).sum()


BIASES = {"no bias": None, "T5's bias": jax.ShapeDtypeStruct((HEADS, 2 * KEYS - 1), jnp.float32)}
QUERIES_OF_GPUS = jax.ShapeDtypeStruct((BATCH, KEYS, HEADS, WIDTH), jnp.bfloat16)


@pytest.mark.parametrize("bias", BIASES)
def test_gpus_need_no_triton(bias: str, no_triton: None) -> None:
    """The loop over examples replaces the kernels, and computes all heads at once."""
    argnums = (0,) if BIASES[bias] is None else (0, 1)
    traced = jax.jit(jax.grad(loss, argnums)).trace(QUERIES_OF_GPUS, BIASES[bias])
    program = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "triton" not in program
    # The logits of all heads of one example, in the forward and in the backward pass.
    assert program.count(f"-> tensor<{HEADS}x{KEYS}x{KEYS}xf32>") >= 4


def test_explain_says_that_there_is_no_triton(no_triton: None) -> None:
    (call,) = explain(loss, QUERIES_OF_GPUS, None, platform="gpu")
    assert call.kernel == "a loop over tiles of logits"
    assert "has no module jax.experimental.pallas.triton" in call.obstacles["kernels"]
    assert "Install an older JAX" in call.obstacles["kernels"]


def test_one_warning_says_that_there_is_no_triton(
    no_triton: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for bias in BIASES.values():
        jax.eval_shape(loss, QUERIES_OF_GPUS, bias)
    (warning,) = caplog.messages
    assert "slow loop" in warning and "jax.experimental.pallas.triton" in warning
