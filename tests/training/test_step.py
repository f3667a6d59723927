"""Gradient accumulation: the same update, a fraction of the memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax import Attention, Block, FeedForward, LanguageModel, RelativeBias, Stack
from synthesizer_jax.inference import Decoding, decode_sequences, score_targets
from synthesizer_jax.models import Run, Size, UniversalStack, alignment, stacks_of, t5
from synthesizer_jax.registry import replace
from synthesizer_jax.sharding import MeshShape
from synthesizer_jax.training import step
from synthesizer_jax.training.step import _split_micro_batches, loss_sums
from synthesizer_jax.training.trainer import Trainer
from tests.training.tiny import CopyStream, experiment


def trainer(model, **changes):
    recipe = experiment(**changes)
    if changes.get("mesh"):
        recipe = replace(recipe, mesh=changes["mesh"])
    return Trainer(replace(recipe, model=model), jax.devices()[:1])


def universal(**options):
    """An encoder-decoder of Universal Transformers with adaptive halting."""
    plain = t5(Size(8, 1, 16, 2, 4), vocab_size=16, relative_bias=False)
    shared = {
        name: UniversalStack((Run(stack.runs[0].block, 3),), halting_threshold=0.9, **options)
        for name, stack in stacks_of(plain).items()
    }
    return plain.copy(**shared)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "normalizer"),
    [
        (t5(Size(8, 1, 16, 2, 4), vocab_size=16), None),
        (t5(Size(8, 1, 16, 2, 4), vocab_size=16), "tokens_with_padding"),
        (universal(ponder_cost=1.0), None),
    ],
    ids=["mean", "with padding", "ponder cost"],
)
def test_micro_batches_make_the_same_update(model, normalizer):
    states, metrics = [], []
    for parts in (1, 4):
        run = trainer(model, micro_batches=parts, loss_normalizer=normalizer)
        batch = next(CopyStream())
        batch["encoder_input_tokens"][1::2, 3:] = 0  # not the lengths of the targets
        state, found = run.step(run.init(), run.shard_batch(batch))
        states.append(state.params)
        metrics.append({k: float(v) for k, v in found.items()})
    for other, found in zip(states[1:], metrics[1:], strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), states[0], other)
        assert found == pytest.approx(metrics[0], rel=1e-5)


@pytest.mark.slow
def test_eight_micro_batches_need_less_than_a_third_of_the_temporaries():
    size = Size(64, 2, 256, 4, 16)
    temporaries = []
    for parts in (1, 8):
        recipe = experiment(micro_batches=parts)
        data = replace(recipe.data, batch_size=64, inputs_length=128, targets_length=64)
        recipe = replace(recipe, model=t5(size, vocab_size=512), data=data, mesh=MeshShape())
        run = Trainer(recipe, jax.devices()[:1])
        temporaries.append(run.compile().memory_analysis().temp_size_in_bytes)
    assert temporaries[1] <= 0.3 * temporaries[0], temporaries


def test_every_micro_batch_has_rows_of_every_device():
    x = _split_micro_batches(jnp.arange(12), 3)
    assert x.tolist() == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


@pytest.mark.slow
def test_a_ponder_cost_is_part_of_the_loss():
    """Averaged over the batch, once a stack, on top of what the tokens cost."""

    def model(cost):
        return universal(ponder_cost=cost)

    batch = {k: jnp.asarray(v) for k, v in next(CopyStream()).items()}
    variables = model(0.0).init(
        jax.random.key(0), batch["encoder_input_tokens"], batch["decoder_input_tokens"]
    )
    free, dear, dearer = (
        loss_sums(model(cost), variables, batch, z_loss=0.0, label_smoothing=0.0)
        for cost in (0.0, 0.5, 1.0)
    )
    assert free.penalty == 0 and dear.loss == free.loss
    assert 2 * 0.5 < dear.penalty / dear.weight < 2 * 0.5 * 4  # one to three steps and a remainder
    np.testing.assert_allclose(dearer.penalty, 2 * dear.penalty, rtol=1e-6)


@pytest.mark.parametrize("most", [0, 2**22], ids=["chunks", "whole"])
def test_bfloat16_logits_of_the_loss_are_not_rounded(most, monkeypatch):
    monkeypatch.setattr(step, "DENSE_LOGITS", most)
    model = t5(Size(8, 1, 16, 2, 4), vocab_size=16, dtype="bfloat16")
    batch = next(CopyStream())
    inputs = batch["encoder_input_tokens"], batch["decoder_input_tokens"]
    variables = model.init(jax.random.key(0), *inputs)
    kernel = variables["params"]["logits_kernel"] * 30.0
    variables["params"]["logits_kernel"] = kernel

    def total(kernel):
        params = {**variables["params"], "logits_kernel": kernel}
        return loss_sums(model, {"params": params}, batch, z_loss=0.0, label_smoothing=0.0).total

    loss, gradient = jax.value_and_grad(total)(kernel)
    hidden = model.apply(variables, *inputs, method=model.hidden).reshape(-1, 8)
    x, k = np.float64(hidden), np.float64(kernel.astype(jnp.bfloat16))
    targets, weights = (
        batch[f"decoder_{n}"].reshape(-1) for n in ("target_tokens", "loss_weights")
    )
    p = np.exp(x @ k) / np.exp(x @ k).sum(-1, keepdims=True)
    np.testing.assert_allclose(loss, -(weights * np.log(p[range(64), targets])).sum(), rtol=2e-6)
    expected = x.T @ (weights[:, None] * (p - np.eye(16)[targets]))
    np.testing.assert_allclose(gradient, expected, atol=4e-3 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_promotes_neither_ranks_nor_dtypes(dtype):
    kind = alignment("rv", head_dim=4, max_length=8)
    size = Size(8, 1, 16, 2, 4)
    model = t5(size, encoder=kind, vocab_size=16, dtype=dtype, dropout_rate=0.1)
    numbers = jnp.array([[1] * 4 + [2] * 4] * 8)
    batch = {k: jnp.asarray(x) for k, x in next(CopyStream()).items()}
    packed = batch | {
        f"{side}_{what}": x
        for side in ("encoder", "decoder")
        for what, x in {"segment_ids": numbers, "positions": numbers}.items()
    }
    source, targets = batch["encoder_input_tokens"], batch["decoder_target_tokens"]

    def total(variables, batch, key, segments=None):
        options = {"z_loss": 1e-4, "label_smoothing": 0.1, "max_segments": segments}
        return loss_sums(model, variables, batch, dropout_key=key, **options).total

    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        key = jax.random.key(0)
        variables = jax.eval_shape(model.init, key, source, targets)
        jax.eval_shape(jax.grad(total), variables, batch, key)
        jax.eval_shape(lambda v: jax.grad(total)(v, packed, key, 2), variables)
        for options in (
            {"beams": 2},
            {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_length": 2},
        ):
            decoding = Decoding(max_length=8, **options)
            search = functools.partial(decode_sequences, model=model, decoding=decoding)
            jax.eval_shape(search, variables, source)
        jax.eval_shape(lambda v: score_targets(v, source, targets=targets, model=model), variables)


def test_a_language_model_learns_from_the_same_batches():
    block = Block(Attention(2, 4), FeedForward(16))
    stack = Stack((Run(block, 1),), bias=RelativeBias(), scan=True)
    model = LanguageModel(vocab_size=16, d_model=8, decoder=stack, prefix=True)
    run, stream = trainer(model), CopyStream()
    state, losses = run.init(), []
    for _ in range(25):
        state, found = run.step(state, run.shard_batch(next(stream)))
        losses.append(float(found["loss"]))
    assert losses[-1] < losses[0] - 0.2
