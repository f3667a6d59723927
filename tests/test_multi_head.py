"""`MultiHeadAttention` against Flax's layers, which are the reference."""

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
"""All alignments of the contract; in this layer only the scale of a `DotProduct` can be set."""

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
"""Flax's NNX layer reshapes masks, which therefore need all batch dimensions."""


def tolerance(name: str) -> float:
    """The gradient of the keys' bias is zero up to rounding errors, which are large in bfloat16."""
    return 0.06 if name.startswith("bfloat16") else 5e-6


def assert_same_parameters(actual, expected) -> None:
    """Asserts that names, shapes, dtypes and initial values are equal."""
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert jax.tree.map(lambda p: p.dtype, actual) == jax.tree.map(lambda p: p.dtype, expected)


def assert_same_signature(signature, flax_signature, added: set[str]) -> None:
    """Asserts that the parameters are equal, except that the first may also have those in `added`."""
    signature, flax_signature = (
        inspect.signature(f).parameters for f in (signature, flax_signature)
    )
    excluded = {"parent", "name"} | (added - flax_signature.keys())
    names = [n for n in signature if n not in excluded]
    assert names == [n for n in flax_signature if n not in excluded]
    for name in names:
        assert signature[name].kind == flax_signature[name].kind, name
        if name != "attention_fn":
            assert signature[name].default == flax_signature[name].default, name


def test_signatures_equal_flax():
    assert_same_signature(sj.MultiHeadAttention, nn.MultiHeadAttention, {"alignment"})
    assert_same_signature(snnx.MultiHeadAttention, nnx.MultiHeadAttention, {"alignment"})
    assert_same_signature(sj.MultiHeadAttention.__call__, nn.MultiHeadAttention.__call__, set())
    newer = {"input_positions"}  # Flax 0.12.8 has none
    assert_same_signature(snnx.MultiHeadAttention.__call__, nnx.MultiHeadAttention.__call__, newer)
    assert_same_signature(
        snnx.MultiHeadAttention.init_cache, nnx.MultiHeadAttention.init_cache, set()
    )
    parameters = inspect.signature(attention_fn).parameters
    for function in (nn.dot_product_attention, nnx.dot_product_attention):
        flax_parameters = inspect.signature(function).parameters
        assert list(parameters)[:12] == list(flax_parameters)[:12] and set(flax_parameters) <= set(
            parameters
        )
        assert all(
            parameters[n].default == p.default
            for n, p in flax_parameters.items()
            if n != "promote_dtype"
        )


def alignments_like_flax(name: str) -> list:
    """The alignments whose results equal Flax's; for padding queries see the test of empty rows."""
    return [None] if name == "padding queries" else [None, sj.DotProduct()]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_linen_equals_flax(name):
    fields, inputs, call = CASES[name]
    flax_layer = nn.MultiHeadAttention(H, **fields)
    initial = flax_layer.init(jax.random.key(0), *inputs)
    params = jax.tree.map(lambda p: p + tokens(9, *p.shape, dtype=p.dtype) / 4, initial)
    run = lambda m: value_and_gradients(lambda p, *xs: m.apply(p, *xs, **call), params, *inputs)
    expected = run(flax_layer)
    for alignment in alignments_like_flax(name):
        layer = sj.MultiHeadAttention(H, alignment=alignment, **fields)
        assert_same_parameters(layer.init(jax.random.key(0), *inputs), expected=initial)
        close(run(layer), expected, tolerance(name))


@pytest.mark.parametrize("name", [n for n in CASES if n not in NOT_IN_FLAXS_NNX])
def test_nnx_equals_flax(name):
    fields, inputs, call = CASES[name]
    options = {"decode": False, **fields}
    flax_layer = nnx.MultiHeadAttention(H, D, rngs=nnx.Rngs(0), **options)
    initial = nnx.state(flax_layer)
    state = jax.tree.map(lambda p: p + tokens(9, *p.shape, dtype=p.dtype) / 4, initial)

    def run(module):
        graph = nnx.graphdef(module)
        actual = value_and_gradients(
            lambda s, *xs: nnx.merge(graph, s)(*xs, **call), state, *inputs
        )
        return jax.tree.leaves(actual)

    expected = run(flax_layer)
    for alignment in alignments_like_flax(name):
        layer = snnx.MultiHeadAttention(H, D, rngs=nnx.Rngs(0), alignment=alignment, **options)
        assert_same_parameters(*(nnx.to_pure_dict(s) for s in (nnx.state(layer), initial)))
        close(run(layer), expected, tolerance(name))


