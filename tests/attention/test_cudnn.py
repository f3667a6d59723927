"""The cuDNN route: its arguments, with XLA in place of cuDNN, and the kernels that it is lowered to."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import AxisType, PartitionSpec

from synthesizer_jax.attention import (
    Mask,
    Partition,
    Terms,
    attend,
    banded,
    cudnn,
    explain,
    low_rank,
)
from tests.attention import cases, oracle
from tests.attention.cases import BATCH, HEADS, KEYS, QUERIES, WIDTH

TERMS = ("static", "relative", "factorized", "dot_product", "dense")
PRODUCTS = ("dot_product", "dense")
BOUND = 2e-5


@pytest.fixture
def by_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs XLA's implementation instead of cuDNN's, for float32 too."""
    monkeypatch.setattr(cudnn, "KERNEL", "xla")
    monkeypatch.setattr(cudnn, "DTYPES", ("float32", "bfloat16", "float16"))
    monkeypatch.setattr(cudnn, "compute_capability", lambda: (9, 0))


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowers for a Hopper GPU with cuDNN 9.19 on a machine without a GPU."""
    monkeypatch.setattr(cudnn, "compute_capability", lambda: (9, 0))
    module = fused_attention_stablehlo
    monkeypatch.setattr(module, "check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(module, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(module, "is_cuda_compute_capability_equal", lambda _: False)


def make_problem(
    names: tuple[str, ...], q: int, k: int, dtype: jnp.dtype = jnp.float32
) -> tuple[Terms, jax.Array, jax.Array]:
    """Returns terms, values and a cotangent of the output."""
    terms = jax.tree.map(lambda x: x.astype(dtype), cases.make_terms(names, BATCH, q, k))
    return (
        terms,
        cases.normal("values", BATCH, k, HEADS, WIDTH, dtype=dtype),
        cases.normal("cotangent", BATCH, q, HEADS, WIDTH, dtype=dtype),
    )


@pytest.mark.parametrize("name", cases.cross_masks())
def test_cross_attention(by_xla: None, name: str) -> None:
    names = PRODUCTS if name == "window on both sides" else TERMS
    terms, values, dout = make_problem(names, QUERIES, KEYS)
    cases.check(terms, values, cases.cross_masks()[name], dout, "cudnn", BOUND)


@pytest.mark.parametrize("name", cases.self_masks() | cases.packed_masks())
def test_self_attention(by_xla: None, name: str) -> None:
    terms, values, dout = make_problem(TERMS, KEYS, KEYS)
    mask = (cases.self_masks() | cases.packed_masks())[name]
    cases.check(terms, values, mask, dout, "cudnn", BOUND)


@pytest.mark.parametrize("names", [("static",), ("relative",), ("factorized",), PRODUCTS], ids=str)
@pytest.mark.parametrize("name", ["causal and padding", "causal window and padding"])
def test_terms_with_lengths_and_windows(by_xla: None, names: tuple[str, ...], name: str) -> None:
    terms, values, dout = make_problem(names, KEYS, KEYS)
    cases.check(terms, values, cases.self_masks()[name], dout, "cudnn", BOUND)


def test_more_queries_than_keys_in_a_window(by_xla: None) -> None:
    """The last queries have no key."""
    terms, values, dout = make_problem(PRODUCTS, KEYS, QUERIES)
    mask = Mask(causal=True, window=2, key_lengths=jnp.array([7, 3, 0]))
    cases.check(terms, values, mask, dout, "cudnn", BOUND)


@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("heads", [1, HEADS])
def test_patterns_of_every_shape(by_xla: None, batch: int, heads: int) -> None:
    terms, values, dout = make_problem(("static", "dot_product"), QUERIES, KEYS)
    mask = Mask(causal=True, allowed=cases.holes(batch, heads, QUERIES, KEYS))
    cases.check(terms, values, mask, dout, "cudnn", BOUND)


def test_bfloat16(by_xla: None) -> None:
    terms, values, dout = make_problem(TERMS, KEYS, KEYS, jnp.bfloat16)
    mask = cases.self_masks()["causal and padding"]
    out, dterms, dvalues = cases.run(terms, values, mask, dout, "cudnn")
    expected = oracle.attention(terms, values, mask, dout)
    assert oracle.rms_error(out, expected.out) < 1e-2
    assert oracle.rms_error(dvalues, expected.values) < 1e-2
    for dterm, expected_dterm in zip(oracle.gradients_of(dterms), expected.terms, strict=True):
        for name, array in expected_dterm.items():
            assert oracle.rms_error(dterm[name], array) < 2e-2, name


def test_gradients_of_shared_factors_are_summed_in_float32() -> None:
    """A sum of ones in bfloat16 would stop at 256."""
    keys = jnp.ones((1, 1, 1, 8), jnp.bfloat16)
    values = jnp.ones((600, 1, 1, 8), jnp.bfloat16)

    def concatenate(keys: jax.Array) -> jax.Array:
        return cudnn._concatenate_factors([keys], values, 1)

    jaxpr = jax.make_jaxpr(jax.grad(lambda x: concatenate(x).astype(jnp.float32).sum()))(keys)
    sums = [e for e in jaxpr.eqns if e.primitive.name == "reduce_sum" and e.invars[0].aval.ndim]
    assert {str(e.invars[0].aval.dtype) for e in sums} == {"float32"}
    np.testing.assert_array_equal(jax.grad(lambda x: concatenate(x).sum())(keys), 600)


def make_mask(name: str) -> Mask:
    lengths = jnp.array([11, 4, 0])
    return {
        "lengths": Mask.padded(lengths),
        "causal window": Mask(causal=True, window=3, key_lengths=lengths),
        "holes": Mask(key_valid=cases.holes(BATCH, KEYS), query_valid=cases.holes(BATCH, KEYS)),
    }[name]


@pytest.mark.parametrize("name", ["lengths", "causal window", "holes"])
@pytest.mark.parametrize("names", [PRODUCTS, TERMS], ids=len)
def test_results_of_the_kernel_for_padding_are_not_read(
    by_xla: None, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], name: str
) -> None:
    """The rows that the kernel may leave undefined, of the output and of all cotangents, are NaN here."""
    mask = make_mask(name)
    pairs = np.broadcast_to(mask.pairs(KEYS, KEYS), (BATCH, 1, KEYS, KEYS))
    has_keys = jnp.asarray(pairs.any(axis=(1, 3)))[..., None, None]
    keys = mask.keys(KEYS)[..., None, None]
    in_any_example = jnp.asarray(pairs.any(axis=0))[None]
    kernel = jax.nn.dot_product_attention

    @jax.custom_vjp
    def spoil_cotangent(x, is_defined):
        return x

    def pad_like(x, is_defined):
        """Pads `is_defined` to the shape of `x`, which the route has padded."""
        sizes = zip(x.shape, is_defined.shape, strict=True)
        return jnp.pad(is_defined, [(0, n - m) if m > 1 else (0, 0) for n, m in sizes])

    spoil_cotangent.defvjp(
        lambda x, is_defined: (x, (x, is_defined)),
        lambda residuals, dout: (jnp.where(pad_like(*residuals), dout, jnp.nan), None),
    )

    def call_spoiled_kernel(query, key, value, bias, *args, **kwargs):
        assert {"query_seq_lengths", "key_value_seq_lengths"} <= set(kwargs)
        bias = None if bias is None else spoil_cotangent(bias, in_any_example)
        query = spoil_cotangent(query, has_keys)
        key, value = spoil_cotangent(key, keys), spoil_cotangent(value, keys)
        out = kernel(query, key, value, bias, *args, **kwargs)
        return jnp.where(pad_like(out, has_keys), out, jnp.nan)

    monkeypatch.setattr(jax.nn, "dot_product_attention", call_spoiled_kernel)
    terms, values, dout = make_problem(names, KEYS, KEYS)

    @functools.partial(jax.jit, compiler_options=cases.FAST_COMPILE)
    def attend_and_vjp(terms, values, dout):
        def f(*args):
            return attend(*args, mask=mask, q_length=KEYS, implementation="cudnn")

        out, vjp = jax.vjp(f, terms, values)
        return out, *vjp(dout)

    out, *gradients = attend_and_vjp(terms, values, dout)
    cases.compare((out, *gradients), oracle.attention(terms, values, mask, dout), BOUND)
    assert not np.any(np.asarray(out)[~np.asarray(has_keys)[..., 0, 0]])


def test_lengths_for_the_kernel_are_not_zero(by_xla: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All queries within `query_seq_lengths` have a key."""
    kernel, recorded_kwargs = jax.nn.dot_product_attention, []

    def record_call(*args, **kwargs):
        recorded_kwargs.append(kwargs)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(jax.nn, "dot_product_attention", record_call)
    terms, values, _ = make_problem(PRODUCTS, KEYS, KEYS)
    mask = Mask(causal=True, window=3, key_lengths=jnp.array([11, 4, 0]))

    @jax.jit
    def lengths(terms, values):
        cudnn._call_cudnn(KEYS, cudnn.fused_inputs(terms, values, mask, q_length=KEYS)[0])
        kwargs = recorded_kwargs[0]
        return kwargs["query_seq_lengths"], kwargs["key_value_seq_lengths"]

    query_lengths, key_lengths = lengths(terms, values)
    np.testing.assert_array_equal(query_lengths, [11, 6, 1])
    np.testing.assert_array_equal(key_lengths, [11, 4, 1])
    assert recorded_kwargs[0]["is_causal"] and recorded_kwargs[0]["local_window_size"] == (2, 0)


