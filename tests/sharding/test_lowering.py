"""Tests lowering of attention for TPUs and GPUs on any mesh; see `tests.sharding.meshes`."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from synthesizer_jax.attention import explanations
from synthesizer_jax.attention.mesh_axes import on_every_device
from tests.sharding.meshes import PAIRWISE, Case, check_lowers


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("case", PAIRWISE, ids=str)
def test_attention_is_lowered_on_a_mesh(case: Case, platform: str) -> None:
    check_lowers(case, platform)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            Case("Attention", AxisType.Auto, True, "batch", False, 4, 4),
            r"not divided over the mesh axes 'tensor' \(2",
        ),
        (
            Case("Attention", AxisType.Auto, False, "none", False, 4, 4),
            "4 devices, but no mesh is set",
        ),
        (Case("Attention", AxisType.Auto, True, "batch and heads", False, 4, 4), None),
    ],
    ids=str,
)
def test_repeated_work_is_warned_of_once(case: Case, message: str | None, caplog) -> None:
    explanations.warn_once.cache_clear()
    case.lower("cuda")
    case.lower("cuda")
    assert len(caplog.messages) == (message is not None)
    if message is not None:
        assert re.search(message, caplog.text)


def test_a_function_on_every_device_sees_whole_arrays_along_automatic_axes() -> None:
    """A function on every device sees whole arrays along automatic mesh axes.

    The arrays are also whole inside a `jax.shard_map` over another axis.
    """
    mesh = jax.make_mesh(
        (2, 2), ("data", "tensor"), (AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    x = jnp.arange(32.0).reshape(4, 8)
    seen = []

    def add_up(x: jax.Array) -> jax.Array:
        seen.append((x.shape, jax.sharding.get_abstract_mesh().manual_axes))
        return jnp.cumsum(x, axis=1)

    def call(x: jax.Array) -> jax.Array:
        return on_every_device(add_up)(x)

    with jax.set_mesh(mesh):
        divided = jax.shard_map(call, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        for run, shape in ((call, (4, 8)), (jax.jit(call), (4, 8)), (jax.jit(divided), (2, 8))):
            seen.clear()
            y = run(jax.device_put(x, P("data", "tensor")))
            np.testing.assert_array_equal(y, np.cumsum(x, axis=1))
            ((seen_shape, axes),) = seen
            assert seen_shape == shape
            assert set(axes) == {"data", "tensor"}
