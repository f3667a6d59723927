"""Tests models whose decoder has one attention layer for its own tokens and the memory."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synthesizer_jax as sj
from synthesizer_jax.inference import Decoding, decode_sequences, score_targets
from synthesizer_jax.mixers.taps import TAPS
from synthesizer_jax.models import EncoderDecoder, Memory, unroll, unroll_variables
from synthesizer_jax.models.token_model import Rows
from synthesizer_jax.primitives.parameters import apply_method
from tests.layers.contract import general
from tests.models.test_models import kernel_runs
from tests.models.test_structures import close

VOCAB, D, LAYERS = 7, 8, 2
MIXERS = {
    "shared": sj.MergedAttention(
        2, 4, sj.DotProduct(normalize_qk=True, rotary_base=50.0), num_kv_heads=1, window=3
    ),
    "random": sj.MergedAttention(2, 4, sj.Random(8), cross_alignment=sj.DotProduct()),
}


def encoder_decoder(mixer: sj.MergedAttention, **stack: Any) -> EncoderDecoder:
    encoder = sj.Block(sj.Attention(2, 4), sj.FeedForward(12))
    decoder = sj.Block(mixer, sj.FeedForward(12), output_norm=True)
    return EncoderDecoder(
        vocab_size=VOCAB,
        d_model=D,
        encoder=sj.Stack((sj.Run(encoder, 1),)),
        decoder=sj.Stack((sj.Run(decoder, LAYERS),), **stack),
    )


@pytest.fixture(scope="module")
def source() -> jax.Array:
    tokens = np.random.default_rng(0).integers(2, VOCAB, (2, 6))
    tokens[1, 4:] = 0
    return jnp.asarray(tokens)


@pytest.fixture(scope="module")
def targets() -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).integers(1, VOCAB, (6, 5)))


@pytest.mark.parametrize("bias", [None, sj.RelativeBias(bidirectional=False)], ids=["", "bias"])
@pytest.mark.parametrize("name", MIXERS)
def test_candidates_that_share_a_memory(name: str, bias: Any, source: Any, targets: Any) -> None:
    """Several rows of targets may share one encoder output, in one pass and in decoding steps.

    The rows change places between the steps, as in beam search.
    """
    model = encoder_decoder(MIXERS[name], bias=bias)
    variables = general(model.init, source, targets[:2])
    order = np.array([2, 0, 1, 4, 5, 3])

    @jax.jit
    def run(variables: Any) -> Any:
        memory = apply_method(model.encode_inputs, variables, source)
        repeated = jax.tree.map(lambda x: jnp.repeat(x, 3, axis=0), memory)
        found, expected = (
            apply_method(model.decode, variables, targets, m) for m in (memory, repeated)
        )
        cache = apply_method(model.init_cache, variables, source, max_length=5)
        cache = cache.map_rows(lambda x: jnp.repeat(x, 3, axis=0))
        _, cache = apply_method(model.extend, variables, targets[order, :3], cache)
        cache = cache.map_rows(lambda x: x[jnp.argsort(order)])
        last, _ = apply_method(model.extend, variables, targets[:, 3:], cache)
        return found, last, expected

    found, last, expected = run(variables)
    close(found, expected)
    close(last, expected[:, 3:])


@pytest.mark.parametrize(
    "settings", [{}, {"beams": 3, "alpha": 0.0}, {"temperature": 1.0}], ids=str
)
def test_decoded_tokens_have_the_scores_of_a_full_pass(settings: Any, source: Any) -> None:
    """Greedy decoding, beam search and sampling use caches, and `score_targets` does not."""
    model = encoder_decoder(MIXERS["shared"])
    variables = general(model.init, source, source)
    found = decode_sequences(
        variables,
        source,
        model=model,
        decoding=Decoding(max_length=4, **settings),
    )
    targets = found.tokens[:, 0]
    scores = score_targets(variables, source, targets=targets, model=model)
    # An untrained model may draw the id of padding, which `score_targets` does not count.
    has_ended = jnp.cumsum(targets == model.ids.end, axis=1) > 0
    counted = ((targets != model.ids.padding) | has_ended).all(axis=1)
    assert counted.any()
    np.testing.assert_allclose(found.scores[counted, 0], scores[counted], rtol=1e-4)


@pytest.mark.parametrize("name", MIXERS)
def test_packed_rows_equal_separate_rows(name: str, source: Any, targets: Any) -> None:
    """The targets of a packed row attend to their own inputs, at their own positions."""
    model = encoder_decoder(MIXERS[name])
    variables = general(model.init, source, targets[:2])
    lengths = np.array([6, 4]), np.array([5, 3])
    separate = jax.jit(functools.partial(apply_method, model.hidden))(
        variables, source, targets[:2]
    )
    rows = [
        jnp.concatenate([x[i, :n] for i, n in enumerate(own)])[None]
        for x, own in zip((source, targets), lengths, strict=True)
    ]
    segments = tuple(jnp.asarray(np.repeat([1, 2], own)[None]) for own in lengths)
    packed = apply_method(model.hidden, variables, *rows, rows=Rows(segments=segments))
    close(packed[0, :5], separate[0])
    close(packed[0, 5:], separate[1, :3])


def test_scans_and_rematerialization_change_nothing(source: Any, targets: Any) -> None:
    """The loss and its gradients are the same, with dropout of attention weights."""
    mixer = MIXERS["shared"].copy(dropout_rate=0.3)
    models = [
        encoder_decoder(mixer, remat="dots"),
        encoder_decoder(mixer, scan=True, remat="full"),
    ]
    variables = general(models[1].init, source, targets[:2])

    def loss(model: EncoderDecoder, variables: Any, **options: Any) -> jax.Array:
        return jnp.sum(jnp.sin(model.apply(variables, source, targets[:2], **options)))

    looped, unstacked = unroll(models[1]), unroll_variables(models[1], variables)
    expected = jax.grad(functools.partial(loss, looped))(unstacked)
    found = jax.grad(functools.partial(loss, models[0]))(unstacked)
    jax.tree.map(close, found, expected)
    scanned = jax.grad(functools.partial(loss, models[1]))(variables)
    jax.tree.map(close, unroll_variables(models[1], scanned), expected)
    dropped = loss(models[0], unstacked, rngs={"dropout": jax.random.key(0)})
    assert abs(dropped - loss(models[0], unstacked)) > 1e-3


def test_tpus_run_kernels_for_both_kinds_of_keys() -> None:
    """Saved residuals include the log sums, so the forward kernels run only once."""
    model = encoder_decoder(MIXERS["shared"].copy(window=None), remat="dots")
    x = jnp.ones((2, 144), int)
    params = jax.eval_shape(model.init, jax.random.key(0), x, x)
    step = jax.jit(jax.grad(lambda p: model.apply(p, x, x).sum()))
    program = step.trace(params).lower(lowering_platforms=("tpu",)).as_text()
    # Each attention has a kernel for each direction: the encoder, and two in each decoder layer.
    assert kernel_runs(program) == 2 * (1 + 2 * LAYERS)
    assert "stablehlo.while" not in program


def test_weights_of_both_kinds_of_keys_sum_to_one(source: Any, targets: Any) -> None:
    model = encoder_decoder(MIXERS["random"])
    variables = general(model.init, source, targets[:2])
    _, sown = model.apply(variables, source, targets[:2], mutable=["intermediates", TAPS])
    layer = sown["intermediates"]["decoder"]["layers_1"]["self_attention"]
    (own,), (memory,) = layer["attention_weights"], layer["memory_weights"]
    assert own.shape == (2, 2, 5, 5) and memory.shape == (2, 2, 5, 6)
    np.testing.assert_allclose(own.sum(-1) + memory.sum(-1), 1, rtol=1e-6)
    np.testing.assert_array_equal(memory[1, :, :, 4:], 0)
    assert {"self_input", "self_mixed", "output"} <= set(sown[TAPS]["decoder"]["layers_0"])


def test_padding_of_the_memory_has_no_influence(source: Any) -> None:
    """NaN in padding reaches neither outputs nor gradients, and padding queries are zero."""
    layer = MIXERS["shared"]
    x, memory = (jax.random.normal(jax.random.key(i), (2, 6, D)) for i in range(2))
    real = jnp.arange(6) < jnp.array([[6], [3]])
    masks = {"mask": sj.Mask.padded(real.sum(1), causal=True)}
    masks["memory_mask"] = sj.Mask(key_lengths=jnp.array([4, 2]))
    variables = general(layer.init, x, memory, **masks)
    seen = jnp.arange(6) < jnp.array([[4], [2]])

    def run(x: jax.Array, memory: jax.Array) -> Any:
        def call(variables: Any, x: jax.Array, memory: jax.Array) -> jax.Array:
            return layer.apply(variables, x, memory, **masks)

        y, back = jax.vjp(call, variables, x, memory)
        return y, back(jnp.ones_like(y))

    def fill(number: float) -> Any:
        """Returns the results if all padding has the same number."""
        pairs = (x, real), (memory, seen)
        return run(*(jnp.where(m[..., None], tokens, number) for tokens, m in pairs))

    clean = run(x, memory)
    jax.tree.map(np.testing.assert_array_equal, fill(1e3), clean)
    # The gradient of a projection or norm multiplies padding tokens by zero, which is NaN if the
    # tokens are NaN.
    y, (_, *of_tokens) = fill(jnp.nan)
    np.testing.assert_array_equal(y, clean[0])
    np.testing.assert_array_equal(y[~real], 0)
    for found, expected, kept in zip(of_tokens, clean[1][1:], (real, seen), strict=True):
        np.testing.assert_array_equal(found[kept], expected[kept])
        np.testing.assert_array_equal(expected[~kept], 0)


def test_padding_queries_read_no_memory() -> None:
    """A padding query of either mask reads no memory, however the masks mark padding queries."""
    layer = sj.MergedAttention(2, 4)
    x = jax.random.normal(jax.random.key(0), (2, 6, D))
    variables = general(layer.init, x, x)
    holes = jnp.asarray([[1, 1, 0, 1, 1, 1], [1, 0, 1, 1, 1, 1]], bool)
    segments = jnp.asarray([[1, 1, 2, 2, 0, 0], [1, 1, 1, 1, 1, 0]])
    pairs = (
        (sj.Mask.padded(jnp.array([5, 3])), sj.Mask(query_lengths=jnp.array([2, 4]))),
        (sj.Mask(key_valid=holes).for_self_attention(), sj.Mask(query_valid=holes[:, ::-1])),
        (sj.Mask.packed(segments), sj.Mask()),
    )
    for mask, memory_mask in pairs:
        masks: dict[str, Any] = {"mask": mask, "memory_mask": memory_mask}
        y, sown = layer.apply(variables, x, x, **masks, mutable=["intermediates"])
        real = mask.queries(6)
        assert real is not None
        np.testing.assert_array_equal((y != 0).all(-1), real)
        of_memory = memory_mask.queries(6)
        if of_memory is not None:
            real = real & of_memory
        (weights,) = sown["intermediates"]["memory_weights"]  # [b, h, q, k]
        np.testing.assert_array_equal((weights > 0).all((1, 3)), real)


def test_errors_say_what_to_do(source: Any, targets: Any) -> None:
    layer = MIXERS["shared"]
    x = jnp.ones((2, 6, D))
    key = jax.random.key(0)
    gaussian = sj.MergedAttention(2, 4, sj.Gaussian(), cross_alignment=sj.DotProduct())
    block = sj.Block(layer, None, cross_mixer=sj.Attention(2, 4))
    wrong = sj.Mask.padded(jnp.array([6, 3]))
    for message, call in {
        "kv is None.*or use Attention": lambda: layer.init(key, x),
        "memory_mask was made for self-attention": lambda: layer.init(key, x, x, memory_mask=wrong),
        "memory_mask cannot be used": lambda: sj.Attention(2, 4).init(
            key, x, memory_mask=sj.Mask()
        ),
        "alignment is Gaussian.*such as GaussianBias": lambda: gaussian.init(key, x, x),
        "alignment is Random.*Set cross_alignment": lambda: sj.MergedAttention(
            2, 4, sj.Random(8)
        ).init(key, x, x),
        "Set cross_mixer=None": lambda: block.init(key, x, memory=Memory(x, sj.Mask())),
        "there is no encoder": lambda: sj.Block(layer, None).init(key, x),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
