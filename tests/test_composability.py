"""Tests attention functions and a layer under JAX's transformations.

The functions are all routes of `attend`, and `dot_product_attention`.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import synthesizer_jax as sj
from synthesizer_jax.attention import (
    attend,
    attend_with_log_sums,
    banded,
    low_rank,
    merge_attention,
    static,
)
from synthesizer_jax.attention.routes import ROUTES
from synthesizer_jax.primitives.parameters import ACTIVATION_AXES, LOGICAL_AXES
from tests.attention.cases import normal
from tests.conftest import ROOT
from tests.environment import FAST_COMPILE

BATCH, LENGTH, HEADS, WIDTH = 4, 6, 2, 3
SQUARE = HEADS, LENGTH, LENGTH
RULES = (("batch", "data"), ("heads", "model"))
STEP = 1e-5
"""The step of finite differences, in float64."""
compiled = functools.partial(jax.jit, compiler_options=FAST_COMPILE)


def by_route(name: str, terms: Callable[..., Any]) -> Callable[..., jax.Array]:
    """Returns a function that calls `attend` with a given route.

    The argument `terms` is a function that makes the terms from parameters and values.
    """
    return lambda parameters, x, mask: attend(
        terms(parameters, x), x, mask=mask, q_length=LENGTH, implementation=name
    )


def product_and_bias(bias: jax.Array, x: jax.Array) -> Any:
    return low_rank(x, x, token_keys=True), static(bias)


def merged(bias: jax.Array, x: jax.Array, mask: sj.Mask) -> jax.Array:
    """Attends to all tokens and once more to the first three tokens, in one softmax."""
    own = attend_with_log_sums(
        product_and_bias(bias, x), x, mask=mask, q_length=LENGTH, implementation="fused"
    )
    first = x[:, :3]
    other = attend_with_log_sums((low_rank(x, 0.5 * first, token_keys=True),), first)
    return merge_attention((own, other))[0]


FUNCTIONS = {
    "static": (by_route("static", lambda table, _: (static(table),)), SQUARE),
    "fused": (by_route("fused", product_and_bias), SQUARE),
    "banded": (by_route("banded", lambda w, _: (banded(w, first=-1),)), (1, 1, HEADS, 3)),
    "reference": (by_route("reference", product_and_bias), SQUARE),
    "merge_attention": (merged, SQUARE),
    "dot_product_attention": (
        lambda bias, x, mask: sj.dot_product_attention(x, x, x, bias, mask),
        SQUARE,
    ),
}
"""Functions ``(parameter, x, mask) -> y``, and the shapes of their parameters."""

LAYERS: dict[str, nn.Module] = {
    "Attention": sj.Attention(HEADS, WIDTH, sj.Mixture((sj.DotProduct(), sj.Random(LENGTH)))),
    "MultiHeadAttention": sj.MultiHeadAttention(HEADS),
    "MultiHeadAttention, alignment": sj.MultiHeadAttention(HEADS, alignment=sj.Dense(LENGTH)),
    "attention_fn": nn.MultiHeadAttention(HEADS, attention_fn=sj.attention_fn),
}


DROP_INS = [name for name in LAYERS if name != "Attention"]


class Subject:
    """A function or a layer under test, its arguments, and its results in float64."""

    def __init__(self, name: str):
        self.layer = LAYERS.get(name)
        if self.layer is None:
            self.call, shape = FUNCTIONS[name]
            x = normal("x", BATCH, LENGTH, HEADS, WIDTH)
            parameters = jnp.exp(normal("parameters", *shape) / 2)
        else:
            layer = self.layer
            x = normal("x", BATCH, LENGTH, HEADS * WIDTH)
            self.call = lambda p, x, mask: layer.apply({"params": p}, x, mask=mask)
            leaves, tree = jax.tree.flatten(layer.init(jax.random.key(0), x)["params"])
            made = (normal(f"{i:04d}", *p.shape) / 2 + 0.1 for i, p in enumerate(leaves))
            parameters = tree.unflatten(made)
        lengths = jnp.array([LENGTH, 2, 5, 1])
        target = normal("target", *x.shape)
        self.arguments = parameters, x, lengths, target
        self.others = parameters, 0.7 * x[::-1] + 0.1, lengths[::-1], target
        self.gradient = jax.value_and_grad(self.loss, (0, 1))
        self.compiled = compiled(self.gradient)

    def output(self, parameters: Any, x: jax.Array, lengths: jax.Array) -> jax.Array:
        return self.call(parameters, x, sj.Mask.padded(lengths))

    def loss(self, parameters: Any, x: jax.Array, lengths: jax.Array, target: jax.Array) -> Any:
        return jnp.sum(self.output(parameters, x, lengths).astype(target.dtype) * target)

    @functools.cached_property
    def expected(self) -> Any:
        """The expected loss and gradient, computed in float64."""
        return self.in_float64(*self.arguments)

    @functools.cached_property
    def of_others(self) -> Any:
        return self.in_float64(*self.others)

    @property
    def both(self) -> Any:
        """The arguments of both batches, without the parameters."""
        return jax.tree.map(lambda *x: jnp.stack(x), self.arguments[1:], self.others[1:])

    def in_float64(self, *arguments: Any) -> Any:
        with jax.enable_x64(True):
            return jax.tree.map(np.asarray, self.compiled(*cast(arguments, np.float64)))

    def moved(self, direction: Any, step: float) -> Any:
        """Returns the float64 loss and gradient after moving parameters and x along a direction."""
        at = cast(self.arguments[:2], np.float64)
        rest = self.arguments[2:]
        return self.in_float64(*jax.tree.map(lambda x, d: x + step * d, at, direction), *rest)

    def direction(self, seed: int) -> Any:
        return jax.tree.map(lambda x: np.cos(seed * np.asarray(x) + 1), self.arguments[:2])


def cast(tree: Any, dtype: Any) -> Any:
    """Converts a tree to NumPy arrays, and casts its floating-point arrays."""

    def convert(x):
        """Converts an array to NumPy, and casts it if it has floating-point numbers."""
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(lambda x: convert(np.asarray(x)), tree)


def dot(one: Any, other: Any) -> float:
    pairs = zip(*map(jax.tree.leaves, (one, other)), strict=True)
    return sum(float(np.vdot(np.asarray(x, np.float64), y)) for x, y in pairs)


def near(actual: Any, expected: Any, bound: float = 2e-5) -> None:
    """Compares arrays by the norm of their difference, relative to the expected norm.

    If the expected norm is less than 1, the absolute norm of the difference counts.
    """
    for x, y in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert x.shape == y.shape
        error = np.linalg.norm(x - y) / max(np.linalg.norm(y), 1.0)
        assert error < bound, error


def vmap(s: Subject) -> None:
    actual = compiled(jax.vmap(s.gradient, (None, 0, 0, 0)))(s.arguments[0], *s.both)
    near(actual, jax.tree.map(lambda *x: np.stack(x), s.expected, s.of_others))


def grad(s: Subject) -> None:
    """The gradient equals the float64 gradient and float64 finite differences."""
    near(s.compiled(*s.arguments), s.expected)
    direction = s.direction(3)
    slope = (s.moved(direction, STEP)[0] - s.moved(direction, -STEP)[0]) / (2 * STEP)
    near(dot(s.expected[1], direction), slope, 1e-6)


def jvp(s: Subject) -> None:
    direction = cast(s.direction(3), np.float32)

    def push(at, rest):
        """Returns the directional derivative."""
        return jax.jvp(lambda *at: s.output(*at, rest), at, direction)[1]

    tangent = compiled(push)(s.arguments[:2], s.arguments[2])
    near(dot(tangent, s.arguments[3]), dot(s.expected[1], direction))


def hessian(s: Subject) -> None:
    """`jax.hessian` along two directions equals finite differences of the float64 gradient."""
    directions = s.direction(3), s.direction(5)
    at, rest = s.arguments[:2], s.arguments[2:]

    def along(steps: jax.Array) -> jax.Array:
        def move(x, one, other):
            """Moves an array along two directions."""
            return x + steps[0] * one + steps[1] * other

        return s.loss(*jax.tree.map(move, at, *cast(directions, np.float32)), *rest)

    expected = np.empty((2, 2))
    for i, direction in enumerate(directions):
        ends = [s.moved(direction, step)[1] for step in (STEP, -STEP)]
        slope = jax.tree.map(lambda x, y: (x - y) / (2 * STEP), *ends)
        expected[i] = [dot(slope, other) for other in directions]
    near(compiled(jax.hessian(along))(jnp.zeros(2)), expected, 1e-4)


def checkpoint(s: Subject) -> None:
    near(compiled(jax.value_and_grad(jax.checkpoint(s.loss), (0, 1)))(*s.arguments), s.expected)


def scan(s: Subject) -> None:
    """If `jax.lax.scan` sums the losses of two batches, the gradient is the same."""

    def of_both(parameters: Any, xs: jax.Array, *rest: jax.Array) -> jax.Array:
        def step(total, arguments):
            """Adds the loss of a batch."""
            return (total + s.loss(parameters, *arguments), None)

        return jax.lax.scan(step, 0.0, (xs, *rest))[0]

    run = compiled(jax.value_and_grad(of_both, (0, 1)))
    value, (in_parameters, in_x) = run(s.arguments[0], *s.both)
    summed = jax.tree.map(np.add, s.expected, s.of_others)
    near((value, in_parameters), (summed[0], summed[1][0]))
    near(in_x, np.stack([s.expected[1][1], s.of_others[1][1]]))


def pmap(s: Subject) -> None:
    """The gradients of two devices with half of the examples each add up to the full gradient."""
    parameters, *rows = s.arguments
    halves = [x.reshape(2, BATCH // 2, *x.shape[1:]) for x in rows]
    mapped = jax.pmap(s.gradient, in_axes=(None, 0, 0, 0), devices=jax.devices()[:2])
    value, (in_parameters, in_x) = mapped(parameters, *halves)
    summed = jax.tree.map(lambda x: np.sum(x, axis=0), (value, in_parameters))
    near((*summed, in_x.reshape(rows[0].shape)), (s.expected[0], *s.expected[1]))


def shard_map(s: Subject) -> None:
    """Under `jax.shard_map` with its default `check_vma=True`, the gradient is the same."""

    def spread(*arguments: Any) -> jax.Array:
        def own(*arguments):
            """Returns the sum of the losses of all devices."""
            return jax.lax.psum(s.loss(*arguments), "data")

        return jax.shard_map(own, in_specs=(P(), *(P("data"),) * 3), out_specs=P())(*arguments)

    with jax.set_mesh(jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])):
        near(compiled(jax.value_and_grad(spread, (0, 1)))(*s.arguments), s.expected)


def explicit_mesh(s: Subject) -> None:
    """The gradient is the same on a mesh that shards examples and, in layers, also heads."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        parameters, *rows = s.arguments
        spread = [jax.device_put(x, P("data")) for x in rows]
        actual = s.compiled(jax.device_put(parameters, P()), *spread)
    assert actual[1][1].sharding.spec[0] in ("data", ("data",))
    near(actual, s.expected)


