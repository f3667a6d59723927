"""A plan says what really lies on a device."""

import dataclasses
import math

import jax
import pytest

from synthesizer_jax.cli.plan import changed_settings
from synthesizer_jax.cli.settings import override
from synthesizer_jax.costs import chips
from synthesizer_jax.models import Size, alignment, t5, unroll
from synthesizer_jax.optimizers import OptimizerRule
from synthesizer_jax.registry import replace
from synthesizer_jax.sharding import MeshShape
from synthesizer_jax.training import aot, plan
from synthesizer_jax.training.trainer import Trainer
from tests.training.tiny import VOCAB, experiment

PLACE = chips.parse_topology("v5e:2x4")


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [MeshShape(), MeshShape(fsdp=4), MeshShape(data=1, fsdp=4, tensor=2)]
)
def test_parameters_and_optimizer_are_what_lies_on_a_device(mesh):
    recipe = experiment(mesh=mesh)
    needs = plan.make_plan(recipe, PLACE).needs
    state = Trainer(recipe, jax.devices()[:8]).init()

    def here(tree):
        shards = [x.addressable_shards[0].data for x in jax.tree.leaves(tree)]
        return sum(chips.tiled_bytes(x.shape, x.dtype.itemsize) for x in shards)

    assert needs.parameters == here(state.params)
    assert needs.optimizer == here(state.opt_state)
    assert needs.gradients == needs.parameters
    rest = needs.gathered + needs.copies + needs.activations
    assert needs.total == 2 * needs.parameters + needs.optimizer + rest
    assert (needs.gathered > 0) == (mesh.fsdp > 1)


def test_an_average_is_counted_and_what_is_frozen_has_neither_gradients_nor_state():
    plain = plan.make_plan(experiment(), PLACE).needs
    averaged = plan.make_plan(experiment(ema=0.999), PLACE).needs
    assert averaged.parameters == 2 * plain.parameters
    assert dataclasses.replace(averaged, parameters=plain.parameters) == plain
    rules = (OptimizerRule("embedding|logits_kernel|decoder/.*", frozen=True),)
    recipe = experiment(rules=rules)
    frozen = plan.make_plan(recipe, PLACE).needs
    assert frozen.parameters == plain.parameters
    encoder = Trainer(recipe, jax.devices()[:1]).layout.abstract.params["encoder"]
    bytes_of = lambda x: chips.tiled_bytes(x.shape, x.dtype.itemsize)
    assert frozen.gradients == sum(map(bytes_of, jax.tree.leaves(encoder)))
    assert plain.optimizer - frozen.optimizer == 2 * (plain.gradients - frozen.gradients)


@pytest.mark.parametrize(
    ("shape", "filled"),
    [
        ((), (128,)),
        ((300,), (512,)),
        ((700,), (1024,)),
        ((1500,), (2048,)),
        ((6, 32), (8, 128)),
        ((3, 32), (4, 128)),
        ((16064, 48), (16128, 48)),  # the other way round it would be 16064 × 128
        ((12, 48, 6, 64), (12, 48, 6, 128)),
        ((12, 768, 2048), (12, 768, 2048)),
    ],
)
def test_tiles_fill_up_what_wastes_least(shape, filled):
    assert chips.tiled_bytes(shape, 4) == 4 * math.prod(filled)


@pytest.mark.slow
def test_activations_grow_with_the_rows_and_shrink_with_remat():
    recipe = experiment()
    (copies, two), (again, three), (_, four) = (plan._residual_bytes(recipe, n) for n in (2, 3, 4))
    assert copies == again
    assert three - two == four - three > 0
    found = [plan._residual_bytes(plan.with_remat(recipe, remat), 2)[1] for remat in plan.REMATS]
    assert found == sorted(found, reverse=True)
    assert found[-1] < found[0] / 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_made_of_tables_is_whole_on_every_device(dtype):
    shape, tables = Size(8, 3, 16, 2, 4), 4 * 3 * 2 * 32 * 32
    kind = alignment("r", head_dim=4, max_length=32)
    model = t5(shape, encoder=kind, vocab_size=VOCAB, dtype=dtype, scan=True)
    data = dataclasses.replace(experiment().data, inputs_length=32)
    recipe = replace(experiment(), model=model, data=data)
    two, three = (plan._residual_bytes(recipe, rows)[1] for rows in (2, 3))
    shared = two - 2 * (three - two)
    assert tables <= shared < 3 * tables
    alone, divided = (
        plan.make_plan(replace(recipe, mesh=MeshShape(data=-1, fsdp=n)), PLACE).needs
        for n in (1, 4)
    )
    assert alone.activations == divided.activations == plan._residual_bytes(recipe, 1)[1]
    assert alone.copies == 4 * divided.copies > 0


