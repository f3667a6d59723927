"""`MultiHeadAttention` and `attention_fn` beside Flax's own, which are the oracle."""

import functools
import inspect
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import synthesizer_jax as sj
import synthesizer_jax.nnx as snnx
from synthesizer_jax import attention_fn
from synthesizer_jax.alignments.base import Alignment
from synthesizer_jax.attention import relative, static
from tests.layers.cases import ALIGNMENT_CASES

B, Q, K, D, H = 2, 6, 5, 8, 2
FAST = {"xla_backend_optimization_level": 0}
ALIGNMENTS = {
    name: case.layer.alignment
    for name, case in ALIGNMENT_CASES.items()
    if not name.startswith("DotProduct,")
}
"""Every alignment of the contract; a plain `DotProduct` takes only its scale in this layer."""


def tokens(seed: int, *shape: int, dtype=jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def pattern(seed: int, *shape: int) -> jax.Array:
    """A mask array in which every query sees some keys."""
    drawn = np.random.default_rng(seed).random(shape) < 0.6
    drawn[..., 0] = True
    return jnp.asarray(drawn)


def close(found, expected, bound: float = 2e-6) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        np.testing.assert_allclose(one, other, rtol=0, atol=bound * max(1, np.abs(other).max()))


PADDING = nn.make_attention_mask(*(jnp.arange(Q) < jnp.array([[Q], [3]]),) * 2)
CASES = {
    "self": ({}, (tokens(0, B, Q, D),), {}),
    "features": (
        {"qkv_features": 12, "out_features": 5, "use_bias": False},
        (tokens(0, B, Q, D),),
        {"mask": pattern(1, B, H, Q, Q)},
    ),
    "cross": ({}, (tokens(0, B, Q, D), tokens(1, B, K, D)), {"mask": pattern(2, B, 1, Q, K)}),
    "values of their own": (
        {"normalize_qk": True},
        (tokens(0, B, Q, D), tokens(1, B, K, D), tokens(2, B, K, D)),
        {"mask": pattern(3, B, 1, 1, K)},
    ),
    "causal 0/1 mask": (
        {},
        (tokens(0, B, Q, D),),
        {"mask": nn.make_causal_mask(jnp.ones((B, Q)))},
    ),
    "a mask for all": ({}, (tokens(0, B, Q, D),), {"mask": pattern(4, Q, Q)}),
    "a mask of heads": ({}, (tokens(0, B, Q, D),), {"mask": pattern(4, H, 1, Q)}),
    "padding queries": ({}, (tokens(0, B, Q, D),), {"mask": PADDING}),
    "no batch": ({}, (tokens(0, Q, D),), {"mask": pattern(5, 1, Q, Q)}),
    "two batch dimensions": (
        {},
        (tokens(0, B, 3, Q, D), tokens(1, B, 3, K, D)),
        {"mask": pattern(6, B, 3, 1, Q, K)},
    ),
    "a mask of one batch dimension": (
        {},
        (tokens(0, B, 3, Q, D),),
        {"mask": pattern(7, 1, 3, 1, 1, Q)},
    ),
    "bfloat16": (
        {"dtype": jnp.bfloat16},
        (tokens(0, B, Q, D),),
        {"mask": pattern(8, B, 1, Q, Q)},
    ),
    "bfloat16 tokens and parameters": (
        {"param_dtype": jnp.bfloat16},
        (tokens(0, B, Q, D, dtype=jnp.bfloat16),),
        {},
    ),
    "bfloat16 tokens": ({}, (tokens(0, B, Q, D, dtype=jnp.bfloat16),), {}),
}
BESIDE = [(name, None) for name in CASES] + [
    (name, sj.DotProduct())
    for name in CASES
    if name != "padding queries"  # see the test of empty rows
]
NOT_IN_FLAXS_NNX = {"a mask of one batch dimension"}
"""Flax's NNX layer reshapes a mask with the batch dimensions, which must all be there."""


def bound(name: str) -> float:
    """In bfloat16 both are rough: the gradient of the keys' bias is zero but for rounding."""
    return 0.06 if name.startswith("bfloat16") else 2e-6


def value_and_gradients(run, *arguments):
    """Of a loss that weighs every output differently; and the output."""

    def loss(*arguments):
        y = run(*arguments)
        return jnp.sum(jnp.sin(jnp.arange(y.size).reshape(y.shape)) * y), y

    function = jax.value_and_grad(loss, argnums=range(len(arguments)), has_aux=True)
    return jax.jit(function, compiler_options=FAST)(*arguments)


def parameters(found, of) -> None:
    """Names, order of nesting, shapes, dtypes and initial values."""
    jax.tree.map(np.testing.assert_array_equal, found, of)
    assert jax.tree.map(lambda p: p.dtype, found) == jax.tree.map(lambda p: p.dtype, of)


def is_defaults(ours, theirs, added: set[str]) -> None:
    ours, theirs = (inspect.signature(f).parameters for f in (ours, theirs))
    rest = {"parent", "name"}
    names = [n for n in ours if n not in rest | added]
    assert names == [n for n in theirs if n not in rest]
    for name in names:
        assert ours[name].kind == theirs[name].kind, name
        if name != "attention_fn":
            assert ours[name].default == theirs[name].default, name


def test_the_signatures_are_flaxs():
    is_defaults(sj.MultiHeadAttention, nn.MultiHeadAttention, {"alignment"})
    is_defaults(snnx.MultiHeadAttention, nnx.MultiHeadAttention, {"alignment"})
    for ours, theirs in (
        (sj.MultiHeadAttention, nn.MultiHeadAttention),
        (snnx.MultiHeadAttention, nnx.MultiHeadAttention),
    ):
        is_defaults(ours.__call__, theirs.__call__, set())
    is_defaults(snnx.MultiHeadAttention.init_cache, nnx.MultiHeadAttention.init_cache, set())
    ours = inspect.signature(attention_fn).parameters
    for function in (nn.dot_product_attention, nnx.dot_product_attention):
        theirs = inspect.signature(function).parameters
        assert list(ours)[:12] == list(theirs)[:12] and set(theirs) <= set(ours)
        assert all(ours[n].default == p.default for n, p in theirs.items() if n != "promote_dtype")


@pytest.mark.parametrize(("name", "alignment"), BESIDE)
def test_linen_with_flaxs_parameters_is_flaxs(name, alignment):
    fields, inputs, call = CASES[name]
    theirs = nn.MultiHeadAttention(H, **fields)
    ours = sj.MultiHeadAttention(H, alignment=alignment, **fields)
    params = theirs.init(jax.random.key(0), *inputs)
    parameters(ours.init(jax.random.key(0), *inputs), of=params)
    params = jax.tree.map(lambda p: p + tokens(9, *p.shape, dtype=p.dtype) / 4, params)
    mask = call.get("mask")
    expected, found = (
        value_and_gradients(lambda p, *xs, m=m: m.apply(p, *xs, mask=mask), params, *inputs)
        for m in (theirs, ours)
    )
    close(found, expected, bound(name))


@pytest.mark.parametrize(("name", "alignment"), [p for p in BESIDE if p[0] not in NOT_IN_FLAXS_NNX])
def test_nnx_with_flaxs_parameters_is_flaxs(name, alignment):
    fields, inputs, call = CASES[name]
    options = {"decode": False, "rngs": nnx.Rngs(0), **fields}
    theirs = nnx.MultiHeadAttention(H, D, **options)
    ours = snnx.MultiHeadAttention(H, D, alignment=alignment, **options | {"rngs": nnx.Rngs(0)})
    parameters(*(nnx.to_pure_dict(nnx.state(m)) for m in (ours, theirs)))
    state = jax.tree.map(lambda p: p + tokens(9, *p.shape, dtype=p.dtype) / 4, nnx.state(theirs))
    mask = call.get("mask")

    def run(module, state, *inputs):
        return nnx.merge(nnx.graphdef(module), state)(*inputs, mask=mask)

    expected, found = (
        value_and_gradients(functools.partial(run, m), state, *inputs) for m in (theirs, ours)
    )
    close(jax.tree.leaves(found), jax.tree.leaves(expected), bound(name))


@pytest.mark.parametrize("broadcast", [True, False])
def test_dropout_is_flaxs_draw(broadcast):
    x, key = tokens(0, B, Q, D), jax.random.key(3)
    fields = {"dropout_rate": 0.4, "broadcast_dropout": broadcast}
    theirs, ours = (m(H, **fields) for m in (nn.MultiHeadAttention, sj.MultiHeadAttention))
    params = theirs.init(jax.random.key(0), x, deterministic=True)
    for options in ({"dropout_rng": key}, {"rngs": {"dropout": key}}):
        expected, found = (
            m.apply(params, x, deterministic=False, **options) for m in (theirs, ours)
        )
        close(found, expected)
        assert np.any(found != ours.apply(params, x, deterministic=True))
    options = {"rngs": nnx.Rngs(0), "decode": False, **fields}
    theirs = nnx.MultiHeadAttention(H, D, **options)
    ours = snnx.MultiHeadAttention(H, D, **options | {"rngs": nnx.Rngs(0)})
    expected, found = (m(x, deterministic=False) for m in (theirs, ours))
    close(found, expected)
    for module in (theirs, ours):
        module.eval()
    close(ours(x), theirs(x))


def test_dropout_in_blocks_drops_as_often():
    """More queries than a block has, each block with a draw of its own."""
    rate, length = 0.3, 200
    zeros, ones = jnp.zeros((1, length, 1, 4)), jnp.ones((1, length, 1, 1))
    drop = functools.partial(attention_fn, dropout_rng=jax.random.key(0), dropout_rate=rate)
    kept = drop(zeros, zeros, ones)[0, :, 0, 0]  # the share of weights kept, a number a query
    assert abs(kept.mean() - 1) < 0.01 and 0.01 < kept.std() < 0.1
    both = drop(jnp.tile(zeros, (2, 1, 3, 1)), *(jnp.tile(x, (2, 1, 3, 1)) for x in (zeros, ones)))
    np.testing.assert_allclose(both, both[:1, :, :1].repeat(2, 0).repeat(3, 2), rtol=1e-5)


@pytest.mark.parametrize("alignment", [sj.DotProduct(), sj.Random(max_length=8)])
def test_dropout_of_an_alignment_is_t5s(alignment):
    """A key is dropped for all queries of an example and head, or for none."""
    layer = sj.MultiHeadAttention(1, alignment=alignment, dropout_rate=0.5, deterministic=False)
    x = tokens(0, B, Q, D)
    params = layer.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)
    params = jax.tree.map(lambda p: p * 0 if p.ndim < 2 else p, params)
    params["params"]["value"]["bias"] = jnp.ones_like(params["params"]["value"]["bias"])
    values = lambda **o: layer.apply(params, x, **o)
    y = values(dropout_rng=jax.random.key(2))
    close(values(dropout_rng=jax.random.key(2)), y, 0)
    assert np.any(y != values(dropout_rng=jax.random.key(4)))
    assert np.any(y != values(rngs={"dropout": jax.random.key(2)}))
    quiet = layer.copy(deterministic=None)
    close(quiet.apply(params, x, deterministic=True), quiet.copy(dropout_rate=0.0).apply(params, x))
    with pytest.raises(ValueError, match="deterministic"):
        quiet.apply(params, x)


