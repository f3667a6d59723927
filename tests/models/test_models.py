"""Encoder-decoders: T5's names, scan and remat, decoding steps, counts, recipes' traps."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax import ZOO, Attention, DotProduct, Mixture, Random, RelativeBias
from synthesizer_jax.costs.summary import flops, summarize
from synthesizer_jax.initializers import Normal
from synthesizer_jax.models import (
    VARIANTS,
    Block,
    EncoderDecoder,
    FeedForward,
    LearnedPositions,
    Run,
    SinusoidalPositions,
    Size,
    Stack,
    alignment,
    stack_layers,
    t5,
    unroll,
    unroll_variables,
)
from synthesizer_jax.parameters import apply_method
from synthesizer_jax.registry import from_json, to_json

SIZE = Size(d_model=16, layers=2, d_ff=24, heads=2, head_dim=8)
ROOM, VOCAB = 12, 50


def model_of(variant, **options):
    kind = alignment(variant, head_dim=8, max_length=ROOM)
    return t5(SIZE, encoder=kind, vocab_size=VOCAB, **options)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    source = rng.integers(2, VOCAB, (3, 11))
    source[1, 7:] = 0
    return jnp.asarray(source), jnp.asarray(rng.integers(2, VOCAB, (3, 9)))


@pytest.fixture(scope="module", params=VARIANTS)
def trained(request, batch):
    """A scanned, rematerialized model, its variables, and its logits."""
    model = model_of(request.param, scan=True, remat="full")
    variables = model.init(jax.random.key(0), *batch)
    return model, variables, model.apply(variables, *batch)


@pytest.mark.slow
def test_scan_equals_loop(trained, batch):
    model, variables, logits = trained
    loop = unroll(model).apply(unroll_variables(model, variables), *batch)
    np.testing.assert_allclose(loop, logits, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_layouts_convert_back(variant, batch):
    model, rng = model_of(variant, scan=True, remat="full"), np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0), *batch)
    variables = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), shapes)
    params = unroll_variables(model, variables)["params"]
    back = {n: stack_layers(getattr(model, n), params[n]) for n in ("encoder", "decoder")}
    for name in back:
        jax.tree.map(np.testing.assert_array_equal, back[name], variables["params"][name])


@pytest.mark.slow
def test_decoding_steps_equal_the_full_pass(trained, batch):
    model, variables, logits = trained
    source, target = batch
    loop, v = unroll(model), unroll_variables(model, variables)
    init_cache = functools.partial(apply_method, loop.init_cache, v, max_length=ROOM)
    step = jax.jit(functools.partial(apply_method, loop.extend, v))
    cache = jax.jit(init_cache)(source)
    outputs = []
    for at in range(target.shape[1]):
        hidden, cache = step(target[:, at : at + 1], cache)
        outputs.append(hidden)
    stepped = apply_method(loop.logits, v, jnp.concatenate(outputs, 1))
    np.testing.assert_allclose(stepped, logits, atol=2e-5)


@pytest.mark.slow
def test_gradient_reaches_every_parameter(trained, batch):
    model, variables, _ = trained
    rest = {k: v for k, v in variables.items() if k != "params"}
    weights = jax.random.normal(jax.random.key(5), (3, 9, VOCAB))
    loss = lambda p: (model.apply({"params": p, **rest}, *batch) * weights).sum()
    for path, g in jax.tree.leaves_with_path(jax.grad(loss)(variables["params"])):
        assert np.all(np.isfinite(g)) and np.any(np.asarray(g) != 0), jax.tree_util.keystr(path)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["v", "r", "rv", "fdv"])
@pytest.mark.parametrize("max_segments", [None, 2])
def test_packed_rows_equal_separate_rows(batch, variant, max_segments):
    """Two pairs packed into one row give the logits that each gives alone."""
    kind = alignment(variant, head_dim=8, max_length=20)
    model = t5(SIZE, encoder=kind, vocab_size=VOCAB)
    source, target = (np.asarray(x) for x in batch)
    variables = model.init(jax.random.key(0), *batch)
    alone = model.apply(variables, source[1:], target[1:])
    packed_source = np.concatenate([source[1, :7], source[2]])[None]
    packed_target = np.concatenate([target[1], target[2]])[None]
    segments = (
        jnp.asarray(np.repeat([1, 2], [7, 11])[None]),
        jnp.asarray(np.repeat([1, 2], [9, 9])[None]),
    )
    packed = jax.jit(functools.partial(model.apply, max_segments=max_segments))(
        variables, packed_source, packed_target, segments=segments
    )
    np.testing.assert_allclose(packed[0, :9], alone[0], atol=2e-5)
    np.testing.assert_allclose(packed[0, 9:], alone[1], atol=2e-5)


@pytest.mark.slow
def test_dropout_needs_its_random_stream_and_only_then_acts(batch):
    model = model_of("rv", dropout_rate=0.5)
    variables = model.init(jax.random.key(0), *batch)
    apply = lambda **k: np.asarray(model.apply(variables, *batch, **k))
    one, two = (apply(rngs={"dropout": jax.random.key(s)}) for s in (1, 2))
    assert np.any(one != two) and np.any(one != apply())
    np.testing.assert_array_equal(one, apply(rngs={"dropout": jax.random.key(1)}))


def test_t5_parameter_names():
    shapes = jax.eval_shape(
        lambda: model_of("v").init(jax.random.key(0), *(jnp.ones((1, 4), int),) * 2)
    )["params"]
    names = {
        "/".join(k.key for k in path) for path, _ in jax.tree.leaves_with_path(shapes["decoder"])
    }
    layer = {
        *(f"self_attention/{n}" for n in ("align/query", "align/key", "value", "out")),
        *(f"encoder_decoder_attention/{n}" for n in ("align/query", "align/key", "value", "out")),
        *("mlp/wi_0", "mlp/wi_1", "mlp/wo"),
    }
    scales = ("pre_self_attention", "pre_cross_attention", "pre_mlp")
    expected = {"final_norm/scale", "relpos_bias/rel_embedding"}
    for i in range(2):
        expected |= {f"layers_{i}/{n}/kernel" for n in layer}
        expected |= {f"layers_{i}/{n}_layer_norm/scale" for n in scales}
    assert names == expected


def test_one_configuration_object_used_everywhere_shares_no_parameters(batch):
    part = Random(max_length=ROOM)
    attention = Attention(2, 8, alignment=Mixture((part, part)))
    feed_forward = FeedForward(24)
    encoder = Stack((Run(Block(attention, feed_forward), 2),))
    decoder = Stack((Run(Block(attention, feed_forward, cross_mixer=attention), 2),))
    for scan in (False, True):
        model = EncoderDecoder(
            vocab_size=VOCAB,
            d_model=16,
            encoder=encoder.copy(scan=scan),
            decoder=decoder.copy(scan=scan),
        )
        params = model.init(jax.random.key(0), *batch)["params"]
        tables = [
            np.asarray(leaf).reshape(-1, 2, ROOM, ROOM)
            for path, leaf in jax.tree.leaves_with_path(params)
            if path[-1].key == "table"
        ]
        tables = np.concatenate(tables)
        assert len(tables) == 3 * 2 * 2  # encoder, decoder, cross × layers × parts
        assert len(np.unique(tables[:, 0, 0, 0])) == len(tables)


@pytest.mark.parametrize("positions", [LearnedPositions(ROOM), SinusoidalPositions()])
def test_absolute_positions(batch, positions):
    model = model_of("v", relative_bias=False)
    with_positions = {
        name: getattr(model, name).copy(positions=positions) for name in ("encoder", "decoder")
    }
    model = model.copy(**with_positions)
    variables = model.init(jax.random.key(0), *batch)
    source, target = batch
    logits = model.apply(variables, source, target)
    swapped = model.apply(variables, source[:, ::-1].at[1].set(source[1]), target)
    assert np.abs(logits[0] - swapped[0]).max() > 1e-3, "the order of the words has no influence"


def test_layers_may_differ(batch):
    feed_forward = FeedForward(24)
    runs = tuple(
        Run(Block(Attention(2, 8, alignment=kind), feed_forward), n)
        for kind, n in ((DotProduct(), 1), (Random(max_length=ROOM), 3))
    )
    for scan in (False, True):
        model = model_of("v", relative_bias=False).copy(encoder=Stack(runs, scan=scan))
        variables = model.init(jax.random.key(0), *batch)
        assert model.encoder.num_layers == 4
        assert np.all(np.isfinite(model.apply(variables, *batch)))


def test_float16_is_refused():
    with pytest.raises(
        ValueError, match="EncoderDecoder: dtype='float16'; it must be 'float32' or"
    ):
        model_of("v", dtype="float16")
    with pytest.raises(ValueError, match="dtype='float16'"):
        model_of("v").copy(dtype="float16")


def test_bfloat16_computes_in_bfloat16_with_float32_parameters(batch):
    model = model_of("rv", dtype="bfloat16")
    variables = model.init(jax.random.key(0), *batch)
    variables["params"]["logits_kernel"] *= 30.0
    logits = model.apply(variables, *batch)
    hidden = model.apply(variables, *batch, method=model.hidden)
    kernel = variables["params"]["logits_kernel"].astype(hidden.dtype)
    assert hidden.dtype == jnp.bfloat16 and logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, np.float64(hidden) @ np.float64(kernel), atol=1e-4)
    assert {x.dtype for x in jax.tree.leaves(variables)} == {jnp.dtype("float32")}
    exact = model_of("rv").apply(variables, *batch)
    assert np.abs(logits - exact).max() < 0.1 * np.abs(exact).max()


@pytest.mark.parametrize("name", ZOO)
def test_zoo_models_round_trip_as_json(name):
    model = ZOO[name]()
    assert from_json(json.loads(json.dumps(to_json(model)))) == model


MESH_MILLIONS = {
    "vanilla": 223,
    "random": 254,
    "factorized": 207,
    "dense": 224,
    "dense_plus": 243,
    "dense_plus_alpha": 243,
    "random_plus": 292,
    "random_plus_alpha": 292,
}
"""Narang et al. 2021, table 2, and Tay et al. 2021, in whole millions."""


@pytest.mark.parametrize("name", MESH_MILLIONS)
def test_parameter_counts_of_the_synthesizer_papers_c4_models(name):
    summary = summarize(ZOO[f"mesh_{name}_base"]())
    assert round(summary.parameters / 1e6) == MESH_MILLIONS[name]
    heads = 12 if name == "vanilla" else 8
    assert summary.positions == 2 * 32 * heads  # one bias for each stack
    assert summary.tables_per_layer == (8 * 512 * 512 if "random" in name else 0)
    learned = summarize(ZOO[f"mesh_learned_{name}_base"]())
    assert learned.positions == 512 * 768  # one table for both stacks
    assert learned.parameters - learned.positions == summary.parameters - summary.positions


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["", "learned_"])
@pytest.mark.parametrize("name", MESH_MILLIONS)
def test_mesh_models_see_the_order_of_tokens(name, positions, batch):
    def narrow(stack):
        (run,) = stack.runs
        return stack.copy(runs=(Run(run.block.copy(feed_forward=FeedForward(24)), 1),))

    model = ZOO[f"mesh_{positions}{name}_base"]()
    stacks = {"encoder": narrow(model.encoder), "decoder": narrow(model.decoder)}
    model = model.copy(vocab_size=VOCAB, d_model=16, **stacks)
    source, target = batch
    variables = model.init(jax.random.key(0), source, target)
    logits = jax.jit(model.apply)
    straight, reverse = (logits(variables, s, target) for s in (source, source[:, ::-1]))
    assert np.abs(straight[0] - reverse[0]).max() > 1e-3
    swapped = target.at[:, 1:3].set(target[:, 2:0:-1])
    assert np.abs(straight[:, -1] - logits(variables, source, swapped)[:, -1]).max() > 1e-3


def test_stacks_may_share_their_positions(batch):
    """One table, added to both stacks' embeddings; decoding steps, packed rows and limits included."""
    source, target = batch
    own = model_of("v", relative_bias=False)
    model = own.copy(positions=LearnedPositions(ROOM, Normal(1.0)))
    variables = model.init(jax.random.key(0), source, target)
    table = variables["params"]["positions"]["embedding"]
    each = LearnedPositions(ROOM)
    separate = own.copy(
        encoder=own.encoder.copy(positions=each), decoder=own.decoder.copy(positions=each)
    )
    params = {k: v for k, v in variables["params"].items() if k != "positions"}
    for name in ("encoder", "decoder"):
        params[name] = params[name] | {"position_embedder": {"embedding": table}}
    whole = apply_method(model.hidden, variables, source, target)
    np.testing.assert_array_equal(
        whole, apply_method(separate.hidden, {"params": params}, source, target)
    )
    cache = apply_method(model.init_cache, variables, source, max_length=ROOM)
    steps = []
    for at in range(3):
        hidden, cache = apply_method(model.extend, variables, target[:, at : at + 1], cache)
        steps.append(hidden)
    np.testing.assert_allclose(jnp.concatenate(steps, 1), whole[:, :3], atol=1e-4)
    with pytest.raises(ValueError, match=f"max_length={ROOM} but the caches have room for 13"):
        apply_method(model.init_cache, variables, source, max_length=ROOM + 1)


