"""Tests that a memory plan gives the number of bytes that are really on a device."""

import dataclasses
import math

import jax
import pytest

from synthesizer_jax.base.registry import replace
from synthesizer_jax.cli.plan import changed_settings
from synthesizer_jax.cli.recipes import override
from synthesizer_jax.costs import chips
from synthesizer_jax.models import Size, alignment, t5, unroll
from synthesizer_jax.optimizers import OptimizerRule
from synthesizer_jax.sharding import MeshShape
from synthesizer_jax.training import plan
from synthesizer_jax.training.trainer import Trainer
from tests.cli.commands import invoke
from tests.training.tiny import VOCAB, encoder
from tests.training.tiny import experiment as make

PLACE, ONE = map(chips.parse_topology, ("v5e:2x4", "v5e:1x1"))
KIND = alignment("rv", head_dim=4, max_length=8)
MODEL = t5(Size(8, 1, 16, 2, 4), encoder=KIND, vocab_size=VOCAB, dropout_rate=0.1)


def experiment(model=MODEL, **changes):
    return make(model, **changes)


def bytes_of(shards):
    return sum(chips.tiled_bytes(x.shape, x.dtype.itemsize) for x in shards)


@pytest.mark.parametrize("mesh", [MeshShape(), MeshShape(data=1, fsdp=4, tensor=2)])
def test_planned_parameters_and_optimizer_are_those_on_a_device(mesh):
    recipe = experiment(mesh=mesh)
    needs = plan.make_plan(recipe, PLACE).needs
    state = Trainer(recipe, jax.devices()[:8]).init()

    def here(tree):
        """Returns how many bytes of a tree are on the first device."""
        return bytes_of(x.addressable_shards[0].data for x in jax.tree.leaves(tree))

    assert needs.parameters == needs.gradients == here(state.params)
    assert needs.optimizer == here(state.opt_state)
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
    trained = Trainer(recipe, jax.devices()[:1]).layout.abstract.params["encoder"]
    assert frozen.gradients == bytes_of(jax.tree.leaves(trained))
    assert plain.optimizer - frozen.optimizer == 2 * (plain.gradients - frozen.gradients)


@pytest.mark.parametrize(
    ("shape", "filled"),
    [
        ((), (128,)),
        ((300,), (512,)),
        ((1500,), (2048,)),
        ((3, 32), (4, 128)),
        ((16064, 48), (16128, 48)),  # swapped axes would give 16064 × 128
        ((12, 48, 6, 64), (12, 48, 6, 128)),
        ((12, 768, 2048), (12, 768, 2048)),
    ],
)
def test_arrays_are_padded_to_the_tiles_that_waste_least(shape, filled):
    assert chips.tiled_bytes(shape, 4) == 4 * math.prod(filled)


def test_activations_grow_with_the_rows_and_shrink_with_remat():
    recipe = experiment()
    (copies, two), (again, three), (_, four) = (plan._residual_bytes(recipe, n) for n in (2, 3, 4))
    assert copies == again
    assert three - two == four - three > 0
    found = [plan._residual_bytes(plan.with_remat(recipe, remat), 2)[1] for remat in plan.REMATS]
    assert found == sorted(found, reverse=True) and found[-1] < found[0] / 2
    whole, parts = (plan.make_plan(experiment(micro_batches=n), ONE) for n in (1, 4))
    assert (whole.rows, parts.rows) == (8, 2)
    assert whole.needs.activations - parts.needs.activations == 6 * (three - two)
    assert parts.needs.gradients == 2 * whole.needs.gradients


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arrays_made_from_tables_are_whole_on_every_device(dtype):
    tables = 4 * 3 * 2 * 32 * 32
    kind = alignment("r", head_dim=4, max_length=32)
    model = t5(Size(8, 3, 16, 2, 4), encoder=kind, vocab_size=VOCAB, dtype=dtype, scan=True)
    recipe = experiment(model, data={"inputs_length": 32})
    two, three = (plan._residual_bytes(recipe, rows)[1] for rows in (2, 3))
    assert tables <= two - 2 * (three - two) < 3 * tables
    alone, divided = (
        plan.make_plan(replace(recipe, mesh=MeshShape(fsdp=n)), PLACE).needs for n in (1, 4)
    )
    assert alone.activations == divided.activations == plan._residual_bytes(recipe, 1)[1]
    assert alone.copies == 4 * divided.copies > 0


