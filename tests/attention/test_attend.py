"""Tests `attend` beyond masks: dropout, precision, transformations, meshes and errors."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from synthesizer_jax.attention import Mask, Partition, attend, relative, scale
from tests.attention import cases, oracle
from tests.attention.cases import BATCH, EVERY_TERM, HEADS, KEYS, PARAMETERS, WIDTH

PADDING = Mask(key_lengths=jnp.array([11, 4, 0])).for_self_attention()
PACKED = cases.packed_masks()["packed causal"]


@pytest.mark.parametrize(
    ("route", "mask"), [("static", PACKED), ("fused", PADDING), ("reference", PADDING)]
)
def test_dropout_is_that_of_whole_values(route: str, mask: Mask) -> None:
    terms, values, g = cases.problem(PARAMETERS)
    key = jax.random.key(7)
    bits = jax.random.bernoulli(key, 0.75, values.shape[:3])
    answer = oracle.attention(terms, values, mask, g, keep=np.asarray(bits) / 0.75)
    run = functools.partial(cases.run, terms, values, mask, g, route, dropout_rate=0.25)
    cases.compare(run(dropout_key=key), answer, 2e-5)
    cases.compare(run(), oracle.attention(terms, values, mask, g), 2e-5)


@pytest.mark.parametrize("route", ["static", "fused", "reference"])
def test_bfloat16_is_close_to_float64(route: str) -> None:
    """In bfloat16, outputs and gradients have two or three correct digits."""
    b, n, h, e = 2, 64, 2, 16
    half = functools.partial(cases.normal, dtype=jnp.bfloat16)
    terms = tuple(
        jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim == 4 else x, t)
        for t in cases.make_terms(cases.ROUTES[route], b, n, n, h)
    )
    values, g = half("values", b, n, h, e), half("cotangent", b, n, h, e)
    mask = Mask(key_lengths=jnp.array([n, 50])).for_self_attention()
    answer = oracle.attention(terms, values, mask, g)
    out, dterms, dvalues = cases.run(terms, values, mask, g, route)
    assert out.dtype == dvalues.dtype == jnp.bfloat16
    assert oracle.rms_error(out, answer.out) < 5e-3
    assert oracle.rms_error(dvalues, answer.values) < 7e-3
    cases.compare((out, dterms, dvalues), answer, 1.2e-2, oracle.rms_error)


def test_gradient_of_mixture_weights_in_bfloat16() -> None:
    """The factors of a mixture multiply queries before the queries are rounded to bfloat16."""

    def cast(x):
        """Casts an array to bfloat16 if the array depends on tokens."""
        return x.astype(jnp.bfloat16) if x.ndim == 4 else x

    terms, values, g = jax.tree.map(cast, cases.problem(EVERY_TERM))
    alpha = cases.normal("alpha", len(terms), HEADS)

    def mixture(terms, alpha: jax.Array):
        return tuple(scale((t,), a)[0] for t, a in zip(terms, alpha, strict=True))

    def loss(alpha: jax.Array) -> jax.Array:
        out = attend(mixture(terms, alpha), values, mask=PADDING, implementation="fused")
        return jnp.sum(out.astype(jnp.float32) * g.astype(jnp.float32))

    found = jax.jit(jax.grad(loss), compiler_options=cases.FAST_COMPILE)(alpha)
    wide, v, dout = jax.tree.map(lambda x: x.astype(jnp.float32), (terms, values, g))
    answer = oracle.attention(mixture(wide, alpha), v, PADDING, dout)
    expected = []
    for term, gradient in zip(wide, answer.terms, strict=True):
        x = np.asarray(getattr(term, term.linear), np.float64)
        others = tuple(axis for axis in range(x.ndim) if axis != (2 if x.ndim == 4 else 0))
        expected.append((gradient[term.linear] * x).sum(others))
    assert oracle.rms_error(found, np.stack(expected)) < 1e-2


@pytest.mark.parametrize(("names", "route"), [(PARAMETERS, "static"), (EVERY_TERM, "fused")])
def test_devices_that_share_the_queries(names: tuple[str, ...], route: str) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "sequence"), axis_types=(AxisType.Auto,) * 2)
    partition = Partition(batch=("data",), sequence=("sequence",))
    b, n = 4, 12
    terms = cases.make_terms(names, b, n, n)
    values, g = cases.normal("values", b, n, HEADS, WIDTH), cases.normal("g", b, n, HEADS, WIDTH)
    lengths = jnp.array([12, 7, 1, 0])
    mask = Mask(key_lengths=lengths, query_lengths=lengths).for_self_attention()
    sinks = jnp.array([0.5, -1.0]) if route == "fused" else None
    run = functools.partial(cases.run, terms, values, mask, g, route, sinks)
    with jax.set_mesh(mesh):
        found = run(partition=partition)
    for x, y in zip(*map(jax.tree.leaves, (found, run())), strict=True):
        assert oracle.error(x, np.asarray(y, np.float64)) < 2e-5
    short = relative(jnp.ones((HEADS, 2 * n - 3)), first=2 - n)
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match="Give the logits an entry for each distance"),
    ):
        attend((short,), values, q_length=n, partition=partition)


def test_sizes_that_the_mesh_does_not_divide() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    terms, values, _ = cases.problem(("static",), b=6)
    partition = Partition(batch=("data",), heads=("tensor",))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"batch=6 .* 4 devices .* 4 and 8"):
        attend(terms, values, partition=partition)
    with pytest.raises(ValueError, match=r"the mesh has no axis 'data'.*jax.set_mesh"):
        attend(terms, values, partition=partition)


@pytest.mark.parametrize("length", [None, 5])
@pytest.mark.parametrize("name", ["packed causal", "packed cross causal", "packed cross window"])
def test_packed_without_counts(name: str, length: int | None) -> None:
    """If packed rows may have any number of segments, positions are looked up tile by tile."""
    terms, values, g = cases.problem(EVERY_TERM)
    mask = dataclasses.replace(cases.packed_masks()[name], segments=None, segment_length=length)
    cases.check(terms, values, mask, g, "auto", 2e-5)


def call(names=("static",), **changes):
    terms, values, _ = cases.problem(names)
    return attend(changes.pop("terms", terms), changes.pop("values", values), **changes)


ONES = jnp.ones((BATCH, KEYS), int)
UNCOUNTED = Mask(key_segments=ONES).for_self_attention()
PATTERN = Mask(allowed=jnp.ones((1, 1, KEYS, KEYS), bool))
SHORT = relative(jnp.ones((HEADS, 20)), first=-9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"implementation": "cudnn"},
            "'cudnn', but it must be auto, static, fused, banded or reference",
        ),
        (
            {"names": ("dense",), "implementation": "static"},
            "LowRank is computed from tokens",
        ),
        ({"implementation": "static", "mask": PATTERN}, "Mask.allowed"),
        ({"implementation": "static", "mask": UNCOUNTED}, "Mask.segments"),
        ({"mask": Mask(key_segments=ONES)}, "only one of query_segments"),
        ({"mask": dataclasses.replace(UNCOUNTED, prefix_lengths=ONES[:, 0])}, "prefix_lengths"),
        ({"mask": dataclasses.replace(UNCOUNTED, query_offset=2)}, "query_offset is 2"),
        ({"values": jnp.ones((3, 11, 2))}, r"\[batch, k, heads, e\]"),
        ({"values": jnp.ones((3, 13, 2, 5))}, "11 keys, but there are 11 queries and 13 values"),
        ({"values": jnp.ones((3, 11, 4, 5))}, "has 2 heads, but the values have 4"),
        ({"names": ("dense",), "values": jnp.ones((5, 11, 2, 5))}, "values have a batch size of 5"),
        ({"terms": (), "q_length": 3}, "terms is empty"),
        ({"names": ("relative",)}, "Pass q_length"),
        (
            {"terms": (SHORT,), "q_length": 11},
            "have distances from -10 to 10",
        ),
        ({"dropout_rate": 1.0}, "dropout_rate is 1.0"),
        ({"soft_cap": 0.0}, "soft_cap is 0.0, but it must be positive"),
    ],
)
def test_wrong_arguments_of_attend_are_errors(changes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**changes)
