"""`MultiHeadAttention` and `attention_fn` beside Flax's own, which are the oracle."""

import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import synthesizer_jax as sj
import synthesizer_jax.nnx as snnx
from synthesizer_jax import attention_fn
from tests.beside_flax import (
    FAST,
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
from tests.layers.cases import ALIGNMENT_CASES

ALIGNMENTS = {
    name: case.layer.alignment
    for name, case in ALIGNMENT_CASES.items()
    if not name.startswith("DotProduct,")
}
"""Every alignment of the contract; a plain `DotProduct` takes only its scale in this layer."""


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
NOT_IN_FLAXS_NNX = {"a mask of one batch dimension"}
"""Flax's NNX layer reshapes a mask with the batch dimensions, which must all be there."""


def bound(name: str) -> float:
    """The gradient of the keys' bias is zero but for rounding, which is rough in bfloat16."""
    return 0.06 if name.startswith("bfloat16") else 5e-6


def parameters(found, of) -> None:
    """The same names, shapes, dtypes and initial values."""
    jax.tree.map(np.testing.assert_array_equal, found, of)
    assert jax.tree.map(lambda p: p.dtype, found) == jax.tree.map(lambda p: p.dtype, of)


def is_defaults(ours, theirs, added: set[str]) -> None:
    """The same parameters, but for those of `added` that only ours has."""
    ours, theirs = (inspect.signature(f).parameters for f in (ours, theirs))
    rest = {"parent", "name"} | (added - theirs.keys())
    names = [n for n in ours if n not in rest]
    assert names == [n for n in theirs if n not in rest]
    for name in names:
        assert ours[name].kind == theirs[name].kind, name
        if name != "attention_fn":
            assert ours[name].default == theirs[name].default, name


def test_the_signatures_are_flaxs():
    is_defaults(sj.MultiHeadAttention, nn.MultiHeadAttention, {"alignment"})
    is_defaults(snnx.MultiHeadAttention, nnx.MultiHeadAttention, {"alignment"})
    is_defaults(sj.MultiHeadAttention.__call__, nn.MultiHeadAttention.__call__, set())
    newer = {"input_positions"}  # Flax 0.12.8 has none
    is_defaults(snnx.MultiHeadAttention.__call__, nnx.MultiHeadAttention.__call__, newer)
    is_defaults(snnx.MultiHeadAttention.init_cache, nnx.MultiHeadAttention.init_cache, set())
    ours = inspect.signature(attention_fn).parameters
    for function in (nn.dot_product_attention, nnx.dot_product_attention):
        theirs = inspect.signature(function).parameters
        assert list(ours)[:12] == list(theirs)[:12] and set(theirs) <= set(ours)
        assert all(ours[n].default == p.default for n, p in theirs.items() if n != "promote_dtype")


def beside(name: str) -> list:
    """The alignments that give Flax's results; padding queries: see the test of empty rows."""
    return [None] if name == "padding queries" else [None, sj.DotProduct()]


@pytest.mark.parametrize("name", CASES)
def test_linen_with_flaxs_parameters_is_flaxs(name):
    fields, inputs, call = CASES[name]
    theirs = nn.MultiHeadAttention(H, **fields)
    initial = theirs.init(jax.random.key(0), *inputs)
    params = jax.tree.map(lambda p: p + tokens(9, *p.shape, dtype=p.dtype) / 4, initial)
    run = lambda m: value_and_gradients(lambda p, *xs: m.apply(p, *xs, **call), params, *inputs)
    expected = run(theirs)
    for alignment in beside(name):
        ours = sj.MultiHeadAttention(H, alignment=alignment, **fields)
        parameters(ours.init(jax.random.key(0), *inputs), of=initial)
        close(run(ours), expected, bound(name))


@pytest.mark.parametrize("name", [n for n in CASES if n not in NOT_IN_FLAXS_NNX])
def test_nnx_with_flaxs_parameters_is_flaxs(name):
    fields, inputs, call = CASES[name]
    options = {"decode": False, **fields}
    theirs = nnx.MultiHeadAttention(H, D, rngs=nnx.Rngs(0), **options)
    initial = nnx.state(theirs)
    state = jax.tree.map(lambda p: p + tokens(9, *p.shape, dtype=p.dtype) / 4, initial)

    def run(module):
        graph = nnx.graphdef(module)
        found = value_and_gradients(lambda s, *xs: nnx.merge(graph, s)(*xs, **call), state, *inputs)
        return jax.tree.leaves(found)

    expected = run(theirs)
    for alignment in beside(name):
        ours = snnx.MultiHeadAttention(H, D, rngs=nnx.Rngs(0), alignment=alignment, **options)
        parameters(*(nnx.to_pure_dict(s) for s in (nnx.state(ours), initial)))
        close(run(ours), expected, bound(name))


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


@pytest.mark.parametrize("library", LAYERS)
def test_sown_weights_are_flaxs(library):
    theirs, plain = LAYERS[library]
    aligned = functools.partial(plain, alignment=sj.DotProduct())
    x, seen = tokens(0, B, 3, Q, D), pattern(1, B, 3, 1, Q, Q)
    expected = applied(theirs(H), x, mask=seen, sow_weights=True)
    for layer in (plain(H), aligned(H), theirs(H, attention_fn=attention_fn)):
        found = applied(layer, x, mask=seen, sow_weights=True)
        close(jax.tree.leaves(found), jax.tree.leaves(expected))
        assert not applied(layer, x, mask=seen)[1]
    fixed = applied(plain(H, alignment=sj.Gaussian()), x, sow_weights=True)[1]
    assert jax.tree.leaves(fixed)[0].shape == (B, 3, H, Q, Q)


@pytest.mark.parametrize("library", LAYERS)
def test_a_query_without_a_key_is_flaxs_or_zero_with_an_alignment(library):
    theirs, ours = LAYERS[library]
    x, options = tokens(0, B, Q, D), {"use_bias": False}
    (expected, _), (found, _) = (applied(m(H, **options), x, mask=PADDING) for m in (theirs, ours))
    close(found, expected)
    aligned, _ = applied(ours(H, alignment=sj.DotProduct(), **options), x, mask=PADDING)
    close(aligned[0], expected[0])
    close(aligned[1, :3], expected[1, :3])
    as_mask, _ = applied(ours(H, **options), x, mask=sj.Mask(key_lengths=jnp.array([Q, 3])))
    close(as_mask, aligned)
    assert not np.any(aligned[1, 3:]) and np.all(expected[1, 3:] != 0)


@pytest.mark.parametrize("library", LAYERS)
def test_alignments_take_any_batch_dimensions(library):
    _, ours = LAYERS[library]
    for alignment in (
        sj.Random(max_length=8),
        sj.Mixture((sj.Dense(max_length=8), sj.DotProduct())),
    ):
        layer = ours(H, alignment=alignment)
        x, y, seen = tokens(0, B, 3, Q, D), tokens(1, B, 3, K, D), pattern(2, B, 3, H, Q, K)
        found, _ = applied(layer, x, y, mask=seen)
        for i in range(B):
            close(found[i], applied(layer, x[i], y[i], mask=seen[i])[0])
        close(found[1, 2], applied(layer, x[1, 2], y[1, 2], mask=seen[1, 2])[0])


def test_grouped_queries_and_causal_order_are_flaxs():
    x, seen = tokens(0, B, Q, D), pattern(1, B, 1, 1, Q)
    options = {"num_kv_heads": 2, "decode": False}
    for call in ({}, {"mask": seen}, {"mask": seen, "is_causal": True}, {"is_causal": True}):
        expected, found = (
            m(4, D, rngs=nnx.Rngs(0), **options)(x, **call)
            for m in (nnx.MultiHeadAttention, snnx.MultiHeadAttention)
        )
        close(found, expected)
    layer = snnx.MultiHeadAttention(
        4, D, alignment=sj.Random(max_length=8), decode=False, rngs=nnx.Rngs(0)
    )
    close(layer(x, is_causal=True), layer(x, mask=nn.make_causal_mask(jnp.ones((B, Q)))))


@pytest.mark.parametrize("library", LAYERS)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"alignment": sj.DotProduct(head_dim=5)}, "give DotProduct nothing but scale"),
        ({"alignment": sj.Random}, "is not an Alignment; give an object"),
        ({"alignment": "random"}, "is not an Alignment; give an object"),
        ({"alignment": sj.Random(8), "normalize_qk": True}, "normalize_qk normalises the dot"),
        (
            {"alignment": sj.Random(8), "attention_fn": nn.dot_product_attention},
            "both say who looks at whom",
        ),
        ({"alignment": sj.Random(8), "qkv_features": 9}, "divisible"),
    ],
)
def test_what_an_alignment_excludes_is_one_sentence(library, fields, message):
    with pytest.raises(ValueError, match=message):
        applied(LAYERS[library][1](H, **fields), tokens(0, B, Q, D))