def test_counts_of_t5():
    # T5 1.1 base and T5 base as in the published checkpoints (32,128 rows).
    assert summarize(ZOO["t5_1_1_base"]()).parameters == 247_577_856
    assert summarize(ZOO["t5_base"]()).parameters == 222_903_552
    assert summarize(ZOO["mesh_vanilla_base"]()).parameters == 222_903_552


def test_summary_by_hand():
    """FLOPs and cache of a tiny model, counted on paper."""
    model = t5(Size(8, 1, 16, 2, 4), vocab_size=10, relative_bias=False)
    k, q, d, f, v = 6, 5, 8, 16, 10
    project, attend = 2 * d * d, 2 * 2 * d
    encoder = k * (4 * project + 3 * 2 * d * f) + k * k * attend
    decoder = q * (4 * project + 2 * project + 3 * 2 * d * f) + k * 2 * project
    decoder += q * q * attend + q * k * attend + q * 2 * d * v
    summary = summarize(model, inputs_length=k, targets_length=q)
    assert summary.flops_per_token == round((encoder + decoder) / (k + q))
    assert summary.cache_bytes_per_token == 2 * d * 4
    scanned = t5(Size(8, 1, 16, 2, 4), vocab_size=10, relative_bias=False, scan=True)
    assert summarize(scanned, inputs_length=k, targets_length=q) == summary
    table = Random(max_length=16)
    halved = t5(Size(8, 1, 16, 2, 4), vocab_size=10, encoder=table, relative_bias=False)
    assert summarize(halved, inputs_length=k, targets_length=q).cache_bytes_per_token == d * 4


