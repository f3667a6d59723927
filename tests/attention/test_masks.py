"""What masks accept and refuse, and what they mean in packed rows."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax.attention import Mask, attend, attention_weights, banded, explain
from tests.attention import cases, oracle
from tests.attention.cases import BATCH, HEADS, KEYS, PARAMETERS, QUERIES, WIDTH

SEGMENTS = cases.packed_masks()["packed"].key_segments
CROSS = cases.packed_masks()["packed cross"]
COUNTED = {"segments": 3, "segment_length": 5}


def problem(names, q: int = KEYS, b: int = BATCH):
    return (
        cases.make_terms(names, b, q, KEYS),
        cases.normal("values", b, KEYS, HEADS, WIDTH),
        cases.normal("cotangent", b, q, HEADS, WIDTH),
    )


@pytest.mark.slow
@pytest.mark.parametrize("route", ["static", "fused", "reference"])
@pytest.mark.parametrize(
    ("short", "full"),
    [
        (Mask(key_lengths=jnp.array([4])), Mask(key_lengths=jnp.full(BATCH, 4))),
        (
            Mask(key_valid=cases.holes(1, KEYS)),
            Mask(key_valid=jnp.tile(cases.holes(1, KEYS), (BATCH, 1))),
        ),
    ],
)
def test_one_mask_for_all_examples(route: str, short: Mask, full: Mask) -> None:
    terms, values, g = problem(PARAMETERS)
    found, expected = (cases.run(terms, values, mask, g, route) for mask in (short, full))
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (
            Mask(key_valid=jnp.ones(KEYS, bool)),
            r"key_valid has shape \(11,\); .* \[batch or 1=3, k=11\]",
        ),
        (
            Mask(key_lengths=jnp.ones(BATCH + 1, int)),
            r"key_lengths has shape \(4,\); .*batch or 1=3",
        ),
        (Mask(key_lengths=jnp.ones(BATCH)), "key_lengths has dtype float32; it must be integers"),
        (Mask(query_valid=jnp.ones((BATCH, KEYS + 1))), r"query_valid has shape \(3, 12\)"),
        (Mask(allowed=jnp.ones((KEYS, KEYS), bool)), r"allowed has shape \(11, 11\)"),
        (Mask(allowed=jnp.ones((1, HEADS + 1, KEYS, KEYS), bool)), "heads or 1=2"),
        (Mask(causal=True, prefix_lengths=jnp.ones((BATCH, 1), int)), "prefix_lengths has shape"),
        (Mask.packed(jnp.ones((BATCH, KEYS + 1), int)), r"query_segments has shape \(3, 12\)"),
        (jnp.ones(KEYS), r"the mask has shape \(11,\); .* Mask.padded"),
    ],
)
@pytest.mark.parametrize("route", ["static", "fused", "reference"])
def test_shapes_are_checked_once(mask: Mask, message: str, route: str) -> None:
    terms, values, _ = problem(("static",))
    with pytest.raises(ValueError, match=message):
        attend(terms, values, mask=mask, implementation=route)


def test_what_is_no_mask() -> None:
    terms, values, _ = problem(("static",))
    with pytest.raises(TypeError, match="the mask is a str; give a Mask, or an array"):
        attend(terms, values, mask="causal")
    with pytest.raises(ValueError, match="add an axis of heads to \\[batch, q, k\\]"):
        attend(terms, values, mask=jnp.ones((BATCH, KEYS, KEYS)))  # Flax: [heads, q, k]
    with pytest.raises(ValueError, match="query_offset=3 in self-attention"):
        Mask(causal=True, query_offset=3).for_self_attention()


@pytest.mark.parametrize("dtype", [bool, jnp.float32, jnp.int32])
@pytest.mark.parametrize("shape", [(BATCH, HEADS), (BATCH, 1), (1, HEADS), ()])
def test_arrays_are_masks(shape, dtype) -> None:
    terms, values, g = problem(("static", "dot_product"))
    array = cases.holes(*shape, KEYS, KEYS)
    full = jnp.broadcast_to(array, (BATCH, HEADS, KEYS, KEYS))
    answer = oracle.attention(terms, values, Mask(allowed=full), g)
    cases.compare(cases.run(terms, values, array.astype(dtype), g, "auto"), answer, 2e-5)


def test_an_array_of_keys_hides_no_query() -> None:
    real = cases.holes(BATCH, KEYS)
    terms, values, g = problem(("static",))
    found = cases.run(terms, values, real[:, None, None], g, "static")
    answer = oracle.attention(terms, values, Mask(key_valid=real), g)
    cases.compare(found, answer, 2e-5)
    assert Mask.of(real[:, None, None]).for_self_attention().queries(KEYS).all()


def test_zeros_and_ones_are_booleans() -> None:
    terms, values, g = problem(("static",))
    real = cases.holes(BATCH, KEYS)
    expected = cases.run(terms, values, Mask.padded(real), g, "reference")
    for route in ("static", "fused", "reference"):
        for dtype in (jnp.int32, jnp.float32):
            found = cases.run(terms, values, Mask.padded(real.astype(dtype)), g, route)
            for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
                assert oracle.error(x, np.asarray(y, np.float64)) < 2e-5


def test_masks_that_are_made_for_their_use() -> None:
    lengths, real = jnp.array([3, 4, 0]), cases.holes(BATCH, KEYS)
    for keys, name in ((lengths, "lengths"), (real, "valid")):
        own = Mask.padded(keys, causal=True, window=2)
        assert own.self_attention and own.causal and own.window == 2
        assert getattr(own, f"query_{name}") is getattr(own, f"key_{name}") is keys
        cross = Mask.padded(keys, lengths)
        assert not cross.self_attention and cross.query_lengths is lengths
    own = Mask.packed(SEGMENTS, causal=True, **COUNTED)
    assert own.self_attention and own.query_segments is own.key_segments is SEGMENTS
    assert (own.segments, own.segment_length) == (3, 5)
    assert not Mask.packed(SEGMENTS, SEGMENTS).self_attention


def test_self_attention_is_known_behind_jit_and_checkpoint() -> None:
    """T5's bias in rows of many segments needs no look-up, whatever has traced the mask."""
    terms = cases.make_terms(("dot_product", "relative"), BATCH, KEYS, KEYS)
    values = cases.normal("values", BATCH, KEYS, HEADS, WIDTH)

    @jax.jit
    @jax.checkpoint
    def layer(mask: Mask) -> jax.Array:
        mask = mask.for_self_attention()
        assert mask.self_attention
        (found,) = explain(attend, terms, values, mask=mask, q_length=KEYS, implementation="fused")
        assert not found.unpacked
        return attend(terms, values, mask=mask, q_length=KEYS)

    for mask in (Mask.packed(SEGMENTS), Mask(query_segments=SEGMENTS, key_segments=SEGMENTS)):
        layer(mask)


