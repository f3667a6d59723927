"""Tests `explain` for functions that have run before, NNX layers, and Flax's own attention."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import synthesizer_jax as sj
import synthesizer_jax.nnx as snnx

X = jnp.ones((2, 160, 8))
Q = jnp.ones((2, 160, 2, 4))
PREFIX = sj.Mask(causal=True, prefix_lengths=jnp.array([3, 4]))


def test_a_compiled_function_that_has_run_is_explained_again():
    function = jax.jit(lambda q: sj.dot_product_attention(q, q, q))
    first = sj.explain(function, Q)
    function(Q)
    assert sj.explain(function, Q) == first
    assert [e.route for e in first] == ["fused"]


def test_nnx_layers_with_dropout():
    rngs = nnx.Rngs(0)
    layer = snnx.Attention(2, 4, sj.Random(160), dropout_rate=0.1, in_features=8, rngs=rngs)
    for module in (layer, nnx.Sequential(layer, nnx.Dropout(0.1, rngs=rngs))):
        (found,) = sj.explain(module, X)
        assert (found.route, found.shape) == ("static", (2, 160, 160, 2))


def test_calls_that_are_left_to_flax():
    layer = nn.MultiHeadAttention(2, dropout_rate=0.1, attention_fn=sj.attention_fn)
    variables = layer.init(jax.random.key(0), X, deterministic=True)
    apply = functools.partial(layer.apply, rngs={"dropout": jax.random.key(1)})
    (found,) = sj.explain(lambda v, x: apply(v, x, deterministic=False), variables, X)
    assert (found.route, found.shape) == ("flax", (2, 160, 160, 2))
    assert "dropout of single weights" in found.obstacles["engine"]
    (found,) = sj.explain(lambda v, x: apply(v, x, deterministic=True), variables, X)
    assert found.route == "fused"


def test_terms_are_explained_for_another_platform():
    values = jnp.ones((2, 512, 2, 64), jnp.bfloat16)
    terms = (sj.attention.low_rank(values, values, token_keys=True),)
    (cpu,) = sj.explain(sj.attend, terms, values)
    (tpu,) = sj.explain(sj.attend, terms, values, platform="tpu")
    assert (cpu.platform, cpu.route) == ("cpu", "fused") and cpu.kernel != "Pallas kernels"
    assert (tpu.platform, tpu.route, tpu.kernel) == ("tpu", "fused", "Pallas kernels")
    assert "computed from tokens" in cpu.obstacles["static"]
    (gpu,) = sj.explain(sj.attend, terms, values, platform="gpu")
    assert (gpu.route, gpu.kernel) == ("fused", "Pallas kernels")
    segments = jnp.repeat(jnp.array([[1, 2], [1, 2]]), 256, axis=1)
    packed = functools.partial(
        sj.attend, mask=sj.Mask.packed(segments, segments=2, segment_length=256)
    )
    # Packed rows are unpacked if a term is looked up by position, so only this call is unpacked.
    bias = sj.attention.static(jnp.ones((2, 512, 512)))
    (gpu,) = sj.explain(packed, (*terms, bias), values, platform="gpu")
    assert gpu.unpacked and gpu.kernel == "Pallas kernels"
    (tpu,) = sj.explain(functools.partial(sj.attend, mask=PREFIX), terms, values, platform="tpu")
    assert tpu.kernel == "a loop over tiles of logits"
    assert "prefix_lengths" in tpu.obstacles["kernels"]


def test_a_loop_on_an_accelerator_is_warned_of_once(monkeypatch, caplog):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    terms = (sj.attention.low_rank(Q, Q, token_keys=True),)
    for mask in (sj.Mask(), PREFIX, PREFIX):
        jax.eval_shape(functools.partial(sj.attend, mask=mask), terms, Q)
    (record,) = caplog.records
    assert "prefix_lengths" in record.message and record.levelname == "WARNING"
