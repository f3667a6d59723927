"""Tests properties of models, such as layouts, dropout, dtypes, memory, halting and errors."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synthesizer_jax as sj
from synthesizer_jax.costs.summary import flops
from synthesizer_jax.models import LOSSES, Rows, Size, alignment, stack_layers, t5, unroll
from synthesizer_jax.models.layers import Dropout
from synthesizer_jax.models.published import hard_coded
from synthesizer_jax.primitives.parameters import apply_method
from tests.layers.contract import general
from tests.models.test_structures import close

D, VOCAB, ROOM = 16, 50, 12
SIZE = Size(d_model=D, layers=1, d_ff=24, heads=2, head_dim=8)


def model_of(variant="v", **options):
    kind = alignment(variant, head_dim=8, max_length=ROOM)
    return t5(SIZE, encoder=kind, vocab_size=VOCAB, **options)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    source = rng.integers(2, VOCAB, (3, 11))
    source[1, 7:] = 0
    return jnp.asarray(source), jnp.asarray(rng.integers(2, VOCAB, (3, 9)))


def test_scan_equals_loop_and_layouts_convert_back(batch):
    """Scanned and looped layers give the same results, and variables convert between both layouts.

    The model has two kinds of layers, a frozen table, and rematerialization.
    """
    frozen = sj.Mixture((sj.DotProduct(), sj.Random(ROOM, trainable=False), sj.Random(ROOM)))
    runs = tuple(
        sj.Run(sj.Block(sj.Attention(2, 8, alignment=kind), sj.FeedForward(24)), n)
        for kind, n in ((sj.DotProduct(), 1), (frozen, 3))
    )
    model = model_of("rd", scan=True, remat="full")
    model = model.copy(encoder=model.encoder.copy(runs=runs))
    variables = general(model.init, *batch)
    assert model.encoder.num_layers == 4
    loop = sj.models.unroll_variables(model, variables)

    @jax.jit
    def run(variables, loop):
        return model.apply(variables, *batch), unroll(model).apply(loop, *batch)

    close(*run(variables, loop), 1e-5)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(run, variables, loop)
    for collection, trees in variables.items():
        for name in {"encoder", "decoder"} & set(trees):
            back = stack_layers(getattr(model, name), loop[collection][name])
            jax.tree.map(np.testing.assert_array_equal, back, trees[name])


def test_dropout_drops_whole_features_and_keeps_the_mean():
    dropped = Dropout(0.25).apply({}, jnp.ones((4, 3, 64)), rngs={"dropout": jax.random.key(0)})
    np.testing.assert_array_equal(dropped, np.broadcast_to(dropped[:, :1], dropped.shape))
    np.testing.assert_allclose(np.unique(dropped), [0, 4 / 3], rtol=1e-6)


def test_elementwise_dropout_keeps_the_mean():
    drop = Dropout(0.25, elementwise=True)
    dropped = drop.apply({}, jnp.ones((64, 63, 64)), rngs={"dropout": jax.random.key(0)})
    np.testing.assert_allclose(np.unique(dropped), [0, 4 / 3], rtol=1e-6)
    for axis in range(3):
        np.testing.assert_allclose(np.mean(dropped, axis), 1, atol=0.4)
    np.testing.assert_allclose(np.mean(dropped), 1, atol=0.005)
    # Two positions that use halves of the same 32 random bits are dropped independently.
    np.testing.assert_allclose(np.mean(dropped[:, :31] != dropped[:, 32:]), 2 * 3 / 16, atol=0.01)


def test_t5_parameter_names(batch):
    shapes = jax.eval_shape(model_of().init, jax.random.key(0), *batch)["params"]["decoder"]
    names = {"/".join(k.key for k in path) for path, _ in jax.tree.leaves_with_path(shapes)}
    attention = ("align/query", "align/key", "value", "out")
    kernels = [
        f"{a}/{n}" for a in ("self_attention", "encoder_decoder_attention") for n in attention
    ]
    scales = ("pre_self_attention", "pre_cross_attention", "pre_mlp")
    expected = {"final_norm/scale", "relpos_bias/rel_embedding"}
    expected |= {f"layers_0/{n}/kernel" for n in (*kernels, "mlp/wi_0", "mlp/wi_1", "mlp/wo")}
    expected |= {f"layers_0/{n}_layer_norm/scale" for n in scales}
    assert names == expected


def test_one_configuration_object_used_everywhere_shares_no_parameters(batch):
    part = sj.Random(max_length=ROOM)
    mixer = sj.Attention(2, 8, alignment=sj.Mixture((part, part)))
    block = sj.Block(mixer, None)
    encoder, decoder = (
        sj.Stack((sj.Run(b, 2),), scan=True) for b in (block, block.copy(cross_mixer=mixer))
    )
    model = sj.EncoderDecoder(vocab_size=VOCAB, d_model=D, encoder=encoder, decoder=decoder)
    params = jax.jit(model.init)(jax.random.key(0), *batch)["params"]
    leaves = jax.tree.leaves_with_path(params)
    tables = [x[:, 0, 0, 0] for path, x in leaves if path[-1].key == "table"]
    assert len(np.unique(tables)) == 3 * 2 * 2  # encoder, decoder, cross × layers × parts


def test_bfloat16_computes_in_bfloat16_with_float32_parameters(batch):
    model = model_of("rv", dtype="bfloat16")
    variables = general(model.init, *batch)
    run = jax.jit(lambda v, h: (apply_method(model.logits, v, h), model.apply(v, *batch)))
    hidden = jax.jit(lambda v: apply_method(model.hidden, v, *batch))(variables)
    logits, whole = run(variables, hidden)
    kernel = np.asarray(variables["params"]["logits_kernel"], jnp.bfloat16)
    assert hidden.dtype == jnp.bfloat16 and logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, np.float64(hidden) @ np.float64(kernel), atol=1e-4)
    shapes = jax.eval_shape(model.init, jax.random.key(0), *batch)
    assert {x.dtype for x in jax.tree.leaves(shapes)} == {jnp.dtype("float32")}
    exact = jax.jit(model.copy(dtype="float32").apply)(variables, *batch)
    close(whole, exact, 0.1)


def test_errors_are_one_line(batch):
    model = model_of()

    def init(model):
        """Returns the shapes of a model's initial variables."""
        return jax.eval_shape(model.init, jax.random.key(0), *batch)

    stack = model.encoder
    blocks = [sj.Block(sj.Attention(h, 8), sj.FeedForward(4)) for h in (2, 3)]
    swish = sj.Run(sj.Block(sj.Attention(2, 8), sj.FeedForward(4, activations=("swish",))), 1)
    for wrong, message in (
        (
            model.copy(dtype="float16"),
            "dtype is 'float16', but it must be one of 'auto', 'float32', 'bfloat16'",
        ),
        (
            model.copy(encoder=stack.copy(remat="some")),
            "Stack.remat is 'some', but it must be one of 'full'",
        ),
        (
            model.copy(encoder=sj.Stack((swish,))),
            "feed_forward.activations is .* but it must be .*'relu'",
        ),
        (
            model.copy(encoder=sj.Stack((sj.Run(sj.Block(sj.FeedForward(4), None), 1),))),
            "but Mixer is expected",
        ),
        (
            model.copy(encoder=stack.copy(runs=tuple(sj.Run(b, 1) for b in blocks))),
            "same number of heads",
        ),
        (model.copy(decoder=sj.UniversalStack((sj.Run(blocks[0], 2),), scan=True)), "scan=False"),
        (model.copy(encoder=model.decoder), "needs a memory, the output of the encoder"),
    ):
        with pytest.raises(ValueError, match=message):
            init(wrong)
    with pytest.raises(ValueError, match="There is no variant 'x'"):
        alignment("x", head_dim=8)
    with pytest.raises(ValueError, match="pooling is 'max', but it must be one of 'mean', 'first'"):
        reader = sj.Encoder(vocab_size=VOCAB, d_model=D, encoder=stack, pooling="max")
        jax.eval_shape(reader.init, jax.random.key(0), batch[0])


