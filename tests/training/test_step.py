"""Compares a step's loss with NumPy, and its updates on meshes and in micro-batches."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from synthesizer_jax.base.registry import replace
from synthesizer_jax.checkpoints.manager import Checkpoints, restore_variables
from synthesizer_jax.checkpoints.placement import place_variables
from synthesizer_jax.inference import Decoding, decode_sequences, score_targets
from synthesizer_jax.models import (
    LOSSES,
    Run,
    Size,
    UniversalStack,
    alignment,
    stacks_of,
    t5,
    unroll,
    unroll_variables,
)
from synthesizer_jax.optimizers import Adafactor, Constant
from synthesizer_jax.sharding import MeshShape
from synthesizer_jax.training import step
from synthesizer_jax.training.step import loss_sums
from synthesizer_jax.training.trainer import Trainer
from tests.training import tiny
from tests.training.test_losses import oracle
from tests.training.tiny import (
    STREAMS,
    VOCAB,
    ClassStream,
    CopyStream,
    close,
    encoder,
    experiment,
    stepped,
)

Z, SMOOTHING = 0.01, 0.1
PLAIN = {"z_loss": 0.0, "label_smoothing": 0.0}
TINY = Size(8, 1, 16, 2, 4)


def initialized(model, batch):
    """Returns random variables without zeros, so that biases have an effect, too."""
    variables = jax.jit(model.init)(jax.random.key(0), batch["encoder_input_tokens"])
    leaves, tree = jax.tree.flatten(variables)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, moved)


class Auxiliary(nn.Module):
    """A user's feed-forward layer that adds its own loss."""

    @nn.compact
    def __call__(self, x):
        self.sow(LOSSES, "auxiliary", jnp.mean(x**2))
        return nn.Dense(x.shape[-1])(x)


def with_auxiliary(model, **changes):
    """Returns the model with `Auxiliary` layers in its decoder."""
    runs = tuple(
        replace(run, block=run.block.copy(feed_forward=Auxiliary())) for run in model.decoder.runs
    )
    return model.copy(decoder=model.decoder.copy(runs=runs, **changes))


def test_scanned_layers_sow_their_losses_too():
    batch = next(CopyStream())
    model = with_auxiliary(experiment(layers=3).model, scan=True)
    tokens = batch["encoder_input_tokens"], batch["decoder_input_tokens"]
    variables = jax.jit(model.init)(jax.random.key(0), *tokens)
    scanned = loss_sums(model, variables, batch, **PLAIN).penalty
    looped = loss_sums(unroll(model), unroll_variables(model, variables), batch, **PLAIN).penalty
    np.testing.assert_allclose(scanned, looped, rtol=1e-5)
    assert looped > 1.0


def test_layers_that_sow_when_they_are_initialized_are_trained_and_restored(tmp_path):
    recipe = experiment()
    recipe = replace(recipe, model=with_auxiliary(recipe.model))
    state, _ = stepped(recipe, CopyStream())
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state, None)
    checkpoints.close()
    _, layout = place_variables(
        recipe.model, recipe.example, MeshShape(), devices=jax.devices()[:1]
    )
    _, variables = restore_variables(tmp_path, layout=layout)
    jax.tree.map(np.testing.assert_array_equal, variables, state.variables)


@pytest.mark.parametrize(("head", "tied"), [("classes", True), ("masked", True), ("masked", False)])
def test_the_loss_is_the_cross_entropy_of_the_head(head, tied, monkeypatch):
    model = encoder(**tiny.HEADS[head]).copy(tied=tied)
    batch = next(STREAMS[head]())
    variables = initialized(model, batch)
    encoded = jax.jit(model.apply)(variables, batch["encoder_input_tokens"])
    logits = encoded.token_logits if head == "masked" else encoded.outputs[:, None]
    targets, weights = batch["decoder_target_tokens"], batch["decoder_loss_weights"]
    loss, z_loss, _ = oracle(np.float64(logits), targets, weights, Z, SMOOTHING)
    hits = (np.asarray(logits).argmax(-1) == targets) * weights
    targets[weights == 0] = -100  # such targets must be ignored
    for most in (step.DENSE_LOGITS, 0):  # all logits at once, and in chunks
        monkeypatch.setattr(step, "DENSE_LOGITS", most)
        compiled = jax.jit(lambda v, b: loss_sums(model, v, b, z_loss=Z, label_smoothing=SMOOTHING))
        sums = compiled(variables, batch)
        np.testing.assert_allclose([sums.loss, sums.z_loss], [loss, z_loss], rtol=1e-5)
        assert (sums.num_correct, sums.weight, sums.penalty) == (hits.sum(), weights.sum(), 0)


