"""Tests what masks accept and refuse, and what they mean in packed rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax.attention import Mask, attend, attention_weights, banded, explain, static
from tests.attention import cases, oracle
from tests.attention.cases import BATCH, HEADS, KEYS, PARAMETERS, WIDTH

SEGMENTS = cases.packed_masks()["packed"].key_segments
CROSS = cases.packed_masks()["packed cross"]
COUNTED = {"segments": 3, "segment_length": 5}


@pytest.mark.parametrize("route", ["static", "fused"])
def test_one_mask_for_all_examples(route: str) -> None:
    terms, values, g = cases.problem(PARAMETERS)
    masks = (Mask(key_lengths=jnp.array([4])), Mask(key_lengths=jnp.full(BATCH, 4)))
    found, expected = (cases.run(terms, values, mask, g, route) for mask in masks)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (
            Mask(key_valid=jnp.ones(KEYS, bool)),
            r"key_valid has shape \(11,\), .* \[batch, k\], which is \[3 or 1, 11\]",
        ),
        (
            Mask(key_lengths=jnp.ones(BATCH + 1, int)),
            r"key_lengths has shape \(4,\), .* \[batch\], which is \[3 or 1\]",
        ),
        (
            Mask(key_lengths=jnp.ones(BATCH)),
            "key_lengths has dtype float32, but it must be integer",
        ),
        (Mask(query_valid=jnp.ones((BATCH, KEYS + 1))), r"query_valid has shape \(3, 12\)"),
        (Mask(allowed=jnp.ones((KEYS, KEYS), bool)), r"allowed has shape \(11, 11\)"),
        (
            Mask(allowed=jnp.ones((1, HEADS + 1, KEYS, KEYS), bool)),
            r"\[3 or 1, 2 or 1, 11 or 1, 11\]",
        ),
        (Mask(causal=True, prefix_lengths=jnp.ones((BATCH, 1), int)), "prefix_lengths has shape"),
        (Mask.packed(jnp.ones((BATCH, KEYS + 1), int)), r"query_segments has shape \(3, 12\)"),
        (jnp.ones(KEYS), r"the mask has shape \(11,\), .* Mask.padded"),
    ],
)
def test_shapes_are_checked(mask: Mask, message: str) -> None:
    terms, values, _ = cases.problem(("static",))
    with pytest.raises(ValueError, match=message):
        attend(terms, values, mask=mask)


@pytest.mark.parametrize("window", [(None, 2**31 - 1), (2**40, None)])
def test_windows_beyond_all_positions_hide_nothing(window) -> None:
    weights = attention_weights(
        (static(jnp.zeros((1, 3, 3))),), mask=Mask(window=window), k_length=3
    )
    np.testing.assert_allclose(weights, jnp.full((1, 1, 3, 3), 1 / 3), rtol=1e-6)


def test_objects_that_are_not_masks_are_refused() -> None:
    terms, values, _ = cases.problem(("static",))
    with pytest.raises(
        TypeError, match="the mask is of type str, but it must be a Mask, or an array"
    ):
        attend(terms, values, mask="causal")
    with pytest.raises(ValueError, match="If it is \\[batch, q, k\\], add an axis of heads"):
        attend(terms, values, mask=jnp.ones((BATCH, KEYS, KEYS)))  # Flax's masks are [heads, q, k]
    with pytest.raises(ValueError, match="query_offset is 3, but in self-attention"):
        Mask(causal=True, query_offset=3).for_self_attention()


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((BATCH, HEADS), bool), ((BATCH, 1), "float32"), ((1, HEADS), "int32"), ((), bool)],
)
def test_arrays_are_masks(shape, dtype) -> None:
    terms, values, g = cases.problem(("static", "dot_product"))
    array = cases.holes(*shape, KEYS, KEYS)
    full = jnp.broadcast_to(array, (BATCH, HEADS, KEYS, KEYS))
    answer = oracle.attention(terms, values, Mask(allowed=full), g)
    cases.compare(cases.run(terms, values, array.astype(dtype), g, "auto"), answer, 2e-5)
    weights = attention_weights(terms, mask=array)
    assert oracle.error(weights, answer.weights) < 2e-5


def test_an_array_of_keys_hides_no_query() -> None:
    real = cases.holes(BATCH, KEYS)
    terms, values, g = cases.problem(("static",))
    found = cases.run(terms, values, real[:, None, None], g, "static")
    answer = oracle.attention(terms, values, Mask(key_valid=real), g)
    cases.compare(found, answer, 2e-5)
    assert Mask.of(real[:, None, None]).for_self_attention().queries(KEYS).all()


def test_self_attention_is_known_behind_jit_and_checkpoint() -> None:
    """A mask remains known as self-attention behind `jit` and `checkpoint`.

    T5's bias is therefore not looked up separately for the many segments of packed rows.
    """
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


@pytest.mark.parametrize(
    ("form", "counted"), [("distance", {}), ("starts", COUNTED), ("per token", COUNTED)]
)
def test_windows_of_packed_cross_attention(form: str, counted: dict) -> None:
    """In packed rows, a window of cross-attention covers the same keys as in separate rows."""
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
    out = np.asarray(attend((term,), values, mask=mask, q_length=KEYS))
    weights, values = np.asarray(weights), np.asarray(values)
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
                        expected += weights[own][:, tap, None] * values[b, columns[first + tap]]
                np.testing.assert_allclose(out[b, row], expected, atol=1e-5)


def test_segments_that_break_the_promise_are_nan() -> None:
    terms, values, _ = cases.problem(("static",))
    apart = jnp.array([[1, 1, 2, 1, 1, 3, 3, 0, 0, 0, 0]])
    values = values[:1]
    out = attend(terms, values, mask=Mask.packed(apart, **COUNTED))
    assert np.isnan(out[0, np.array([0, 1, 3, 4])]).all()
    assert not np.isnan(out[0, np.array([2, 5, 6, 7])]).any()
    long = jnp.array([[1, 1, 1, 1, 1, 1, 2, 2, 0, 0, 0]])
    short = jnp.array([[1, 1, 1, 2, 2, 2, 2, 2, 0, 0, 0]])
    out = attend(terms, values, mask=Mask.packed(long, short, **COUNTED))
    assert np.isnan(out[0, :3]).all() and not np.isnan(out[0, 3:]).any()
