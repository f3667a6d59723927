"""Rows that share a memory, padding on either side, packed rows, and positions past a table."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax import (
    Attention,
    Block,
    Encoder,
    FeedForward,
    LanguageModel,
    LightweightConvolution,
    Mask,
    Random,
    RelativeBias,
    Run,
    SentenceFeedForward,
    Stack,
    UniversalStack,
)
from synthesizer_jax.inference import decode
from synthesizer_jax.models import (
    LOSSES,
    EncoderDecoder,
    LearnedPositions,
    SinusoidalPositions,
    Size,
    stacks_of,
    t5,
)
from synthesizer_jax.parameters import apply_method

VOCAB, D = 5, 8
CROSS = {
    "attention": Attention(2, 4),
    "random": Attention(2, 4, alignment=Random(max_length=8)),
    "sentence": SentenceFeedForward(8, 12, 2, 4),
}


def encoder_decoder(cross, **stack):
    own = Attention(2, 4)
    return EncoderDecoder(
        vocab_size=VOCAB,
        d_model=D,
        encoder=Stack((Run(Block(own, FeedForward(12)), 1),), **stack),
        decoder=Stack((Run(Block(own, FeedForward(12), cross_mixer=cross), 2),), **stack),
    )


@pytest.fixture(scope="module")
def source():
    tokens = np.random.default_rng(0).integers(2, VOCAB, (2, 6))
    tokens[1, 4:] = 0
    return jnp.asarray(tokens)


@pytest.fixture(scope="module", params=CROSS)
def trained(request, source):
    model = encoder_decoder(CROSS[request.param])
    variables = model.init(jax.random.key(5), source, source[:, :4])
    variables["params"]["logits_kernel"] *= 3.0  # sequences differ clearly
    if request.param == "sentence":  # and by what was decoded before
        for layer in ("layers_0", "layers_1"):
            cross = variables["params"]["decoder"][layer]["encoder_decoder_attention"]
            cross["network"]["kernel_1"] *= 4.0
    return model, variables


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2])
def test_candidates_that_share_a_memory(trained, source, rows):
    """As if the memory had been repeated; and the same for a prompt and steps with caches."""
    model, variables = trained
    memory = apply_method(model.encode_inputs, variables, source[:rows])
    repeated = jax.tree.map(lambda x: jnp.repeat(x, 3, axis=0), memory)
    tokens = jnp.asarray(np.random.default_rng(1).integers(1, VOCAB, (3 * rows, 5)))
    run = lambda memory: apply_method(model.decode, variables, tokens, memory)
    expected = run(repeated)
    np.testing.assert_allclose(run(memory), expected, atol=1e-5)

    @jax.jit
    def steps(variables):
        cache = apply_method(model.init_cache, variables, source[:rows], max_length=5)
        cache = cache.map_rows(lambda x: jnp.repeat(x, 3, axis=0))
        parts = []
        for span in (slice(0, 3), slice(3, 5)):
            y, cache = apply_method(model.extend, variables, tokens[:, span], cache)
            parts.append(y)
        return jnp.concatenate(parts, axis=1)

    stepped = steps(variables)
    np.testing.assert_allclose(stepped, expected, atol=1e-5)


@pytest.mark.slow
def test_rows_that_do_not_divide_are_refused(trained, source):
    model, variables = trained
    memory = apply_method(model.encode_inputs, variables, source)
    with pytest.raises(ValueError, match="3 rows of tokens for 2 rows of memory"):
        apply_method(model.decode, variables, jnp.ones((3, 2), int), memory)


@pytest.mark.slow
def test_beams_score_what_the_model_scores(trained, source):
    """Each beam reads its own tokens; with enough beams the best sequence that ends is found."""
    model, variables = trained
    length = 3

    @jax.jit
    def scores(targets):
        """``[2, n]`` log-probabilities of the sequences ``[2, n, length]``, up to EOS."""
        memory = apply_method(model.encode_inputs, variables, source)
        memory = jax.tree.map(lambda x: jnp.repeat(x, targets.shape[1], axis=0), memory)
        rows = targets.reshape(-1, length)
        shifted = jnp.pad(rows[:, :-1], ((0, 0), (1, 0)))
        hidden = apply_method(model.decode, variables, shifted, memory)
        logp = jax.nn.log_softmax(apply_method(model.logits, variables, hidden))
        logp = jnp.take_along_axis(logp, rows[..., None], axis=-1)[..., 0]
        over = jnp.cumsum(shifted == 1, axis=1) > 0
        return jnp.where(over, 0, logp).sum(-1).reshape(targets.shape[:2])

    for beams in (2, 60):
        found = decode(variables, source, model=model, max_length=length, beams=beams, alpha=0.0)
        np.testing.assert_allclose(found.scores, scores(found.tokens[:, None])[:, 0], atol=1e-4)
    every = jnp.asarray([s for s in itertools.product(range(VOCAB), repeat=length) if 1 in s])
    best = scores(jnp.tile(every, (2, 1, 1))).max(axis=1)
    np.testing.assert_allclose(found.scores, best, atol=1e-4)


POSITIONED = {"bias": RelativeBias(), "positions": LearnedPositions(12)}


def padded_left(tokens):
    return np.stack([np.roll(row, (row == 0).sum()) for row in np.asarray(tokens)])


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["random", "convolution"])
def test_padding_may_stand_on_either_side(mixer, source):
    """And between the tokens: positions count real ones."""
    own = {
        "random": Attention(2, 4, alignment=Random(max_length=12)),
        "convolution": LightweightConvolution(width=3),
    }[mixer]
    options = {"positions": LearnedPositions(12)}
    options |= {"bias": RelativeBias()} if mixer == "random" else {}
    stack = Stack((Run(Block(own, FeedForward(12)), 1),), **options)
    target = jnp.asarray([[0, 2, 3], [0, 4, 0]])
    left = jnp.asarray(padded_left(source))
    holes = jnp.asarray([source[0], [0, *source[1, :2], 0, *source[1, 2:4]]])
    crossing = encoder_decoder(Attention(2, 4))
    models = (
        crossing.copy(encoder=stack),
        LanguageModel(vocab_size=VOCAB, d_model=D, decoder=stack, prefix=mixer == "random"),
    )
    for model in models:
        variables = model.init(jax.random.key(0), source, target)
        right = model.apply(variables, source, target)
        for other in (left, holes):
            np.testing.assert_allclose(model.apply(variables, other, target), right, atol=1e-5)
        found, same = (decode(variables, s, model=model, max_length=4) for s in (source, left))
        np.testing.assert_array_equal(found.tokens, same.tokens)
        np.testing.assert_allclose(found.scores, same.scores, atol=1e-5)
    reader = Encoder(
        vocab_size=VOCAB, d_model=D, encoder=stack, outputs=2, masked_lm=True, token_types=2
    )
    variables = reader.init(jax.random.key(0), source)
    types = (source > 3).astype(int)
    right = reader.apply(variables, source, token_types=types)
    found = reader.apply(variables, left, token_types=(left > 3).astype(int))
    np.testing.assert_allclose(found.outputs, right.outputs, atol=1e-5)
    np.testing.assert_allclose(found.token_logits[1, 2:], right.token_logits[1, :4], atol=1e-5)
    np.testing.assert_allclose(found.hidden[0], right.hidden[0], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("universal", [False, True])
def test_ragged_prompts_of_a_stack(universal, source):
    """Embeddings, padded on either side, then steps that nobody tells where they stand."""
    kind = UniversalStack if universal else Stack
    own = Attention(2, 4, alignment=Random(max_length=12))
    stack = kind((Run(Block(own, FeedForward(12)), 2),), **POSITIONED)
    x = jnp.asarray(np.random.default_rng(3).normal(size=(2, 8, D)), jnp.float32)
    variables = stack.init(jax.random.key(0), x)
    whole = stack.apply(variables, x, mask=Mask(causal=True))
    right = x[:, :5].at[1, 3:].set(9.0)
    left = right.at[1].set(jnp.roll(right[1], 2, axis=0))
    valid = jnp.arange(5) >= jnp.array([[0], [2]])
    extend = functools.partial(apply_method, stack.extend, variables)
    step = jax.jit(extend)
    for prompt, mask, real in (
        (right, Mask(key_lengths=jnp.array([5, 3])), slice(0, 3)),
        (left, Mask(key_valid=valid), slice(2, 5)),
    ):
        caches = apply_method(stack.init_cache, variables, x, max_length=8)
        y, caches = extend(prompt, caches, mask=mask)
        np.testing.assert_allclose(y[0], whole[0, :5], atol=1e-5)
        np.testing.assert_allclose(y[1, real], whole[1, :3], atol=1e-5)
        for i in range(3):
            y, caches = step(jnp.stack([x[0, 5 + i], x[1, 3 + i]])[:, None], caches)
            expected = jnp.stack([whole[0, 5 + i], whole[1, 3 + i]])
            np.testing.assert_allclose(y[:, 0], expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("kind", ["universal", "halting", "learned", "shared"])
def test_packed_rows_count_positions_in_segments(kind, told, source):
    """A row longer than the table holds segments that fit; `positions` are found where not given."""
    plain = t5(Size(D, 1, 12, 2, 4), vocab_size=VOCAB, relative_bias=False)
    if kind == "learned":
        options = {"positions": LearnedPositions(6)}
        model = plain.copy(**{n: s.copy(**options) for n, s in stacks_of(plain).items()})
    elif kind == "shared":
        model = plain.copy(positions=LearnedPositions(6))
    else:
        halting = 0.8 if kind == "halting" else None
        model = plain.copy(
            **{
                n: UniversalStack((Run(s.runs[0].block, 3),), halting_threshold=halting)
                for n, s in stacks_of(plain).items()
            }
        )
    rng = np.random.default_rng(4)
    first, second = rng.integers(2, VOCAB, (1, 6)), rng.integers(2, VOCAB, (1, 4))
    variables = model.init(jax.random.key(0), first, first)
    alone = [model.apply(variables, x, x) for x in (first, second)]
    row = np.concatenate([first, second, [[0, 0]]], axis=1)
    segments = np.repeat([1, 2, 0], [6, 4, 2])[None]
    positions = np.concatenate([np.arange(6), np.arange(4), [0, 0]])[None] if told else None
    pair = lambda x: None if x is None else (jnp.asarray(x),) * 2
    found = jax.jit(model.apply)(
        variables, row, row, segments=pair(segments), positions=pair(positions)
    )
    np.testing.assert_allclose(found[:, :6], alone[0], atol=1e-4)
    np.testing.assert_allclose(found[:, 6:10], alone[1], atol=1e-4)


@pytest.mark.slow
def test_positions_past_a_table_are_refused(source):
    """Where the length is known before anything runs; where it is not, the output is NaN."""
    table = LearnedPositions(6)
    x = jnp.ones((1, 7, D))
    variables = table.init(jax.random.key(0), jnp.arange(6), D)
    with pytest.raises(ValueError, match="max_length=6 but was given 7 positions"):
        table.apply(variables, np.arange(7), D)
    found = jax.jit(lambda p: table.apply(variables, p, D))(jnp.array([5, 6]))
    assert np.isfinite(found[0]).all() and np.isnan(found[1]).all()
    stack = Stack((Run(Block(Attention(2, 4), FeedForward(4)), 1),), positions=table)
    with pytest.raises(ValueError, match="max_length=6 but was given 7 positions"):
        stack.init(jax.random.key(0), x)
    learned = encoder_decoder(Attention(2, 4), positions=table)
    sentence = encoder_decoder(SentenceFeedForward(6, 5))
    own = SentenceFeedForward(6, 5, causal=True)
    blocks = (Run(Block(own, FeedForward(4), cross_mixer=Attention(2, 4)), 1),)
    causal = encoder_decoder(Attention(2, 4)).copy(decoder=Stack(blocks))
    language = LanguageModel(vocab_size=VOCAB, d_model=D, decoder=stack)
    for model, tokens in (
        (learned, source),
        (sentence, source),
        (causal, source),
        (language, source[:, :1]),
    ):
        variables = model.init(jax.random.key(0), tokens, source[:, :4])
        room = 8 + (tokens.shape[1] if model is language else 0)
        with pytest.raises(ValueError, match=f"max_length=6 but .*{room} positions"):
            decode(variables, tokens, model=model, max_length=8)
        decode(variables, tokens, model=model, max_length=5)


@pytest.mark.slow
def test_the_ponder_cost_counts_positions_with_a_target(source):
    plain = t5(Size(D, 1, 12, 2, 4), vocab_size=VOCAB, relative_bias=False)
    model = plain.copy(
        **{
            n: UniversalStack((Run(s.runs[0].block, 3),), halting_threshold=0.7)
            for n, s in stacks_of(plain).items()
        }
    )
    target = jnp.asarray([[0, 2, 3, 0, 0], [0, 4, 2, 3, 2]])
    variables = model.init(jax.random.key(0), source, target)

    def cost(model, source, target, **options):
        _, left = model.apply(
            variables, source, target, method=model.hidden, mutable=[LOSSES], **options
        )
        return jax.tree.leaves(left)

    wide = (jnp.pad(source, ((0, 0), (0, 3))), jnp.pad(target, ((0, 0), (0, 4))))
    expected = cost(model, source, target)
    np.testing.assert_allclose(cost(model, *wide), expected, rtol=1e-5)
    rows = [cost(model, source[i : i + 1], target[i : i + 1]) for i in range(2)]
    np.testing.assert_allclose(np.mean(rows, axis=0), expected, rtol=1e-5)
    without = cost(model, source[:1], target[:1], counted=jnp.asarray([[True, True] + [False] * 3]))
    np.testing.assert_allclose(without, cost(model, source[:1], target[:1, :2]), rtol=1e-5)


def test_sinusoids_do_not_end():
    places = jnp.array([[10**6]])
    assert np.isfinite(SinusoidalPositions().apply({}, places, D)).all()
