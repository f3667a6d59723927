"""Language models, encoders, Universal Transformers, published models and their counts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax import (
    ZOO,
    Attention,
    Block,
    DotProduct,
    Encoder,
    FeedForward,
    Gaussian,
    LanguageModel,
    LightweightConvolution,
    Linformer,
    Mixture,
    Random,
    RelativeBias,
    Run,
    SentenceFeedForward,
    Stack,
    TalkingHeads,
    UniversalStack,
)
from synthesizer_jax.costs.summary import num_elements, summarize
from synthesizer_jax.inference.decoding import decode
from synthesizer_jax.inference.scoring import score_targets
from synthesizer_jax.models import LOSSES, SinusoidalPositions, Size, stacks_of, t5
from synthesizer_jax.models.published import FIXED_HEADS, hard_coded
from synthesizer_jax.parameters import abstract_variables, apply_method

VOCAB, D = 30, 12
MIXERS = {
    "dot product": Attention(2, 6),
    "random": Attention(2, 6, alignment=Random(max_length=24)),
    "gaussian": Attention(2, 6, alignment=Gaussian((-1, 0))),
    "convolution": LightweightConvolution(width=4),
    "talking heads": TalkingHeads(2, 6),
}


def language_model(mixer, *, prefix=False, **options):
    bias = RelativeBias() if mixer.bias_heads else None
    stack = Stack((Run(Block(mixer, FeedForward(16)), 2),), bias=bias, **options)
    return LanguageModel(vocab_size=VOCAB, d_model=D, decoder=stack, prefix=prefix)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    source = rng.integers(2, VOCAB, (3, 7))
    source[1, 4:] = 0
    source[2, 1:] = 0
    target = rng.integers(2, VOCAB, (3, 6))
    return jnp.asarray(source), jnp.asarray(target)


@pytest.mark.slow
@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("name", MIXERS)
def test_language_model_steps_equal_the_full_pass(name, prefix, batch):
    """Inputs of different lengths: every example stands at a position of its own."""
    model = language_model(MIXERS[name], prefix=prefix)
    source, target = batch
    variables = model.init(jax.random.key(0), *batch)
    whole = apply_method(model.hidden, variables, source, target)
    cache = apply_method(model.init_cache, variables, source, max_length=target.shape[1])
    step = jax.jit(functools.partial(apply_method, model.extend, variables))
    parts = []
    for at in range(target.shape[1]):
        hidden, cache = step(target[:, at : at + 1], cache)
        parts.append(hidden)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), whole, atol=1e-4)


@pytest.mark.slow
def test_language_model_rows_are_inputs_then_targets(batch):
    """An example with padding gives what the joined text alone gives."""
    source, target = batch
    for prefix in (False, True):
        model = language_model(MIXERS["dot product"], prefix=prefix)
        variables = model.init(jax.random.key(0), *batch)
        whole = model.apply(variables, source, target)
        alone = model.apply(variables, source[1:2, :4], target[1:2])
        np.testing.assert_allclose(whole[1], alone[0], atol=1e-4)
    causal = language_model(MIXERS["dot product"])
    text = jnp.concatenate([source[:1], target[:1]], 1)
    everything = causal.apply(variables, jnp.zeros((1, 0), int), text)
    np.testing.assert_allclose(
        causal.apply(variables, source[:1], target[:1])[0], everything[0, 7:], atol=1e-4
    )


def test_only_a_prefix_model_lets_inputs_see_later_inputs(batch):
    source, target = batch
    changed = source.at[0, 6].set(5)
    for prefix in (False, True):
        model = language_model(MIXERS["dot product"], prefix=prefix)
        variables = model.init(jax.random.key(0), *batch)
        first = lambda s, m=model, v=variables: m.apply(
            v,
            s,
            target,
            method=lambda m, s, t: m.decoder(m.embed(s), mask=m._mask((s != 0).sum(-1))),
        )[0, 0]
        assert bool(jnp.any(first(source) != first(changed))) == prefix


@pytest.mark.slow
def test_language_models_decode_and_score_like_encoder_decoders(batch):
    model = language_model(MIXERS["random"])
    variables = model.init(jax.random.key(1), *batch)
    for beams in (1, 2):
        found = decode(variables, batch[0], model=model, max_length=5, beams=beams)
        assert found.tokens.shape == (3, 5)
    greedy = decode(variables, batch[0], model=model, max_length=5)
    ends = np.asarray(greedy.tokens)
    scores = score_targets(variables, batch[0], targets=jnp.asarray(ends), model=model)
    np.testing.assert_allclose(scores, greedy.scores, atol=1e-4)


def test_language_model_refuses_packed_rows(batch):
    model = language_model(MIXERS["dot product"])
    segments = tuple(jnp.ones_like(x) for x in batch)
    with pytest.raises(ValueError, match=r"data\.pack=false"):
        model.init(jax.random.key(0), *batch, segments=segments)


PACKABLE = {
    "dot product": DotProduct(6),
    "random": Random(max_length=14),
    "relative bias": DotProduct(6),
    "mixture": Mixture((Random(max_length=14), DotProduct(6))),
}


@pytest.mark.parametrize("max_segments", [None, 3])
@pytest.mark.parametrize("kind", PACKABLE)
def test_packed_targets_equal_separate_rows(kind, max_segments):
    """Rows without inputs hold several texts, which do not see one another."""
    mixer = Attention(2, 6, alignment=PACKABLE[kind])
    stack = Stack(
        (Run(Block(mixer, FeedForward(16)), 2),),
        bias=RelativeBias() if kind == "relative bias" else None,
    )
    model = LanguageModel(vocab_size=VOCAB, d_model=D, decoder=stack)
    rng = np.random.default_rng(3)
    texts = [rng.integers(2, VOCAB, (1, n)).astype(np.int32) for n in (5, 3, 4)]
    nothing = jnp.zeros((1, 0), jnp.int32)
    variables = model.init(jax.random.key(0), nothing, texts[0])
    alone = [model.apply(variables, nothing, text) for text in texts]
    row = jnp.asarray(np.concatenate([*texts, [[0, 0]]], axis=1))
    segments = jnp.asarray(np.repeat([1, 2, 3, 0], [5, 3, 4, 2])[None])
    positions = jnp.asarray(np.concatenate([*map(np.arange, (5, 3, 4)), [0, 0]])[None])
    packed = jax.jit(functools.partial(model.apply, max_segments=max_segments))(
        variables, nothing, row, segments=(nothing, segments), positions=(nothing, positions)
    )
    np.testing.assert_allclose(packed[:, :12], np.concatenate(alone, axis=1), atol=2e-5)


def test_targets_alone_are_what_no_inputs_are(batch):
    model = language_model(MIXERS["dot product"], prefix=True)
    _, target = batch
    variables = model.init(jax.random.key(0), *batch)
    padding = model.apply(variables, jnp.zeros((3, 4), jnp.int32), target)
    nothing = model.apply(variables, jnp.zeros((3, 0), jnp.int32), target)
    np.testing.assert_allclose(nothing, padding, atol=2e-5)


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_encoder_reads_real_tokens_only(pooling, batch):
    stack = Stack((Run(Block(Attention(2, 6), FeedForward(16)), 2),), bias=RelativeBias())
    model = Encoder(
        vocab_size=VOCAB, d_model=D, encoder=stack, outputs=3, pooling=pooling, masked_lm=True
    )
    source = batch[0]
    variables = model.init(jax.random.key(0), source)
    found = model.apply(variables, source)
    assert found.outputs.shape == (3, 3) and found.token_logits.shape == (3, 7, VOCAB)
    longer = model.apply(variables, jnp.pad(source, ((0, 0), (0, 4))))
    np.testing.assert_allclose(longer.outputs, found.outputs, atol=1e-5)
    hidden = np.asarray(found.hidden)[1]
    expected = hidden[:4].mean(0) if pooling == "mean" else hidden[0]
    np.testing.assert_allclose(found.pooled[1], expected, atol=1e-5)
    narrow = model.copy(dtype="bfloat16").apply(variables, source)
    head = variables["params"]["output_dense"]
    exact = np.float64(narrow.pooled) @ np.float64(head["kernel"]) + head["bias"]
    np.testing.assert_allclose(narrow.outputs, exact, atol=1e-6)
    assert narrow.token_logits.dtype == jnp.float32
    with pytest.raises(ValueError, match="mean, first"):
        model.copy(pooling="max").init(jax.random.key(0), source)


def test_encoder_with_linformer_and_attention_replacements(batch):
    for mixer in (
        Linformer(2, 6, max_length=9, projected_length=4),
        SentenceFeedForward(9, 5, 2, 6),
    ):
        stack = Stack((Run(Block(mixer, FeedForward(16)), 1),))
        model = Encoder(vocab_size=VOCAB, d_model=D, encoder=stack, outputs=1)
        variables = model.init(jax.random.key(0), batch[0])
        assert np.all(np.isfinite(model.apply(variables, batch[0]).outputs))
        with pytest.raises(ValueError, match="use it in encoders"):
            language_model(mixer).init(jax.random.key(0), *batch)


def act(states, probabilities, threshold):
    """Adaptive computation time of one position (Graves 2016): its output, and n + remainder.

    The average of the states starts from zeros, as in Tensor2Tensor and Mesh-TensorFlow.
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
    """Against adaptive computation time written for one position, states from the loop itself."""
    from synthesizer_jax.models.block import Block as Layer

    block = Layer(Attention(2, 6), FeedForward(16))
    stack = UniversalStack((Run(block, 4),), halting_threshold=0.6, norm=None)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, D)), jnp.float32)
    variables = stack.init(jax.random.key(0), x)
    params = jax.tree.map(lambda a: a, variables["params"])
    gate = np.random.default_rng(1).normal(size=(D, 1))
    params["halting"] = {"kernel": jnp.asarray(0.2 * gate), "bias": -0.5 * jnp.ones(1)}
    y, state = stack.apply({"params": params}, x, mutable=[LOSSES])
    sines = SinusoidalPositions()
    places, states, probabilities, h = jnp.arange(5)[None], [], [], x
    for step in range(4):
        h = h + sines.apply({}, places, D) + sines.apply({}, jnp.full((1, 1), step), D)
        gate = h @ params["halting"]["kernel"] + params["halting"]["bias"]
        probabilities.append(np.asarray(jax.nn.sigmoid(gate))[..., 0])
        h, _ = block.apply({"params": params["shared"]}, h)
        states.append(np.asarray(h))
    pondered, steps = [], []
    for b, i in np.ndindex(2, 5):
        own = [s[b, i] for s in states], [p[b, i] for p in probabilities]
        expected, cost, taken = act(*own, 0.6)
        np.testing.assert_allclose(y[b, i], expected, atol=1e-4)
        pondered.append(cost)
        steps.append(taken)
    assert len(set(steps)) > 1, "all positions halt at the same step"
    np.testing.assert_allclose(state[LOSSES]["ponder"][0], 0.01 * np.mean(pondered), rtol=1e-4)


