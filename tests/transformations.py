"""Checks that a function of parameters and inputs composes with a transformation of JAX or Flax."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import synthesizer_jax as sj
from synthesizer_jax import nnx as snnx
from tests.attention import cases

BATCH = 4
RULES = (("batch", "data"), ("heads", "model"))
STEP = 1e-5
"""Of finite differences, in float64."""

Call = Callable[[Any, jax.Array, sj.Mask], jax.Array]


@dataclasses.dataclass(frozen=True)
class Row:
    """A function of parameters, inputs and a mask.

    Attributes:
      call: ``(parameters, x, mask) -> y``, x and y with an axis of examples first.
      shape: of x and y.
      parameters: shape of a function's only parameter; a layer makes its own.
      layer: the layer, None for functions.
    """

    call: Call
    shape: tuple[int, ...]
    parameters: tuple[int, ...] = ()
    layer: nn.Module | None = None


class Subject:
    """A row with numbers, and what it gives in float64.

    Args:
      row: the row.
    """

    def __init__(self, row: Row):
        self.row = row
        x = cases.normal("x", *row.shape)
        if row.layer is None:
            parameters = jnp.exp(cases.normal("parameters", *row.parameters) / 2)
        else:
            shapes = jax.eval_shape(row.layer.init, jax.random.key(0), x)["params"]
            leaves, tree = jax.tree.flatten(shapes)
            parameters = tree.unflatten(
                cases.normal(f"{i:04d}", *leaf.shape) / 2 + 0.1 for i, leaf in enumerate(leaves)
            )
        lengths, target = jnp.array([row.shape[1], 2, 5, 1]), cases.normal("target", *row.shape)
        self.arguments = parameters, x, lengths, target
        self.others = parameters, 0.7 * x[::-1] + 0.1, lengths[::-1], target

    def output(self, parameters: Any, x: jax.Array, lengths: jax.Array) -> jax.Array:
        return self.row.call(parameters, x, sj.Mask.padded(lengths))

    def loss(self, parameters: Any, x: jax.Array, lengths: jax.Array, target: jax.Array) -> Any:
        return total(self.output(parameters, x, lengths), target)

    @functools.cached_property
    def gradient(self) -> Callable[..., Any]:
        """The loss and its gradient in the parameters and x."""
        return jax.value_and_grad(self.loss, (0, 1))

    @functools.cached_property
    def compiled(self) -> Callable[..., Any]:
        return compiled(self.gradient)

    @functools.cached_property
    def expected(self) -> Any:
        """Loss and gradient."""
        return self.in_float64(*self.arguments)

    @functools.cached_property
    def of_others(self) -> Any:
        return self.in_float64(*self.others)

    def in_float64(self, *arguments: Any) -> Any:
        with jax.enable_x64(True):
            return jax.tree.map(np.asarray, self.compiled(*cast(arguments, np.float64)))

    def on_devices(self) -> Any:
        """Loss and gradient where the axis ``data`` of the mesh divides the examples."""
        parameters, *rows = self.arguments
        spread = [jax.device_put(x, P("data")) for x in rows]
        return self.compiled(jax.device_put(parameters, P()), *spread)

    def moved(self, direction: Any, step: float) -> Any:
        """Loss and gradient at parameters and x a step away."""
        at, rest = cast(self.arguments[:2], np.float64), self.arguments[2:]
        return self.in_float64(*jax.tree.map(lambda x, d: x + step * d, at, direction), *rest)

    def direction(self, seed: int) -> Any:
        return jax.tree.map(lambda x: np.cos(seed * np.asarray(x) + 1), self.arguments[:2])


def total(y: jax.Array, target: jax.Array) -> jax.Array:
    """The output weighted by the target and summed: a loss."""
    return jnp.sum(y.astype(target.dtype) * target)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(function, compiler_options=cases.FAST_COMPILE)


def cast(tree: Any, dtype: Any) -> Any:
    """NumPy arrays, the floating-point ones of another dtype."""
    wanted = lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return jax.tree.map(lambda x: wanted(np.asarray(x)), tree)


def dot(one: Any, other: Any) -> float:
    pairs = zip(*map(jax.tree.leaves, (one, other)), strict=True)
    return sum(float(np.vdot(np.asarray(x, np.float64), y)) for x, y in pairs)


def near(found: Any, expected: Any, bound: float = 2e-5) -> None:
    """Norms of differences, relative to those of the expected arrays or 1."""
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert x.shape == y.shape
        error = np.linalg.norm(x - y) / max(np.linalg.norm(y), 1.0)
        assert error < bound, error


def jit(s: Subject) -> None:
    """A compiled loss equals the loss computed operation by operation."""
    near(s.compiled(*s.arguments)[0], s.loss(*s.arguments))


def vmap(s: Subject) -> None:
    """`jax.vmap` of the gradient over two batches gives the gradient of each."""
    (parameters, *one), (_, *other) = s.arguments, s.others
    both = jax.tree.map(lambda *x: jnp.stack(x), one, other)
    found = compiled(jax.vmap(s.gradient, (None, 0, 0, 0)))(parameters, *both)
    near(found, jax.tree.map(lambda *x: np.stack(x), s.expected, s.of_others))


def grad(s: Subject) -> None:
    """The gradient in parameters and inputs equals the same in float64, and finite differences there."""
    near(s.compiled(*s.arguments), s.expected)
    direction = s.direction(3)
    slope = (s.moved(direction, STEP)[0] - s.moved(direction, -STEP)[0]) / (2 * STEP)
    near(dot(s.expected[1], direction), slope, 1e-6)


def jvp(s: Subject) -> None:
    """The output's tangent along a direction agrees with the gradient."""
    direction = cast(s.direction(3), np.float32)
    push = lambda at, rest: jax.jvp(lambda *at: s.output(*at, rest), at, direction)[1]
    tangent = compiled(push)(s.arguments[:2], s.arguments[2])
    near(dot(tangent, s.arguments[3]), dot(s.expected[1], direction))


