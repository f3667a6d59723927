"""Compares `MultiHeadAttention` and `attention_fn` with Flax's layers and functions."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict

import synthesizer_jax as sj
import synthesizer_jax.nnx as snnx
from synthesizer_jax import attention_fn
from synthesizer_jax.attention import relative, static
from tests.attention.oracle import close
from tests.environment import FAST_COMPILE as FAST

B, Q, K, D, H = 2, 6, 5, 8, 2
LIBRARIES = ("linen", "nnx")
HALF = jnp.bfloat16


def tokens(seed: int, *shape: int, dtype=jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def pattern(seed: int, *shape: int) -> jax.Array:
    """Returns a random mask in which every query attends to at least one key."""
    array = np.random.default_rng(seed).random(shape) < 0.6
    array[..., 0] = True
    return jnp.asarray(array)


def value_and_gradients(forward, *arguments):
    """Returns the value and the gradients of a loss, and the output.

    The loss gives a different weight to every output.
    """

    def loss(*arguments):
        y = forward(*arguments)
        return jnp.sum(jnp.sin(jnp.arange(y.size).reshape(y.shape)) * y), y

    function = jax.value_and_grad(loss, argnums=range(len(arguments)), has_aux=True)
    return jax.jit(function, compiler_options=FAST)(*arguments)


def make(library: str, *, flax: bool = False, heads: int = H, **fields):
    """Returns one of our layers or of Flax's layers. NNX layers already have their parameters."""
    if library == "linen":
        return (nn if flax else sj).MultiHeadAttention(heads, **fields)
    fields = {"in_features": D, "decode": False, "rngs": nnx.Rngs(0), **fields}
    return (nnx if flax else snnx).MultiHeadAttention(heads, **fields)


def applied(layer, *inputs, **options):
    """Returns the output, and the attention weights if they are sown."""
    if isinstance(layer, nn.Module):
        params = {"params": jax.jit(layer.init)(jax.random.key(0), *inputs)["params"]}
        apply = functools.partial(layer.apply, mutable=["intermediates"], **options)
        y, state = jax.jit(apply, compiler_options=FAST)(params, *inputs)
        return y, state.get("intermediates")
    call = nnx.jit(lambda layer: nnx.capture(layer, nnx.Intermediate)(*inputs, **options))
    y, state = call(layer)
    return y, nnx.to_pure_dict(state)


def functional(layer, *inputs):
    """Returns a layer's parameters, and the layer as a function of parameters and inputs."""
    if isinstance(layer, nn.Module):
        return jax.jit(layer.init)(jax.random.key(0), *inputs), layer.apply
    graph, state = nnx.split(layer)
    return nnx.to_pure_dict(state), lambda s, *xs, **o: nnx.merge(graph, nnx.State(s))(*xs, **o)