@pytest.mark.parametrize("broadcast", [True, False])
def test_dropout_mask_equals_flax(broadcast):
    x, key = tokens(0, B, Q, D), jax.random.key(3)
    fields = {"dropout_rate": 0.4, "broadcast_dropout": broadcast}
    flax_layer, layer = (m(H, **fields) for m in (nn.MultiHeadAttention, sj.MultiHeadAttention))
    params = flax_layer.init(jax.random.key(0), x, deterministic=True)
    for options in ({"dropout_rng": key}, {"rngs": {"dropout": key}}):
        expected, actual = (
            m.apply(params, x, deterministic=False, **options) for m in (flax_layer, layer)
        )
        close(actual, expected)
        assert np.any(actual != layer.apply(params, x, deterministic=True))
    options = {"rngs": nnx.Rngs(0), "decode": False, **fields}
    flax_layer = nnx.MultiHeadAttention(H, D, **options)
    layer = snnx.MultiHeadAttention(H, D, **options | {"rngs": nnx.Rngs(0)})
    expected, actual = (m(x, deterministic=False) for m in (flax_layer, layer))
    close(actual, expected)
    for module in (flax_layer, layer):
        module.eval()
    close(layer(x), flax_layer(x))


@pytest.mark.parametrize("alignment", [sj.DotProduct(), sj.Random(max_length=8)])
def test_dropout_of_an_alignment_is_that_of_t5(alignment):
    """A key is dropped for all queries of an example and head or for none."""
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ALIGNMENTS)
def test_alignments_equal_attention(name):
    """Linen equals `Attention`, NNX equals Linen, and decoding steps equal the full pass."""
    alignment, x = ALIGNMENTS[name], tokens(0, B, Q, 10)
    fields = {"qkv_features": 12, "use_bias": False, "alignment": alignment}
    layer = sj.MultiHeadAttention(4, **fields)
    variables = layer.init(jax.random.key(0), x)
    params = dict(variables["params"])
    if isinstance(alignment, sj.DotProduct):
        params = {"align": {n: params.pop(n) for n in ("query", "key")}, **params}
    attention = sj.Attention(4, 3, alignment=alignment)
    causal_mask = nn.make_causal_mask(jnp.ones((B, Q)))
    run = functools.partial(jax.jit, compiler_options=FAST)
    expected = run(attention.apply)({**variables, "params": params}, x, mask=sj.Mask(causal=True))
    actual = run(
        lambda v: [layer.apply(v, x, mask=m) for m in (causal_mask, sj.Mask(causal=True))]
    )(variables)
    close(actual, [expected, expected])

    module = snnx.MultiHeadAttention(4, 10, decode=False, rngs=nnx.Rngs(0), **fields)
    graph, state = nnx.split(module)
    flat = dict(nnx.to_flat_state(state))
    merged = flatten_by_path(variables["params"]) | flatten_by_path(variables.get("constants", {}))
    assert set(flat) == set(merged)
    state = nnx.from_flat_state({path: v.replace(merged[path]) for path, v in flat.items()})
    close(run(lambda s: nnx.merge(graph, s)(x, mask=causal_mask))(state), expected)
    nnx.update(module, state)
    module.init_cache((B, Q + 2, 10))
    module.set_attributes(decode=True)
    step = nnx.jit(lambda module, x: module(x))
    steps = [step(module, x[:, i : i + 1]) for i in range(Q)]
    close(jnp.concatenate(steps, 1), expected)