def mesh_of_types(s: Subject) -> None:
    """The gradient is the same if only the types of the arguments contain the explicit mesh.

    `jax.set_mesh` is not called.
    """
    mesh = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Explicit,) * 2)
    parameters, *rows = s.arguments
    spread = jax.device_put(rows, NamedSharding(mesh, P("data")))
    actual = s.compiled(jax.device_put(parameters, NamedSharding(mesh, P())), *spread)
    assert actual[1][1].sharding.spec[0] == "data"
    near(actual, s.expected)


def x64(s: Subject) -> None:
    """With `jax.enable_x64`, float32 arguments still give the same float32 gradient."""
    with jax.enable_x64(True):
        actual = s.compiled(*s.arguments)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(actual))
    near(actual, s.expected)


subject = functools.cache(Subject)
TRANSFORMATIONS = (vmap, grad, checkpoint, scan, pmap, shard_map, explicit_mesh, mesh_of_types, x64)
COMPOSED = [
    *itertools.product(TRANSFORMATIONS, [*FUNCTIONS, "Attention"]),
    *itertools.product([jvp, hessian], ["reference"]),
    *itertools.product(
        [explicit_mesh, mesh_of_types],
        ["MultiHeadAttention", "MultiHeadAttention, alignment", "attention_fn"],
    ),
]


