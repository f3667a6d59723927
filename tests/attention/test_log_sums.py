"""Tests `attend_with_log_sums` and `merge_attention` with the NumPy oracle."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from synthesizer_jax.attention import (
    Mask,
    Partition,
    Split,
    Terms,
    attend,
    attend_with_log_sums,
    banded,
    low_rank,
    merge_attention,
    static,
)
from tests.attention import cases, oracle
from tests.attention.cases import BATCH, HEADS, KEYS, QUERIES, WIDTH

MASKS = {n: (m, QUERIES) for n, m in cases.cross_masks().items()}
MASKS |= {n: (m, KEYS) for n, m in (cases.self_masks() | cases.packed_masks()).items()}
SHARED = ("none", "window and offset", "causal and padding", "packed causal")
"""Masks with which all examples may attend to the same keys, as the static route requires."""
OTHER = ("padding", "prefix and padding", "causal and holes", "packed cross causal")
LOWEST = np.finfo(np.float32).min


def log_sum_cotangent(q: int) -> jax.Array:
    return cases.normal("log sums", BATCH, q, HEADS)


def run(terms: Terms, values: jax.Array, g: jax.Array, sinks: Any = None, **options: Any) -> Any:
    """Returns the output, the log sums, and the cotangents of terms, values and sinks."""
    q = g.shape[1]

    @functools.partial(jax.jit, compiler_options=cases.FAST_COMPILE)
    def both(*arguments: Any) -> Any:
        def call(terms: Terms, values: jax.Array, sinks: Any) -> Any:
            return attend_with_log_sums(terms, values, q_length=q, sinks=sinks, **options)

        results, back = jax.vjp(call, *arguments)
        return (*results, *back((g, log_sum_cotangent(q))))

    return both(terms, values, sinks)


def check(found: Any, answer: oracle.Answer) -> None:
    out, log_sums, dterms, dvalues, dsinks = found
    cases.compare((out, dterms, dvalues), answer, 2e-5)
    has_keys = np.isfinite(answer.log_sums)
    np.testing.assert_array_equal(np.asarray(log_sums)[~has_keys], LOWEST)
    np.testing.assert_allclose(log_sums[has_keys], answer.log_sums[has_keys], atol=2e-5)
    if dsinks is not None:
        assert oracle.error(dsinks, answer.sinks) < 2e-5


@pytest.mark.parametrize(
    ("route", "name"),
    [
        *(("static", name) for name in SHARED),
        *(("fused", name) for name in (*SHARED, *OTHER)),
        *(("reference", name) for name in (*SHARED, *OTHER)),
    ],
)
def test_log_sums_and_their_gradients(route: str, name: str) -> None:
    """All padding in the inputs is NaN, and padding queries also have cotangents."""
    mask, q = MASKS[name]
    terms, values, g = cases.problem(cases.ROUTES[route], q)
    answer = oracle.attention(terms, values, mask, g, g_log_sums=log_sum_cotangent(q))
    check(run(terms, values, g, mask=mask, implementation=route), answer)


@pytest.mark.parametrize("route", ["static", "fused", "reference"])
def test_log_sums_include_sinks(route: str) -> None:
    """In contrast to `attend`, the static route supports sinks, because they are merged later."""
    mask, q = MASKS["causal and padding"]
    terms, values, g = cases.problem(cases.ROUTES[route], q)
    sinks = jnp.array([0.5, -1.0])
    given = {"sinks": np.asarray(sinks), "g_log_sums": log_sum_cotangent(q)}
    answer = oracle.attention(terms, values, mask, g, **given)
    check(run(terms, values, g, sinks, mask=mask, implementation=route), answer)


@pytest.mark.parametrize("route", ["fused", "reference"])
def test_log_sums_of_capped_logits(route: str) -> None:
    mask, q = MASKS["padding"]
    terms, values, g = cases.problem(cases.EVERY_TERM, q)
    given = {"soft_cap": 1.5, "g_log_sums": log_sum_cotangent(q)}
    answer = oracle.attention(terms, values, mask, g, **given)
    check(run(terms, values, g, mask=mask, implementation=route, soft_cap=1.5), answer)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("route", ["static", "fused", "reference"])
def test_log_sums_on_a_mesh(route: str, kind: AxisType) -> None:
    b, n = 4, 12
    terms = cases.make_terms(cases.ROUTES[route], b, n, n)
    values, g = (cases.normal(name, b, n, HEADS, WIDTH) for name in ("values", "g"))
    lengths = jnp.array([12, 7, 1, 0])
    mask = Mask(causal=True, key_lengths=lengths).for_self_attention()

    def loss(terms: Terms, values: jax.Array, **options: Any) -> tuple[jax.Array, Any]:
        results = attend_with_log_sums(terms, values, mask=mask, implementation=route, **options)
        out, log_sums = results
        real = jnp.where(mask.queries(n)[..., None], log_sums, 0)
        return jnp.sum(out * g) + jnp.sum(jnp.sin(real)), results

    gradient = jax.value_and_grad(loss, (0, 1), has_aux=True)
    expected = jax.jit(gradient)(terms, values)
    mesh = jax.make_mesh((2, 2), ("data", "model"), (kind,) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        options = {}
        if kind == AxisType.Auto:
            options["partition"] = Partition(batch=("data",), heads=("model",))
        spread = jax.device_put(values, P("data", None, "model"))
        found = jax.jit(functools.partial(gradient, **options))(terms, spread)
    oracle.close(jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, expected), 2e-5)


def test_groups_of_heads_have_log_sums_of_their_own() -> None:
    values = cases.normal("values", BATCH, KEYS, 2 * HEADS, WIDTH)
    groups = [cases.make_terms(names, BATCH, KEYS, KEYS) for names in (("static",), ("dense",))]
    found = attend_with_log_sums((Split(tuple(groups)),), values)
    parts = [
        attend_with_log_sums(terms, values[:, :, i * HEADS : (i + 1) * HEADS])
        for i, terms in enumerate(groups)
    ]
    oracle.close(found, jax.tree.map(lambda *x: jnp.concatenate(x, axis=2), *parts))


def test_dropout_changes_only_the_output() -> None:
    terms, values, _ = cases.problem(("dot_product",))
    dropout = {"dropout_rate": 0.5, "dropout_key": jax.random.key(0)}
    out, log_sums = attend_with_log_sums(terms, values, **dropout)
    np.testing.assert_array_equal(log_sums, attend_with_log_sums(terms, values)[1])
    oracle.close(out, attend(terms, values, **dropout))


@pytest.mark.parametrize("k", [KEYS, 0])
@pytest.mark.parametrize("route", ["static", "fused", "reference"])
def test_log_sums_of_bfloat16_have_more_digits(route: str, k: int) -> None:
    terms, values, _ = cases.problem(("static",), QUERIES, k)
    arrays = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (terms, values))
    attend_on = functools.partial(attend_with_log_sums, q_length=QUERIES, implementation=route)
    out, log_sums = jax.eval_shape(attend_on, *arrays)
    assert out.dtype == jnp.bfloat16 and log_sums.dtype == jnp.float32
    assert out.shape == (BATCH, QUERIES, HEADS, WIDTH) and log_sums.shape == out.shape[:3]


def test_weights_without_a_softmax_have_no_log_sums() -> None:
    values = cases.normal("values", BATCH, KEYS, HEADS, WIDTH)
    window = (banded(jnp.ones((1, 1, HEADS, 3))),)
    mixed = (Split((window, cases.make_terms(("dense",), BATCH, KEYS, KEYS))),)
    wide = cases.normal("values", BATCH, KEYS, 2 * HEADS, WIDTH)
    for terms, v in ((window, values), (mixed, wide)):
        with pytest.raises(ValueError, match=r"a term is Banded.*such as those of a GaussianBias"):
            attend_with_log_sums(terms, v, q_length=KEYS)


@pytest.mark.parametrize("sinks", [None, jnp.array([0.3, -0.7])], ids=["no sinks", "sinks"])
def test_merged_parts_are_attention_to_all_keys(sinks: jax.Array | None) -> None:
    """The parts have different masks and routes, and one query has no key in any part."""
    split = 4
    holes = cases.holes(BATCH, 1, QUERIES, KEYS).at[1, :, 2].set(False)
    terms, values, g = cases.problem(("dot_product",), QUERIES)
    (term,) = terms

    def part(keys: slice, route: str, term: Any, values: jax.Array) -> Any:
        own = dataclasses.replace(term, keys=term.keys[:, keys])
        mask = Mask(allowed=holes[..., keys])
        return attend_with_log_sums((own,), values[:, keys], mask=mask, implementation=route)

    def merged(term: Any, values: jax.Array, sinks: Any) -> tuple[jax.Array, jax.Array]:
        parts = (
            part(slice(split), "fused", term, values),
            part(slice(split, None), "reference", term, values),
        )
        return merge_attention(parts, sinks=sinks)

    results, back = jax.vjp(merged, term, values, sinks)
    dterm, dvalues, dsinks = back((g, log_sum_cotangent(QUERIES)))
    given = {} if sinks is None else {"sinks": np.asarray(sinks)}
    answer = oracle.attention(
        terms, values, Mask(allowed=holes), g, g_log_sums=log_sum_cotangent(QUERIES), **given
    )
    assert not np.isfinite(answer.log_sums[1, 2]).any()
    check((*results, (dterm,), dvalues, dsinks), answer)


def test_merging_rounds_once_and_is_stable() -> None:
    """Log sums in the hundreds do not overflow, and bfloat16 outputs are merged in float32."""
    out = cases.normal("out", 2, BATCH, QUERIES, HEADS, WIDTH, dtype=jnp.bfloat16)
    log_sums = jnp.stack([jnp.full((BATCH, QUERIES, HEADS), x) for x in (600.0, 601.0)])
    merged, total = merge_attention(list(zip(out, log_sums, strict=True)))
    share = 1 / (1 + np.exp(1.0))
    expected = share * np.float32(out[0]) + (1 - share) * np.float32(out[1])
    assert merged.dtype == jnp.bfloat16
    np.testing.assert_array_equal(merged, jnp.asarray(expected, jnp.bfloat16))
    np.testing.assert_allclose(total, 601 + np.log1p(np.exp(-1)), rtol=1e-6)


def test_a_part_without_keys_changes_nothing() -> None:
    values = cases.normal("values", BATCH, KEYS, HEADS, WIDTH)
    x = cases.normal("queries", BATCH, QUERIES, HEADS, WIDTH)
    part = attend_with_log_sums((low_rank(x, values, token_keys=True),), values)
    none = low_rank(x, values[:, :0], token_keys=True)
    empty = attend_with_log_sums((none,), values[:, :0])
    oracle.close(merge_attention((part, empty)), part)


def test_log_sums_of_parameters_for_different_keys_name_the_other_routes() -> None:
    values = cases.normal("values", BATCH, KEYS, HEADS, WIDTH)
    terms = (static(cases.normal("table", HEADS, KEYS, KEYS)),)
    mask = Mask(key_lengths=jnp.array([3, 4, 5]))
    with pytest.raises(ValueError, match="log sums only if all examples may attend to the same"):
        attend_with_log_sums(terms, values, mask=mask, implementation="static")
    found, _ = attend_with_log_sums(terms, values, mask=mask)
    oracle.close(found, attend(terms, values, mask=mask))