def test_a_layer_is_gathered_whole():
    shape = Size(16, 3, 64, 2, 8)
    # A decoder layer consists of two attention layers and a feed-forward layer.
    layer = 2 * 4 * 16 * 16 + 3 * 16 * 64
    recipe = experiment(t5(shape, vocab_size=VOCAB, scan=True), mesh=MeshShape(data=2, fsdp=4))
    assert layer > VOCAB * 16
    found = [
        plan.make_plan(replace(recipe, model=model), PLACE).needs.gathered
        for model in (recipe.model, unroll(recipe.model), replace(recipe.model, dtype="bfloat16"))
    ]
    assert found == [8 * layer, 8 * layer, 4 * layer]
    large = replace(recipe, model=t5(shape, vocab_size=1024))
    assert plan.make_plan(large, PLACE).needs.gathered == 8 * 1024 * 16


def test_advice_fits_starts_with_the_cheapest_and_can_be_typed():
    recipe = experiment(encoder(), mesh=MeshShape(data=2, fsdp=2, tensor=2))
    recipe = plan.with_remat(recipe, "full")
    (first, best), *_, (last, way) = options = plan.advise(recipe, PLACE)
    assert best.fits and len(options) > 2
    assert best.mesh == {"data": 8, "fsdp": 1, "tensor": 1, "sequence": 1}
    assert way == plan.make_plan(last, PLACE)
    for changed in (first, last):
        assert override(recipe, *changed_settings(recipe, changed)) == changed
        assert changed_settings(changed, changed) == []
    huge = t5(Size(8192, 48, 65536, 64, 128), vocab_size=128, scan=True).encoder
    huge = replace(recipe, model=encoder().copy(encoder=huge, d_model=8192))
    assert plan.advise(huge, ONE) == []


def test_a_plan_shows_its_progress():
    result = invoke("plan quickstart --topology v5e:2x4")
    assert result.stdout.startswith("v5e:2x4: 8 chips")
    phases = ["tracing a training step", "trying up to 20 settings of the mesh and of remat"]
    assert result.stderr.splitlines() == phases


def test_parameters_are_shared_by_as_many_as_divide_the_width():
    place = chips.parse_topology("v5e:4x4")
    assert plan.candidate_meshes(place, 64)[1] == MeshShape(data=1, fsdp=-1)
    assert plan.candidate_meshes(place, 24)[1:3] == [
        MeshShape(fsdp=8),
        MeshShape(1, fsdp=-1, tensor=2),
    ]
    assert plan.candidate_meshes(ONE, 64) == [MeshShape()]
    narrow = experiment(t5(Size(24, 2, 64, 2, 8), vocab_size=128), mesh=MeshShape(1, -1))
    narrow = replace(narrow, data=replace(narrow.data, batch_size=16))
    with pytest.raises(ValueError, match=r"embed=24 .* 16 and 32\. You can also set fsdp=8"):
        plan.make_plan(narrow, place)


def test_costs_of_an_encoder_are_those_of_its_inputs():
    recipe = experiment(encoder(masked_lm=True))
    place = chips.parse_topology("v5e:2x2")
    found = plan.make_plan(recipe, place)
    assert found.fits and found.needs.activations > 0
    assert found.flops == Trainer(recipe, jax.devices()[:1]).step_flops() > 0
    hours = 3600 * found.flops / (0.4 * place.chip.flops) / 3600
    more = plan.make_plan(recipe, chips.parse_topology("v5e:2x4"))
    assert found.chip_hours(3600) == pytest.approx(more.chip_hours(3600)) == pytest.approx(hours)
    shorter = experiment(recipe.model, data={"inputs_length": 4, "targets_length": 4})
    assert plan.make_plan(shorter, place).flops < found.flops


