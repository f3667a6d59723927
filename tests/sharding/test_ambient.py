"""Tests layers on meshes with explicit, automatic and manual axes."""

from __future__ import annotations

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import synthesizer_jax as sj
from synthesizer_jax.alignments.base import dense_product
from synthesizer_jax.attention import Partition, attend, banded
from synthesizer_jax.models import Size, t5
from synthesizer_jax.primitives.parameters import abstract_variables, is_axes
from tests.attention import cases, oracle

FAST = cases.FAST_COMPILE
EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
AXES = {
    "batch": ("replica", "shard"),
    "heads": "model",
    "embed": "shard",
    "mlp": "model",
    "vocab": "model",
}
RULES = tuple(AXES.items())
"""The logical axis rules of a user."""


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2, 2), ("replica", "shard", "model"), (kind,) * 3)


def assert_close(actual, expected, bound: float = 1e-4) -> None:
    for x, y in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert oracle.error(x, np.asarray(y, np.float64)) < bound


B, N, D, H, E = 8, 16, 12, 4, 3


def test_a_normalized_window_has_gradients_on_a_mesh() -> None:
    weights, values = cases.normal("w", 1, 1, H, 3), cases.normal("values", B, N, H, E)

    def loss(weights, values):
        term = banded(jnp.abs(weights), first=-1, normalize=True)
        return jnp.sin(attend((term,), values, q_length=N, implementation="banded")).sum()

    run = jax.jit(jax.grad(loss, (0, 1)))
    expected = run(weights, values)
    with jax.set_mesh(mesh_of(EXPLICIT)):
        assert_close(run(weights, jax.device_put(values, P(("replica", "shard")))), expected)


def test_functions_with_a_partition_need_no_communication_on_automatic_axes() -> None:
    q, k, v = (cases.normal(name, B, N, H, E) for name in "qkv")
    table = cases.normal("table", H, 32)
    lengths = jnp.array([16, 3, 5, 6, 1, 16, 0, 8])

    def loss(q, k, v, table, partition=None):
        out = sj.dot_product_attention(
            q, k, v, sj.relative_bias(table), key_value_seq_lengths=lengths, partition=partition
        )
        return (out**2).sum(), out

    def compiled(*arguments, **options):
        run = jax.value_and_grad(functools.partial(loss, **options), (0, 1, 2, 3), has_aux=True)
        return jax.jit(run).lower(*arguments).compile(FAST)

    expected = compiled(q, k, v, table)(q, k, v, table)
    with jax.set_mesh(mesh_of(AUTO)):
        sharded_inputs = jax.device_put((q, k, v), P(("replica", "shard"), None, "model"))
        partition = Partition(batch=("replica", "shard"), heads=("model",))
        arguments = (*sharded_inputs, jax.device_put(table, P("model")))
        program = compiled(*arguments, partition=partition)
        assert_close(program(*arguments), expected)
    assert not moved_shapes(program.as_text())


def moved_shapes(hlo: str) -> list[tuple[int, ...]]:
    """Returns the output shapes of all collectives except reductions."""
    kinds = "all-gather|all-to-all|collective-permute"
    results = re.findall(rf"= (.*?) (?:{kinds})(?:-start)?\(", hlo)
    sizes = [size for result in results for size in re.findall(r"\w+\[([\d,]*)\]", result)]
    return [tuple(int(n) for n in size.split(",") if n) for size in sizes]


class Layer(nn.Module):
    """A user's layer, which combines this package's attention with Flax's modules."""

    alignment: sj.Alignment
    route: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def kernel(*axes):
            """Returns an initializer for a kernel with logical axes."""
            return nn.with_logical_partitioning(nn.initializers.lecun_normal(), axes)

        y = sj.Attention(H, E, self.alignment, implementation=self.route)(
            nn.LayerNorm(use_bias=False, use_scale=False)(x), mask=sj.Mask(causal=True)
        )
        x = nn.with_logical_constraint(x + y, ("batch", None, None))
        # With explicit mesh axes, the output sharding of Flax's dense layers must be specified.
        dense = functools.partial(nn.Dense, use_bias=False, dot_general=dense_product)
        h = dense(4 * D, kernel_init=kernel("embed", "mlp"))(x)
        return x + dense(D, kernel_init=kernel("mlp", "embed"))(nn.relu(h))