def loss(terms: Terms, values: jax.Array, *, mask: Mask, implementation: str) -> jax.Array:
    out = attend(terms, values, mask=mask, q_length=KEYS, implementation=implementation)
    return jnp.sum(jnp.sin(out) * jnp.arange(HEADS)[:, None])


def test_derivatives_and_transformations(by_xla: None) -> None:
    terms, values, _ = make_problem(("static", "dense"), KEYS, KEYS)
    mask = cases.self_masks()["causal and padding"]
    direction = jax.tree.map(lambda x: jnp.cos(3 * x + 1), (terms, values))
    pair = jax.tree.map(lambda x, y: jnp.stack([x, y]), (terms, values), direction)

    def transform(implementation: str) -> dict[str, object]:
        def f(*args):
            return loss(*args, mask=mask, implementation=implementation)

        gradient = jax.grad(f, (0, 1))
        return {
            "jvp": jax.jvp(f, (terms, values), direction),
            "second order": jax.jvp(gradient, (terms, values), direction),
            "vmap": jax.vmap(gradient)(*pair),
            "vmap of values": jax.vmap(gradient, (None, 0))(terms, pair[1]),
            "checkpoint": jax.grad(jax.checkpoint(f), (0, 1))(terms, values),
        }

    actual, expected = (
        jax.jit(transform, static_argnums=0, compiler_options=cases.FAST_COMPILE)(name)
        for name in ("cudnn", "reference")
    )
    for x, y in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert oracle.error(x, np.asarray(y, np.float64)) < 1e-4


