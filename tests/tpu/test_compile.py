"""The training step compiled for real TPU topologies by libtpu; run by `make test-tpu`."""

import functools
import re

import pytest

from synthesizer_jax import Gaussian
from synthesizer_jax.attention.attend import SMALL
from synthesizer_jax.data.pipeline import DataConfig
from synthesizer_jax.models import Size, alignment, t5
from synthesizer_jax.models.zoo import T5_1_1
from synthesizer_jax.registry import replace
from synthesizer_jax.sharding import MeshShape, chips, make_mesh
from synthesizer_jax.sharding.mesh import planned_devices
from synthesizer_jax.training import ahead, plan
from synthesizer_jax.training.experiment import Experiment, Training
from synthesizer_jax.training.optimizers import Adafactor

pytest.importorskip("libtpu", reason="libtpu is not installed; make test-tpu does that")
pytestmark = pytest.mark.tpu

INPUTS, TARGETS, ROWS = 512, 114, 4
PLACES = {
    "v5e:2x4": MeshShape(data=1, fsdp=4, tensor=2),
    "v5p:4x4x4": MeshShape(data=2, fsdp=16, tensor=2),
}
VARIANTS = ("v", "r", "rv", "gaussian")


def recipe(variant, name):
    """A step of base size, scanned, some rows a device."""
    shape, mesh = T5_1_1["base"], PLACES[name]
    rows = ROWS * chips.topology(name).devices // mesh.tensor
    common = {"dropout_rate": 0.1, "dtype": "bfloat16", "scan": True, "remat": "dots"}
    if variant == "gaussian":
        model = t5(
            shape,
            encoder=Gaussian((-1, 1)),
            decoder=Gaussian((-1, 0)),
            relative_bias=False,
            **common,
        )
    else:
        model = t5(shape, encoder=alignment(variant, head_dim=shape.head_dim), **common)
    return Experiment(
        model=model,
        data=DataConfig("none", INPUTS, TARGETS, rows),
        training=Training(steps=1, optimizer=Adafactor()),
        mesh=mesh,
    )


@functools.cache
def compiled(variant, name):
    """One compilation serves all tests of a step."""
    return ahead.compile_step(recipe(variant, name), chips.topology(name))


every = pytest.mark.parametrize(
    ("variant", "name"), [(v, n) for n in PLACES for v in VARIANTS], ids=str
)


@pytest.mark.parametrize(
    "name", ["v5e:2x4", "v5e:16x16", "v6e:16x16", "v5p:4x4x4", "v4:4x4x8", "tpu7x:4x4x4"]
)
def test_devices_lie_as_planned(name):
    place = chips.topology(name)
    real, planned = ahead.devices_of(place), planned_devices(place)
    wanted = {(d.device_kind, tuple(d.coords), d.core_on_chip) for d in real}
    assert {(d.device_kind, d.coords, d.core_on_chip) for d in planned} == wanted


def test_a_mesh_that_splits_a_dimension_is_made_with_a_warning(caplog):
    place = chips.topology("v6e:4x4")
    mesh = make_mesh(MeshShape(data=1, fsdp=8, tensor=2), ahead.devices_of(place))
    assert dict(mesh.shape) == {"data": 1, "fsdp": 8, "tensor": 2, "sequence": 1}
    assert "splits dimensions of the slice" in caplog.text


@every
def test_no_buffer_holds_all_logits(variant, name):
    """No ``[batch, heads, q, k]``, whatever the order of its axes.

    The decoder's own 114 × 114 are no more than its queries, keys and values: `SMALL`.
    """
    heads = T5_1_1["base"].heads // PLACES[name].tensor
    lengths = (INPUTS, TARGETS)
    pairs = [(q, k) for q in lengths for k in lengths if q * k > SMALL]
    squares = {tuple(sorted((ROWS, heads, *pair))) for pair in pairs}
    found = set()
    for sizes in re.findall(r"\[([\d,]+)\]", compiled(variant, name).as_text()):
        shape = tuple(sorted(int(n) for n in sizes.split(",") if n != "1"))
        if shape in squares:
            found.add(shape)
    assert not found


@every
def test_the_fused_route_is_its_kernels(variant, name):
    """Forward and backward, in the encoder where it has dot products, and across."""
    fused = 2 if variant in ("v", "rv") else 1
    assert compiled(variant, name).as_text().count('"tpu_custom_call"') == 2 * fused


@pytest.mark.parametrize("name", ["v4:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_kernels_compile_for_other_generations(name):
    place = chips.topology(name)
    kind = alignment("rv", head_dim=64)
    model = t5(Size(256, 1, 512, 4, 64), encoder=kind, dtype="bfloat16", scan=True)
    data = DataConfig("none", INPUTS, TARGETS, ROWS * place.devices)
    small = replace(recipe("rv", "v5e:2x4"), model=model, data=data, mesh=MeshShape())
    assert ahead.compile_step(small, place).as_text().count('"tpu_custom_call"') == 4


@every
def test_memory_is_within_the_plan(variant, name):
    place = chips.topology(name)
    needs = plan.make_plan(recipe(variant, name), place).needs
    memory = compiled(variant, name).memory_analysis()
    batch = 4 * ROWS * (INPUTS + 3 * TARGETS)
    given = needs.parameters + needs.optimizer + batch
    assert memory.argument_size_in_bytes == pytest.approx(given, rel=0.01)
    # The plan leaves out that `tensor` divides most of what is kept for the backward pass.
    assert 0.5 * needs.total <= memory.peak_memory_in_bytes <= needs.total


@every
def test_what_moves_between_devices_is_parameters_and_sums(variant, name):
    """Gathers of activations or sums of logits would be many times as much."""
    place = chips.topology(name)
    found = ahead.costs_of(compiled(variant, name)).collectives
    expected = plan.collective_bytes(recipe(variant, name), place)
    # A gather whose product begins before all has come is made of permutes; nothing is redistributed.
    assert found.keys() <= {"all-gather", "collective-permute", "all-reduce", "reduce-scatter"}
    assert found["all-gather"] <= 1.1 * expected["gathers"]
    assert sum(found.values()) == pytest.approx(sum(expected.values()), rel=0.1)
