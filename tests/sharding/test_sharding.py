"""The same run on one device and on meshes of eight devices."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.models import FeedForward, Size, alignment, t5
from synthesizer_jax.optimizers import Adafactor, Constant
from synthesizer_jax.parameters import LOGICAL_AXES, with_axes
from synthesizer_jax.registry import replace
from synthesizer_jax.sharding import RULES, MeshShape, check_batch, make_mesh, partition_spec
from synthesizer_jax.training.trainer import Trainer
from tests.training.tiny import CopyStream, experiment

DEVICES = 8


def train_five_steps(mesh, devices, *, variant="rv", **changes):
    """The losses of five steps, and the final state."""
    variant = alignment(variant, head_dim=4, max_length=8)
    model = t5(Size(16, 2, 32, 4, 4), encoder=variant, vocab_size=16, dropout_rate=0.1, scan=True)
    recipe = replace(experiment(**changes), model=model, mesh=mesh)
    trainer = Trainer(recipe, jax.devices()[:devices])
    state, stream = trainer.init(), CopyStream()
    losses = []
    for _ in range(5):
        state, metrics = trainer.step(state, trainer.shard_batch(next(stream)))
        losses.append(float(metrics["loss"]))
    return losses, state


@pytest.fixture(scope="module", params=["adamw", "adafactor"])
def optimizer(request):
    adafactor = Adafactor(learning_rate=Constant(0.01), min_size=4)
    return {} if request.param == "adamw" else {"optimizer": adafactor}


@pytest.fixture(scope="module")
def single(optimizer):
    return train_five_steps(MeshShape(), 1, **optimizer)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        MeshShape(data=8),
        MeshShape(data=2, tensor=4),
        MeshShape(data=1, fsdp=4, tensor=2),
        MeshShape(data=2, tensor=2, sequence=2),
    ],
    ids=str,
)
def test_meshes_have_the_same_losses(mesh, optimizer, single):
    losses, state = train_five_steps(mesh, DEVICES, **optimizer)
    np.testing.assert_allclose(losses, single[0], rtol=2e-4)
    if mesh.fsdp > 1:
        table = state.params["encoder"]["run_0"]["attention"]["align"]["part_0"]["table"]
        assert table.sharding.spec == P(None, "tensor", "fsdp", None)


@pytest.mark.slow
def test_tables_alone_train_on_a_mesh():
    """Their route is partitioned over examples; parameters are initialized with a single example."""
    losses, _ = train_five_steps(MeshShape(data=8), DEVICES, variant="r")
    single, _ = train_five_steps(MeshShape(), 1, variant="r")
    np.testing.assert_allclose(losses, single, rtol=2e-4)


@pytest.mark.slow
def test_micro_batches_have_the_same_gradients(single, optimizer):
    losses, _ = train_five_steps(MeshShape(), 1, micro_batches=4, **optimizer)
    # Dropout masks differ between micro-batches, so only the first losses are similar.
    assert abs(losses[0] - single[0][0]) < 0.15


def test_every_logical_axis_has_a_rule():
    assert set(RULES) == set(LOGICAL_AXES)
    with pytest.raises(ValueError, match="unknown logical axis 'width'"):
        with_axes(lambda *_: None, "width")


def test_sizes_that_are_not_divisible_are_errors():
    mesh = make_mesh(MeshShape(data=1, fsdp=4, tensor=2))
    assert partition_spec(("embed", "mlp"), (8, 6), mesh) == P("fsdp", "tensor")
    with pytest.raises(ValueError, match=r"wi: embed=10 .*fsdp=4; the nearest .* 8 and 12"):
        partition_spec(("embed", "mlp"), (10, 6), mesh, name="wi")
    with pytest.raises(ValueError, match="'tensor' twice"):
        partition_spec(("heads", "vocab"), (8, 8), mesh)
    with pytest.raises(ValueError, match=r"batch_size=30 .* 1 × 4 × 3 = 12; .* 24 and 36"):
        check_batch(30, mesh, micro_batches=3)
    with pytest.raises(ValueError, match="does not fit 8 devices"):
        make_mesh(MeshShape(data=3))
    with pytest.raises(ValueError, match="at most one is -1"):
        MeshShape(data=-1, fsdp=-1).sizes(8)
    with pytest.raises(ValueError, match=r"batch_size=12 .*shards=8; .* 8 and 16"):
        DataConfig("m", 8, 8, 12)


def test_sizes_within_and_between_slices():
    assert MeshShape(fsdp=4).sizes(16, slices=2) == ((2, 4, 1, 1), (2, 1, 1, 1))
    assert MeshShape(data=1, fsdp=-1, dcn_data=1, dcn_fsdp=-1).sizes(24, 3) == (
        (1, 8, 1, 1),
        (1, 3, 1, 1),
    )
    assert MeshShape().sizes(8) == ((8, 1, 1, 1), (1, 1, 1, 1))
    with pytest.raises(ValueError, match=r"dcn_data=4, .* does not fit 2 slices: .* multiply to 2"):
        MeshShape(dcn_data=4).sizes(16, slices=2)
    with pytest.raises(ValueError, match=r"mesh data=3, .* does not fit 8 devices of a slice"):
        MeshShape(data=3).sizes(16, slices=2)
    with pytest.raises(ValueError, match="10 devices cannot form 4 slices"):
        MeshShape().sizes(10, slices=4)


def test_mesh_without_tensor_parallelism_needs_no_divisible_heads():
    mesh = make_mesh(MeshShape(data=8))
    assert partition_spec(("embed", "heads", "kv"), (5, 3, 7), mesh) == P(None, None, None)
    assert FeedForward(3).hidden_dim == 3
