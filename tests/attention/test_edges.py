"""Tests that `attend` accepts extreme sizes, dtypes and numbers."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax.attention import (
    Mask,
    attend,
    attention_weights,
    banded,
    low_rank,
    relative,
    static,
)
from tests.attention import cases, oracle
from tests.attention.cases import BATCH, EVERY_TERM, HEADS, KEYS, WIDTH


def cast(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def test_one_example_in_half_precision() -> None:
    """Tests that an array with a batch axis of size 1 is not treated as shared among examples.

    The test covers a single call, a call under `vmap`, and a program for TPUs.
    """
    terms = cast(cases.make_terms(EVERY_TERM, 1, KEYS, KEYS), "float16")
    values = cases.normal("values", 1, KEYS, HEADS, WIDTH, dtype="float16")

    def grad(terms, values, route="fused"):
        def loss(*x):
            """Returns the sum of the output in float32."""
            return attend(*x, implementation=route).astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1))(terms, values)

    jitted = jax.jit(grad, static_argnums=2, compiler_options=cases.FAST_COMPILE)
    found = jitted(terms, values)
    expected = jitted(*cast((terms, values), jnp.float32), "reference")
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert x.dtype == jnp.float16
        assert oracle.rms_error(x, np.asarray(y, np.float64)) < 2e-2
    jax.eval_shape(jax.vmap(grad), *jax.tree.map(lambda x: x[None], (terms, values)))
    jax.jit(grad).trace(terms, values).lower(lowering_platforms=("tpu",))


@pytest.mark.parametrize("route", ["static", "fused"])
def test_64_bit_integers_by_default(route: str) -> None:
    """`attend` works although `jax_enable_x64` turns Python integers into 64-bit arrays."""
    terms = cases.make_terms(cases.ROUTES[route], BATCH, KEYS, KEYS)
    values = cases.normal("values", BATCH, KEYS, HEADS, WIDTH)
    mask = Mask.padded(jnp.array([11, 4, 0], jnp.int32), causal=True)

    def loss(terms, values, route):
        return jnp.sin(attend(terms, values, mask=mask, implementation=route)).sum()

    with jax.enable_x64(True):
        gradient = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
        found, expected = (gradient(terms, values, r) for r in (route, "reference"))
        jax.jit(jax.grad(loss), static_argnums=2).trace(terms, values, route).lower(
            lowering_platforms=("tpu",)
        )
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert x.dtype == jnp.float32
        assert oracle.error(x, np.asarray(y, np.float64)) < 2e-5


@pytest.mark.parametrize("route", ["fused", "reference"])
def test_values_and_sinks_may_be_wider_than_logits(route: str) -> None:
    """Values and sinks may be float64 although the logits are float32."""
    terms = cases.make_terms(("dot_product",), BATCH, KEYS, KEYS)
    values = ("values", BATCH, KEYS, HEADS, WIDTH)
    mask = Mask(query_lengths=jnp.array([11, 4, 0]))
    sinks = jnp.array([0.5, -1.0])

    def loss(terms, values, sinks):
        return jnp.sin(attend(terms, values, mask=mask, sinks=sinks, implementation=route)).sum()

    narrow = jax.grad(loss, (0, 1, 2))(terms, cases.normal(*values), sinks)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wide = [x.astype(jnp.float64) for x in (cases.normal(*values), sinks)]
        found = jax.grad(loss, (0, 1, 2))(terms, *wide)
    assert [x.dtype.name for x in jax.tree.leaves(found)[-2:]] == ["float64"] * 2
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), found, narrow)


@pytest.mark.parametrize("gap", [14.0, 30.0])
def test_float16_tables_keep_their_digits(gap: float) -> None:
    """Large logits of padding keys do not reduce the precision for the other keys."""
    b, n = 2, 32
    logits = cases.normal("logits", HEADS, n, n) + gap * (jnp.arange(n) >= 20)
    values, g = (cases.normal(x, b, n, HEADS, WIDTH, dtype="float16") for x in ("values", "g"))
    mask = Mask(key_lengths=jnp.full(b, 20))
    answer = oracle.attention((static(logits),), values, mask, g)
    found = cases.run((static(logits),), values, mask, g, "static")
    assert found[0].dtype == found[2].dtype == jnp.float16
    cases.compare(found, answer, 2e-3, oracle.rms_error)


@pytest.mark.parametrize("route", ["static", "fused", "reference"])
def test_logits_of_minus_infinity_and_equal_ones_of_any_size(route: str) -> None:
    """A query whose logits are all −∞ counts as a query without keys.

    If all logits are equal, the output is the mean of the values, even if the logits are huge.
    """
    logits = cases.normal("logits", HEADS, KEYS, KEYS)
    logits = logits.at[:, 3].set(-jnp.inf).at[:, 4, 2:].set(-jnp.inf)
    values, g = (cases.normal(x, BATCH, KEYS, HEADS, WIDTH) for x in ("values", "g"))
    for mask in (Mask(), Mask.padded(jnp.array([11, 5, 2]))):
        found = cases.run((static(logits),), values, mask, g, route)
        hidden = dataclasses.replace(mask, allowed=(logits > -jnp.inf)[None])
        answer = oracle.attention((static(jnp.maximum(logits, -50.0)),), values, hidden, g)
        cases.compare(found, answer, 2e-5)
    mean = np.asarray(values.mean(1, keepdims=True))
    for size in (float(jnp.finfo(jnp.float32).min), 3e38):
        terms = (static(jnp.full((HEADS, KEYS, KEYS), size)),)
        out, *_ = cases.run(terms, values, Mask(), g, route)
        np.testing.assert_allclose(out, np.broadcast_to(mean, out.shape), atol=1e-6)


@pytest.mark.parametrize("route", ["static", "fused"])
@pytest.mark.parametrize("sizes", [(0, 5, 7), (2, 0, 7), (2, 5, 0)], ids=str)
def test_empty_arrays(route: str, sizes: tuple[int, int, int]) -> None:
    b, q, k = sizes
    names = cases.ROUTES[route]
    terms = cases.make_terms([n for n in names if n != "relative" and (k or n != "outer")], b, q, k)
    values = cases.normal("values", b, k, HEADS, WIDTH)
    mask = Mask(causal=True, key_lengths=jnp.zeros(b, int))

    def loss(terms, values):
        return attend(terms, values, mask=mask, q_length=q, implementation=route).sum()

    out = jax.eval_shape(lambda v: attend(terms, v, mask=mask, implementation=route), values)
    assert out.shape == (b, q, HEADS, WIDTH)
    for x in jax.tree.leaves(jax.jit(jax.grad(loss, (0, 1)))(terms, values)):
        assert not np.any(x)


@pytest.mark.parametrize("first", [-9, -3, 0, 4])
@pytest.mark.parametrize("mask", [Mask(window=(1, 2)), Mask(causal=True, window=8)])
def test_weights_of_a_window_see_as_far_as_the_mask(first: int, mask: Mask) -> None:
    """The weights of a window respect the mask, even if the mask hides the whole window."""
    term = (banded(jnp.abs(cases.normal("w", 1, 1, HEADS, 6)), first=first, normalize=True),)
    values, g = (cases.normal(x, BATCH, KEYS, HEADS, WIDTH) for x in ("values", "g"))
    pairs = Mask(allowed=mask.pairs(KEYS, KEYS))
    expected = cases.run(term, values, pairs, g, "reference")
    found = cases.run(term, values, mask, g, "banded")
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, expected
    )


@pytest.mark.parametrize("mask", ["causal and padding", "packed causal"])
@pytest.mark.parametrize("route", [*cases.ROUTES, "banded"])
def test_no_dtype_is_promoted_by_accident(route: str, mask: str) -> None:
    """Both passes run under strict dtype promotion.

    Logits and values may have different dtypes.
    """
    masks = cases.self_masks() | cases.packed_masks()
    terms = cast(cases.make_terms(cases.ROUTES.get(route, ()), BATCH, KEYS, KEYS), "bfloat16")
    if route == "banded":
        terms = (banded(cases.normal("w", 1, KEYS, HEADS, 3, dtype="bfloat16"), first=-2),)
    values = cases.normal("values", BATCH, KEYS, HEADS, WIDTH, dtype="bfloat16")

    def loss(terms, values):
        y = attend(terms, values, mask=masks[mask], q_length=KEYS, implementation=route)
        assert y.dtype == jnp.bfloat16
        return y.astype(jnp.float32).sum()

    with jax.numpy_dtype_promotion("strict"):
        gradients = jax.eval_shape(jax.grad(loss, argnums=(0, 1)), terms, values)
        jax.eval_shape(loss, cast(terms, jnp.float32), values)
        weights = jax.eval_shape(
            lambda t: attention_weights(t, mask=masks[mask], k_length=KEYS), terms
        )
    assert {x.dtype for x in jax.tree.leaves(gradients)} == {jnp.dtype("bfloat16")}
    assert weights.dtype == jnp.float32


@pytest.mark.parametrize("route", ["static", "fused", "banded", "reference"])
def test_padding_may_hold_anything(route: str) -> None:
    """NaNs in padding tokens change neither the outputs nor the gradients."""
    lengths = jnp.array([11, 4, 0])
    real = (jnp.arange(KEYS) < lengths[:, None])[..., None, None]
    terms = cases.make_terms(cases.ROUTES.get(route, ()), BATCH, KEYS, KEYS)
    if route == "banded":
        terms = (banded(cases.normal("w", BATCH, KEYS, HEADS, 3), first=-1),)
    values, g = (cases.normal(x, BATCH, KEYS, HEADS, WIDTH) for x in ("values", "g"))

    def poison(x):
        return jnp.where(real, x, jnp.nan) if x.ndim == 4 and x.shape[0] == BATCH else x

    clean, dirty = (
        cases.run(*pair, Mask.padded(lengths), g, route)
        for pair in ((terms, values), jax.tree.map(poison, (terms, values)))
    )
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_nan_weights_of_padding_queries_do_not_reach_gradients(batch: int, normalize: bool) -> None:
    """Banded weights may be computed from padding tokens that are NaN, also for one example."""
    values, g = (cases.normal(x, batch, KEYS, HEADS, WIDTH) for x in ("values", "g"))
    weights = jnp.exp(cases.normal("w", batch, KEYS, HEADS, 3))
    mask = Mask.padded(jnp.full(batch, KEYS - 2))

    def gradients(weights):
        term = banded(weights, first=-1, normalize=normalize)
        return cases.run((term,), values, mask, g, "banded")

    clean = gradients(weights)
    dirty = gradients(weights.at[:, KEYS - 2 :].set(jnp.nan))
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)


def test_a_traced_position_beyond_a_bias_is_nan() -> None:
    """If a traced position is outside of a bias, the output is NaN.

    A position that is known during tracing would raise an error instead.
    """
    term = relative(cases.normal("bias", HEADS, 8), first=-5)
    keys = cases.normal("keys", 1, 4, HEADS, 3)
    values = cases.normal("values", 1, 4, HEADS, WIDTH)

    @jax.jit
    def step(position):
        product = low_rank(keys[:, :1], keys, token_keys=True)
        return attend((product, term), values, mask=Mask(query_offset=position))

    assert np.isfinite(step(3)).all() and np.isfinite(step(5)).all()
    assert np.isnan(step(6)).all() and np.isnan(step(0)).all()


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        (static(jnp.ones((2, 3, 3))), "terms is a single Static term, but it must be a tuple"),
        ((jnp.ones((2, 3, 3)),), "contains an object of type ArrayImpl"),
        ((type(static(jnp.ones((2, 3, 3)))),), "contains the class Static"),
        (None, "terms is of type NoneType, but it must be a tuple of terms"),
    ],
)
def test_what_an_alignment_may_return_by_mistake(terms, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        attend(terms, jnp.ones((1, 3, 2, 4)))


@pytest.mark.parametrize("way", ["plain", "scan", "checkpoint"])
def test_the_loop_of_gpus_holds_no_pattern_of_all_examples(way: str) -> None:
    """On GPUs, the loop over examples does not materialize the masks of all examples at once."""
    b, n = 6, 24
    queries = cases.normal("queries", b, n, 4, 8)
    mask = Mask.padded(jnp.arange(b) + 3, causal=True)

    def layer(x, _=None):
        terms = (low_rank(x, x, token_keys=True),)
        return attend(terms, x, mask=mask, implementation="fused"), None

    if way == "checkpoint":
        layer = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)
    run = {"scan": lambda x: jax.lax.scan(layer, x, None, length=2)[0].sum()}.get(
        way, lambda x: layer(x)[0].sum()
    )
    lowered = jax.jit(jax.grad(run)).trace(queries).lower(lowering_platforms=("rocm",)).as_text()
    assert f"4x{n}x{n}x" in lowered
    for element in ("i1", "f32"):
        assert f"{b}x4x{n}x{n}x{element}" not in lowered


def test_factors_of_outer_terms_are_not_rounded() -> None:
    """Tests that float32 factors of outer terms are multiplied with full precision on GPUs.

    By default, GPUs and TPUs round float32 factors of matrix products to fewer digits.
    """
    terms = cases.make_terms(("outer",), BATCH, KEYS, KEYS)
    values = cases.normal("values", BATCH, KEYS, HEADS, WIDTH)
    call = functools.partial(attend, terms, implementation="fused")
    text = jax.jit(call).trace(values).lower(lowering_platforms=("cuda",)).as_text()
    factors = [line for line in text.splitlines() if "dot_general" in line]
    assert sum("HIGHEST" in line for line in factors) == 2


@pytest.mark.parametrize("route", ["static", "fused", "banded"])
def test_padding_keeps_little_for_the_backward_pass(route: str) -> None:
    """Padding does not increase the memory of the backward pass.

    The backward pass keeps neither copies of queries, keys or values, nor arrays as large as the
    logits.
    """
    b, n, h, e = 2, 256, 2, 64
    x = jax.ShapeDtypeStruct((b, n, h, e), jnp.float32)
    table = jax.ShapeDtypeStruct((h, n, n), jnp.float32)
    terms = {
        "static": lambda q, k, table: (static(table),),
        "fused": lambda q, k, table: (low_rank(q, k, token_keys=True), static(table)),
        "banded": lambda q, k, table: (banded(table[None, None, :, 0, :3], first=-2),),
    }[route]

    def kept(mask: Mask) -> int:
        def call(q, k, v, table):
            made = terms(q, k, table)
            return attend(made, v, mask=mask, q_length=n, implementation=route)

        back = jax.eval_shape(lambda *a: jax.vjp(call, *a)[1], x, x, x, table)
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(back))

    padded = Mask.padded(jnp.array([200, 256]), causal=True)
    assert kept(padded) <= kept(Mask(causal=True)) + 8 * b * n