@pytest.mark.slow
@pytest.mark.parametrize("route", ["auto", "fused", "reference"])
@pytest.mark.parametrize("counted", [COUNTED, {}], ids=["counted", "uncounted"])
@pytest.mark.parametrize(
    "band", [{"causal": True}, {"window": 2}, {"causal": True, "window": (None, 1)}]
)
def test_bands_count_inside_segments(route: str, counted: dict, band: dict) -> None:
    """Packed cross-attention gives what every segment gives by itself."""
    names = ("dot_product", "dense", "outer", "static", "relative", "factorized")
    terms, values, _ = problem(names)
    mask = Mask.packed(CROSS.key_segments, CROSS.query_segments, **counted, **band)
    out = attend(terms, values, mask=mask, q_length=KEYS, implementation=route)
    for b in range(2):
        for segment in (1, 2, 3):
            rows = np.flatnonzero(np.asarray(CROSS.query_segments[b]) == segment)
            columns = np.flatnonzero(np.asarray(CROSS.key_segments[b]) == segment)
            if len(rows) and len(columns):
                own = alone(terms, b, rows, columns)
                expected = attend(
                    own, values[b : b + 1, columns], mask=Mask(**band), q_length=len(rows)
                )
                np.testing.assert_allclose(out[b, rows], expected[0], atol=2e-5)


def alone(terms, b: int, rows: np.ndarray, columns: np.ndarray):
    """The terms of one segment in a row of its own."""
    static = {"logits": lambda x: x[:, : len(rows), : len(columns)]}
    found = []
    for term in terms:
        match type(term).__name__:
            case "Static":
                found.append(dataclasses.replace(term, logits=static["logits"](term.logits)))
            case "Outer":
                found.append(type(term)(term.a[b : b + 1, rows], term.b[b : b + 1, rows]))
            case "LowRank":
                q, k = term.queries, term.keys
                q = q[b : b + 1, rows] if term.token_queries else q[:, : len(rows)]
                k = k[b : b + 1, columns] if term.token_keys else k[:, : len(columns)]
                found.append(dataclasses.replace(term, queries=q, keys=k))
            case _:
                found.append(term)
    return tuple(found)


