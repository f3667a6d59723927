"""Compares the kernels for TPUs and GPUs with the loop over examples and with the oracle.

The kernels run in interpret mode on a CPU. The kernels for TPUs are also lowered.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax.attention import (
    Mask,
    Static,
    attend,
    fused_arrays,
    fused_gpu,
    fused_gpu_geometry,
    fused_loop,
    fused_route,
    fused_tpu,
    fused_tpu_geometry,
    low_rank,
    static,
    static_tpu,
    static_tpu_geometry,
)
from synthesizer_jax.attention.derivatives import platform_dependent
from synthesizer_jax.attention.fused_route import softmax_vjp_delta
from synthesizer_jax.attention.static_conditions import MIN_ROW_SUM, is_separable
from synthesizer_jax.attention.static_route import static_inputs
from synthesizer_jax.attention.terms import Call, clear_padding
from tests.attention import cases, oracle
from tests.attention.cases import BATCH, EVERY_TERM, HEADS, KEYS, QUERIES, WIDTH

CROSS = {n: (m, QUERIES) for n, m in cases.cross_masks().items()}
OWN = {n: (m, KEYS) for n, m in (cases.self_masks() | cases.packed_masks()).items()}
FUSED = {"tpu": fused_tpu, "gpu": fused_gpu}
TERMS = {"tpu": EVERY_TERM, "gpu": tuple(name for name in EVERY_TERM if name != "outer")}

every = pytest.mark.parametrize("platform", FUSED)


def both_ways(platform, names, mask, q, k, dtype=jnp.float32, soft_cap=None, bias=0.0):
    """Returns output, row statistics and cotangents, of the fused kernels and of the loop.

    All padding in the inputs is NaN, except for the kernels for TPUs, whose padding the fused route
    sets to zero. The log sums of the rows also have a cotangent, which is subtracted from δ; see
    `fused_route`.
    """
    dlog_sums = cases.normal("log sums", BATCH, q, HEADS)[..., None]
    terms, values, g = jax.tree.map(lambda x: x.astype(dtype), cases.problem(names, q, k))
    terms = jax.tree.map(lambda x: x + bias, terms)
    inputs = fused_route.fused_inputs(Call(terms, values, mask, q))
    offset = mask.query_offset
    products, values = inputs.products, inputs.values
    ones = jax.tree.map(jnp.ones_like, (products, values))
    marked = inputs._replace(products=ones[0], values=ones[1]).cleared(q)

    def poison(one, x):
        """Replaces the padding with NaN."""
        return jnp.where(one == 0, jnp.nan, x)

    products, values = jax.tree.map(poison, (marked.products, marked.values), (products, values))
    inputs = inputs._replace(products=products, values=values)
    kernels = FUSED[platform]
    assert kernels.obstacle(inputs) is None

    @functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=cases.FAST_COMPILE)
    def run(forward, backward, inputs):
        out, rows = forward(inputs)
        delta = softmax_vjp_delta(out, g, jnp.float32) - dlog_sums
        back = backward(inputs, rows, delta, g)
        return out, rows.inverse_row_sum, back

    forward = functools.partial(kernels.forward, q, offset, soft_cap, interpret=True)
    backward = functools.partial(kernels.backward, offset, soft_cap, interpret=True)
    loop_forward = functools.partial(fused_loop.loop_forward, q, soft_cap=soft_cap)
    loop_backward = functools.partial(fused_loop.loop_backward, soft_cap=soft_cap)
    cleared = inputs.cleared(q) if platform == "tpu" else inputs
    return run(forward, backward, cleared), run(loop_forward, loop_backward, inputs)


def check_fused(platform, names, mask, q, k, bound=2e-5, **options):
    oracle.close(*both_ways(platform, names, mask, q, k, **options), bound)


def use_tile_sizes(monkeypatch, queries, keys):
    """Makes all GPU kernels use tiles of the given sizes."""
    sizes = fused_gpu_geometry.TileSizes(queries, keys, warps=4, stages=2)
    monkeypatch.setattr(fused_gpu_geometry, "choose_tile_sizes", lambda *_, **__: sizes)


BOTH = ("padding", "holes", "window and offset", "packed causal", "packed cross")
MASKS = {
    "tpu": (*BOTH, "causal and holes"),
    "gpu": (*BOTH, "offset beyond the keys", "prefix and padding"),
}


@pytest.mark.parametrize(("platform", "name"), [(p, name) for p in FUSED for name in MASKS[p]])
def test_fused_kernels_with_every_kind_of_mask(platform, name):
    """Compares the fused kernels with the oracle for every kind of mask.

    Packed rows are tested only with terms that do not depend on positions, because rows are
    unpacked for all other terms.
    """
    mask, q = (CROSS | OWN)[name]
    names = TERMS[platform]
    if mask.query_segments is not None:
        names = ("dot_product", "relative") if mask.self_attention else ("dot_product",)
    check_fused(platform, names, mask, q, KEYS)


@pytest.mark.parametrize(("platform", "name"), [(p, name) for p in FUSED for name in TERMS[p]])
def test_kernels_with_each_term_alone(platform, name):
    check_fused(platform, (name,), CROSS["padding"][0], QUERIES, KEYS)


@pytest.mark.parametrize(("platform", "heads"), [("tpu", 1), ("gpu", 1), ("gpu", HEADS)])
def test_patterns_and_capped_logits(platform, heads):
    mask = Mask(allowed=cases.holes(BATCH, heads, QUERIES, KEYS))
    check_fused(platform, ("dot_product", "relative", "static"), mask, QUERIES, KEYS, soft_cap=1.5)


@every
@pytest.mark.parametrize("names", [EVERY_TERM, ("dot_product", "relative")], ids=len)
def test_tiles_of_queries_and_keys(platform, names, monkeypatch):
    """There are more queries and keys than fit into a tile, and the last tile is not full."""
    monkeypatch.setattr(fused_tpu_geometry, "MAX_TILE", 128 * 16)
    use_tile_sizes(monkeypatch, 32, 64)
    lengths = jnp.array([140, 129, 0])
    mask = Mask(causal=True, key_lengths=lengths, query_lengths=lengths)
    if names == EVERY_TERM:
        mask = dataclasses.replace(mask, allowed=cases.holes(1, 1, 140, 140))
    names = tuple(name for name in names if name in TERMS[platform])
    check_fused(
        platform, names, mask, 140, 140, 1e-4, soft_cap=None if names == EVERY_TERM else 2.0
    )


@every
@pytest.mark.parametrize("name", ["relative", "static"])
def test_rows_without_queries_do_not_overflow(platform, name, monkeypatch):
    """A bias at padding positions does not overflow, although its exponential is infinite."""
    use_tile_sizes(monkeypatch, 16, 16)
    check_fused(platform, (name,), Mask(query_lengths=jnp.array([20, 5, 0])), 20, 20, bias=100.0)


@every
def test_fused_bfloat16_is_as_close_as_the_loop(platform):
    names = ("dot_product", "relative", "dense")
    mask = CROSS["padding"][0]
    wide = both_ways(platform, names, mask, QUERIES, KEYS)[1]

    def error(found):
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wide), strict=True)
        return max(
            float(np.abs(np.float32(x) - y).max() / max(1.0, np.abs(y).max())) for x, y in pairs
        )

    ours, loop = map(error, both_ways(platform, names, mask, QUERIES, KEYS, jnp.bfloat16))
    assert ours < 1.5 * loop < 0.1


@every
@pytest.mark.parametrize("size", [float(jnp.finfo(jnp.float32).min), 3e38])
def test_equal_logits_of_any_size_give_the_mean(platform, size):
    values = cases.normal("values", BATCH, KEYS, HEADS, WIDTH)
    terms = (static(jnp.full((HEADS, QUERIES, KEYS), size)),)
    inputs = fused_route.fused_inputs(Call(terms, values, Mask(), QUERIES))
    out, _ = FUSED[platform].forward(QUERIES, 0, None, inputs, interpret=True)
    mean = jnp.broadcast_to(values.mean(1, keepdims=True), out.shape)
    np.testing.assert_allclose(out, mean, atol=1e-5)


# The CPU compiler of jaxlib 0.12.0 fuses matrix products in bfloat16, but fails to compile the
# fusion. Disable these fusions.
NO_FUSED_PRODUCTS = {"xla_cpu_experimental_ynn_fusion_type": ""}


@functools.partial(
    jax.jit, static_argnums=0, compiler_options={**cases.FAST_COMPILE, **NO_FUSED_PRODUCTS}
)
def run_static(offset, terms, values, mask, g):
    """Returns the output, the cotangents, and the largest inverse of a softmax denominator.

    The cotangents are those of terms and values.
    """
    q = g.shape[1]
    inputs, back = jax.vjp(lambda terms: static_inputs(Call(terms, values, mask, q)), terms)
    out, inverse = static_tpu.forward(
        q, offset, inputs, same_keys=is_separable(mask), interpret=True
    )
    found = static_tpu.backward(offset, inputs, out, inverse, g, interpret=True)
    (dterms,) = back(jax.tree.map(_zero, inputs)._replace(biases=found.biases))
    return (out, dterms, found.values), jnp.zeros(()) if inverse is None else inverse.max()


def _zero(x):
    x = jnp.asarray(x)
    exact = jnp.issubdtype(x.dtype, jnp.inexact)
    return jnp.zeros_like(x) if exact else np.zeros(x.shape, jax.dtypes.float0)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("padding", ("static",)),
        ("padding", ("relative",)),
        ("none", cases.PARAMETERS),
        ("holes", ("static", "relative")),
        ("window on both sides", ("static", "relative")),
        ("offset beyond the keys", ("static", "relative")),
        ("causal and padding", ("static", "relative")),
        ("causal and holes", ("static", "relative")),
    ],
)
def test_static_kernels_with_every_kind_of_mask(name, names):
    mask, q = (CROSS | OWN)[name]
    terms, values, g = cases.problem(names, q)
    found, _ = run_static(mask.query_offset, terms, values, mask, g)
    cases.compare(found, oracle.attention(terms, values, mask, g), 2e-6)


@pytest.mark.parametrize("names", [("static", "relative"), ("relative",)])
@pytest.mark.parametrize("name", ["padding", "causal and padding"])
def test_static_kernels_sum_over_several_programs(name, names):
    """The cotangents of the bias are sums over examples that different programs compute.

    The heads are so wide that one example fills the columns of a matrix product, so every program
    computes only one example.
    """
    mask, q = (CROSS | OWN)[name]
    width = static_tpu_geometry.PRODUCT_COLUMNS
    terms = cases.make_terms(names, BATCH, q, KEYS)
    values = cases.normal("values", BATCH, KEYS, HEADS, width)
    g = cases.normal("cotangent", BATCH, q, HEADS, width)
    inputs = static_inputs(Call(terms, values, mask, q))
    assert static_tpu_geometry.make_tiling(inputs, q, mask.query_offset).grid == (HEADS, BATCH)
    found, _ = run_static(mask.query_offset, terms, values, mask, g)
    cases.compare(found, oracle.attention(terms, values, mask, g), 2e-6)


@pytest.mark.parametrize("gap", [20, 60, 1000])
def test_logits_far_under_the_maximum_are_noticed(gap):
    """The static kernels notice that their result is inaccurate, so that the loop runs instead.

    Keys that are padding in some examples have much larger logits than the other keys.
    """
    mask, q = CROSS["padding"]
    logits = cases.normal("far", HEADS, q, KEYS) + gap * (jnp.arange(KEYS) >= 6)
    terms = (static(logits),)
    (_, values, g) = cases.problem((), q)
    found, largest = run_static(0, terms, values, mask, g)
    assert (largest < 1 / MIN_ROW_SUM) == (gap < 44)
    if gap < 44:
        cases.compare(found, oracle.attention(terms, values, mask, g), 2e-6)


def test_static_bfloat16_is_as_close_as_the_loop():
    mask, q = CROSS["padding"]
    terms, *full = cases.problem(("static",), q)
    values, g = (x.astype(jnp.bfloat16) for x in full)
    expected = oracle.attention(terms, values, mask, g)

    def errors(found):
        out, (dterm,), dvalues = found
        pairs = (out, expected.out), (dvalues, expected.values)
        pairs += ((dterm.logits, expected.terms[0]["logits"]),)
        return max(oracle.rms_error(x, y) for x, y in pairs)

    ours, _ = run_static(0, terms, values, mask, g)
    assert errors(ours) < 1.5 * errors(cases.run(terms, values, mask, g, "static")) < 0.02
    # If a table is in bfloat16, its gradient is still summed in float32.
    narrow = Static(terms[0].logits.astype(jnp.bfloat16))
    wide = Static(narrow.logits.astype(jnp.float32))
    (_, (found,), _), (_, (exact,), _) = (
        run_static(0, (term,), full[0], mask, full[1])[0] for term in (narrow, wide)
    )
    np.testing.assert_array_equal(found.logits, exact.logits.astype(jnp.bfloat16))


def test_calls_that_the_kernels_do_not_support():
    terms, values, _ = cases.problem(("static",), QUERIES)

    def obstacles(mask, values=values, q=QUERIES):
        inputs = fused_route.fused_inputs(Call(terms, values, mask, QUERIES))
        return fused_tpu.obstacle(inputs), static_tpu.obstacle(q, inputs)

    for name, mask in {
        "prefix_lengths": Mask(causal=True, prefix_lengths=jnp.array([1, 2, 3])),
        "query_offset": Mask(causal=True, query_offset=jnp.asarray(3)),
    }.items():
        assert all(name in obstacle for obstacle in obstacles(mask))
    assert "allowed" in obstacles(Mask(allowed=cases.holes(1, HEADS, QUERIES, KEYS)))[0]
    assert obstacles(Mask()) == (None, None)
    pattern = jax.ShapeDtypeStruct((48, 1, 8192, 8192), bool)
    inputs = fused_route.fused_inputs(Call(terms, values, Mask(), QUERIES))
    inputs = inputs._replace(mask=dataclasses.replace(inputs.mask, allowed=pattern))
    assert "which is too large for the kernels" in fused_gpu.obstacle(inputs)
    half = values.astype(jnp.float16)
    assert all("float16" in obstacle for obstacle in obstacles(Mask(), half))
    # Even if a row has few keys, its logits occupy whole registers.
    assert fused_tpu_geometry.choose_tile_rows(16384, 16) * 128 <= fused_tpu_geometry.MAX_TILE
    for shape, word in (((1, 10**6, 2, 64), "keys"), ((1, 8, 12, 80), "width")):
        large = jax.ShapeDtypeStruct(shape, jnp.float32)
        assert word in obstacles(Mask(), large, 8)[1]


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


def test_padding_is_set_to_zero_once_and_only_for_tpus(monkeypatch):
    """The kernels for TPUs read padding. The backward pass does not set it to zero again."""
    calls = []

    def counted(*args):
        """Counts the calls of `clear_padding`."""
        calls.append(args)
        return clear_padding(*args)

    for module in (fused_route, fused_arrays):
        monkeypatch.setattr(module, "clear_padding", counted)
    mask = Mask(key_lengths=jnp.array([5, 3, 0])).for_self_attention()
    x = jax.ShapeDtypeStruct((BATCH, 128, 2, 64), jnp.bfloat16)

    def loss(x):
        out = attend((low_rank(x, x, token_keys=True),), x, mask=mask, implementation="fused")
        return out.astype(jnp.float32).sum()

    for platform, count in (("tpu", 1), ("cpu", 0)):
        calls.clear()
        jax.jit(jax.grad(loss)).trace(x).lower(lowering_platforms=(platform,))
        assert len(calls) == count, platform


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_the_callers_precision_reaches_what_a_platform_runs(platform):
    """The caller's matrix precision applies, although the function is traced during lowering.

    At that time, the context manager that sets the precision has already ended.
    """

    def square(x):
        """Returns a matrix product."""
        return (x @ x,)

    def run(x):
        with jax.default_matmul_precision("highest"):
            return platform_dependent(x, default=square, tpu=square, cuda=square)

    def loss(x):
        with jax.default_matmul_precision("highest"):
            return attend((low_rank(x, x, token_keys=True),), x, implementation="fused").sum()

    x = jax.ShapeDtypeStruct((1, 8, 1, 4), jnp.float32)
    text = jax.jit(jax.grad(jax.jit(loss))).lower(x).as_text()
    assert text.count("dot_general") == text.count("[HIGHEST, HIGHEST]") > 5
    traced = jax.jit(run).trace(jax.ShapeDtypeStruct((2, 2), jnp.float32))
    assert "HIGHEST" in traced.lower(lowering_platforms=(platform,)).as_text()