def hessian(s: Subject) -> None:
    """`jax.hessian` along two directions equals finite differences of the gradient in float64."""
    directions = s.direction(3), s.direction(5)
    at, rest = s.arguments[:2], s.arguments[2:]

    def along(steps: jax.Array) -> jax.Array:
        move = lambda x, one, other: x + steps[0] * one + steps[1] * other
        return s.loss(*jax.tree.map(move, at, *cast(directions, np.float32)), *rest)

    expected = np.empty((2, 2))
    for i, direction in enumerate(directions):
        ends = [s.moved(direction, step)[1] for step in (STEP, -STEP)]
        slope = jax.tree.map(lambda x, y: (x - y) / (2 * STEP), *ends)
        expected[i] = [dot(slope, other) for other in directions]
    near(compiled(jax.hessian(along))(jnp.zeros(2)), expected, 1e-4)


def checkpoint(s: Subject) -> None:
    """The gradient through `jax.checkpoint` is the same."""
    rematerialized = jax.value_and_grad(jax.checkpoint(s.loss), (0, 1))
    near(compiled(rematerialized)(*s.arguments), s.expected)


def scan(s: Subject) -> None:
    """The gradient of the losses of two batches, summed by `jax.lax.scan`, is the sum of the gradients."""
    (parameters, *one), (_, *other) = s.arguments, s.others
    both = jax.tree.map(lambda *x: jnp.stack(x), one, other)

    def of_both(parameters: Any, xs: jax.Array, *rest: jax.Array) -> jax.Array:
        add = lambda so_far, arguments: (so_far + s.loss(parameters, *arguments), None)
        return jax.lax.scan(add, 0.0, (xs, *rest))[0]

    value, (in_parameters, in_x) = compiled(jax.value_and_grad(of_both, (0, 1)))(parameters, *both)
    summed = jax.tree.map(np.add, s.expected, s.of_others)
    near((value, in_parameters), (summed[0], summed[1][0]))
    near(in_x, np.stack([s.expected[1][1], s.of_others[1][1]]))