@pytest.mark.slow
def test_universal_transformer_shares_its_block_and_decodes(batch):
    tiny = t5(Size(D, 2, 16, 2, 6), vocab_size=VOCAB, relative_bias=False)
    for threshold in (None, 0.7):
        shared = {
            name: UniversalStack((Run(s.runs[0].block, 3),), halting_threshold=threshold)
            for name, s in stacks_of(tiny).items()
        }
        model = tiny.copy(**shared)
        variables = model.init(jax.random.key(0), *batch)
        once = num_elements(
            t5(Size(D, 1, 16, 2, 6), vocab_size=VOCAB, relative_bias=False).init(
                jax.random.key(0), *batch
            )["params"]
        )
        gates = 0 if threshold is None else 2 * (D + 1)
        assert num_elements(variables["params"]) == once + gates
        found = decode(variables, batch[0], model=model, max_length=5)
        scores = score_targets(variables, batch[0], targets=found.tokens, model=model)
        np.testing.assert_allclose(scores, found.scores, atol=1e-4)


def test_published_bert_counts():
    """Bhojanapalli et al. 2020, tables 1 to 3, in millions; pooler and MLM head included."""
    millions = dict(
        zip(FIXED_HEADS, (168, 193, 218, 319, 130, 142, 218, 214, 252, 290, 327), strict=True)
    )
    for (d_model, heads, width), published in millions.items():
        found = summarize(ZOO[f"bert_{d_model}_{heads}x{width}"]()).parameters
        assert round(found / 1e6) == published
    assert round(summarize(ZOO["bert_large"]()).parameters / 1e6) == 336


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["base", "hc_sa", "hc_all", "sh_x"])
def test_hard_coded_models(variant, batch):
    """No queries and keys where attention is hard-coded; SH-X has one cross-attention."""
    model = hard_coded(variant, d_model=D, layers=2, heads=2, d_ff=16, vocab_size=VOCAB)
    source, target = batch
    variables = model.init(jax.random.key(0), source, target)
    paths = ["/".join(k.key for k in p) for p, _ in jax.tree.leaves_with_path(variables)]
    queries = [p for p in paths if "query" in p]
    assert len(queries) == {"base": 6, "hc_sa": 2, "hc_all": 0, "sh_x": 1}[variant]
    crosses = {p.split("/")[2] for p in paths if "encoder_decoder_attention" in p}
    assert crosses == ({"layers_1"} if variant == "sh_x" else {"layers_0", "layers_1"})
    assert not any("attention" in p and "bias" in p and "norm" not in p for p in paths)
    found = decode(variables, source, model=model, max_length=5)
    scores = score_targets(variables, source, targets=found.tokens, model=model)
    np.testing.assert_allclose(scores, found.scores, atol=1e-4)
    mean = jnp.abs(apply_method(model.hidden, variables, source, target).mean(-1)).max()
    assert mean < 1e-5  # post-norm: the last thing is a normalization