def test_errors_are_one_sentence(batch):
    model = model_of("v")
    with pytest.raises(ValueError, match="remat='some'"):
        model.copy(encoder=model.encoder.copy(remat="some")).init(jax.random.key(0), *batch)
    with pytest.raises(ValueError, match="activation 'swish'; allowed: relu, gelu"):
        FeedForward(4, activations=("swish",)).init(jax.random.key(0), jnp.ones((1, 2, 3)))
    with pytest.raises(ValueError, match="unknown variant 'x'"):
        alignment("x", head_dim=8)
    with pytest.raises(ValueError, match="same number of heads"):
        blocks = [Block(Attention(h, 8), FeedForward(4)) for h in (2, 3)]
        stack = Stack(tuple(Run(b, 1) for b in blocks), bias=RelativeBias())
        stack.init(jax.random.key(0), jnp.ones((1, 4, 8)))


def test_a_gated_layer_keeps_three_hidden_arrays_for_its_gradient():
    layer, x = FeedForward(24), jnp.ones((2, 3, 8))
    params = layer.init(jax.random.key(0), x)
    _, back = jax.vjp(layer.apply, params, x)
    kept = [a for a in jax.tree.leaves(back) if a.shape[:1] in ((2,), (6,)) and a.shape[-1] == 24]
    assert len(kept) == 3  # both products of the inputs, and what `wo` reads


def test_layers_that_keep_their_products_make_none_twice():
    def work(remat):
        model = t5(Size(16, 2, 24, 2, 8), vocab_size=32, remat=remat)
        x = jnp.ones((2, 144), int)  # long enough for the fused route
        params = jax.eval_shape(model.init, jax.random.key(0), x, x)
        return flops(jax.make_jaxpr(jax.grad(lambda p: model.apply(p, x, x).sum()))(params).jaxpr)

    assert work("dots") == work("dots_with_no_batch_dims") == work(None) < 0.9 * work("full")


def kernel_runs(program: str, function: str = "main") -> int:
    """How many kernels a StableHLO function runs, with those of the functions that it calls."""
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
    # Forward, and one kernel for the gradients of a table of pairs this small.
    assert kernel_runs(program) == 3 * (again + 1)
    assert "stablehlo.while" not in program