def flatten_by_path(tree) -> dict:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {tuple(p.key for p in path): leaf for path, leaf in leaves}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", *ALIGNMENTS])
def test_linen_decoding_steps_equal_flax_or_the_full_pass(name):
    alignment, x = ALIGNMENTS.get(name), tokens(0, B, Q, 10)
    layer = sj.MultiHeadAttention(4, qkv_features=12, alignment=alignment, decode=True)
    run = functools.partial(jax.jit, compiler_options=FAST)
    variables = run(layer.init)(jax.random.key(0), x)
    cache, fixed = variables["cache"], {k: v for k, v in variables.items() if k != "cache"}
    causal_mask = nn.make_causal_mask(jnp.ones((B, Q)))
    flax_layer = nn.MultiHeadAttention(4, qkv_features=12, decode=alignment is None)
    if alignment is None:
        assert_same_parameters(variables, expected=flax_layer.init(jax.random.key(0), x))
        flax_cache = cache
    full_output = run(layer.copy(decode=False).apply)(fixed, x, mask=causal_mask)
    lengths = jnp.array([Q, 3])
    full_output_of_lengths = layer.copy(decode=False).apply(
        fixed, x, mask=causal_mask * (jnp.arange(Q) < lengths[:, None, None, None])
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
            expected, new = flax_layer.apply(
                {**fixed, "cache": flax_cache}, token, mutable=["cache"]
            )
            flax_cache = new["cache"]
        y, masked, cache = step(cache, token)
        close(y, full_output[:, i : i + 1])
        close(masked, [full_output_of_lengths[:, i : i + 1]] * 2)
        if alignment is None:
            close((y, cache), (expected, flax_cache))
    assert cache["cache_index"] == Q


@pytest.mark.parametrize("library", LAYERS)
def test_sown_weights_equal_flax(library):
    make_flax_layer, make_layer = LAYERS[library]
    make_aligned_layer = functools.partial(make_layer, alignment=sj.DotProduct())
    x, mask = tokens(0, B, 3, Q, D), pattern(1, B, 3, 1, Q, Q)
    expected = applied(make_flax_layer(H), x, mask=mask, sow_weights=True)
    for layer in (
        make_layer(H),
        make_aligned_layer(H),
        make_flax_layer(H, attention_fn=attention_fn),
    ):
        actual = applied(layer, x, mask=mask, sow_weights=True)
        close(jax.tree.leaves(actual), jax.tree.leaves(expected))
        assert not applied(layer, x, mask=mask)[1]
    fixed = applied(make_layer(H, alignment=sj.Gaussian()), x, sow_weights=True)[1]
    assert jax.tree.leaves(fixed)[0].shape == (B, 3, H, Q, Q)


@pytest.mark.parametrize("library", LAYERS)
def test_a_fully_masked_query_equals_flax_or_is_zero_with_an_alignment(library):
    make_flax_layer, make_layer = LAYERS[library]
    x, options = tokens(0, B, Q, D), {"use_bias": False}
    (expected, _), (actual, _) = (
        applied(m(H, **options), x, mask=PADDING) for m in (make_flax_layer, make_layer)
    )
    close(actual, expected)
    aligned, _ = applied(make_layer(H, alignment=sj.DotProduct(), **options), x, mask=PADDING)
    close(aligned[0], expected[0])
    close(aligned[1, :3], expected[1, :3])
    as_mask, _ = applied(make_layer(H, **options), x, mask=sj.Mask(key_lengths=jnp.array([Q, 3])))
    close(as_mask, aligned)
    assert not np.any(aligned[1, 3:]) and np.all(expected[1, 3:] != 0)


@pytest.mark.parametrize("library", LAYERS)
def test_alignments_support_any_batch_dimensions(library):
    _, make_layer = LAYERS[library]
    for alignment in (
        sj.Random(max_length=8),
        sj.Mixture((sj.Dense(max_length=8), sj.DotProduct())),
    ):
        layer = make_layer(H, alignment=alignment)
        x, y, mask = tokens(0, B, 3, Q, D), tokens(1, B, 3, K, D), pattern(2, B, 3, H, Q, K)
        actual, _ = applied(layer, x, y, mask=mask)
        for i in range(B):
            close(actual[i], applied(layer, x[i], y[i], mask=mask[i])[0])
        close(actual[1, 2], applied(layer, x[1, 2], y[1, 2], mask=mask[1, 2])[0])


def test_grouped_queries_and_causal_masks_equal_flax():
    x, mask = tokens(0, B, Q, D), pattern(1, B, 1, 1, Q)
    options = {"num_kv_heads": 2, "decode": False}
    for call in ({}, {"mask": mask}, {"mask": mask, "is_causal": True}, {"is_causal": True}):
        expected, actual = (
            m(4, D, rngs=nnx.Rngs(0), **options)(x, **call)
            for m in (nnx.MultiHeadAttention, snnx.MultiHeadAttention)
        )
        close(actual, expected)
    layer = snnx.MultiHeadAttention(
        4, D, alignment=sj.Random(max_length=8), decode=False, rngs=nnx.Rngs(0)
    )
    close(layer(x, is_causal=True), layer(x, mask=nn.make_causal_mask(jnp.ones((B, Q)))))


@pytest.mark.slow
@pytest.mark.parametrize("library", LAYERS)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"alignment": sj.DotProduct(head_dim=5)}, "set only scale on DotProduct"),
        ({"alignment": sj.Random}, "is not an Alignment; pass an object"),
        ({"alignment": "random"}, "is not an Alignment; pass an object"),
        (
            {"alignment": sj.Random(8), "normalize_qk": True},
            "normalize_qk is supported for DotProduct only",
        ),
        (
            {"alignment": sj.Random(8), "attention_fn": nn.dot_product_attention},
            "exclude each other",
        ),
        ({"alignment": sj.Random(8), "qkv_features": 9}, "divisible"),
    ],
)
def test_fields_that_exclude_an_alignment_are_errors(library, fields, message):
    with pytest.raises(ValueError, match=message):
        applied(LAYERS[library][1](H, **fields), tokens(0, B, Q, D))