class Model(nn.Module):
    alignment: sj.Alignment
    routes: list[str]  # lists are not hashable

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for route in self.routes:
            x = Layer(self.alignment, route)(x)
        return x


LONG = 48
ALIGNMENTS = {
    "random": (sj.Random(LONG), ["static"] * 2),
    "rv": (sj.Mixture((sj.DotProduct(), sj.Random(LONG))), ["fused"] * 2),
    "dense": (sj.Dense(LONG), ["fused"] * 2),
    "gaussian": (sj.Gaussian(), ["banded"] * 2),
}


def lower_step(name: str, mesh: jax.sharding.Mesh, **options) -> jax.stages.Lowered:
    """Lowers a training step of a user's model with FSDP and tensor parallelism."""
    x = jax.ShapeDtypeStruct((B, LONG, D), jnp.float32)
    model = Model(*ALIGNMENTS[name])
    shapes, axes = abstract_variables(model, x)
    specs = jax.tree.map(lambda names: P(*map(AXES.get, names)), axes, is_leaf=is_axes)

    def place(s, spec):
        """Returns the shape, dtype and sharding of a parameter."""
        return jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, spec))

    def step(variables, x):
        return jax.value_and_grad(lambda v: (model.apply(v, x) ** 2).mean())(variables)

    with nn.logical_axis_rules(RULES), jax.set_mesh(mesh):
        variables = jax.tree.map(place, shapes, specs)
        x = place(x, P(("replica", "shard")))
        return jax.jit(step).trace(variables, x).lower(**options)


@pytest.mark.parametrize("name", ALIGNMENTS)
def test_a_users_model_gathers_kernels_only(name: str) -> None:
    """In a user's model with FSDP and tensor parallelism, only kernels are gathered.

    No table, activation or array of logits is gathered.
    """
    kind = AUTO if name in ("rv", "gaussian") else EXPLICIT
    hlo = lower_step(name, mesh_of(kind)).compile().as_text()
    check_hlo(hlo, num_batch_shards=4)


def check_hlo(hlo: str, *, num_batch_shards: int) -> None:
    """Checks that only kernels are gathered, and that all other arrays are sharded.

    No array may contain all examples or all logits.
    """
    shapes = moved_shapes(hlo)
    assert shapes  # the kernels, which are sharded over ``shard``
    assert all(np.prod(shape) <= 4 * D * D for shape in shapes)  # never [b, n, d] or a table
    assert f"f32[{B},{LONG}," not in hlo
    for b in (B, B // num_batch_shards):
        for h in (H, H // 2):
            assert f"[{b},{h},{LONG},{LONG}]" not in hlo
    assert f"[{H},{LONG},{LONG}]" not in hlo  # a table of all heads


def test_models_under_explicit_axes() -> None:
    """A training step of a T5 gives the same result with explicit mesh axes."""
    model = t5(
        Size(D, 1, 8, H, E), encoder=sj.Random(N), vocab_size=10, dropout_rate=0.1, scan=True
    )
    model = model.copy(encoder=model.encoder.copy(elementwise_dropout=True))
    inputs, targets = (
        jax.random.randint(jax.random.key(i), (B, n), 0, 10).at[:, 0].set(3)
        for i, n in ((0, N), (1, 6))
    )
    variables = jax.jit(model.init, compiler_options=FAST)(
        jax.random.key(2), inputs[:1], targets[:1]
    )

    def loss(variables, inputs, targets):
        logits = model.apply(variables, inputs, targets, rngs={"dropout": jax.random.key(3)})
        return (logits**2).mean()

    run = jax.jit(jax.value_and_grad(loss), compiler_options=FAST)
    expected = run(variables, inputs, targets)
    with jax.set_mesh(mesh_of(EXPLICIT)):
        sharded_inputs = jax.device_put((inputs, targets), P(("replica", "shard")))
        assert_close(run(variables, *sharded_inputs), expected)


def test_vmap_under_a_mesh() -> None:
    layer = sj.Attention(H, E, sj.Random(N))
    x = cases.normal("tokens", 2, B, N, D)
    variables = layer.init(jax.random.key(0), x[0])
    run = jax.jit(lambda v, x: jax.vmap(layer.apply, (None, 0))(v, x))
    expected = run(variables, x)
    with jax.set_mesh(mesh_of(EXPLICIT)), nn.logical_axis_rules(RULES):
        assert_close(run(variables, jax.device_put(x, P(None, "replica"))), expected, 1e-5)