def test_a_mesh_divides_examples_and_heads(by_xla: None) -> None:
    terms = cases.make_terms(TERMS, 4, KEYS, KEYS)
    values = cases.normal("values", 4, KEYS, HEADS, WIDTH)
    dout = cases.normal("cotangent", 4, KEYS, HEADS, WIDTH)
    mask = Mask.padded(jnp.array([11, 4, 0, 7]), causal=True)
    partition = Partition(batch=("data",), heads=("tensor",))

    @functools.partial(jax.jit, compiler_options=cases.FAST_COMPILE)
    def attend_and_vjp(terms, values, dout):
        def f(*args):
            return attend(*args, mask=mask, implementation="cudnn", partition=partition)

        out, vjp = jax.vjp(f, terms, values)
        return out, *vjp(dout)

    with jax.set_mesh(jax.make_mesh((2, 2), ("data", "tensor"), (AxisType.Auto,) * 2)):
        actual = attend_and_vjp(terms, values, dout)
    cases.compare(actual, oracle.attention(terms, values, mask, dout), BOUND)


def test_errors() -> None:
    def assert_error(
        terms: Terms, values: jax.Array, sentence: str, mask: Mask | None = None
    ) -> None:
        with pytest.raises(ValueError, match=f"'cudnn' is not possible here: .*{sentence}"):
            attend(terms, values, mask=mask, q_length=KEYS, implementation="cudnn")

    terms, values, _ = make_problem(PRODUCTS, KEYS, KEYS, jnp.bfloat16)
    terms32, values32, _ = make_problem(PRODUCTS, KEYS, KEYS)
    assert_error(terms32, values32, "supports float16 and bfloat16, but the values are float32")
    assert_error(terms32, values, "a LowRank term is float32 and the values are bfloat16")
    assert_error(cases.make_terms(("outer",), BATCH, KEYS, KEYS), values, "has no Outer terms")
    assert_error((banded(jnp.ones((1, 1, HEADS, 3))),), values, "has no Banded terms")
    assert_error(terms, values, "needs an NVIDIA GPU of compute capability 8.0")
    segments = cases.packed_masks()["packed"].key_segments
    assert_error(terms, values, "in packed rows it needs Mask.segments", Mask.packed(segments))