@pytest.mark.parametrize("alignment", [None, sj.Random(max_length=8)], ids=["none", "Random"])
@pytest.mark.parametrize("library", LAYERS)
def test_errors_are_where_flax_has_them(library, alignment):
    layer = LAYERS[library][1](H, alignment=alignment, dropout_rate=0.5)
    x, y = tokens(0, B, Q, D), tokens(1, B, K, D)
    quiet = {"deterministic": True}
    for arguments, options, message in (
        ((x, None, y), quiet, "inputs_k` cannot be None|inputs_k cannot be None"),
        ((x, y, x), quiet, "same length|as many as values"),
        ((x, tokens(1, 3, K, D)), quiet, "batch dimensions"),
        ((x,), {}, "deterministic"),
        ((x,), {**quiet, "mask": jnp.ones((B, 3, Q, Q))}, "does not broadcast to"),
        ((x,), {**quiet, "mask": jnp.ones((B, 1, Q, K))}, "does not broadcast to"),
    ):
        with pytest.raises(ValueError, match=message):
            run = layer if library == "nnx" else functools.partial(layer.init, jax.random.key(0))
            run(*arguments, **options)
    if library == "nnx":
        with pytest.raises(ValueError, match="init_cache"):
            layer(x, decode=True, **quiet)
        with pytest.raises(ValueError, match="decode"):
            snnx.MultiHeadAttention(H, D, alignment=alignment, rngs=nnx.Rngs(0))(x)
        layer.init_cache((B, Q, D))
        step = lambda x: layer(x, decode=True, **quiet)
    else:
        layer = layer.copy(decode=True)
        variables = layer.init(jax.random.key(0), x, **quiet)
        step = lambda x: layer.apply(variables, x, mutable=["cache"], **quiet)
    for tokens_of_a_step in (x, x[:1, :1]):
        with pytest.raises(ValueError, match=r"utoregressive cache shape error"):
            step(tokens_of_a_step)