def test_a_gated_layer_keeps_three_hidden_arrays_for_its_gradient():
    layer = sj.FeedForward(24)
    x = jnp.ones((2, 3, 8))
    params = layer.init(jax.random.key(0), x)
    _, back = jax.vjp(layer.apply, params, x)
    kept = [a for a in jax.tree.leaves(back) if a.shape[:1] in ((2,), (6,)) and a.shape[-1] == 24]
    assert len(kept) == 3  # both products of the inputs, and the input of `wo`


def test_layers_that_keep_their_products_make_none_twice():
    def work(remat):
        model = t5(Size(16, 1, 24, 2, 8), vocab_size=32, remat=remat)
        x = jnp.ones((2, 144), int)  # long enough for the fused route
        params = jax.eval_shape(model.init, jax.random.key(0), x, x)
        return flops(jax.make_jaxpr(jax.grad(lambda p: model.apply(p, x, x).sum()))(params).jaxpr)

    assert work("dots") == work("dots_with_no_batch_dims") == work(None) < 0.9 * work("full")


def kernel_runs(program: str, function: str = "main") -> int:
    """Returns how many kernels a StableHLO function runs, including the functions that it calls.

    Every call of a function is counted.
    """
    body = re.search(rf"func\.func \w+ @{function}\((.*?)\n  \}}", program, re.DOTALL)[1]
    called = re.findall(r"call @(\w+)\(", body)
    return sum(1 if f == "tpu_custom_call" else kernel_runs(program, f) for f in called)