def dropped(variables, tokens, model, method):
    """The share of zeros in what a model's method makes with dropout."""
    out = model.apply(variables, tokens, rngs={"dropout": jax.random.key(3)}, method=method)
    return float((out == 0).mean())


def test_hard_coded_models_drop_embeddings_and_sublayer_outputs_only(batch):
    """As the released code: nothing inside the feed-forward layer, nothing of the stacks' outputs."""
    model = hard_coded(
        "hc_sa", d_model=D, layers=1, heads=2, d_ff=16, vocab_size=VOCAB, dropout_rate=0.5
    )
    source, target = batch
    variables = model.init(jax.random.key(0), source, target)
    assert dropped(variables, source, model, "encode") == 0.0
    block = model.encoder.runs[0].block
    assert block.dropout_rate == 0.5 and block.feed_forward.dropout_rate == 0.0
    plain, noisy = (
        model.apply(variables, source, method=model.encode, rngs=rngs)
        for rngs in ({}, {"dropout": jax.random.key(0)})
    )
    assert np.abs(plain - noisy).max() > 0.1
    ordinary = t5(Size(D, 1, 16, 2, 6), vocab_size=VOCAB, dropout_rate=0.5)
    variables = ordinary.init(jax.random.key(0), source, target)
    assert dropped(variables, source, ordinary, "encode") > 0.2


