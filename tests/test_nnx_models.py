"""NNX models against the Linen models with the same configuration."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from synthesizer_jax import (
    Attention,
    Block,
    Encoder,
    FeedForward,
    LanguageModel,
    Mask,
    Random,
    RelativeBias,
    Run,
    SentenceFeedForward,
    Stack,
    UniversalStack,
    t5,
)
from synthesizer_jax import nnx as snnx
from synthesizer_jax.inference import decode
from synthesizer_jax.models import Memory, Size

D, VOCAB = 8, 11
SIZE = Size(d_model=D, layers=1, d_ff=6, heads=2, head_dim=4)
INPUTS = jnp.array([[3, 4, 5, 1], [6, 2, 0, 0]])
TARGETS = jnp.array([[0, 7, 8], [0, 9, 0]])
TINY = t5(SIZE, vocab_size=VOCAB, encoder=Random(max_length=8), dropout_rate=0.5)
BLOCK = Block(Attention(2, 4, dropout_rate=0.5), FeedForward(6))
STACK = Stack((Run(BLOCK, 2),), bias=RelativeBias())
READER = Encoder(vocab_size=VOCAB, d_model=D, encoder=STACK, outputs=3, pooler=True)
WRITER = LanguageModel(vocab_size=VOCAB, d_model=D, decoder=STACK, prefix=True)


def apply_linen(module, method=None, *args, **kwargs):
    return module.config.apply(snnx.linen_variables(module), *args, method=method, **kwargs)


def assert_trees_equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.fixture(scope="module")
def tiny():
    return snnx.to_nnx(TINY, rngs=nnx.Rngs(0), deterministic=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "inputs"),
    [(TINY, (INPUTS, TARGETS)), (WRITER, (INPUTS, TARGETS)), (READER, (INPUTS,))],
    ids=["EncoderDecoder", "LanguageModel", "Encoder"],
)
def test_a_model_equals_linen(config, inputs):
    model = snnx.to_nnx(config, rngs=nnx.Rngs(0))
    assert type(model) is getattr(snnx, type(config).__name__)
    key = jax.random.key(5)
    expected = apply_linen(model, None, *inputs, rngs={"dropout": key})
    assert_trees_equal(model(*inputs, rngs=key), expected)
    assert np.any(jax.tree.leaves(model(*inputs))[0] != jax.tree.leaves(model(*inputs))[0])
    model.eval()
    assert_trees_equal(model(*inputs), apply_linen(model, None, *inputs))
    shapes = jax.eval_shape(config.init, jax.random.key(0), *inputs)
    actual = snnx.linen_variables(model)
    assert jax.tree.structure(actual) == jax.tree.structure(shapes)
    assert jax.tree.map(jnp.shape, actual) == jax.tree.map(jnp.shape, shapes)
    assert_trees_equal(nnx.merge(*nnx.split(model))(*inputs), model(*inputs))


def test_fields_as_arguments_are_a_configuration():
    fields = {"vocab_size": VOCAB, "d_model": D, "encoder": TINY.encoder, "decoder": TINY.decoder}
    model = snnx.EncoderDecoder(**fields, rngs=nnx.Rngs(0))
    same = snnx.to_nnx(TINY, rngs=nnx.Rngs(0))
    assert model.config == TINY and model.d_model == D
    assert_trees_equal(nnx.state(model, nnx.Param), nnx.state(same, nnx.Param))


def test_methods_equal_linen(tiny):
    memory = tiny.encode_inputs(INPUTS)
    assert_trees_equal(tiny.encode(INPUTS), memory.encoded)
    assert_trees_equal(memory.encoded, apply_linen(tiny, "encode", INPUTS))
    hidden = tiny.decode(TARGETS, memory)
    assert_trees_equal(hidden, tiny.hidden(INPUTS, TARGETS))
    assert_trees_equal(tiny.logits(hidden), tiny(INPUTS, TARGETS))
    cache = tiny.init_cache(INPUTS, max_length=3)
    for at in range(3):
        state, cache = tiny.extend(TARGETS[:, at : at + 1], cache)
    np.testing.assert_allclose(state[:, 0], hidden[:, 2], atol=1e-5)


def test_decoding_with_the_linen_variables(tiny):
    actual = decode(snnx.linen_variables(tiny), INPUTS, model=tiny.config, max_length=4)
    assert actual.tokens.shape == (2, 4)


def test_dropout_is_active_in_every_method_until_eval():
    model = snnx.to_nnx(TINY, rngs=nnx.Rngs(params=0, dropout=1))
    for call in (lambda **o: model.encode(INPUTS, **o), lambda **o: model(INPUTS, TARGETS, **o)):
        assert np.any(call() != call())
        assert_trees_equal(call(deterministic=True), call(deterministic=True))
    quiet = nnx.view(model, deterministic=True)
    assert_trees_equal(quiet.encode(INPUTS), quiet.encode(INPUTS))


def test_a_scanned_model_without_dropout_needs_no_stream():
    """Linen's scan splits the random stream even if no layer uses it."""
    size = Size(d_model=D, layers=2, d_ff=6, heads=2, head_dim=4)
    config = t5(size, vocab_size=VOCAB, scan=True, remat="dots")
    model = nnx.eval_shape(lambda: snnx.to_nnx(config, rngs=nnx.Rngs(params=0)))
    assert not model.has_dropout and model.rngs is None
    assert nnx.eval_shape(lambda m: m(INPUTS, TARGETS), model).shape == (2, 3, VOCAB)