PADDING = nn.make_attention_mask(*(jnp.arange(Q) < jnp.array([[Q], [3]]),) * 2)
CASES = {
    "features": (
        {"qkv_features": 12, "out_features": 5, "use_bias": False},
        (tokens(0, B, Q, D),),
        {"mask": pattern(1, B, H, Q, Q)},
    ),
    "values of their own": (
        {"normalize_qk": True},
        (tokens(0, B, Q, D), tokens(1, B, K, D), tokens(2, B, K, D)),
        {"mask": pattern(3, B, 1, 1, K)},
    ),
    "causal 0/1 mask": ({}, (tokens(0, B, Q, D),), {"mask": nn.make_causal_mask(jnp.ones((B, Q)))}),
    "padding queries": ({}, (tokens(0, B, Q, D),), {"mask": PADDING}),
    "no batch": ({}, (tokens(0, Q, D),), {"mask": pattern(5, H, 1, Q)}),
    "two batch dimensions": (
        {},
        (tokens(0, B, 3, Q, D), tokens(1, B, 3, K, D)),
        {"mask": pattern(6, B, 3, H, Q, K)},
    ),
    "bfloat16": ({"param_dtype": HALF, "dtype": HALF}, (tokens(0, B, Q, D, dtype=HALF),), {}),
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", CASES)
def test_the_layer_equals_flax(name, library):
    """Our layer has the same initial parameters, outputs and gradients as Flax's layer.

    The results are also equal with the alignment `DotProduct`.
    """
    fields, inputs, call = CASES[name]
    initial, flax_apply = functional(make(library, flax=True, **fields), *inputs)
    params = jax.tree.map(lambda p: p + tokens(9, *p.shape, dtype=p.dtype) / 4, initial)

    def run(f):
        """Returns the loss, the gradients and the output of a function."""
        return value_and_gradients(functools.partial(f, **call), params, *inputs)

    expected = run(flax_apply)
    # With an alignment, our output is zero for a query that sees no key, unlike Flax's. Do not
    # compare these.
    for alignment in [None] if name == "padding queries" else [None, sj.DotProduct()]:
        own, apply = functional(make(library, alignment=alignment, **fields), *inputs)
        jax.tree.map(np.testing.assert_array_equal, own, initial)
        assert jax.tree.map(lambda p: p.dtype, own) == jax.tree.map(lambda p: p.dtype, initial)
        # The exact gradient of the keys' bias is zero. In bfloat16, its rounding errors are large.
        close(run(apply), expected, 0.06 if name.startswith("bfloat16") else 5e-6)


@pytest.mark.parametrize("broadcast", [True, False])
def test_dropout_equals_flax(broadcast):
    x = tokens(0, B, Q, D)
    key = jax.random.key(3)
    fields = {"dropout_rate": 0.4, "broadcast_dropout": broadcast}
    flax_layer, layer = (make("linen", flax=flax, **fields) for flax in (True, False))
    params = flax_layer.init(jax.random.key(0), x, deterministic=True)
    for options in ({"dropout_rng": key}, {"rngs": {"dropout": key}}):
        expected, actual = (
            m.apply(params, x, deterministic=False, **options) for m in (flax_layer, layer)
        )
        close(actual, expected)
        assert np.any(actual != layer.apply(params, x, deterministic=True))
    flax_layer, layer = (make("nnx", flax=flax, **fields) for flax in (True, False))
    close(layer(x, deterministic=False), flax_layer(x, deterministic=False))
    for module in (flax_layer, layer):
        module.eval()
    close(layer(x), flax_layer(x))


def test_dropout_in_tiles_has_the_same_rate():
    """Dropout has the same rate if attention is computed in tiles.

    If there are more queries than fit into a tile, every query draws its own dropout mask.
    """
    rate, length = 0.3, 200
    zeros = jnp.zeros((1, length, 1, 4))
    ones = jnp.ones((1, length, 1, 1))
    drop = functools.partial(attention_fn, dropout_rng=jax.random.key(0), dropout_rate=rate)
    kept_share = drop(zeros, zeros, ones)[0, :, 0, 0]  # for each query
    assert abs(kept_share.mean() - 1) < 0.01 and 0.01 < kept_share.std() < 0.1
    batched = drop(*(jnp.tile(x, (2, 1, 3, 1)) for x in (zeros, zeros, ones)))
    np.testing.assert_allclose(batched, batched[:1, :, :1].repeat(2, 0).repeat(3, 2), rtol=1e-5)


def test_dropout_of_an_alignment_is_that_of_t5():
    """An alignment's dropout is T5's: a key is dropped for all queries of a head or for none."""
    x = tokens(0, B, Q, D)
    fields = {"alignment": sj.Random(8), "dropout_rate": 0.5}
    module = make("nnx", heads=1, **fields)
    module.align.table[...] *= 0  # with uniform weights, all queries have the same output
    y = module(x, deterministic=False)
    np.testing.assert_allclose(y, y[:, :1].repeat(Q, 1), atol=1e-6)
    assert np.any(np.abs(y - module(x, deterministic=True)) > 1e-3)


ALIGNMENTS = {
    "DotProduct": sj.DotProduct(scale=0.3, rotary_base=100.0),
    "Dense": sj.Dense(max_length=8),
    "Random": sj.Random(max_length=8, trainable=False),
    "Gaussian": sj.Gaussian(),
    "Mixture of two with keys": sj.Mixture((sj.DotProduct(), sj.Dense(8), sj.DotProduct())),
    "PerHead": sj.PerHead((sj.Gaussian(), sj.DotProduct())),
}


@pytest.mark.parametrize("name", ["none", *ALIGNMENTS])
def test_alignments_equal_attention_and_steps_the_full_pass(name):
    """With alignments, the layers equal `Attention`, and decoding steps equal the full pass.

    The Linen layers are compared with `Attention`, and the NNX layers with the Linen layers.
    """
    alignment = ALIGNMENTS.get(name)
    x = tokens(0, B, Q, 10)
    fields = {"qkv_features": 16, "use_bias": False, "alignment": alignment}
    layer = sj.MultiHeadAttention(4, **fields)
    variables = jax.jit(layer.init)(jax.random.key(0), x)
    causal = nn.make_causal_mask(jnp.ones((B, Q)))
    lengths = jnp.array([Q, 3])
    padding = (jnp.arange(Q) < lengths[:, None])[:, None, None]
    masks = [
        causal,
        causal * padding,
        sj.Mask(causal=True),
        sj.Mask(causal=True, key_lengths=lengths),
    ]
    run = functools.partial(jax.jit, compiler_options=FAST)
    whole, short, *others = run(lambda v: [layer.apply(v, x, mask=m) for m in masks])(variables)
    close(others, [whole, jnp.where((jnp.arange(Q) < lengths[:, None])[..., None], short, 0)])
    if alignment is not None:
        params = dict(variables["params"])
        if name == "DotProduct":
            params = {"align": {n: params.pop(n) for n in ("query", "key")}, **params}
        attention = sj.Attention(4, 4, alignment=alignment)
        close(
            run(lambda v: attention.apply(v, x, mask=masks[2]))({**variables, "params": params}),
            whole,
        )

    decoder = layer.copy(decode=True)
    cache = run(decoder.init)(jax.random.key(0), x)["cache"]
    module = make("nnx", heads=4, in_features=10, **fields)
    flat = flatten_dict(variables["params"]) | flatten_dict(variables.get("constants", {}))
    state = dict(nnx.to_flat_state(nnx.state(module)))
    assert set(flat) == set(state)
    nnx.update(module, nnx.from_flat_state({p: v.replace(flat[p]) for p, v in state.items()}))
    close(nnx.jit(lambda m: m(x, mask=causal))(module), whole)
    module.init_cache((B, Q + 2, 10))
    module.set_attributes(decode=True)

    @run
    def step(cache, x):
        call = functools.partial(decoder.apply, {**variables, "cache": cache}, x, mutable=["cache"])
        y, new = call()
        return y, [call(mask=m)[0] for m in (padding, masks[3])], new["cache"]

    @nnx.jit
    def nnx_step(module, x):
        return module(x)

    for i in range(Q):
        y, masked, cache = step(cache, x[:, i : i + 1])
        close([y, *masked], [whole[:, i : i + 1], *[short[:, i : i + 1]] * 2])
        close(nnx_step(module, x[:, i : i + 1]), whole[:, i : i + 1])
    assert cache["cache_index"] == Q
    names = {"DotProduct": 1, "none": 1, "PerHead": 1, "Mixture of two with keys": 2}
    assert len(cache) == 2 + names.get(name, 0)


@pytest.mark.parametrize("alignment", [None, sj.Random(Q)], ids=["dot product", "Random"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_masks_of_positions_not_yet_decoded_have_no_effect(library, alignment):
    """Parts of a mask for positions that are not decoded yet have no effect.

    For example, a prefix may be longer than the decoded tokens, or padding may be masked.

    Decoding into a full cache is an error.
    """
    x = tokens(0, B, 2, D)
    layer = make(library, alignment=alignment, decode=True)
    variables = layer.init(jax.random.key(0), x) if library == "linen" else {}

    def run(**options):
        if library == "linen":
            return layer.apply(variables, x[:, :1], mutable=["cache"], **options)
        layer.init_cache(x.shape)
        return layer(x[:, :1], **options), None

    expected, new = run()
    real = jnp.arange(2) < jnp.array([[2], [1]])
    for mask in (sj.Mask(prefix_lengths=jnp.array([2, 1])), sj.Mask.padded(real)):
        np.testing.assert_allclose(run(mask=mask)[0], expected, atol=1e-6)
    if alignment is None:
        return
    message = r"max_length=2, but 3 positions .* call init or init_cache with longer inputs"
    with pytest.raises(ValueError, match=message):
        for _ in range(2):
            if library == "linen":
                variables |= new
                _, new = run()
            else:
                layer(x[:, :1])


@pytest.mark.parametrize("library", LIBRARIES)
def test_sown_weights_equal_flax(library):
    x = tokens(0, B, 3, Q, D)
    mask = pattern(1, B, 3, 1, Q, Q)
    expected = applied(make(library, flax=True), x, mask=mask, sow_weights=True)
    for layer in (
        make(library),
        make(library, alignment=sj.DotProduct()),
        make(library, flax=True, attention_fn=attention_fn),
    ):
        actual = applied(layer, x, mask=mask, sow_weights=True)
        close(jax.tree.leaves(actual), jax.tree.leaves(expected))
        assert not applied(layer, x, mask=mask)[1]
    fixed = applied(make(library, alignment=sj.Gaussian()), x, sow_weights=True)[1]
    assert jax.tree.leaves(fixed)[0].shape == (B, 3, H, Q, Q)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_fully_masked_query_gets_zeros_with_an_alignment_or_a_mask_object(library):
    x = tokens(0, B, Q, D)
    options = {"use_bias": False}
    expected, _ = applied(make(library, flax=True, **options), x, mask=PADDING)
    aligned, _ = applied(make(library, alignment=sj.DotProduct(), **options), x, mask=PADDING)
    close([aligned[0], aligned[1, :3]], [expected[0], expected[1, :3]])
    assert not np.any(aligned[1, 3:]) and np.all(expected[1, 3:] != 0)
    mask = sj.Mask(key_lengths=jnp.array([Q, 3]))
    for attention in (attention_fn, functools.partial(attention_fn, precision="highest")):
        layer = make(library, attention_fn=attention, **options)
        y, sown = applied(layer, x, mask=mask, sow_weights=True)
        close(y, aligned)
        (weights,) = jax.tree.leaves(sown)
        np.testing.assert_allclose(weights[1].sum(-1)[:, :3], 1, rtol=1e-5)
        assert np.all(weights[1, :, 3:] == 0)


@pytest.mark.parametrize("library", LIBRARIES)
def test_packed_cross_attention_rotates_by_the_position_in_the_segment(library):
    layer = make(library, alignment=sj.DotProduct(rotary_base=100.0))
    x, y = tokens(0, 1, 5, D), tokens(1, 1, 7, D)
    mask = sj.Mask.packed(jnp.array([[1, 1, 1, 1, 2, 2, 2]]), jnp.array([[1, 1, 2, 2, 2]]))
    together, _ = applied(layer, x, y, mask=mask)
    apart = [applied(layer, x[:, a], y[:, b])[0] for a, b in (np.s_[:2, :4], np.s_[2:, 4:])]
    close(together, np.concatenate(apart, axis=1))


def test_grouped_queries_and_causal_masks_equal_flax():
    x = tokens(0, B, Q, D)
    mask = pattern(1, B, 1, 1, Q)
    flax_layer, layer = (make("nnx", flax=f, heads=4, num_kv_heads=2) for f in (True, False))
    for call in ({"mask": mask}, {"mask": mask, "is_causal": True}, {"is_causal": True}):
        close(layer(x, **call), flax_layer(x, **call))
    layer = make("nnx", alignment=sj.Random(max_length=8))
    close(layer(x, is_causal=True), layer(x, mask=nn.make_causal_mask(jnp.ones((B, Q)))))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"alignment": sj.DotProduct(head_dim=5)}, "Set only scale, .* of DotProduct"),
        ({"alignment": sj.Random}, "must be an Alignment object"),
        ({"alignment": sj.Random(8), "normalize_qk": True}, "normalize_qk cannot be used together"),
        (
            {"alignment": sj.Random(8), "attention_fn": nn.dot_product_attention},
            "attention_fn cannot be used together",
        ),
        ({"alignment": sj.Random(8), "qkv_features": 9}, "divisible"),
    ],
)
def test_fields_that_exclude_an_alignment_are_errors(library, fields, message):
    with pytest.raises(ValueError, match=message):
        applied(make(library, **fields), tokens(0, B, Q, D))