def test_topologies_are_parsed_and_unknown_ones_are_errors():
    found = chips.parse_topology("tpu7x:2x2x1")
    assert (found.chips, found.devices, found.name) == (4, 8, "tpu7x:2x2x1")
    assert chips.parse_topology("v5litepod-16", 2) == chips.parse_topology("v5e:4x4", 2)
    two = plan.make_plan(experiment(), chips.parse_topology("v5e:2x2", slices=2))
    assert (two.topology.chips, two.mesh["data"]) == (8, 8)
    for name, slices, message in (
        ("v9:4x4", 1, r"chip in 'v9:4x4' is not known\. The known chips are v2, v3, v4, v5e"),
        ("v5p:4x4", 1, r"no slice 'v5p:4x4' of v5p\. .* similar size: v5p:2x2x4 \(v5p"),
        ("v5e:4x4", 0, "of slices is 0, but it must be at least 1"),
        ("b300:8", 1, r"chips are v2, .* tpu7x, a100, h100, h200, b200\.$"),
        ("h100:3", 1, r"no slice 'h100:3' of h100\. .* size: h100:2 \(h100-2\) or h100:4"),
        ("h100:12", 1, "similar size: h100:8 .* or h100:16"),
        ("h100:8", 2, "of slices is 2, but GPUs form only one slice. .*, for example h100:16"),
    ):
        with pytest.raises(ValueError, match=message):
            chips.parse_topology(name, slices)
    with pytest.raises(
        SystemExit, match=r"chip in 'h100-8' is not known\. The known chips are v2, .* tpu7x\.$"
    ):
        chips.main("h100-8")  # the launcher only makes TPUs


def test_gpus_pad_no_arrays_and_have_a_rate_for_each_dtype():
    place = chips.parse_topology("h100-8")
    assert place == chips.parse_topology("h100:8") and place.devices == 8
    models = (encoder(masked_lm=True, dtype=dtype) for dtype in ("bfloat16", "float32"))
    half, full = (plan.make_plan(experiment(model), place) for model in models)
    assert plan.make_plan(experiment(encoder(masked_lm=True, dtype="auto")), place) == half
    assert half.seconds == pytest.approx(half.flops / (8 * 989.5e12))
    assert full.seconds == pytest.approx(full.flops / (8 * 494.5e12))
    assert full.capacity == 80 * chips.GIB
    trainer = Trainer(experiment(encoder(masked_lm=True)), jax.devices()[:1])
    arrays = jax.tree.leaves(trainer.layout.abstract.params)
    assert full.needs.parameters == 4 * sum(x.size for x in arrays)


def test_gpus_are_described_to_the_compiler(monkeypatch):
    asked = []

    def refuse(**options):
        asked.append(options)
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(plan.topologies, "get_topology_desc", refuse)
    for name in ("a100:1", "h200:24"):
        message = rf"for {name} cannot be compiled: .*pip install 'synthesizer-jax\[cuda\]'\.$"
        with pytest.raises(ValueError, match=message):
            plan.devices_of(chips.parse_topology(name))
    assert [x["topology"] for x in asked] == ["1x1x1", "1x3x8"]
    assert (
        "device_memory_size: 151397597184 memory_bandwidth: 4800000000000"
        in asked[1]["target_config"]
    )


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory on HBM, 16G exceed 15G", plan.TooLargeError),
        (
            "RESOURCE_EXHAUSTED: Allocation would exceed memory, space=vmem",
            jax.errors.JaxRuntimeError,
        ),
    ],
)
def test_only_a_step_without_room_is_too_large(monkeypatch, message, kind):
    def refuse(*_):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(plan, "devices_of", lambda _: jax.devices())
    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    with pytest.raises(kind, match="HBM, 16G" if kind is plan.TooLargeError else "."):
        plan.compile_step(experiment(encoder()), PLACE)
