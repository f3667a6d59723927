"""Tests rows that share an encoder memory, ragged prompts, and positions beyond a table."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import synthesizer_jax as sj
from synthesizer_jax import nnx as snnx
from synthesizer_jax.models import LOSSES, EncoderDecoder, LearnedPositions
from synthesizer_jax.primitives.parameters import apply_method
from tests.layers.contract import general
from tests.models.test_structures import close

VOCAB, D = 5, 8
CROSS = {
    "random": sj.Attention(2, 4, alignment=sj.Random(max_length=8)),
    "sentence": sj.SentenceFeedForward(8, 12, 2, 4),
}


def encoder_decoder(cross, **stack):
    block = sj.Block(sj.Attention(2, 4), sj.FeedForward(12))
    return EncoderDecoder(
        vocab_size=VOCAB,
        d_model=D,
        encoder=sj.Stack((sj.Run(block, 1),), **stack),
        decoder=sj.Stack((sj.Run(block.copy(cross_mixer=cross), 1),), **stack),
    )


@pytest.fixture(scope="module")
def source():
    tokens = np.random.default_rng(0).integers(2, VOCAB, (2, 6))
    tokens[1, 4:] = 0
    return jnp.asarray(tokens)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("cross", CROSS)
def test_candidates_that_share_a_memory(cross, rows, source):
    """Several rows of targets may share one encoder output.

    The results equal those of a repeated encoder output, also for a prompt and for decoding steps
    with caches.
    """
    model = encoder_decoder(CROSS[cross])
    tokens = jnp.asarray(np.random.default_rng(1).integers(1, VOCAB, (3 * rows, 5)))
    variables = general(model.init, source, tokens[:2])
    order = np.array([2, 0, 1, 4, 5, 3])[: 3 * rows]

    @jax.jit
    def run(variables):
        memory = apply_method(model.encode_inputs, variables, source[:rows])
        repeated = jax.tree.map(lambda x: jnp.repeat(x, 3, axis=0), memory)
        found, expected = (
            apply_method(model.decode, variables, tokens, m) for m in (memory, repeated)
        )
        cache = apply_method(model.init_cache, variables, source[:rows], max_length=5)
        cache = cache.map_rows(lambda x: jnp.repeat(x, 3, axis=0))
        _, cache = apply_method(model.extend, variables, tokens[order, :3], cache)
        cache = cache.map_rows(lambda x: x[jnp.argsort(order)])  # as beams change places
        last, _ = apply_method(model.extend, variables, tokens[:, 3:], cache)
        return found, last, expected

    found, last, expected = run(variables)
    close(found, expected)
    close(last, expected[:, 3:])
    memory = jax.eval_shape(lambda v: apply_method(model.encode_inputs, v, source), variables)
    with pytest.raises(ValueError, match="3 rows of tokens for 2 rows of memory"):
        jax.eval_shape(lambda m: apply_method(model.decode, variables, tokens[:3], m), memory)


def test_a_mask_says_which_inputs_are_real(source):
    """A mask says which inputs are real.

    With ``Mask()``, padding counts as real tokens. A mask of the real tokens gives the same outputs
    as no mask.
    """
    model = encoder_decoder(sj.Attention(2, 4), bias=sj.RelativeBias())
    targets = jnp.array([[0, 3, 2], [0, 2, 0]])
    variables = general(model.init, source, targets)
    reader = sj.Encoder(
        vocab_size=VOCAB, d_model=D, encoder=model.encoder, pooling="first", outputs=2
    )
    own = general(reader.init, source)
    everything = sj.Mask()
    real = sj.Mask(key_valid=source[:, ::-1] != 0)

    def another_id(params):  # uses 1 instead of 0
        embedding = params["params"]["embedding"]
        return {"params": params["params"] | {"embedding": embedding.at[1].set(embedding[0])}}

    @jax.jit
    def run(variables, own):
        replaced = jnp.where(source == 0, 1, source)
        cache = apply_method(model.init_cache, variables, source, max_length=3, mask=everything)
        found = (
            model.apply(variables, source, targets, mask=everything),
            apply_method(model.extend, variables, targets, cache)[0],
            reader.apply(own, source, mask=everything),
            model.apply(variables, source[:, ::-1], targets, mask=real),
            reader.apply(own, source[:, ::-1], mask=real).outputs,
        )
        expected = (
            model.apply(another_id(variables), replaced, targets),
            apply_method(model.hidden, another_id(variables), replaced, targets),
            reader.apply(another_id(own), replaced),
            model.apply(variables, source[:, ::-1], targets),
            reader.apply(own, source[:, ::-1]).outputs,
        )
        module = nnx.merge(nnx.graphdef(snnx.to_nnx(reader, rngs=nnx.Rngs(0))), own["params"])
        return (*found, module(source, mask=everything)), (*expected, found[2])

    found, expected = run(variables, own)
    jax.tree.map(close, found, expected)
    packed = sj.models.token_model.Rows(segments=(source, targets))
    with pytest.raises(
        ValueError, match=r"mask cannot be used with packed rows, because rows.segments"
    ):
        model.apply(variables, source, targets, rows=packed, mask=everything)


def test_an_array_is_a_tokenizers_attention_mask(source):
    """A boolean array acts like the attention mask of a tokenizer.

    In all methods of a model, it hides padding keys, and padding queries still see the real tokens.
    """
    model = encoder_decoder(sj.Attention(2, 4), bias=sj.RelativeBias())
    targets = jnp.array([[0, 3, 2], [0, 2, 0]])
    variables = general(model.init, source, targets)
    reader = sj.Encoder(vocab_size=VOCAB, d_model=D, encoder=model.encoder, outputs=2)
    own = general(reader.init, source)
    source = jnp.roll(source, 1, axis=1)  # moves some of the padding to the front
    real = np.asarray(source) != 0
    pairs = np.tril(np.ones((6, 6), bool))

    @jax.jit
    def answers(variables, own, mask, keys, pattern):
        states = apply_method(model.encode, variables, source, mask=mask)
        memory = sj.models.Memory(states, keys)
        cache = apply_method(model.init_cache, variables, source, max_length=3, mask=mask)
        module = nnx.merge(nnx.graphdef(snnx.to_nnx(reader, rngs=nnx.Rngs(0))), own["params"])
        return (
            states,
            apply_method(model.hidden, variables, source, targets, mask=mask),
            apply_method(model.extend, variables, targets, cache)[0],
            apply_method(model.decode, variables, targets, memory),
            module(source, mask=mask),
            module.pool(states, mask),
            apply_method(model.encode, variables, source, mask=pattern),
            module(source, mask=pattern),
        )

    expected = answers(
        variables,
        own,
        sj.Mask(key_valid=jnp.asarray(real), query_valid=jnp.ones((2, 6), bool)),
        sj.Mask(key_valid=jnp.asarray(real)),
        sj.Mask(allowed=jnp.asarray(pairs[None, None])),
    )
    found = answers(variables, own, real.astype(np.int32), real, pairs[None, None])
    jax.tree.map(close, found, expected)
    close(found[1], found[3])
    close(found[1], found[2])
    for mask, message in (
        (real[0], r"shape \(6,\), but it must be \[batch or 1, keys\], which is \[2 or 1, 6\]"),
        (pairs, r"shape \(6, 6\), .* mask\[None, None\] if your mask is \[q, keys\]"),
        (np.stack([pairs] * 2), r"shape \(2, 6, 6\), .* mask\[:, None\] if it is"),
        (np.where(real, 0.0, -1e9), "meant to be added to the logits, pass mask == 0"),
    ):
        with pytest.raises(ValueError, match=message):
            model.apply(variables, source, targets, mask=mask)
        with pytest.raises(ValueError, match=message):
            reader.apply(own, source, mask=mask)
    for mask in (True, "causal"):
        with pytest.raises(
            TypeError, match=f"the mask is of type {type(mask).__name__}, but it must be a Mask, or"
        ):
            reader.apply(own, source, mask=mask)


def test_stacks_read_arrays_as_layers_do():
    """Stacks interpret a mask array in the same way as layers.

    An array with two axes is ``[q, k]``. For losses that modules add, all positions count.
    """
    stack = sj.UniversalStack(
        (sj.Run(sj.Block(sj.Attention(2, 4), None), 2),), halting_threshold=0.5
    )
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, D)), jnp.float32)
    variables = {"params": general(stack.init, x)["params"]}
    pairs = jnp.tri(6)
    keys = jnp.ones((2, 1, 1, 6)).at[1, :, :, 4:].set(0)
    apply = jax.jit(lambda mask: stack.apply(variables, x, mask=mask, mutable=[LOSSES]))
    found = apply(pairs), apply(keys)
    masks = (
        sj.Mask(causal=True),
        sj.Mask(key_valid=keys[:, 0, 0], query_valid=jnp.ones((2, 6), bool)),
    )
    jax.tree.map(close, found, tuple(map(apply, masks)))


@pytest.mark.parametrize("kind", [sj.Stack, sj.UniversalStack])
def test_ragged_prompts_of_a_stack(kind):
    """Stacks decode prompts of different lengths.

    The embeddings are padded with NaN on either side. Decoding steps follow, for which no positions
    are given.
    """
    own = sj.Attention(2, 4, alignment=sj.Random(max_length=12))
    block = sj.Block(own, sj.FeedForward(12))
    stack = kind((sj.Run(block, 2),), bias=sj.RelativeBias(), positions=LearnedPositions(12))
    x = jnp.asarray(np.random.default_rng(3).normal(size=(2, 8, D)), jnp.float32)
    variables = general(stack.init, x)
    right = x[:, :5].at[1, 3:].set(jnp.nan)
    left = right.at[1].set(jnp.roll(right[1], 2, axis=0))
    valid = np.concatenate([np.arange(5) < [[5], [3]], np.arange(5) >= [[0], [2]]])

    @jax.jit
    def run(variables):
        whole = stack.apply(variables, x, mask=sj.Mask(causal=True))
        prompts = jnp.concatenate([right, left])
        caches = apply_method(stack.init_cache, variables, prompts, max_length=8)
        mask = sj.Mask(key_valid=jnp.asarray(valid))
        y, caches = apply_method(stack.extend, variables, prompts, caches, mask=mask)
        new = jnp.stack([x[0, 5:8], x[1, 3:6]] * 2)

        def step(caches, new):
            """Decodes one token."""
            return apply_method(stack.extend, variables, new[:, None], caches)[::-1]

        return whole, y, jax.lax.scan(step, caches, new.swapaxes(0, 1))[1][:, :, 0].swapaxes(0, 1)

    whole, prompts, steps = map(np.asarray, run(variables))
    for i, n in enumerate((5, 3, 5, 3)):
        close(prompts[i][valid[i]], whole[i % 2, :n])
        close(steps[i], whole[i % 2, n : n + 3])


def test_positions_past_a_table_are_refused(source):
    """Positions beyond a table raise an error if the length is known, and give NaN otherwise."""
    table = LearnedPositions(6)
    values = {"params": {"embedding": jnp.ones((6, D))}}
    with pytest.raises(ValueError, match="max_length=6, but it was given 7 positions"):
        table.apply(values, np.arange(7), D)
    found = jax.jit(lambda p: table.apply(values, p, D))(jnp.array([5, 6]))
    assert np.isfinite(found[0]).all() and np.isnan(found[1]).all()
    block = sj.Block(sj.Attention(2, 4), sj.FeedForward(4))
    stack = sj.Stack((sj.Run(block, 1),), positions=table)
    with pytest.raises(ValueError, match="max_length=6, but it was given 7 positions"):
        jax.eval_shape(stack.init, jax.random.key(0), jnp.ones((1, 7, D)))
    learned = encoder_decoder(sj.Attention(2, 4), positions=table)
    for model, tokens in (
        (learned, source),
        (sj.LanguageModel(vocab_size=VOCAB, d_model=D, decoder=stack), source[:, :1]),
    ):
        variables = general(model.init, tokens, source[:, :4])
        room = 8 + (tokens.shape[1] if isinstance(model, sj.LanguageModel) else 0)
        init = functools.partial(apply_method, model.init_cache, variables, tokens)
        jax.eval_shape(functools.partial(init, max_length=5))
        with pytest.raises(ValueError, match=f"max_length=6, but .*{room} positions"):
            jax.eval_shape(functools.partial(init, max_length=8))
