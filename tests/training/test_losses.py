"""Compares losses and their gradients with NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from synthesizer_jax.costs.summary import flops
from synthesizer_jax.training.losses import chunked_cross_entropy, cross_entropy, loss_denominator

Z, V = 0.01, 11


def oracle(logits, targets, weights, z, smoothing):
    """Returns the loss, the z-loss and their gradient, which are computed token by token."""
    loss = z_loss = 0.0
    gradient = np.zeros_like(logits)
    for i in np.ndindex(targets.shape):
        row = logits[i]
        log_z = np.log(np.exp(row).sum())
        y = np.full(len(row), smoothing / (len(row) - 1))
        y[targets[i]] = 1 - smoothing
        entropy = -(y[y > 0] * np.log(y[y > 0])).sum()
        loss += weights[i] * (log_z - y @ row - entropy)
        z_loss += weights[i] * z * log_z**2
        p = np.exp(row - log_z)
        gradient[i] = weights[i] * (p - y + 2 * z * log_z * p)
    return loss, z_loss, gradient


def made(shape=(3, 5), seed=0):
    rng = np.random.default_rng(seed)
    weights = (rng.random(shape) > 0.3).astype(np.float32)
    return rng.normal(size=(*shape, V)) * 2, rng.integers(0, V, shape), weights


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradient_equal_numpy(smoothing):
    logits, targets, weights = made()
    loss, z_loss, gradient = oracle(logits, targets, weights, Z, smoothing)

    def total(logits):
        sums = cross_entropy(logits, targets, weights=weights, z_loss=Z, label_smoothing=smoothing)
        return sums.total, sums

    (_, sums), found = jax.jit(jax.value_and_grad(total, has_aux=True))(jnp.float32(logits))
    np.testing.assert_allclose(sums.loss, loss, rtol=1e-5)
    np.testing.assert_allclose(sums.z_loss, z_loss, rtol=1e-5)
    np.testing.assert_allclose(found, gradient, atol=1e-5)
    hits = (logits.argmax(-1) == targets) * weights
    assert (sums.num_correct, sums.weight) == (hits.sum(), weights.sum())


def test_of_equal_logits_the_first_is_predicted():
    rng = np.random.default_rng(0)
    logits, targets = rng.integers(0, 3, (1, 200, V)), rng.integers(0, V, (1, 200))
    sums = cross_entropy(jnp.float32(logits), targets, weights=jnp.ones((1, 200)))
    assert 0 < sums.num_correct == (logits.argmax(-1) == targets).sum()


def chunked(logits, targets, *, chunk=4, **options):
    """Computes losses in chunks.

    The output projection is the identity, so the hidden states are the logits.
    """
    kernel = jnp.eye(V)
    return chunked_cross_entropy(
        logits, kernel, targets=jnp.asarray(targets), chunk=chunk, **options
    )


BOTH = pytest.mark.parametrize("losses", [cross_entropy, chunked])


@pytest.mark.parametrize(
    ("b", "t", "chunk", "cap"), [(1, 1, 4, None), (3, 5, 4, 1.0), (2, 6, 12, None), (2, 7, 1, None)]
)
def test_chunks_equal_the_whole(b, t, chunk, cap):
    _, targets, weights = made((b, t))
    rng = np.random.default_rng(1)
    hidden, kernel = (jnp.float32(rng.normal(size=shape)) for shape in ((b, t, 6), (6, V)))
    options = {"weights": weights, "z_loss": Z, "label_smoothing": 0.1}
    own = {"targets": jnp.asarray(targets), "scale": 0.5, "soft_cap": cap, "chunk": chunk}

    def whole(h, k):
        logits = (0.5 * h) @ k
        sums = cross_entropy(
            logits if cap is None else cap * jnp.tanh(logits / cap), targets, **options
        )
        return sums.total, sums

    def chunks(h, k):
        sums = chunked_cross_entropy(h, k, **own, **options)
        return sums.total, sums

    @jax.jit
    def both(h, k):
        return [jax.value_and_grad(f, (0, 1), has_aux=True)(h, k) for f in (whole, chunks)]

    for x, y in zip(*map(jax.tree.leaves, both(hidden, kernel)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_chunks_never_hold_all_logits():
    hidden = jax.ShapeDtypeStruct((8, 512, 32), jnp.float32)
    kernel = jax.ShapeDtypeStruct((32, 4000), jnp.float32)
    targets = jnp.zeros((8, 512), jnp.int32)
    weights = jnp.ones((8, 512))

    def temporaries(loss):
        gradient = jax.jit(jax.grad(lambda h, k: loss(h, k).total, (0, 1)))
        return gradient.lower(hidden, kernel).compile().memory_analysis().temp_size_in_bytes

    whole = temporaries(lambda h, k: cross_entropy(h @ k, targets, weights=weights))
    cut = temporaries(
        lambda h, k: chunked_cross_entropy(h, k, targets=targets, weights=weights, chunk=256)
    )
    assert cut < 0.2 * whole


def test_logits_of_a_chunk_are_made_once():
    hidden, kernel = jnp.ones((2, 6, 5)), jnp.ones((5, V))
    targets = jnp.zeros((2, 6), int)
    weights = jnp.ones((2, 6))

    def loss(h, k):
        return chunked_cross_entropy(h, k, targets=targets, weights=weights, chunk=4).total

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(hidden, kernel)
    one_chunk = 2 * 4 * 5 * V
    assert flops(jaxpr.jaxpr) == 3 * 3 * one_chunk  # 3 chunks, with logits and two gradients each


@BOTH
def test_targets_of_weight_zero_are_ignored(losses):
    """Targets with weight zero are ignored, even if they are -100 or have NaN logits.

    Invalid targets with a nonzero weight make everything NaN.
    """
    logits, targets, weights = made()
    weights[0, 0] = weights[2, 1] = 0.0
    strange = targets.copy()
    strange[0, 0] = -100
    strange[2, 1] = V

    @jax.jit
    def run(x, w, targets):
        def total(x):
            """Returns the total loss."""
            return losses(x, targets, weights=w, z_loss=Z, label_smoothing=0.1).total

        return jax.value_and_grad(total)(x)

    plain, odd = (run(jnp.float32(logits), weights, t) for t in (targets, strange))
    jax.tree.map(np.testing.assert_array_equal, plain, odd)
    weights[0, 0] = 1.0
    for wrong in (-100, -1, V):
        strange[0, 0] = wrong
        total, gradient = run(jnp.float32(logits), weights, strange)
        assert np.isnan(total) and np.all(np.isnan(gradient[0, 0]))
        assert np.all(np.isfinite(gradient[0, 1]))
    logits[2, 1] = np.nan
    assert np.isfinite(cross_entropy(logits, targets, weights=weights).total)


def test_targets_may_have_8_bits():
    logits = jax.random.normal(jax.random.key(0), (2, 3, 300))
    targets = np.array([[0, 7, 255]] * 2, np.uint8)
    weights = jnp.ones((2, 3))
    found, expected = (
        cross_entropy(logits, t, weights=weights) for t in (targets, targets.astype(np.int32))
    )
    assert found.total == expected.total


@BOTH
def test_second_derivatives(losses):
    """Second derivatives of losses equal finite differences of the gradient."""
    logits, targets, weights = made((2, 3))
    weights[0, 0] = 0.0
    direction = np.random.default_rng(1).normal(size=logits.shape)
    direction = jnp.float32(np.where((weights != 0)[..., None], direction, 0.0))

    def total(x):
        return losses(x, targets, weights=weights, z_loss=Z, label_smoothing=0.1).total

    x = jnp.float32(logits)
    gradient = jax.jit(jax.grad(total))
    over_reverse = jax.jvp(gradient, (x,), (direction,))[1]
    twice_reverse = jax.grad(lambda x: (gradient(x) * direction).sum())(x)
    unseen = gradient(x.at[0, 0].set(jnp.nan))  # NaN logits with weight 0
    np.testing.assert_array_equal(unseen, gradient(x))
    difference = (gradient(x + 1e-2 * direction) - gradient(x - 1e-2 * direction)) / 2e-2
    for product in (over_reverse, twice_reverse):
        np.testing.assert_allclose(product, difference, atol=2e-3)


def test_no_tokens_cost_nothing():
    for losses in (cross_entropy, chunked):
        sums = losses(jnp.zeros((0, 4, V)), jnp.zeros((0, 4), int), weights=jnp.zeros((0, 4)))
        assert sums.total == sums.weight == 0


def test_the_loss_has_the_denominator_of_its_normalizer():
    weights = jnp.asarray([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    assert loss_denominator(weights) == 3
    assert loss_denominator(weights, "tokens_with_padding") == 6
    assert loss_denominator(weights, 233_472.0) == 233_472
    assert loss_denominator(jnp.zeros((2, 2))) == 1


def test_a_factor_of_the_total_is_not_rounded_to_bfloat16():
    """A factor of the total loss is not rounded to bfloat16.

    An example of a factor is one over the number of tokens.
    """
    logits, targets, weights = made()
    x = jnp.asarray(logits, jnp.bfloat16)
    factor = jnp.float32(1 / 37)

    def total(x, factor):
        """Returns the total loss, multiplied by a factor."""
        return factor * chunked(x, targets, weights=weights).total

    whole, scaled = (jax.grad(total)(x, f) for f in (jnp.float32(1.0), factor))
    np.testing.assert_array_equal(scaled, (whole * factor).astype(jnp.bfloat16))


@BOTH
def test_losses_under_shard_map(losses):
    """Losses work under `jax.shard_map` with the default `check_vma`.

    The logits are sharded over devices, and the kernel is replicated.
    """
    logits, targets, weights = made((8, 5))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = P("data")

    def total(factor, x, y, w):
        return losses(factor * x, y, weights=w, z_loss=Z).total

    def divided(factor, *arrays):
        return jax.lax.psum(total(factor, *arrays), "data")

    spread = jax.shard_map(divided, mesh=mesh, in_specs=(None, rows, rows, rows), out_specs=P())
    arguments = jnp.float32(1.5), jnp.float32(logits), jnp.asarray(targets), jnp.asarray(weights)
    found, expected = (jax.jit(jax.value_and_grad(f, (0, 1)))(*arguments) for f in (spread, total))
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@BOTH
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_large_logits_lose_no_digits(losses, smoothing):
    """Large logits do not reduce the precision of losses.

    The log-partition function is about 150, where neighboring float32 numbers differ by 1.5e-5.
    """
    rng = np.random.default_rng(3)
    logits = np.float32(150 + rng.normal(size=(1, 4, V))).astype(np.float64)
    targets = rng.integers(0, V, (1, 4))
    weights = np.ones((1, 4), np.float32)
    z_loss = Z if smoothing else 0.0
    loss, *_, expected = oracle(logits, targets, weights, z_loss, smoothing)

    def total(x):
        sums = losses(x, targets, weights=weights, z_loss=z_loss, label_smoothing=smoothing)
        return sums.total, sums

    found, sums = jax.grad(total, has_aux=True)(jnp.float32(logits))
    np.testing.assert_allclose(sums.loss, loss, rtol=1e-6)
    np.testing.assert_allclose(found, expected, atol=1e-6 * max(1.0, np.abs(expected).max()))