@pytest.mark.slow
def test_a_layer_is_gathered_whole():
    shape = Size(16, 3, 64, 2, 8)
    layer = 2 * 4 * 16 * 16 + 3 * 16 * 64  # a decoder's two attentions, and the feed-forward layer
    recipe = replace(
        experiment(mesh=MeshShape(data=2, fsdp=4)), model=t5(shape, vocab_size=VOCAB, scan=True)
    )
    assert layer > VOCAB * 16
    found = [
        plan.make_plan(replace(recipe, model=model), PLACE).needs.gathered
        for model in (recipe.model, unroll(recipe.model), replace(recipe.model, dtype="bfloat16"))
    ]
    assert found == [8 * layer, 8 * layer, 4 * layer]
    large = t5(shape, vocab_size=1024)
    needs = plan.make_plan(replace(recipe, model=large), PLACE).needs
    assert needs.gathered == 8 * 1024 * 16


def test_a_micro_batch_keeps_less():
    whole, parts = (
        plan.make_plan(experiment(micro_batches=n), chips.parse_topology("v5e:1x1")) for n in (1, 4)
    )
    assert (whole.rows, parts.rows) == (8, 2)
    six = plan._residual_bytes(experiment(), 8)[1] - plan._residual_bytes(experiment(), 2)[1]
    assert whole.needs.activations - parts.needs.activations == six > 0
    assert parts.needs.gradients == 2 * whole.needs.gradients


def test_a_mesh_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="does not fit 8 devices of a slice"):
        plan.make_plan(experiment(mesh=MeshShape(data=3)), PLACE)
    with pytest.raises(ValueError, match=r"batch_size=8 is not divisible by .* = 16"):
        plan.make_plan(experiment(), chips.parse_topology("v5e:4x4"))


@pytest.mark.slow
def test_advice_fits_and_begins_with_what_costs_least():
    recipe = experiment()
    (_, best), *_ = plan.advise(recipe, PLACE)
    assert best.fits
    assert best.mesh == {"data": 8, "fsdp": 1, "tensor": 1, "sequence": 1}
    huge = replace(recipe, model=t5(Size(8192, 48, 65536, 64, 128), vocab_size=128, scan=True))
    assert plan.advise(huge, chips.parse_topology("v5e:1x1")) == []
    large = replace(recipe, model=t5(Size(2048, 24, 5120, 32, 64), vocab_size=32128, scan=True))
    for changed, way in plan.advise(large, PLACE):
        assert way.fits
        assert way == plan.make_plan(changed, PLACE)


def test_meshes_that_split_no_dimension_of_a_slice():
    assert plan.unsplit_sizes(chips.parse_topology("v6e:16x16")) == [(256, 1), (16, 16), (1, 256)]
    assert plan.unsplit_sizes(chips.parse_topology("v5p:4x4x8")) == [
        *((128, 1), (32, 4), (16, 8), (8, 16), (4, 32), (1, 128))
    ]
    assert (8, 2) in plan.unsplit_sizes(chips.parse_topology("tpu7x:2x2x2")), (
        "two devices are one chip's"
    )
    recipe = experiment(mesh=MeshShape(data=4, fsdp=1, tensor=2))
    assert plan.make_plan(recipe, PLACE).whole_axes, "rings of eight v5e chips"


@pytest.mark.slow
def test_what_is_advised_can_be_typed():
    recipe = experiment(mesh=MeshShape(data=2, fsdp=2, tensor=2, sequence=1))
    recipe = plan.with_remat(recipe, "full")
    ways = plan.advise(recipe, PLACE)
    assert len(ways) > 2
    for changed, _ in ways:
        typed = recipe
        for assignment in changed_settings(recipe, changed):
            typed = override(typed, assignment)
        assert typed == changed
        assert changed_settings(changed, changed) == []


@pytest.mark.slow
def test_parameters_are_shared_by_as_many_as_divide_the_width():
    place = chips.parse_topology("v5e:4x4")
    assert place.devices == 16
    assert plan.candidate_meshes(place, 64)[1] == MeshShape(data=1, fsdp=-1)
    assert plan.candidate_meshes(place, 24)[1:3] == [
        MeshShape(data=-1, fsdp=8),
        MeshShape(data=1, fsdp=-1, tensor=2),
    ]
    assert plan.candidate_meshes(chips.parse_topology("v5e:1x1"), 64) == [MeshShape()]
    assert MeshShape(data=1, fsdp=-1, tensor=4) in plan.candidate_meshes(
        chips.parse_topology("v5e:2x2"), 64
    )
    narrow = replace(experiment(), model=t5(Size(24, 2, 64, 2, 8), vocab_size=128))
    narrow = replace(narrow, data=replace(narrow.data, batch_size=16))
    advised = [way.mesh for _, way in plan.advise(narrow, place)]
    assert {"data": 2, "fsdp": 8, "tensor": 1, "sequence": 1} in advised
    with pytest.raises(ValueError, match=r"embed=24 .* 16 and 32, and fsdp=8 divides it"):
        plan.make_plan(replace(narrow, mesh=MeshShape(data=1, fsdp=-1)), place)


