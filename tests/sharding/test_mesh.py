"""Tests meshes, rules for logical axes, and the rows that each process loads."""

from typing import NamedTuple

import flax.linen as nn
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.primitives.parameters import with_axes
from synthesizer_jax.sharding import (
    MeshShape,
    batch_sharding,
    batch_shards,
    check_batch,
    make_mesh,
    partition_spec,
    use_mesh,
)
from synthesizer_jax.training.trainer import BatchShards


def test_parameters_have_known_logical_axes():
    with pytest.raises(ValueError, match="There is no logical axis 'width'"):
        with_axes(lambda *_: None, "width")


def test_sizes_that_are_not_divisible_are_errors():
    mesh = make_mesh(MeshShape(data=1, fsdp=4, tensor=2))
    assert partition_spec(("embed", "mlp"), (8, 6), mesh) == P("fsdp", "tensor")
    with pytest.raises(ValueError, match=r"wi: embed=10 .*fsdp=4\. The nearest .* 8 and 12"):
        partition_spec(("embed", "mlp"), (10, 6), mesh, name="wi")
    with pytest.raises(ValueError, match="two dimensions over the mesh axis 'tensor'"):
        partition_spec(("heads", "vocab"), (8, 8), mesh)
    with pytest.raises(ValueError, match=r"batch_size=30 .* 1 × 4 × 3 = 12\. .* 24 and 36"):
        check_batch(30, mesh, micro_batches=3)
    with pytest.raises(ValueError, match=r"batch_size=12 .*shards=8\. .* 8 and 16"):
        DataConfig("m", 8, 8, 12)
    assert partition_spec(("embed", "heads"), (5, 3), make_mesh(MeshShape(data=8))) == P(None, None)


@pytest.mark.parametrize(
    ("axes", "spec", "batch"),
    [
        (("data", "fsdp"), P("fsdp", None), ("data", "fsdp")),
        (("data", "tensor"), P(None, "tensor"), ("data",)),
        (("fsdp", "tensor"), P("fsdp", "tensor"), ("fsdp",)),
        (("dp", "tp"), P(None, None), ()),
        (("data",), P(None, None), ("data",)),
    ],
)
def test_nothing_is_sharded_over_an_axis_that_a_mesh_lacks(axes, spec, batch):
    mesh = jax.make_mesh((2,) * len(axes), axes, devices=jax.devices()[: 2 ** len(axes)])
    assert partition_spec(("embed", "mlp"), (8, 6), mesh) == spec
    assert batch_sharding(mesh) == NamedSharding(mesh, P(batch))
    shards = 2 ** len(batch)
    assert batch_shards(mesh) == shards
    check_batch(shards * 3, mesh, micro_batches=3)
    names = " × ".join((*batch, "training.micro_batches"))
    with pytest.raises(
        ValueError, match=rf"batch_size=7 is not divisible by {names} = .*{shards * 3}\."
    ):
        check_batch(7, mesh, micro_batches=3)
    with use_mesh(mesh):
        rules = dict(nn.get_logical_axis_rules())
    assert {axis for value in rules.values() for axis in np.atleast_1d(value)} <= set(axes)
    assert rules.get("batch", ()) == batch and rules.get("mlp") == spec[1]


def test_sizes_within_and_between_slices():
    assert MeshShape(fsdp=4).sizes(16, slices=2) == ((2, 4, 1, 1), (2, 1, 1, 1))
    both = MeshShape(data=1, fsdp=-1, dcn_data=1, dcn_fsdp=-1)
    assert both.sizes(24, 3) == ((1, 8, 1, 1), (1, 3, 1, 1))
    assert MeshShape().sizes(8) == ((8, 1, 1, 1), (1, 1, 1, 1))
    for shape, devices, slices, message in (
        (MeshShape(dcn_data=4), 16, 2, r"dcn_data=4, .* product must be 2, the number of slices"),
        (
            MeshShape(data=3),
            16,
            2,
            r"sizes data=3, .* product must be 8, the number of devices of a slice",
        ),
        (MeshShape(data=-1, fsdp=-1), 8, 1, "only one of them may be -1"),
        (MeshShape(), 10, 4, "10 devices cannot be divided into 4 slices"),
    ):
        with pytest.raises(ValueError, match=message):
            shape.sizes(devices, slices)


class Device(NamedTuple):
    process_index: int
    id: int


class Spread:
    """A sharding of rows over devices of several processes, given as ``(process, first, last)``."""

    def __init__(self, *parts):
        self.parts = parts

    def devices_indices_map(self, shape):
        return {
            Device(p, i): (slice(first, last),) for i, (p, first, last) in enumerate(self.parts)
        }


@pytest.mark.parametrize(
    ("rows", "shards", "parts", "loaded", "saved"),
    [
        (
            *(16, 8, [(0, 0, 4), (0, 4, 8), (1, 8, 12), (1, 12, 16)]),
            *([[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ),
        # If two processes have the same rows, both load them, but only one saves them.
        (16, 4, [(0, 0, 16), (1, 0, 16)], [[0, 1, 2, 3]] * 2, [[0, 1, 2, 3], []]),
        # There are more processes than shards, and the order of devices is arbitrary.
        (
            8,
            2,
            [(0, 6, 8), (1, 0, 2), (2, 2, 4), (3, 4, 6)],
            [[1], [0], [0], [1]],
            [[1], [0], [], []],
        ),
    ],
)
def test_processes_load_the_shards_of_their_devices(rows, shards, parts, loaded, saved):
    found = BatchShards(rows, shards, Spread(*parts))
    assert [found.shards_of(p) for p in range(len(loaded))] == loaded
    assert [found.saved_by(p) for p in range(len(saved))] == saved