@pytest.mark.parametrize("alignment", [None, sj.Random(Q)], ids=["dot product", "Random"])
@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_a_steps_mask_neither_opens_nor_hides_what_is_not_there(library, alignment):
    """A prefix beyond the tokens that are there, and padding given as a pattern."""
    x = tokens(0, B, Q, D)
    if library == "linen":
        layer = sj.MultiHeadAttention(H, alignment=alignment, decode=True)
        variables = layer.init(jax.random.key(0), x)
        run = lambda m: layer.apply(variables, x[:, :1], mask=m, mutable=["cache"])[0]
    else:
        layer = snnx.MultiHeadAttention(H, D, alignment=alignment, decode=True, rngs=nnx.Rngs(0))

        def run(mask):
            layer.init_cache(x.shape)
            return layer(x[:, :1], mask=mask)

    expected = run(None)
    real = jnp.arange(Q) < jnp.array([[Q], [3]])
    for mask in (sj.Mask(prefix_lengths=jnp.array([3, 2])), sj.Mask.padded(real)):
        np.testing.assert_allclose(run(mask), expected, atol=1e-6)


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_a_full_cache_of_an_alignment(library):
    x = tokens(0, B, 2, D)
    if library == "linen":
        layer = sj.MultiHeadAttention(H, alignment=sj.Dense(8), decode=True)
        variables = layer.init(jax.random.key(0), x)

        def run():
            _, kept = layer.apply(variables, x[:, :1], mutable=["cache"])
            variables.update(kept)
    else:
        layer = snnx.MultiHeadAttention(H, D, alignment=sj.Dense(8), decode=True, rngs=nnx.Rngs(0))
        layer.init_cache(x.shape)
        run = lambda: layer(x[:, :1])
    for _ in range(2):
        run()
    with pytest.raises(
        ValueError,
        match=r"max_length=2 but 3 positions .* by init or init_cache with longer inputs",
    ):
        run()


def test_sown_weights_of_padding_queries_are_zero_as_their_output_is():
    x = tokens(0, B, Q, D)
    layer = sj.MultiHeadAttention(H)
    variables = layer.init(jax.random.key(0), x)
    mask = sj.Mask.padded(jnp.array([Q, 3]))
    _, found = layer.apply(variables, x, mask=mask, sow_weights=True, mutable=["intermediates"])
    (weights,) = found["intermediates"]["attention_weights"]
    np.testing.assert_allclose(weights[1].sum(-1)[:, :3], 1, rtol=1e-5)
    assert np.all(weights[1, :, 3:] == 0)


def test_an_nnx_alignments_parameters_carry_logical_axes():
    layer = snnx.MultiHeadAttention(H, D, alignment=sj.Random(Q), decode=False, rngs=nnx.Rngs(0))
    assert layer.align.table.out_sharding == ("heads", "query_length", "key_length")


def test_flaxs_own_layer_has_another_way_to_nnx():
    with pytest.raises(
        ValueError, match=r"is Flax's attention .*build synthesizer_jax\.nnx\.Multi"
    ):
        snnx.to_nnx(nn.MultiHeadAttention(H), in_features=D, rngs=nnx.Rngs(0))