@pytest.mark.parametrize("counted", [COUNTED, {}], ids=["counted", "uncounted"])
@pytest.mark.parametrize("form", ["distance", "starts", "per token"])
def test_windows_of_packed_cross_attention(counted: dict, form: str) -> None:
    """Hard-coded cross-attention looks where it would in a row of its own."""
    width = 3
    weights = {
        "distance": cases.normal("w", 1, 1, HEADS, width),
        "starts": cases.normal("w", 1, KEYS, HEADS, width),
        "per token": cases.normal("w", BATCH, KEYS, HEADS, width),
    }[form]
    starts = jnp.arange(KEYS) * 2 - 1 if form == "starts" else None
    term = banded(weights, first=-1, starts=starts)
    values = cases.normal("values", BATCH, KEYS, HEADS, WIDTH)
    mask = Mask.packed(CROSS.key_segments, CROSS.query_segments, **counted)
    out = attend((term,), values, mask=mask, q_length=KEYS)
    for b in range(2):
        for segment in (1, 2, 3):
            rows = np.flatnonzero(np.asarray(CROSS.query_segments[b]) == segment)
            columns = np.flatnonzero(np.asarray(CROSS.key_segments[b]) == segment)
            for position, row in enumerate(rows):
                first = position - 1 if starts is None else int(starts[position])
                own = {"distance": (0, 0), "starts": (0, position), "per token": (b, row)}[form]
                expected = np.zeros((HEADS, WIDTH))
                for tap in range(width):
                    if 0 <= first + tap < len(columns):
                        value = np.asarray(values[b, columns[first + tap]])
                        expected += np.asarray(weights[own][:, tap])[:, None] * value
                np.testing.assert_allclose(out[b, row], expected, atol=1e-5)


def test_segments_that_break_the_promise_are_nan() -> None:
    terms, values, _ = problem(("static",))
    apart = jnp.array([[1, 1, 2, 1, 1, 3, 3, 0, 0, 0, 0]])
    terms, values = terms, values[:1]
    out = attend(terms, values, mask=Mask.packed(apart, **COUNTED))
    assert np.isnan(out[0, np.array([0, 1, 3, 4])]).all()
    assert not np.isnan(out[0, np.array([2, 5, 6, 7])]).any()
    long = jnp.array([[1, 1, 1, 1, 1, 1, 2, 2, 0, 0, 0]])
    short = jnp.array([[1, 1, 1, 2, 2, 2, 2, 2, 0, 0, 0]])
    out = attend(terms, values, mask=Mask.packed(long, short, **COUNTED))
    assert np.isnan(out[0, :3]).all() and not np.isnan(out[0, 3:]).any()


def test_tables_as_long_as_the_longest_segment() -> None:
    """A row may be longer than the tables of positions when its segments are not."""
    short = cases.make_terms(("static", "dense", "factorized"), BATCH, 5, 5)
    long = cases.make_terms(("static", "dense", "factorized"), BATCH, KEYS, KEYS)
    dense = dataclasses.replace(short[1], queries=long[1].queries)
    values = cases.normal("values", BATCH, KEYS, HEADS, WIDTH)
    padded = (
        dataclasses.replace(short[0], logits=jnp.pad(short[0].logits, ((0, 0), (0, 6), (0, 6)))),
        dataclasses.replace(dense, keys=jnp.pad(short[1].keys, ((0, 0), (0, 6), (0, 0), (0, 0)))),
        jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 6), (0, 0), (0, 0))), short[2]),
    )
    for counted in (COUNTED, {"segment_length": 5}):
        mask = Mask.packed(SEGMENTS, **counted)
        call = functools.partial(attend, values=values, mask=mask, q_length=KEYS)
        np.testing.assert_allclose(call((short[0], dense, short[2])), call(padded), atol=1e-5)
    with pytest.raises(ValueError, match="is for 5 queries and 5 keys, but there are 11 queries"):
        attend(short[:1], values, mask=Mask.packed(SEGMENTS), q_length=KEYS)


def test_weights_take_arrays_too() -> None:
    terms, values, g = problem(("static", "dot_product"), QUERIES)
    array = cases.holes(BATCH, 1, QUERIES, KEYS)
    expected = oracle.attention(terms, values, Mask(allowed=array), g).weights
    assert oracle.error(attention_weights(terms, mask=array), expected) < 2e-5


@pytest.mark.parametrize(
    ("mask", "shape"),
    [
        (Mask(), None),
        (Mask(causal=True), (1, 1, QUERIES, KEYS)),
        (Mask(key_valid=np.ones(KEYS, bool)), (1, 1, 1, KEYS)),
        (Mask(key_valid=np.ones((BATCH, KEYS), bool)), (BATCH, 1, 1, KEYS)),
        (Mask(query_valid=np.ones((BATCH, QUERIES), bool)), (BATCH, 1, QUERIES, 1)),
        (Mask(allowed=np.ones((HEADS, QUERIES, KEYS), bool)), (1, HEADS, QUERIES, KEYS)),
        (Mask(allowed=np.ones((QUERIES, KEYS), bool)), (1, 1, QUERIES, KEYS)),
    ],
    ids=repr,
)
def test_pairs_have_the_axes_of_logits(mask: Mask, shape: tuple[int, ...] | None) -> None:
    pairs = mask.pairs(QUERIES, KEYS)
    assert (None if pairs is None else pairs.shape) == shape