def test_a_model_trains():
    model = snnx.to_nnx(READER, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    labels = jnp.array([2, 0])

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            outputs = model(INPUTS).outputs
            return optax.softmax_cross_entropy_with_integer_labels(outputs, labels).mean()

        optimizer.update(model, nnx.grad(loss)(model))

    for _ in range(30):
        step(model, optimizer)
    model.eval()
    np.testing.assert_array_equal(model(INPUTS).outputs.argmax(-1), labels)


X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, D)), jnp.float32)
CROSS = Block(Attention(2, 4), None, cross_mixer=Attention(2, 4, dropout_rate=0.5))
CAUSAL = Block(SentenceFeedForward(8, 4, causal=True), FeedForward(6))
PARTS = {
    "FeedForward": (FeedForward(6, dropout_rate=0.5), {}),
    "Block": (BLOCK, {}),
    "Block with cross-attention": (CROSS, {"memory": Memory(X[:, :3], Mask())}),
    "causal Block": (CAUSAL, {"mask": Mask(causal=True)}),
    "Stack": (STACK, {"mask": Mask(causal=True)}),
    "Stack with cross-attention": (Stack((Run(CROSS, 2),)), {"memory": Memory(X, Mask())}),
    "UniversalStack": (UniversalStack((Run(BLOCK, 2),)), {}),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_equals_linen(name):
    config, options = PARTS[name]
    module = snnx.to_nnx(config, in_features=D, rngs=nnx.Rngs(0))
    assert type(module) is getattr(snnx, type(config).__name__)
    key = jax.random.key(3)
    keys = {"rngs": {"dropout": key}} if module.has_dropout else {}
    assert_trees_equal(
        module(X, rngs=key, **options), apply_linen(module, None, X, **options, **keys)
    )


def test_losses_are_captured():
    universal = UniversalStack((Run(BLOCK, 3),), halting_threshold=0.6)
    config = LanguageModel(vocab_size=VOCAB, d_model=D, decoder=universal)
    model = snnx.to_nnx(config, rngs=nnx.Rngs(0), deterministic=True)
    logits, losses = nnx.capture(model, snnx.Loss)(INPUTS, TARGETS)
    expected, updates = apply_linen(model, None, INPUTS, TARGETS, mutable=["losses"])
    assert_trees_equal(logits, expected)
    (actual,) = jax.tree.leaves(losses)
    assert actual == updates["losses"]["decoder"]["ponder"][0] > 0