@pytest.mark.parametrize(("transformation", "name"), COMPOSED)
def test_a_function_composes_with_a_transformation(
    transformation: Callable[[Subject], None], name: str
) -> None:
    """The derivatives of a loss are the same with and without a transformation."""
    transformation(subject(name))


@pytest.mark.parametrize("name", ["static", "fused", "banded", "own bias"])
def test_other_derivatives_of_fast_routes_name_the_reference(name: str) -> None:
    *at, lengths, target = subject("fused" if name == "own bias" else name).arguments

    def loss(parameters: Any, x: jax.Array) -> Any:
        if name != "own bias":
            return subject(name).loss(parameters, x, lengths, target)
        bias = jnp.stack([parameters] * BATCH)  # a bias for each example
        return sj.dot_product_attention(x, x, x, bias, implementation="fused").sum()

    def slope(*at):
        """Returns the squared norm of a gradient."""
        return jnp.sum(jax.grad(loss, 1)(*at) ** 2)

    for other in (
        lambda: jax.jit(lambda *at: jax.jvp(loss, at, at))(*at),
        lambda: jax.grad(slope, 1)(*at),
    ):
        with pytest.raises(TypeError, match='use implementation="reference"'):
            other()


def test_the_page_is_complete() -> None:
    text = (ROOT / "docs/composability.md").read_text(encoding="utf-8")
    axes = re.findall(r"^\| `(\w+)` \| [^|]+ \|$", text, flags=re.M)
    assert axes == [*LOGICAL_AXES, *ACTIVATION_AXES]
    assert set(ROUTES) <= set(FUNCTIONS)