@pytest.mark.parametrize("alignment", [None, sj.Random(max_length=8)], ids=["none", "Random"])
@pytest.mark.parametrize("library", LAYERS)
def test_errors_equal_flax(library, alignment):
    layer = LAYERS[library][1](H, alignment=alignment, dropout_rate=0.5)
    x, y = tokens(0, B, Q, D), tokens(1, B, K, D)
    quiet = {"deterministic": True}
    for arguments, options, message in (
        ((x, None, y), quiet, "inputs_k` cannot be None|inputs_k cannot be None"),
        ((x, y, x), quiet, "equal lengths|lengths must match"),
        ((x, tokens(1, 3, K, D)), quiet, "batch dim"),
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
def test_masks_of_positions_not_yet_decoded_have_no_effect(library, alignment):
    """A prefix longer than the decoded tokens, and a padding mask."""
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
def test_a_full_cache_is_an_error(library):
    x = tokens(0, B, 2, D)
    if library == "linen":
        layer = sj.MultiHeadAttention(H, alignment=sj.Dense(8), decode=True)
        variables = layer.init(jax.random.key(0), x)

        def run_step():
            _, variables_out = layer.apply(variables, x[:, :1], mutable=["cache"])
            variables.update(variables_out)
    else:
        layer = snnx.MultiHeadAttention(H, D, alignment=sj.Dense(8), decode=True, rngs=nnx.Rngs(0))
        layer.init_cache(x.shape)
        run_step = lambda: layer(x[:, :1])
    for _ in range(2):
        run_step()
    with pytest.raises(
        ValueError,
        match=r"max_length=2 but 3 positions .* by init or init_cache with longer inputs",
    ):
        run_step()


def test_sown_weights_of_padding_queries_are_zero_like_their_outputs():
    x = tokens(0, B, Q, D)
    layer = sj.MultiHeadAttention(H)
    variables = layer.init(jax.random.key(0), x)
    mask = sj.Mask.padded(jnp.array([Q, 3]))
    _, actual = layer.apply(variables, x, mask=mask, sow_weights=True, mutable=["intermediates"])
    (weights,) = actual["intermediates"]["attention_weights"]
    np.testing.assert_allclose(weights[1].sum(-1)[:, :3], 1, rtol=1e-5)
    assert np.all(weights[1, :, 3:] == 0)


def test_parameters_of_an_nnx_alignment_have_logical_axes():
    layer = snnx.MultiHeadAttention(H, D, alignment=sj.Random(Q), decode=False, rngs=nnx.Rngs(0))
    assert layer.align.table.out_sharding == ("heads", "query_length", "key_length")


def test_to_nnx_of_flaxs_layer_is_an_error():
    with pytest.raises(ValueError, match=r"is Flax's attention .*use synthesizer_jax\.nnx\.Multi"):
        snnx.to_nnx(nn.MultiHeadAttention(H), in_features=D, rngs=nnx.Rngs(0))
