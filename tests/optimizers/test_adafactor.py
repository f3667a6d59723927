"""Compares Adafactor with NumPy code that follows T5X and the paper.

Stacked parameters are compared with separate parameters.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from synthesizer_jax.optimizers import Adafactor, AdamW
from synthesizer_jax.optimizers.adafactor import factored_dims, state_axes
from synthesizer_jax.optimizers.schedules import Constant, Cosine, InverseSquareRoot, Linear, Noam
from synthesizer_jax.primitives.parameters import abstract_variables, is_axes
from tests.layers import cases as layers
from tests.layers import contract

MIN = 4  # small arrays are factored, too


def run_updates(tree, axes, gradients, *, min_size=MIN):
    transformation = Adafactor(Constant(0.1), min_size=min_size).build(axes)
    state = transformation.init(tree)
    update = jax.jit(transformation.update)
    for g in gradients:
        updates, state = update(g, state, tree)
        tree = optax.apply_updates(tree, updates)
    return tree, state


def make_problem(shape, axes):
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape)
    gradients = [rng.normal(size=shape) * (1 + 3 * rng.random(shape)) for _ in range(3)]

    def as32(a):
        """Returns a tree that contains the array in float32."""
        return {"x": jnp.asarray(a, jnp.float32)}

    return as32(x), {"x": axes}, [as32(g) for g in gradients]


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((4, 6, 8), ("layers", "heads", "relpos_buckets")),
        ((4, 5, 6), ("heads", "query_length", "key_length")),
        ((4, 5, 6), ("heads", "key_length", "synth_hidden")),
        ((4, 5, 2), ("heads", "query_length", "rank")),
        ((2, 3, 5, 6), ("layers", "heads", "query_length", "key_length")),
        ((2, 3, 50, 8), ("layers", "heads", "query_length", "rank")),  # T5X would factor it
    ],
)
def test_a_stack_is_updated_like_single_parameters(shape, axes):
    tree, names, gradients = make_problem(shape, axes)
    stacked, _ = run_updates(tree, names, gradients)
    for i in range(shape[0]):
        single, _ = run_updates(
            {"x": tree["x"][i]}, {"x": axes[1:]}, [{"x": g["x"][i]} for g in gradients]
        )
        np.testing.assert_allclose(stacked["x"][i], single["x"], rtol=1e-6, atol=1e-7)


# T5X's `standard_logical_factor_rules` for the axes of T5. The last line has axes that T5X does not
# have.
T5X_RULES = {
    **dict.fromkeys(("vocab", "mlp", "heads", "kv"), "column"),
    **{"embed": "row", "layers": "batch", "norm": "none"},
    **{"synth_hidden": "column", "length": "column", "relpos_buckets": "none", "parts": "none"},
}


def t5x_updates(x, axes, gradients, *, min_size, rate=0.1):
    """Returns the updates that T5X's Adafactor makes (Shazeer and Stern 2018, algorithms 4 and 5).

    Step sizes are relative. For stacked parameters, rules determine which axes are factored. A
    single matrix is factored if it is large enough. T5X stores the heads and kv dimensions of a
    kernel as one dimension.
    """
    x = np.array(x, np.float64)
    rules = [T5X_RULES[a] for a in axes]
    batch, rows, columns = (
        tuple(i for i, rule in enumerate(rules) if rule == kind)
        for kind in ("batch", "row", "column")
    )

    def size(dims):
        """Returns the product of some dimensions."""
        return np.prod([x.shape[i] for i in dims], initial=1)

    if not batch and min(size(rows), size(columns)) < min_size:
        rows = columns = ()
    inner = tuple(i for i in range(x.ndim) if i not in batch)

    def mean(a, dims):
        """Returns the mean over some dimensions, which are kept with size one."""
        return a.mean(axis=dims, keepdims=True)

    row = column = v = 0.0
    for t, g in enumerate(gradients, start=1):
        beta = 1 - t**-0.8
        square = np.square(g, dtype=np.float64) + 1e-30
        row = beta * row + (1 - beta) * mean(square, columns)
        column = beta * column + (1 - beta) * mean(square, rows)
        v = beta * v + (1 - beta) * square
        u = g / np.sqrt(row * column / mean(row, rows) if rows and columns else v)
        u = u / np.maximum(1, np.sqrt(mean(u**2, inner)))
        x = x - rate * np.maximum(1e-3, np.sqrt(mean(x**2, inner))) * u
    return x, bool(rows and columns)


@pytest.mark.parametrize("min_size", [1, 6])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((5, 7), ("embed", "mlp")),
        ((4, 5, 7), ("layers", "embed", "mlp")),
        ((5, 3, 2), ("embed", "heads", "kv")),
        ((4, 5, 3, 2), ("layers", "embed", "heads", "kv")),
        ((4, 3, 2, 5), ("layers", "heads", "kv", "embed")),
        ((9,), ("norm",)),
        ((4, 9), ("layers", "norm")),
        ((4, 7), ("layers", "mlp")),
        ((7, 5), ("vocab", "embed")),
        ((7, 4, 2), ("embed", "heads", "synth_hidden")),
        ((6, 8), ("heads", "relpos_buckets")),
        ((6, 5), ("heads", "parts")),
        ((7, 6), ("length", "embed")),
    ],
)
def test_updates_equal_t5x(shape, axes, min_size):
    tree, names, gradients = make_problem(shape, axes)
    expected, factored = t5x_updates(
        tree["x"], axes, [g["x"] for g in gradients], min_size=min_size
    )
    actual, state = run_updates(tree, names, gradients, min_size=min_size)
    assert set(state.moments["x"]) == ({"row", "col"} if factored else {"full"})
    np.testing.assert_allclose(actual["x"], expected, rtol=2e-5, atol=1e-6)


UNFACTORED = {None, "taps", "talk_to"}
"""Axes of sentence networks and of dynamic kernels, whose moments are not factored."""


@pytest.mark.parametrize("name", layers.CASES)
def test_kernels_of_all_layers_are_factored_and_biases_are_not(name):
    """In all layers, kernels are factored and biases are not.

    If this test fails for a new logical axis, group the axis like similar axes, such as
    ``kv_heads`` like ``heads``.
    """
    case = layers.CASES[name]
    x = jax.ShapeDtypeStruct((2, contract.LENGTH, contract.D), jnp.float32)
    memory = {"kv": x} if case.layer.reads_memory else {}
    shapes, axes = abstract_variables(case.layer, x, mask=contract.mask(case.modes[-1]), **memory)
    leaves = jax.tree.leaves_with_path(axes["params"], is_leaf=is_axes)
    for (path, names), p in zip(leaves, jax.tree.leaves(shapes["params"]), strict=True):
        alike = tuple(axis and axis.replace("kv_heads", "heads") for axis in names)
        for more, size in (((), 1), (("layers",), 99)):
            dims = factored_dims((*more, *names), (2,) * len(more) + p.shape, min_size=size)
            other = factored_dims((*more, *alike), (2,) * len(more) + p.shape, min_size=size)
            assert dims == other, names
        dims = factored_dims(names, p.shape, min_size=1)
        if path[-1].key == "bias":
            assert not dims.rows, names
        elif len(names) > 2 and not UNFACTORED & set(names):
            assert dims.rows and dims.columns, names


def test_zero_gradients_and_bfloat16_parameters_stay_finite():
    tree = {"x": jnp.ones((8, 8), jnp.bfloat16)}
    actual, state = run_updates(
        tree, {"x": ("embed", "mlp")}, [{"x": jnp.zeros((8, 8), jnp.bfloat16)}]
    )
    assert actual["x"].dtype == jnp.bfloat16
    assert np.all(np.asarray(actual["x"], np.float32) == 1)
    assert {m.dtype for m in jax.tree.leaves(state.moments)} == {jnp.dtype("float32")}


def test_state_axes_follow_the_parameters():
    params = {"a": {"kernel": jnp.zeros((128, 4, 64))}, "b": {"scale": jnp.zeros(3)}}
    axes = {"a": {"kernel": ("embed", "heads", "kv")}, "b": {"scale": ("norm",)}}
    wanted = {
        AdamW(weight_decay=0.1): [("embed", "heads", "kv")] * 2,
        Adafactor(clip_norm=1.0): [("heads", "kv"), ("embed",)],
    }
    for recipe, expected in wanted.items():
        state = jax.eval_shape(recipe.build(axes).init, params)
        found = jax.tree.leaves_with_path(state_axes(state, axes, params), is_leaf=is_axes)
        assert [n for k, n in found if "kernel" in jax.tree_util.keystr(k)] == expected


def test_scales_buckets_and_mixture_weights_have_no_weight_decay():
    params = {n: jnp.ones(s) for n, s in (("k", (3, 3)), ("s", (3,)), ("b", (2, 3)), ("w", (2, 2)))}
    axes = {"k": ("embed", "mlp"), "s": ("norm",)}
    axes |= {"b": ("heads", "relpos_buckets"), "w": ("heads", "parts")}
    adamw = AdamW(learning_rate=Constant(0.5), weight_decay=0.1).build(axes)
    updates, _ = adamw.update(jax.tree.map(jnp.zeros_like, params), adamw.init(params), params)
    np.testing.assert_allclose(updates["k"], -0.05, rtol=1e-6)
    assert all(not np.any(updates[n]) for n in "sbw")


def test_schedules():
    t5 = InverseSquareRoot().build()
    for step, value in ((0, 0.01), (10_000, 0.01), (40_000, 0.005)):
        np.testing.assert_allclose(t5(step), value, rtol=1e-6)
    warm = Constant(0.4, warmup_steps=4).build()
    np.testing.assert_allclose([warm(s) for s in range(6)], [0.1, 0.2, 0.3, 0.4, 0.4, 0.4], 1e-6)
    cosine = Cosine(1.0, total_steps=12, warmup_steps=2, final=0.1).build()
    np.testing.assert_allclose(
        [cosine(s) for s in (0, 1, 2, 7, 12, 99)], [0.5, 1, 1, 0.55, 0.1, 0.1], rtol=1e-5
    )
    np.testing.assert_allclose(jax.jit(cosine)(jnp.asarray(7)), 0.55, rtol=1e-5)
    linear = Linear(1.0, total_steps=6, warmup_steps=2).build()
    np.testing.assert_allclose([linear(s) for s in (1, 2, 4, 6, 9)], [1, 1, 0.5, 0, 0], atol=1e-6)
    steps = np.arange(1, 9)  # the paper counts from 1
    noam = 2.0 * 64**-0.5 * np.minimum(steps**-0.5, steps * 4**-1.5)
    found = [Noam(64, warmup_steps=4, factor=2.0).build()(s - 1) for s in steps]
    np.testing.assert_allclose(found, noam, rtol=1e-6)
