"""The cuDNN route: its arguments, computed by XLA in cuDNN's place, and the kernels it is lowered to."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import AxisType, PartitionSpec

from synthesizer_jax.attention import Mask, Partition, attend, banded, cudnn, explain, low_rank
from tests.attention import cases, oracle
from tests.attention.cases import BATCH, HEADS, KEYS, QUERIES, WIDTH

TERMS = ("static", "relative", "factorized", "dot_product", "dense")
PRODUCTS = ("dot_product", "dense")
BOUND = 2e-5


@pytest.fixture
def by_xla(monkeypatch):
    """XLA computes what cuDNN is asked for, in float32 too."""
    monkeypatch.setattr(cudnn, "KERNEL", "xla")
    monkeypatch.setattr(cudnn, "DTYPES", ("float32", "bfloat16", "float16"))
    monkeypatch.setattr(cudnn, "compute_capability", lambda: (9, 0))


@pytest.fixture
def lowered(monkeypatch):
    """A machine without a GPU lowers for one, on which JAX finds cuDNN 9.19 and Hopper."""
    monkeypatch.setattr(cudnn, "compute_capability", lambda: (9, 0))
    private = fused_attention_stablehlo
    monkeypatch.setattr(private, "check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(private, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(private, "is_cuda_compute_capability_equal", lambda _: False)


def problem(names: tuple[str, ...], q: int, k: int, dtype: jnp.dtype = jnp.float32):
    terms = jax.tree.map(lambda x: x.astype(dtype), cases.make_terms(names, BATCH, q, k))
    return (
        terms,
        cases.normal("values", BATCH, k, HEADS, WIDTH, dtype=dtype),
        cases.normal("cotangent", BATCH, q, HEADS, WIDTH, dtype=dtype),
    )


@pytest.mark.parametrize("name", cases.cross_masks())
def test_cross_attention(by_xla, name: str) -> None:
    names = PRODUCTS if name == "window on both sides" else TERMS
    terms, values, g = problem(names, QUERIES, KEYS)
    cases.check(terms, values, cases.cross_masks()[name], g, "cudnn", BOUND)


@pytest.mark.parametrize("name", cases.self_masks() | cases.packed_masks())
def test_self_attention(by_xla, name: str) -> None:
    terms, values, g = problem(TERMS, KEYS, KEYS)
    mask = (cases.self_masks() | cases.packed_masks())[name]
    cases.check(terms, values, mask, g, "cudnn", BOUND)


@pytest.mark.parametrize("names", [("static",), ("relative",), ("factorized",), PRODUCTS], ids=str)
@pytest.mark.parametrize("name", ["causal and padding", "causal window and padding"])
def test_terms_with_lengths_and_windows(by_xla, names: tuple[str, ...], name: str) -> None:
    terms, values, g = problem(names, KEYS, KEYS)
    cases.check(terms, values, cases.self_masks()[name], g, "cudnn", BOUND)


def test_more_queries_than_keys_in_a_window(by_xla) -> None:
    """The last queries see no key."""
    terms, values, g = problem(PRODUCTS, KEYS, QUERIES)
    mask = Mask(causal=True, window=2, key_lengths=jnp.array([7, 3, 0]))
    cases.check(terms, values, mask, g, "cudnn", BOUND)


@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("heads", [1, HEADS])
def test_any_pattern(by_xla, batch: int, heads: int) -> None:
    terms, values, g = problem(("static", "dot_product"), QUERIES, KEYS)
    mask = Mask(causal=True, allowed=cases.holes(batch, heads, QUERIES, KEYS))
    cases.check(terms, values, mask, g, "cudnn", BOUND)


def test_bfloat16(by_xla) -> None:
    terms, values, g = problem(TERMS, KEYS, KEYS, jnp.bfloat16)
    mask = cases.self_masks()["causal and padding"]
    out, dterms, dvalues = cases.run(terms, values, mask, g, "cudnn")
    answer = oracle.attention(terms, values, mask, g)
    assert oracle.rms_error(out, answer.out) < 1e-2
    assert oracle.rms_error(dvalues, answer.values) < 1e-2
    for term, expected in zip(oracle.gradients_of(dterms), answer.terms, strict=True):
        for name, array in expected.items():
            assert oracle.rms_error(term[name], array) < 2e-2, name


def test_gradients_of_shared_factors_are_summed_in_float32() -> None:
    """In bfloat16, 257 is 256."""
    keys = jnp.ones((1, 1, 1, 8), jnp.bfloat16)
    values = jnp.ones((600, 1, 1, 8), jnp.bfloat16)

    def factor(keys):
        return cudnn._factor((low_rank(values, keys, token_keys=False),), "keys", values, 1)

    jaxpr = jax.make_jaxpr(jax.grad(lambda x: factor(x).astype(jnp.float32).sum()))(keys)
    sums = [e for e in jaxpr.eqns if e.primitive.name == "reduce_sum" and e.invars[0].aval.ndim]
    assert {str(e.invars[0].aval.dtype) for e in sums} == {"float32"}
    np.testing.assert_array_equal(jax.grad(lambda x: factor(x).sum())(keys), 600)


def mask_of(name: str) -> Mask:
    lengths = jnp.array([11, 4, 0])
    return {
        "lengths": Mask.padded(lengths),
        "causal window": Mask(causal=True, window=3, key_lengths=lengths),
        "holes": Mask(key_valid=cases.holes(BATCH, KEYS), query_valid=cases.holes(BATCH, KEYS)),
    }[name]


@pytest.mark.parametrize("name", ["lengths", "causal window", "holes"])
@pytest.mark.parametrize("names", [PRODUCTS, TERMS], ids=len)
def test_what_the_kernel_leaves_in_padding_is_not_read(
    by_xla, monkeypatch, names: tuple[str, ...], name: str
) -> None:
    """NaN in rows that the kernel may leave as they are, of the output and of every cotangent."""
    mask = mask_of(name)
    pairs = np.broadcast_to(mask.pairs(KEYS, KEYS), (BATCH, 1, KEYS, KEYS))
    rows = jnp.asarray(pairs.any(axis=(1, 3)))[..., None, None]
    keys = mask.keys(KEYS)[..., None, None]
    shared = jnp.asarray(pairs.any(axis=0))[None]
    kernel = jax.nn.dot_product_attention

    @jax.custom_vjp
    def spoil_back(x, real):
        return x

    def even(x, real):
        return jnp.pad(
            real,
            [(0, n - m) if m > 1 else (0, 0) for n, m in zip(x.shape, real.shape, strict=True)],
        )

    spoil_back.defvjp(
        lambda x, real: (x, (x, real)),
        lambda kept, g: (jnp.where(even(*kept), g, jnp.nan), None),
    )

    def spoiled(query, key, value, bias, *args, **kwargs):
        assert {"query_seq_lengths", "key_value_seq_lengths"} <= set(kwargs)
        bias = None if bias is None else spoil_back(bias, shared)
        factors = spoil_back(query, rows), spoil_back(key, keys), spoil_back(value, keys)
        out = kernel(*factors, bias, *args, **kwargs)
        return jnp.where(even(out, rows), out, jnp.nan)

    monkeypatch.setattr(jax.nn, "dot_product_attention", spoiled)
    terms, values, g = problem(names, KEYS, KEYS)

    @functools.partial(jax.jit, compiler_options=cases.FAST_COMPILE)
    def run(terms, values, g):
        def f(*x):
            return attend(*x, mask=mask, q_length=KEYS, implementation="cudnn")

        out, back = jax.vjp(f, terms, values)
        return out, *back(g)

    out, *gradients = run(terms, values, g)
    cases.compare((out, *gradients), oracle.attention(terms, values, mask, g), BOUND)
    assert not np.any(np.asarray(out)[~np.asarray(rows)[..., 0, 0]])


def test_no_example_is_empty_for_the_kernel(by_xla, monkeypatch) -> None:
    """And no row before the last of `query_seq_lengths` is."""
    kernel, given = jax.nn.dot_product_attention, []

    def noted(*args, **kwargs):
        given.append(kwargs)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(jax.nn, "dot_product_attention", noted)
    terms, values, _ = problem(PRODUCTS, KEYS, KEYS)
    mask = Mask(causal=True, window=3, key_lengths=jnp.array([11, 4, 0]))

    @jax.jit
    def lengths(terms, values):
        cudnn._call(KEYS, cudnn.inputs_of(terms, values, mask, KEYS)[0])
        return given[0]["query_seq_lengths"], given[0]["key_value_seq_lengths"]

    queries, keys = lengths(terms, values)
    np.testing.assert_array_equal(queries, [11, 6, 1])
    np.testing.assert_array_equal(keys, [11, 4, 1])
    assert given[0]["is_causal"] and given[0]["local_window_size"] == (2, 0)


def loss(terms, values, mask, implementation):
    out = attend(terms, values, mask=mask, q_length=KEYS, implementation=implementation)
    return jnp.sum(jnp.sin(out) * jnp.arange(HEADS)[:, None])


def test_derivatives_and_transformations(by_xla) -> None:
    terms, values, _ = problem(("static", "dense"), KEYS, KEYS)
    mask = cases.self_masks()["causal and padding"]
    direction = jax.tree.map(lambda x: jnp.cos(3 * x + 1), (terms, values))
    pair = jax.tree.map(lambda x, y: jnp.stack([x, y]), (terms, values), direction)

    def every_way(implementation: str):
        def f(*x):
            return loss(*x, mask, implementation)

        gradient = jax.grad(f, (0, 1))
        return {
            "jvp": jax.jvp(f, (terms, values), direction),
            "second order": jax.jvp(gradient, (terms, values), direction),
            "vmap": jax.vmap(gradient)(*pair),
            "vmap of values": jax.vmap(gradient, (None, 0))(terms, pair[1]),
            "checkpoint": jax.grad(jax.checkpoint(f), (0, 1))(terms, values),
        }

    found, expected = (
        jax.jit(every_way, static_argnums=0, compiler_options=cases.FAST_COMPILE)(name)
        for name in ("cudnn", "reference")
    )
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert oracle.error(x, np.asarray(y, np.float64)) < 1e-4


def test_a_mesh_divides_examples_and_heads(by_xla) -> None:
    terms = cases.make_terms(TERMS, 4, KEYS, KEYS)
    values = cases.normal("values", 4, KEYS, HEADS, WIDTH)
    g = cases.normal("cotangent", 4, KEYS, HEADS, WIDTH)
    mask = Mask.padded(jnp.array([11, 4, 0, 7]), causal=True)
    partition = Partition(batch=("data",), heads=("tensor",))

    @functools.partial(jax.jit, compiler_options=cases.FAST_COMPILE)
    def run(terms, values, g):
        def f(*x):
            return attend(*x, mask=mask, implementation="cudnn", partition=partition)

        out, back = jax.vjp(f, terms, values)
        return out, *back(g)

    with jax.set_mesh(jax.make_mesh((2, 2), ("data", "tensor"), (AxisType.Auto,) * 2)):
        found = run(terms, values, g)
    cases.compare(found, oracle.attention(terms, values, mask, g), BOUND)


def test_what_cannot_be_done_is_one_sentence() -> None:
    def refuses(terms, values, sentence, mask=None):
        with pytest.raises(ValueError, match=f"'cudnn' is not possible here: .*{sentence}"):
            attend(terms, values, mask=mask, q_length=KEYS, implementation="cudnn")

    half = problem(PRODUCTS, KEYS, KEYS, jnp.bfloat16)
    terms, values, _ = half
    full = problem(PRODUCTS, KEYS, KEYS)
    refuses(full[0], full[1], "takes float16 and bfloat16, but the values are float32")
    refuses(full[0], values, "a LowRank term is float32 and the values are bfloat16")
    refuses(cases.make_terms(("outer",), BATCH, KEYS, KEYS), values, "has no Outer terms")
    refuses((banded(jnp.ones((1, 1, HEADS, 3))),), values, "has no Banded terms")
    refuses(terms, values, "needs an NVIDIA GPU of compute capability 8.0")
    segments = cases.packed_masks()["packed"].key_segments
    refuses(terms, values, "in packed rows it needs Mask.segments", Mask.packed(segments))


@pytest.mark.parametrize(
    ("capability", "width", "why"),
    [
        ((9, 0), 256, None),
        ((9, 0), 257, "up to 256 on this GPU, .* need 264"),
        ((8, 0), 128, None),
        ((10, 0), 129, "up to 128 on this GPU, .* need 136"),
        ((7, 5), 64, "compute capability 8.0 or above"),
    ],
)
def test_generations_of_gpus(monkeypatch, capability, width: int, why: str | None) -> None:
    monkeypatch.setattr(cudnn, "compute_capability", lambda: capability)
    x = jnp.zeros((1, 2, 1, width), jnp.bfloat16)
    found = cudnn.obstacle((low_rank(x, x, token_keys=True),), x[..., :8])
    assert re.search(why, found) if why else not found


def test_explain_names_the_obstacle(by_xla) -> None:
    terms, values, _ = problem(PRODUCTS, KEYS, KEYS)
    (auto,) = explain(attend, terms, values)
    assert auto.route != "cudnn" and "only where it is asked for" in auto.obstacles["cudnn"]
    (asked,) = explain(attend, terms, values, implementation="cudnn")
    assert (asked.route, asked.kernel) == ("cudnn", "cuDNN")
    assert "cudnn" not in asked.obstacles
    (outer,) = explain(attend, cases.make_terms(("outer",), BATCH, KEYS, KEYS), values)
    assert "has no Outer terms" in outer.obstacles["cudnn"]


def calls(function, *args) -> list[tuple[str, str, int, list[str]]]:
    """The kernels in a function lowered for CUDA: name, mask, window and the types of operands and results.

    Inside `jax.shard_map`, where JAX does not ask for the devices that the kernels would be divided over.
    """
    mesh = jax.make_mesh((1,), ("data",))
    everywhere = PartitionSpec()
    inside = jax.shard_map(function, mesh=mesh, in_specs=everywhere, out_specs=everywhere)
    text = jax.jit(inside).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    found = []
    for line in text.splitlines():
        for name in re.findall(r"__cudnn\$(\w+)", line):
            (mask,) = re.findall(r"mask_type\\22: \\22(\w+)", line)
            (window,) = re.findall(r"sliding_window_length\\22: (\d+)", line)
            types = re.findall(r"tensor<([^>]*)>", line.rpartition(" : ")[2])
            found.append((name, mask, int(window), types))
    return found


@pytest.mark.parametrize(
    ("names", "mask", "kernel", "kind", "window"),
    [
        (PRODUCTS, Mask(causal=True, window=3), "fmhaSoftmax", "PADDING_CAUSAL", 3),
        (TERMS, Mask.padded(jnp.array([11, 4, 0])), "fmhaScaleBiasSoftmax", "PADDING", 0),
        (TERMS, Mask(causal=True, window=3), "fmhaScaleBiasSoftmax", "PADDING_CAUSAL", 0),
    ],
    ids=["window", "lengths", "window with a bias"],
)
def test_kernels_that_are_called(lowered, names, mask, kernel, kind, window) -> None:
    terms, values, _ = problem(names, KEYS, KEYS, jnp.bfloat16)

    def f(terms, values):
        out = attend(terms, values, mask=mask, q_length=KEYS, implementation="cudnn")
        return out.astype(jnp.float32).sum()

    forward, back = calls(jax.grad(f, (0, 1)), terms, values)
    assert forward[:3] == (kernel, kind, window)
    assert back[:3] == (f"{kernel}Backward", kind, window)
    assert calls(f, terms, values) == [forward]
    ((mapped, *_),) = calls(jax.vmap(f, (None, 0)), terms, values[None])
    assert mapped == kernel
    shapes = [s for _, _, _, types in (forward, back) for s in types]
    assert "3x2x12x12xf32" not in shapes, "neither a bias nor its gradient for every example"
    assert back[3].count("1x2x12x12xf32") == (2 if "Bias" in kernel else 0)