@pytest.mark.parametrize("remat", [None, "dots", "full"])
def test_tpus_run_kernels_in_all_three_attentions(remat):
    model = t5(Size(16, 1, 24, 2, 8), vocab_size=32, remat=remat, scan=False)
    x = jnp.ones((2, 144), int)
    params = jax.eval_shape(model.init, jax.random.key(0), x, x)
    step = jax.jit(jax.grad(lambda p: model.apply(p, x, x).sum()))
    program = step.trace(params).lower(lowering_platforms=("tpu",)).as_text()
    again = 2 if remat == "full" else 1
    # There is one forward kernel, and one kernel for the gradients, because the table is small.
    assert kernel_runs(program) == 3 * (again + 1)
    assert "stablehlo.while" not in program


def language_model(kind=None, **options):
    block = sj.Block(sj.Attention(2, 8, alignment=kind or sj.DotProduct()), sj.FeedForward(16))
    stack = sj.Stack((sj.Run(block, 1),), bias=sj.RelativeBias())
    return sj.LanguageModel(vocab_size=VOCAB, d_model=D, decoder=stack, **options)


@pytest.mark.parametrize("prefix", [False, True])
def test_language_model_rows_are_inputs_then_targets(prefix, batch):
    """A row of a language model contains the inputs, followed by the targets.

    Inputs see later inputs only in a prefix language model. Inputs that are only padding are
    equivalent to no inputs.
    """
    source, target = batch
    model = language_model(prefix=prefix)
    variables = general(model.init, *batch)

    @jax.jit
    def run(variables):
        def apply(*tokens):
            """Applies the model to inputs and targets."""
            return model.apply(variables, *tokens)

        text = jnp.concatenate([source[:1], target[:1]], 1)

        def of_inputs(m, s):
            """Returns the decoder's outputs for the inputs only."""
            return m.decoder(m.embed(s), mask=m._mask((s != 0).sum(-1)))

        inputs = (source, source.at[0, 10].set(5))
        states = [model.apply(variables, s, method=of_inputs) for s in inputs]
        nothing, padding = (apply(jnp.zeros((3, n), int), target) for n in (0, 4))
        return (
            (apply(*batch)[1], apply(source[1:2, :7], target[1:2])[0]),
            (apply(*batch)[0], apply(jnp.zeros((1, 0), int), text)[0, 11:]),
            (nothing, padding),
            [x[0, 0] for x in states],
        )

    alone, joined, empty, states = run(variables)
    close(*alone)
    close(*empty)
    assert np.any(states[0] != states[1]) == prefix
    if not prefix:
        close(*joined)
    with pytest.raises(ValueError, match=r"data\.pack=false"):
        segments = tuple(jnp.ones_like(x) for x in batch)
        jax.eval_shape(lambda: model.apply(variables, *batch, rows=Rows(segments)))


def test_packed_targets_equal_separate_rows():
    """Packed targets give the same outputs as separate rows.

    A row without inputs may contain several texts, which do not see each other.
    """
    model = language_model(sj.Mixture((sj.Random(max_length=14), sj.DotProduct())))
    nothing = jnp.zeros((1, 0), jnp.int32)
    lengths = (5, 3, 4)
    texts = [np.random.default_rng(n).integers(2, VOCAB, (1, n)) for n in lengths]
    variables = general(model.init, nothing, texts[0])
    row = jnp.asarray(np.concatenate([*texts, [[0, 0]]], axis=1))
    segments = jnp.asarray(np.repeat([1, 2, 3, 0], [*lengths, 2])[None])

    @jax.jit
    def run(variables):
        apply = functools.partial(model.apply, variables, nothing)
        rows = [Rows((nothing, segments), max_segments=n) for n in (None, 3)]
        packed = [apply(row, rows=of_texts)[:, :12] for of_texts in rows]
        return packed, [apply(text) for text in texts]

    packed, alone = run(variables)
    for found in packed:
        close(found, np.concatenate(alone, axis=1))