@pytest.mark.parametrize("name", ALIGNMENTS)
def test_an_alignment_is_that_of_attention(name):
    """Linen against `Attention`, whose oracle is NumPy; NNX against Linen; steps against the whole."""
    alignment, x = ALIGNMENTS[name], tokens(0, B, Q, 10)
    fields = {"qkv_features": 12, "use_bias": False, "alignment": alignment}
    layer = sj.MultiHeadAttention(4, **fields)
    variables = layer.init(jax.random.key(0), x)
    params = dict(variables["params"])
    if isinstance(alignment, sj.DotProduct):
        params = {"align": {n: params.pop(n) for n in ("query", "key")}, **params}
    attention = sj.Attention(4, 3, alignment=alignment)
    seen = nn.make_causal_mask(jnp.ones((B, Q)))
    run = functools.partial(jax.jit, compiler_options=FAST)
    expected = run(attention.apply)({**variables, "params": params}, x, mask=sj.Mask(causal=True))
    found = run(lambda v: [layer.apply(v, x, mask=m) for m in (seen, sj.Mask(causal=True))])(
        variables
    )
    close(found, [expected, expected])

    module = snnx.MultiHeadAttention(4, 10, decode=False, rngs=nnx.Rngs(0), **fields)
    graph, state = nnx.split(module)
    flat = dict(nnx.to_flat_state(state))
    merged = by_path(variables["params"]) | by_path(variables.get("constants", {}))
    assert set(flat) == set(merged)
    state = nnx.from_flat_state({path: v.replace(merged[path]) for path, v in flat.items()})
    close(run(lambda s: nnx.merge(graph, s)(x, mask=seen))(state), expected)
    nnx.update(module, state)
    module.init_cache((B, Q + 2, 10))
    module.set_attributes(decode=True)
    step = nnx.jit(lambda module, x: module(x))
    steps = [step(module, x[:, i : i + 1]) for i in range(Q)]
    close(jnp.concatenate(steps, 1), expected)