def pmap(s: Subject) -> None:
    """The gradients of two devices, each with half of the examples, add up to the gradient."""
    parameters, *rows = s.arguments
    halves = [x.reshape(2, BATCH // 2, *x.shape[1:]) for x in rows]
    mapped = jax.pmap(s.gradient, in_axes=(None, 0, 0, 0), devices=jax.devices()[:2])
    value, (in_parameters, in_x) = mapped(parameters, *halves)
    summed = jax.tree.map(lambda x: np.sum(x, axis=0), (value, in_parameters))
    near((*summed, in_x.reshape(s.row.shape)), (s.expected[0], *s.expected[1]))


def shard_map(s: Subject) -> None:
    """The gradient of a loss summed over devices in `jax.shard_map`, with its default `check_vma=True`,
    is the same.
    """

    def spread(*arguments: Any) -> jax.Array:
        own = lambda *arguments: jax.lax.psum(s.loss(*arguments), "data")
        return jax.shard_map(own, in_specs=(P(), *(P("data"),) * 3), out_specs=P())(*arguments)

    with jax.set_mesh(jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])):
        near(compiled(jax.value_and_grad(spread, (0, 1)))(*s.arguments), s.expected)


def explicit_mesh(s: Subject) -> None:
    """The gradient on a mesh of four by two devices with explicit axes, JAX's default, is the same. Four
    devices divide the examples, two the heads of layers.
    """
    with on_mesh(AxisType.Explicit):
        found = s.on_devices()
        assert jax.typeof(found[1][1]).sharding.spec[0] in ("data", ("data",))
    near(found, s.expected)


def auto_mesh(s: Subject) -> None:
    """The gradient on the same mesh with automatic axes is the same."""
    with on_mesh(AxisType.Auto):
        found = s.on_devices()
    near(found, s.expected)


@contextlib.contextmanager
def on_mesh(kind: AxisType) -> Iterator[None]:
    mesh = jax.make_mesh((4, 2), ("data", "model"), (kind,) * 2)
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        yield


def x64(s: Subject) -> None:
    """Under `jax.enable_x64`, float32 arguments give the same gradient in float32."""
    with jax.enable_x64(True):
        found = s.compiled(*s.arguments)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(found))
    near(found, s.expected)


def bfloat16(s: Subject) -> None:
    """The gradient of one example in bfloat16 is within 5 % of that in float64; the parameters of layers
    are float32.
    """
    parameters, x, lengths, target = s.arguments
    if s.row.layer is None:
        parameters = jax.tree.map(lambda p: p.astype(jnp.bfloat16), parameters)
    found = s.compiled(parameters, x[:1].astype(jnp.bfloat16), lengths[:1], target[:1])
    only_first = target * (np.arange(BATCH) == 0).reshape(-1, *(1,) * (target.ndim - 1))
    value, (in_parameters, in_x) = s.in_float64(*s.arguments[:3], only_first)
    near(found, (value, (in_parameters, in_x[:1])), 0.05)


def nnx_module(s: Subject) -> None:
    """The NNX module has the loss and the gradient of the Linen layer with the same parameters."""
    _, *rows = s.arguments
    assert s.row.layer is not None
    module = snnx.to_nnx(s.row.layer, in_features=rows[0].shape[-1], rngs=nnx.Rngs(0))

    @nnx.jit
    def run(module: Any) -> Any:
        loss = lambda module: total(module(rows[0], mask=sj.Mask.padded(rows[1])), rows[2])
        return nnx.value_and_grad(loss)(module)

    value, in_parameters = run(module)
    variables = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    expected, (in_linen, _) = s.compiled(variables, *rows)
    near((value, nnx.to_pure_dict(in_parameters)), (expected, in_linen))