def test_dropout_acts_where_there_is_a_key():
    model = encoder(dropout_rate=0.5)
    batch = next(ClassStream())
    variables = initialized(model, batch)
    loss = jax.jit(lambda key: loss_sums(model, variables, batch, **PLAIN, dropout_key=key).loss)
    losses = [float(loss(key)) for key in (None, None, jax.random.key(1), jax.random.key(2))]
    assert losses[0] == losses[1] and len(set(losses)) == 3


def universal(cost):
    """Returns an encoder-decoder whose stacks are Universal Transformers with adaptive halting."""
    plain = t5(TINY, vocab_size=VOCAB, relative_bias=False)
    shared = {
        name: UniversalStack(
            (Run(stack.runs[0].block, 3),), halting_threshold=0.9, ponder_cost=cost
        )
        for name, stack in stacks_of(plain).items()
    }
    return plain.copy(**shared)


def test_a_ponder_cost_is_part_of_the_loss():
    """The ponder cost is part of the loss.

    Each stack's ponder cost is averaged over the batch and added to the loss of the tokens.
    """
    batch = {k: jnp.asarray(v) for k, v in next(CopyStream()).items()}
    inputs = batch["encoder_input_tokens"], batch["decoder_input_tokens"]
    variables = jax.jit(universal(0.0).init)(jax.random.key(0), *inputs)

    def losses(v):
        """Returns the sums of losses for three weights of the ponder cost."""
        return [loss_sums(universal(c), v, batch, **PLAIN) for c in (0.0, 0.5, 1.0)]

    free, dear, dearer = jax.jit(losses)(variables)
    assert free.penalty == 0 and dear.loss == free.loss
    assert 2 * 0.5 < dear.penalty / dear.weight < 2 * 0.5 * 4  # 1 to 3 steps plus a remainder
    np.testing.assert_allclose(dearer.penalty, 2 * dear.penalty, rtol=1e-6)


class Uneven(CopyStream):
    """A stream whose inputs and targets have different lengths."""

    def batch(self, rng):
        batch = super().batch(rng)
        batch["encoder_input_tokens"] = batch["encoder_input_tokens"].copy()
        batch["encoder_input_tokens"][1::2, 3:] = 0
        return batch


@pytest.mark.parametrize(
    ("model", "stream", "normalizer"),
    [
        (t5(TINY, vocab_size=VOCAB), Uneven, "tokens_with_padding"),
        (universal(1.0), Uneven, None),
        (encoder(masked_lm=True), STREAMS["masked"], None),
    ],
    ids=["with padding", "ponder cost", "masked"],
)
def test_micro_batches_make_the_same_update(model, stream, normalizer):
    (one, (found,)), (four, (other,)) = (
        stepped(experiment(model, micro_batches=n, loss_normalizer=normalizer), stream())
        for n in (1, 4)
    )
    close(one.params, four.params, atol=1e-5)
    assert found == pytest.approx(other, rel=1e-5)


def test_eight_micro_batches_need_less_than_a_third_of_the_temporaries():
    parts = step._split_micro_batches(jnp.arange(12), 3)  # every part has rows of every device
    assert parts.tolist() == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    temporaries = []
    for parts in (1, 8):
        data = {"inputs_length": 128, "targets_length": 64}
        recipe = experiment(
            t5(Size(32, 1, 128, 2, 16), vocab_size=256), data=data, micro_batches=parts
        )
        recipe = replace(recipe, data=dataclasses.replace(recipe.data, batch_size=64))
        compiled = Trainer(recipe, jax.devices()[:1]).compile()
        temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
    assert temporaries[1] <= 0.3 * temporaries[0], temporaries