@pytest.mark.parametrize(
    ("capability", "width", "message"),
    [
        ((9, 0), 256, None),
        ((9, 0), 257, "up to 256 on this GPU, .* need 264"),
        ((8, 0), 128, None),
        ((10, 0), 129, "up to 128 on this GPU, .* need 136"),
        ((7, 5), 64, "compute capability 8.0 or above"),
    ],
)
def test_generations_of_gpus(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], width: int, message: str | None
) -> None:
    monkeypatch.setattr(cudnn, "compute_capability", lambda: capability)
    x = jnp.zeros((1, 2, 1, width), jnp.bfloat16)
    obstacle = cudnn.obstacle((low_rank(x, x, token_keys=True),), x[..., :8])
    assert re.search(message, obstacle) if message else not obstacle


def test_explain_names_the_obstacle(by_xla: None) -> None:
    terms, values, _ = make_problem(PRODUCTS, KEYS, KEYS)
    (auto,) = explain(attend, terms, values)
    assert auto.route != "cudnn" and "only where it is asked for" in auto.obstacles["cudnn"]
    (explicit,) = explain(attend, terms, values, implementation="cudnn")
    assert (explicit.route, explicit.kernel) == ("cudnn", "cuDNN")
    assert "cudnn" not in explicit.obstacles
    (outer,) = explain(attend, cases.make_terms(("outer",), BATCH, KEYS, KEYS), values)
    assert "has no Outer terms" in outer.obstacles["cudnn"]


class KernelCall(NamedTuple):
    name: str
    mask: str
    window: int
    types: list[str]
    """The types of the operands and the results."""


def list_kernel_calls(function: Callable[..., object], *args: object) -> list[KernelCall]:
    """Returns the calls of kernels in a function that is lowered for CUDA.

    The function is lowered inside `jax.shard_map`, as JAX otherwise asks for the devices over which it
    would divide the kernels.
    """
    mesh = jax.make_mesh((1,), ("data",))
    replicated = PartitionSpec()
    mapped = jax.shard_map(function, mesh=mesh, in_specs=replicated, out_specs=replicated)
    program = jax.jit(mapped).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    kernel_calls = []
    for line in program.splitlines():
        for name in re.findall(r"__cudnn\$(\w+)", line):
            (mask,) = re.findall(r"mask_type\\22: \\22(\w+)", line)
            (window,) = re.findall(r"sliding_window_length\\22: (\d+)", line)
            types = re.findall(r"tensor<([^>]*)>", line.rpartition(" : ")[2])
            kernel_calls.append(KernelCall(name, mask, int(window), types))
    return kernel_calls


@pytest.mark.parametrize(
    ("names", "mask", "kernel", "kind", "window"),
    [
        (PRODUCTS, Mask(causal=True, window=3), "fmhaSoftmax", "PADDING_CAUSAL", 3),
        (TERMS, Mask.padded(jnp.array([11, 4, 0])), "fmhaScaleBiasSoftmax", "PADDING", 0),
        (TERMS, Mask(causal=True, window=3), "fmhaScaleBiasSoftmax", "PADDING_CAUSAL", 0),
    ],
    ids=["window", "lengths", "window with a bias"],
)
def test_kernel_calls(
    lowered: None, names: tuple[str, ...], mask: Mask, kernel: str, kind: str, window: int
) -> None:
    terms, values, _ = make_problem(names, KEYS, KEYS, jnp.bfloat16)

    def f(terms, values):
        out = attend(terms, values, mask=mask, q_length=KEYS, implementation="cudnn")
        return out.astype(jnp.float32).sum()

    forward, backward = list_kernel_calls(jax.grad(f, (0, 1)), terms, values)
    assert forward[:3] == (kernel, kind, window)
    assert backward[:3] == (f"{kernel}Backward", kind, window)
    assert list_kernel_calls(f, terms, values) == [forward]
    (mapped,) = list_kernel_calls(jax.vmap(f, (None, 0)), terms, values[None])
    assert mapped.name == kernel
    types = forward.types + backward.types
    assert "3x2x12x12xf32" not in types, "neither a bias nor its gradient for every example"
    assert backward.types.count("1x2x12x12xf32") == (2 if "Bias" in kernel else 0)