def by_path(tree) -> dict:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {tuple(p.key for p in path): leaf for path, leaf in leaves}


@pytest.mark.parametrize("name", ["none", *ALIGNMENTS])
def test_linen_steps_are_flaxs_or_the_whole_pass(name):
    alignment, x = ALIGNMENTS.get(name), tokens(0, B, Q, 10)
    layer = sj.MultiHeadAttention(4, qkv_features=12, alignment=alignment, decode=True)
    run = functools.partial(jax.jit, compiler_options=FAST)
    variables = run(layer.init)(jax.random.key(0), x)
    cache, fixed = variables["cache"], {k: v for k, v in variables.items() if k != "cache"}
    seen = nn.make_causal_mask(jnp.ones((B, Q)))
    theirs = nn.MultiHeadAttention(4, qkv_features=12, decode=alignment is None)
    if alignment is None:
        parameters(variables, of=theirs.init(jax.random.key(0), x))
        kept = cache
    whole = run(layer.copy(decode=False).apply)(fixed, x, mask=seen)
    lengths = jnp.array([Q, 3])
    shown = layer.copy(decode=False).apply(
        fixed, x, mask=seen * (jnp.arange(Q) < lengths[:, None, None, None])
    )
    padding = (jnp.arange(Q) < lengths[:, None])[:, None, None]

    @run
    def step(cache, x):
        options = {"mutable": ["cache"]}
        plain, new = layer.apply({**fixed, "cache": cache}, x, **options)
        masked = [
            layer.apply({**fixed, "cache": cache}, x, mask=m, **options)[0]
            for m in (padding, sj.Mask(causal=True, key_lengths=lengths))
        ]
        return plain, masked, new["cache"]

    for i in range(Q):
        token = x[:, i : i + 1]
        if alignment is None:
            expected, new = theirs.apply({**fixed, "cache": kept}, token, mutable=["cache"])
            kept = new["cache"]
        y, masked, cache = step(cache, token)
        close(y, whole[:, i : i + 1])
        close(masked, [shown[:, i : i + 1]] * 2)
        if alignment is None:
            close((y, cache), (expected, kept))
    assert cache["cache_index"] == Q