@pytest.mark.parametrize("alignment", [None, sj.Random(max_length=8)], ids=["none", "Random"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_errors_equal_flax(library, alignment):
    layer = make(library, alignment=alignment, dropout_rate=0.5)
    x, y = tokens(0, B, Q, D), tokens(1, B, K, D)
    quiet = {"deterministic": True}
    run = layer if library == "nnx" else functools.partial(layer.init, jax.random.key(0))
    for arguments, options, message in (
        ((x, None, y), quiet, "inputs_k` cannot be None|inputs_k cannot be None"),
        ((x, y, x), quiet, "equal lengths|lengths must match"),
        ((x, tokens(1, 3, K, D)), quiet, "batch dim"),
        ((x,), {}, "deterministic"),
        ((x,), {**quiet, "mask": jnp.ones((B, 3, Q, Q))}, "must broadcast to"),
    ):
        with pytest.raises(ValueError, match=message):
            run(*arguments, **options)
    if library == "nnx":
        with pytest.raises(ValueError, match="init_cache"):
            layer(x, decode=True, **quiet)
        with pytest.raises(ValueError, match="decode"):
            make("nnx", alignment=alignment, decode=None)(x)
        layer.init_cache((B, Q, D))

        def step(x):
            """Makes one decoding step."""
            return layer(x, decode=True, **quiet)
    else:
        layer = layer.copy(decode=True)
        variables = layer.init(jax.random.key(0), x, **quiet)

        def step(x):
            """Makes one decoding step."""
            return layer.apply(variables, x, mutable=["cache"], **quiet)

    for tokens_of_a_step in (x, x[:1, :1]):
        with pytest.raises(ValueError, match=r"utoregressive cache shape error"):
            step(tokens_of_a_step)


def test_the_nnx_layer_has_logical_axes_and_refuses_arguments_of_other_attention():
    layer = make("nnx", alignment=sj.Random(Q))
    assert layer.align.table.out_sharding == ("heads", "query_length", "key_length")
    with pytest.raises(TypeError, match="unexpected keyword argument 'input_positions'"):
        layer(tokens(0, B, Q, D), input_positions=jnp.arange(Q))
    with pytest.raises(ValueError, match=r"Use synthesizer_jax\.nnx\.MultiHeadAttention or"):
        snnx.to_nnx(nn.MultiHeadAttention(H), in_features=D, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("library", LIBRARIES)
def test_attention_fn_in_flaxs_layers_with_a_bias(library):
    x = tokens(0, B, 3, Q, D)
    y = tokens(1, B, 3, K, D)
    mask = pattern(2, B, 3, 1, Q, K)
    table = tokens(3, H, Q, K)
    flax_attention = {"linen": nn, "nnx": nnx}[library].dot_product_attention

    def of(f, bias):
        """Returns Flax's layer with the given attention function and bias."""
        return make(library, flax=True, attention_fn=functools.partial(f, bias=bias))

    expected, _ = applied(of(flax_attention, table), x, y, mask=mask)
    for bias in (table, static(table)):
        close(applied(of(attention_fn, bias), x, y, mask=mask)[0], expected)


def test_a_bias_may_be_terms():
    diagonals, query, key = tokens(0, H, Q + K - 1), tokens(1, B, Q, H, 4), tokens(2, B, K, H, 4)
    table = jnp.stack([diagonals[:, Q - 1 - q : Q - 1 - q + K] for q in range(Q)], 1)
    expected = nn.dot_product_attention(query, key, key, table)
    for options in ({}, {"precision": "highest"}):
        bias = (relative(diagonals, first=1 - Q),)
        close(attention_fn(query, key, key, bias, **options), expected)


@pytest.mark.parametrize(
    "options", [{"dropout_rng": jax.random.key(0), "dropout_rate": 0.1}, {"precision": "highest"}]
)
def test_long_inputs_need_no_array_of_all_weights(options):
    """Long inputs need no array with the attention weights of all examples.

    The gradients of a shared bias are not stored for each example, either.
    """
    batch, length = 3, 384
    x, table = tokens(0, batch, length, H, 4), tokens(1, H, length, length)
    mask = pattern(2, batch, 1, 1, length)

    def loss(x, table):
        """Returns the sum of the outputs."""
        return attention_fn(x, x, x, table, mask, **options).sum()

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))
    hlo = gradients.lower(x, table).compile().as_text()
    sizes = {np.prod([int(n) for n in m.split(",")]) for m in re.findall(r"\w\[([\d,]+)\]", hlo)}
    assert max(sizes) < batch * H * length * length
    if not options.get("dropout_rate"):

        def flax_loss(x, table):
            """Returns the sum of the outputs of Flax's attention function."""
            return nn.dot_product_attention(x, x, x, table, mask).sum()

        close(gradients(x, table), jax.jit(jax.grad(flax_loss, argnums=(0, 1)))(x, table), 1e-5)


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        (((2, 6, 2, 4), (2, 5, 4), (2, 5, 4)), {}, "with equally many axes"),
        (((2, 6, 2, 4), (3, 5, 2, 4), (3, 5, 2, 4)), {}, "Their batch dims must match"),
        (((2, 6, 2, 4), (2, 5, 2, 3), (2, 5, 2, 4)), {}, "query and key depths must match"),
        (((2, 6, 2, 4), (2, 5, 2, 4), (2, 6, 2, 4)), {}, "lengths must match"),
        (((2, 6, 4, 4), (2, 5, 3, 4), (2, 5, 3, 4)), {}, "heads of the key must divide"),
        (((2, 3, 4, H, 2),) * 3, {"dropout_rate": 0.1}, "dropout needs a PRNG key"),
        (((2, 3, 4, H, 2),) * 3, {"mask": sj.Mask(key_lengths=jnp.ones(2, int))}, "Pass an array"),
    ],
)
def test_errors_of_attention_fn(shapes, options, message):
    with pytest.raises(ValueError, match=message):
        attention_fn(*(jnp.ones(s) for s in shapes), **options)