KIND = alignment("rv", head_dim=4, max_length=8)
SCANNED = t5(Size(16, 2, 32, 4, 4), encoder=KIND, vocab_size=VOCAB, dropout_rate=0.1, scan=True)
FACTORED = Adafactor(learning_rate=Constant(0.01), min_size=4)
ON_MESHES = {
    "data": (SCANNED, CopyStream, {}, [MeshShape(data=2, tensor=2, sequence=2)]),
    "fsdp": (SCANNED, CopyStream, {"optimizer": FACTORED}, [MeshShape(data=1, fsdp=4, tensor=2)]),
    "masked": (
        *(encoder(masked_lm=True), STREAMS["masked"], {"ema": 0.9}),
        [MeshShape(data=8), MeshShape(data=2, fsdp=2, tensor=2)],
    ),
}


@pytest.mark.parametrize("name", ON_MESHES)
def test_meshes_have_the_same_losses(name, monkeypatch):
    """The losses are the same on every mesh.

    The losses are also computed in chunks, for the rows of each device.
    """
    model, stream, options, meshes = ON_MESHES[name]
    monkeypatch.setattr(step, "DENSE_LOGITS", 0)
    recipe = experiment(model, **options)
    state, single = stepped(recipe, stream(), steps=4)
    for mesh in meshes:
        found, metrics = stepped(replace(recipe, mesh=mesh), stream(), steps=4, devices=8)
        for one, many in zip(single, metrics, strict=True):
            assert many == pytest.approx(one, rel=2e-3)
            assert many["data_checksum"] == one["data_checksum"]
        close(found.averaged_variables, state.averaged_variables, atol=5e-4)
        if name == "fsdp":
            table = found.params["encoder"]["run_0"]["attention"]["align"]["part_0"]["table"]
            assert table.sharding.spec == P(None, "tensor", "fsdp", None)


def test_bfloat16_on_several_cpus():
    recipe = experiment(t5(TINY, vocab_size=VOCAB, dtype="bfloat16"))
    (_, (one,)), (_, (two,)) = (stepped(recipe, CopyStream(), devices=n) for n in (1, 2))
    assert two == pytest.approx(one, rel=2e-2)


@pytest.mark.parametrize("most", [0, 2**22], ids=["chunks", "whole"])
def test_bfloat16_logits_of_the_loss_are_not_rounded(most, monkeypatch):
    monkeypatch.setattr(step, "DENSE_LOGITS", most)
    model = t5(TINY, vocab_size=16, dtype="bfloat16")
    batch = next(CopyStream())
    inputs = batch["encoder_input_tokens"], batch["decoder_input_tokens"]
    variables = jax.jit(model.init)(jax.random.key(0), *inputs)
    kernel = variables["params"]["logits_kernel"] * 30.0
    variables["params"]["logits_kernel"] = kernel

    def total(kernel):
        params = {**variables["params"], "logits_kernel": kernel}
        return loss_sums(model, {"params": params}, batch, **PLAIN).total

    loss, gradient = jax.jit(jax.value_and_grad(total))(kernel)
    hidden = jax.jit(functools.partial(model.apply, method=model.hidden))(
        variables, *inputs
    ).reshape(-1, 8)
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
    """JAX can trace training, decoding and scoring while every promotion is an error."""
    model = t5(TINY, encoder=KIND, vocab_size=16, dtype=dtype, dropout_rate=0.1)
    numbers = jnp.array([[1] * 4 + [2] * 4] * 8)
    batch = {k: jnp.asarray(x) for k, x in next(CopyStream()).items()}
    packed = batch | {f"{side}_segment_ids": numbers for side in ("encoder", "decoder")}
    source, targets = batch["encoder_input_tokens"], batch["decoder_target_tokens"]

    def total(variables, batch, key, segments=None):
        options = {"z_loss": 1e-4, "label_smoothing": 0.1, "max_segments": segments}
        return loss_sums(model, variables, batch, dropout_key=key, **options).total

    # With these settings, JAX raises an error while it traces a promotion. No values are computed.
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        key = jax.random.key(0)
        variables = jax.eval_shape(model.init, key, source, targets)
        jax.eval_shape(jax.grad(total), variables, batch, key)
        jax.eval_shape(lambda v: jax.grad(total)(v, packed, key, 2), variables)
        for options in ({"beams": 2}, {"temperature": 0.5, "top_k": 3, "top_p": 0.9}):
            decoding = Decoding(max_length=8, **options)
            search = functools.partial(decode_sequences, model=model, decoding=decoding)
            jax.eval_shape(search, variables, source)
        jax.eval_shape(lambda v: score_targets(v, source, targets=targets, model=model), variables)