def test_the_small_hard_coded_model_has_the_ratio_of_its_own_corpus():
    """You et al. 2020's code: IWSLT 2016 and WMT, English to German."""
    for name, ratio in (("hc_all", 1.02305), ("hc_all_small", 1.03606)):
        block = ZOO[f"hard_coded_{name}"]().decoder.runs[0].block
        assert block.cross_mixer.alignment.ratio == ratio


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_every_named_model_makes_sense_without_being_allocated(name):
    model = ZOO[name]()
    lengths = (48, 32)
    from synthesizer_jax.costs.summary import _scan_runs

    example = model.example(*lengths)
    shapes, axes = abstract_variables(_scan_runs(model), *example)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(shapes))
    out = jax.eval_shape(_scan_runs(model).apply, shapes, *example)
    first = jax.tree.leaves(out)[0]
    assert first.shape[:2] == ((1, 48) if isinstance(model, Encoder) else (1, 32))
    assert jax.tree.structure(shapes) == jax.tree.structure(
        axes, is_leaf=lambda a: isinstance(a, tuple)
    )


def test_reported_baselines():
    """What our formula gives for Narang et al. 2021's baselines."""
    counted = functools.partial(summarize, inputs_length=64, targets_length=64)
    light = counted(ZOO["lightweight_convolution_base"]())
    assert round(light.parameters / 1e6) == 224
    d, layers, d_ff, vocab = 768, 12, 3072, 32_128
    cross, wide = 4 * d * d, 2 * d * d_ff
    own = 4 * d * d + d + 9 * d  # input, gate, pointwise with bias, output, kernels
    formula = vocab * d + 2 * 512 * d + layers * (2 * (own + wide) + cross) + d * (5 * layers + 2)
    assert light.parameters == formula
    kernels = 12 * 2 * (d * 192 * 9 - d * 9)  # a quarter of the channels, made from the token
    dynamic = counted(ZOO["dynamic_convolution_base"]())
    assert dynamic.parameters == formula + kernels
    # Published: 257 M, and 11.8 against 11.1 T operations.
    assert abs(dynamic.parameters / 257e6 - 1) < 0.01
    long = functools.partial(summarize, inputs_length=512, targets_length=512)
    work = [long(ZOO[n]()).flops_per_token for n in ("dynamic_convolution_base", "t5_base")]
    assert abs(work[0] / work[1] - 11.8 / 11.1) < 0.03


def test_dot_product_free_head_size_in_a_model(batch):
    kind = DotProduct(head_dim=5)
    model = t5(Size(D, 1, 16, 7, 3), encoder=kind, vocab_size=VOCAB)
    variables = model.init(jax.random.key(0), *batch)
    assert model.apply(variables, *batch).shape == (3, 6, VOCAB)
