"""The static route's TPU kernels, interpreted, against the oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax.attention import Mask, Static, attend, static, static_tpu
from synthesizer_jax.attention.blocked import FusedInputs, divide_terms
from synthesizer_jax.attention.static import _is_separable, static_inputs
from synthesizer_jax.attention.terms import Call
from tests.attention import cases, oracle
from tests.attention.cases import BATCH, HEADS, KEYS, QUERIES, WIDTH


def run_kernels(terms, values, mask, g):
    """Output, cotangents of terms and values, and whether an example's own maximum was needed."""
    *found, own = _run(mask.query_offset, terms, values, mask, g)
    return tuple(found), bool(own)


@functools.partial(jax.jit, static_argnums=0, compiler_options=cases.FAST_COMPILE)
def _run(offset, terms, values, mask, g):
    q = g.shape[1]
    inputs, back = jax.vjp(lambda terms: static_inputs(Call(terms, values, mask, q)), terms)
    out, inverse = static_tpu.forward(
        q, offset, inputs, same_keys=_is_separable(mask), interpret=True
    )
    found = static_tpu.backward(offset, inputs, out, inverse, g, interpret=True)
    zeros = jax.tree.map(_zero, inputs)
    (dterms,) = back(zeros._replace(biases=found.biases))
    own = False if inverse is None else (inverse < 0).any()
    return out, dterms, found.values, own


def _zero(x):
    x = jnp.asarray(x)
    exact = jnp.issubdtype(x.dtype, jnp.inexact)
    return jnp.zeros_like(x) if exact else np.zeros(x.shape, jax.dtypes.float0)


def check(terms, mask, q, k, bound=2e-6):
    """The kernels against the oracle; whether an example's own maximum was needed."""
    values = cases.normal("values", BATCH, k, HEADS, WIDTH)
    g = cases.normal("cotangent", BATCH, q, HEADS, WIDTH)
    found, own = run_kernels(terms, values, mask, g)
    cases.compare(found, oracle.attention(terms, values, mask, g), bound)
    return own


def masks():
    """The masks that the kernels take, with their numbers of queries and keys."""
    cross = {n: (m, QUERIES, KEYS) for n, m in cases.cross_masks().items()}
    own = {n: (m, KEYS, KEYS) for n, m in cases.self_masks().items()}
    return {n: x for n, x in (cross | own).items() if x[0].prefix_lengths is None}


@pytest.mark.slow
@pytest.mark.parametrize("name", masks())
def test_every_mask(name):
    mask, q, k = masks()[name]
    assert not check(cases.make_terms(("static", "relative"), BATCH, q, k), mask, q, k)


@pytest.mark.parametrize("names", [("static",), ("relative",), cases.PARAMETERS], ids=len)
def test_every_term(names):
    mask = cases.cross_masks()["padding"]
    check(cases.make_terms(names, BATCH, QUERIES, KEYS), mask, QUERIES, KEYS)


@pytest.mark.parametrize("gap", [20, 60, 1000])
@pytest.mark.parametrize("name", ["padding", "real queries"])
def test_logits_far_under_the_maximum(name, gap):
    """Keys that are padding in some examples lie far above all others."""
    mask, q, k = masks()[name]
    logits = cases.normal("far", HEADS, q, k) + gap * (jnp.arange(k) >= 6)
    own = check((static(logits),), mask, q, k)
    assert own == (gap > 44)


def test_a_table_in_bfloat16_is_summed_in_float32():
    mask, q, k = masks()["padding"]
    (term,) = cases.make_terms(("static",), BATCH, q, k)
    narrow = Static(term.logits.astype(jnp.bfloat16))
    values = cases.normal("values", BATCH, k, HEADS, WIDTH)
    g = cases.normal("cotangent", BATCH, q, HEADS, WIDTH)
    (_, (found,), _), _ = run_kernels((narrow,), values, mask, g)
    wide = Static(narrow.logits.astype(jnp.float32))
    (_, (expected,), _), _ = run_kernels((wide,), values, mask, g)
    assert found.logits.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.logits, expected.logits.astype(jnp.bfloat16))


def test_bfloat16_is_as_close_as_the_other_way():
    mask, q, k = masks()["padding"]
    terms = cases.make_terms(("static",), BATCH, q, k)
    values = cases.normal("values", BATCH, k, HEADS, WIDTH, dtype=jnp.bfloat16)
    g = cases.normal("cotangent", BATCH, q, HEADS, WIDTH, dtype=jnp.bfloat16)
    expected = oracle.attention(terms, values, mask, g)
    ours, _ = run_kernels(terms, values, mask, g)
    other = cases.run(terms, values, mask, g, "static")

    def errors(found):
        out, (dterm,), dvalues = found
        pairs = (
            (out, expected.out),
            (dvalues, expected.values),
            (dterm.logits, expected.terms[0]["logits"]),
        )
        return max(oracle.rms_error(x, y) for x, y in pairs)

    assert errors(ours) < 1.5 * errors(other) < 0.02


@pytest.mark.parametrize(
    ("heads", "width", "group"), [(12, 64, 2), (8, 128, 1), (16, 80, 8), (2, 5, 2)]
)
def test_heads_of_a_program_fill_registers(heads, width, group):
    assert static_tpu._heads_per_program(heads, width) == group


def test_what_the_kernels_do_not_take():
    terms = cases.make_terms(("static",), BATCH, QUERIES, KEYS)
    values = cases.normal("values", BATCH, KEYS, HEADS, WIDTH)
    refused = {
        "prefix_lengths": Mask(causal=True, prefix_lengths=jnp.array([1, 2, 3])),
        "query_offset": Mask(causal=True, query_offset=jnp.asarray(3)),
    }
    for name, mask in refused.items():
        assert name in static_tpu.obstacle(QUERIES, FusedInputs(*divide_terms(terms), values, mask))
    assert not static_tpu.obstacle(QUERIES, FusedInputs(*divide_terms(terms), values, Mask()))
    for shape, word in (((1, 10**6, 2, 64), "keys"), ((1, 8, 12, 80), "width")):
        values = jax.ShapeDtypeStruct(shape, jnp.float32)
        assert word in static_tpu.obstacle(8, FusedInputs(*divide_terms(terms), values, Mask()))


def test_tpus_run_the_kernels():
    mask = Mask(key_lengths=jnp.array([5, 3, 0])).for_self_attention()
    values = jax.ShapeDtypeStruct((BATCH, 128, 2, 64), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((2, 128, 128), jnp.float32)

    def loss(table, values):
        return attend((static(table),), values, mask=mask).astype(jnp.float32).sum()

    lowered = (
        jax.jit(jax.grad(loss, (0, 1))).trace(table, values).lower(lowering_platforms=("tpu",))
    )
    assert lowered.as_text().count("tpu_custom_call") == 2