def test_encoders_pool_real_tokens_and_read_their_types(batch):
    stack = sj.Stack((sj.Run(sj.Block(sj.Attention(2, 8), None), 1),), bias=sj.RelativeBias())
    model = sj.Encoder(vocab_size=VOCAB, d_model=D, encoder=stack, outputs=3, token_types=2)
    source = batch[0]
    left = jnp.stack([jnp.roll(row, (row == 0).sum()) for row in source])
    variables = general(model.init, source)

    @jax.jit
    def run(variables):
        def apply(m, x):
            """Applies the model to tokens of two token types."""
            return m.apply(variables, x, token_types=(x > 9).astype(int))

        return apply(model, source), apply(model, left), apply(model.copy(dtype="bfloat16"), source)

    right, moved, narrow = run(variables)
    close(right.pooled[1], np.asarray(right.hidden)[1, :7].mean(0))
    close(moved.outputs, right.outputs)
    assert narrow.pooled.dtype == jnp.bfloat16 and narrow.outputs.dtype == jnp.float32
    # The outputs are not rounded to bfloat16, because the output head computes in float32.
    assert np.any(narrow.outputs != narrow.outputs.astype(jnp.bfloat16))


def act(states, probabilities, threshold):
    """Computes adaptive computation time (Graves 2016) for one position.

    Returns the output, and the ponder cost n + remainder. As in Tensor2Tensor and Mesh-TensorFlow,
    the average of the states starts from zeros.
    """
    total, average, steps, remainder = 0.0, 0.0, 0, 0.0
    for p, state in zip(probabilities, states, strict=True):
        if total >= 1:
            break
        stops = total + p > threshold
        weight = 1 - total if stops else p
        remainder = weight if stops else 0.0
        total = 1.0 if stops else total + p
        average = state * weight + average * (1 - weight)
        steps += 1
    return average, steps + remainder, steps


def test_universal_transformer_halts_position_by_position():
    """Compares the halting of a Universal Transformer with a function for a single position.

    The states are those of the tested loop. The ponder cost is averaged over the real positions of
    a row, or over the chosen positions, and then over rows.
    """
    block = sj.Block(sj.Attention(2, 8), sj.FeedForward(16))
    places = jnp.arange(5)[None]
    stack = sj.UniversalStack((sj.Run(block, 4),), halting_threshold=0.6, norm=None)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, D)), jnp.float32)
    params = general(stack.init, x)["params"]
    lengths = np.array([2, 5])
    params["halting"]["bias"] = -np.ones(1, np.float32)  # positions halt at different steps

    @jax.jit
    def run(params):
        def apply(**o):
            """Applies the stack, and returns its losses, too."""
            return stack.apply({"params": params}, x, mutable=[LOSSES], **o)

        causal = sj.Mask(causal=True)
        counted = places < lengths[:, None]
        y, _ = apply(mask=causal)
        costs = [
            apply(mask=mask, **options)[1][LOSSES]["ponder"][0]
            for mask, options in (
                (sj.Mask(causal=True, key_lengths=jnp.asarray(lengths)), {}),
                (causal, {"counted": counted}),
            )
        ]
        sines = sj.models.SinusoidalPositions()
        states = []
        probabilities = []
        h = x
        for step in range(4):
            h = h + sines.apply({}, places, D) + sines.apply({}, jnp.full((1, 1), step), D)
            gate = h @ params["halting"]["kernel"] + params["halting"]["bias"]
            probabilities.append(jax.nn.sigmoid(gate)[..., 0])
            h, _ = block.apply({"params": params["shared"]}, h, causal)
            states.append(h)
        return y, costs, states, probabilities

    y, costs, states, probabilities = jax.tree.map(np.asarray, run(params))
    pondered = np.zeros((2, 5))
    steps = set()
    for b, i in np.ndindex(2, 5):
        own = [s[b, i] for s in states], [p[b, i] for p in probabilities]
        expected, pondered[b, i], taken = act(*own, 0.6)
        np.testing.assert_allclose(y[b, i], expected, atol=1e-4)
        steps.add(taken)
    assert len(steps) > 1, "all positions halt at the same step"
    mean = np.mean([row[:n].mean() for row, n in zip(pondered, lengths, strict=True)])
    np.testing.assert_allclose(costs, 0.01 * mean, rtol=1e-4)


def test_elementwise_dropout_reaches_all_dropouts(monkeypatch):
    drawn = []
    bits = jax.random.bits
    monkeypatch.setattr(
        jax.random, "bits", lambda key, shape: drawn.append(shape) or bits(key, shape)
    )
    model = hard_coded("base", dropout_rate=0.1, layers=1)
    tokens = jnp.ones((2, 3), jnp.int32)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    jax.eval_shape(model.init, keys, tokens, tokens)
    assert set(drawn) == {(2, 2, model.d_model)}