def test_two_slices_have_twice_the_chips():
    two = plan.make_plan(experiment(), chips.parse_topology("v5e:2x2", slices=2))
    assert two.topology.chips == 8
    assert two.mesh["data"] == 8


def test_names_of_topologies():
    found = chips.parse_topology("tpu7x:2x2x1")
    assert (found.chips, found.devices, found.name) == (4, 8, "tpu7x:2x2x1")
    assert chips.parse_topology("v5litepod-16", 2) == chips.parse_topology("v5e:4x4", 2)
    with pytest.raises(ValueError, match="unknown chip in 'v9:4x4'; choose from v2, v3, v4, v5e"):
        chips.parse_topology("v9:4x4")
    with pytest.raises(
        ValueError, match=r"v5p has no slice 'v5p:4x4'; near it are v5p:2x2x4 \(v5p"
    ):
        chips.parse_topology("v5p:4x4")
    with pytest.raises(ValueError, match="0 slices"):
        chips.parse_topology("v5e:4x4", 0)


def test_collectives_are_read_from_a_programs_text():
    text = """
%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[], f32[4]) parameter(0)
  ROOT %all-reduce.3 = f32[4]{0} all-reduce(%x), channel_id=2, to_apply=%add
}

%condition (p: (s32[], f32[4])) -> pred[] {
  %last = s32[]{:T(128)} constant(12)
  ROOT %less = pred[] compare(%counter, %last), direction=LT
}

ENTRY %main (a: f32[3,5]) -> f32[3,5] {
  %all-gather.3 = bf16[768,12,64]{2,1,0:T(8,128)(2,1)S(1)} all-gather(%copy), channel_id=8, x
  %all-gather.4 = bf16[768,12,64]{2,1,0:T(8,128)(2,1)} all-gather(%copy), channel_id=8, x
  %all-gather.5 = (bf16[8,4]{1,0}, bf16[16,4]{1,0}) all-gather-start(%copy), channel_id=9, x
  %all-reduce.1 = (f32[10]{0}, u32[]{:T(128)}) all-reduce(%a, %b), channel_id=1, to_apply=%add
  %all-reduce.2 = f32[3,5]{1,0} all-reduce(%c), channel_id=1, to_apply=%add
  %loop = (s32[], f32[4]) while(%tuple), condition=%condition, body=%body
  ROOT %add.1 = f32[3,5]{1,0} add(%c, %c)
}
"""
    assert list(aot._collective_operations(text)) == [
        ("all-reduce", 12 * 16),
        ("all-gather", 2 * 768 * 12 * 64),
        ("all-gather", 2 * 16 * 4),
        ("all-reduce", 44),
        ("all-reduce", 60),
    ]


def test_costs_are_multiplied_out_over_layers(monkeypatch):
    """Two layers cost what one does and once more what the second adds."""
    depth = []

    def compile_step(recipe, topology):
        sizes = [stack.runs[0].repeats for stack in (recipe.model.encoder, recipe.model.decoder)]
        assert not (recipe.model.encoder.scan or recipe.model.decoder.scan)
        depth.append(sizes)
        return sizes

    monkeypatch.setattr(aot, "compile_step", compile_step)
    monkeypatch.setattr(
        aot, "_program_costs", lambda n: aot.Costs(100 + 7 * n[0] + 5 * n[1], 1.0, {"x": n[0]})
    )
    model = t5(Size(8, 6, 16, 2, 4), vocab_size=16, scan=True)
    found = aot._extrapolate_costs(replace(experiment(), model=model), PLACE)
    assert depth == [[1, 1], [2, 2]]
    assert found == aot.Costs(100 + 7 * 6 + 5 * 6, 1.0, {"x": 6})
    depth.clear()
    shallow = replace(model.decoder, runs=(replace(model.decoder.runs[0], repeats=3),))
    found = aot._extrapolate_costs(
        replace(experiment(), model=replace(model, decoder=shallow)), PLACE
    )
    assert depth == [[1, 1], [1, 2], [2, 1]]
    assert found == aot.Costs(100 + 7 * 6 + 5 * 3, 1.0, {"x": 6})


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory on HBM, 16G exceed 15G", aot.TooLargeError),
        (
            "RESOURCE_EXHAUSTED: Allocation would exceed memory, space=vmem",
            jax.errors.JaxRuntimeError,
        ),
        ("INTERNAL: hbm", jax.errors.JaxRuntimeError),
    ],
)
def test_only_a_step_without_room_is_too_large(monkeypatch, message, kind):
    def refuse(_):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(aot, "devices_of", lambda _: jax.devices())
    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    with pytest.raises(kind, match="HBM, 16G" if kind is aot.TooLargeError else "."):
        aot.compile_step(experiment(), PLACE)
