"""Compiles training steps with libtpu for real TPU topologies. `make test-tpu` runs these tests."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from synthesizer_jax import DotProduct, Gaussian, MergedAttention
from synthesizer_jax.attention import Mask, attend, low_rank, relative, static
from synthesizer_jax.attention.routes import FEW_LOGITS
from synthesizer_jax.base.registry import replace
from synthesizer_jax.costs import chips
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.models import Size, alignment, t5
from synthesizer_jax.models.zoo import T5_1_1
from synthesizer_jax.optimizers import Adafactor
from synthesizer_jax.sharding import MeshShape, make_mesh
from synthesizer_jax.training import plan
from synthesizer_jax.training.experiment import Experiment, Training

pytest.importorskip("libtpu", reason="libtpu is not installed; make test-tpu does that")
pytestmark = pytest.mark.tpu

INPUTS, TARGETS, ROWS = 512, 114, 4
PLACES = {
    "v5e:2x4": MeshShape(data=1, fsdp=4, tensor=2),
    "v5p:4x4x4": MeshShape(data=2, fsdp=16, tensor=2),
}
VARIANTS = ("v", "r", "rv", "gaussian")


def recipe(variant, name):
    """Returns the experiment for a training step of the base size with scanned layers."""
    shape, mesh = T5_1_1["base"], PLACES[name]
    rows = ROWS * chips.parse_topology(name).devices // mesh.tensor
    common = {"dropout_rate": 0.1, "dtype": "bfloat16", "scan": True, "remat": "dots"}
    if variant == "gaussian":
        hard = {"encoder": Gaussian((-1, 1)), "decoder": Gaussian((-1, 0)), "relative_bias": False}
        model = t5(shape, **hard, **common)
    else:
        model = t5(shape, encoder=alignment(variant, head_dim=shape.head_dim), **common)
    data = DataConfig("none", INPUTS, TARGETS, rows)
    training = Training(steps=1, optimizer=Adafactor())
    return Experiment(model=model, data=data, training=training, mesh=mesh)


@functools.cache
def compiled(variant, name):
    """Returns a compiled training step. The result is cached, because several tests use it."""
    return plan.compile_step(recipe(variant, name), chips.parse_topology(name))


every = pytest.mark.parametrize(
    ("variant", "name"), [(v, n) for n in PLACES for v in VARIANTS], ids=str
)


def test_a_slice_may_have_a_single_chip():
    assert len(plan.devices_of(chips.parse_topology("v5e:1x1"))) == 1


def test_a_mesh_that_splits_a_dimension_is_made_with_a_warning(caplog):
    place = chips.parse_topology("v6e:4x4")
    mesh = make_mesh(MeshShape(data=1, fsdp=8, tensor=2), plan.devices_of(place))
    assert dict(mesh.shape) == {"data": 1, "fsdp": 8, "tensor": 2, "sequence": 1}
    assert "splits dimensions of the slice" in caplog.text


@every
def test_no_buffer_holds_all_logits(variant, name):
    """A compiled step has no array ``[batch, heads, q, k]``, in any order of the axes.

    The logits of the decoder's self-attention, 114 × 114, are an exception (see `FEW_LOGITS`),
    because they are not larger than its queries, keys and values.
    """
    heads = T5_1_1["base"].heads // PLACES[name].tensor
    lengths = (INPUTS, TARGETS)
    pairs = [(q, k) for q in lengths for k in lengths if q * k > FEW_LOGITS]
    squares = {tuple(sorted((ROWS, heads, *pair))) for pair in pairs}
    found = set()
    for sizes in re.findall(r"\[([\d,]+)\]", compiled(variant, name).as_text()):
        shape = tuple(sorted(int(n) for n in sizes.split(",") if n != "1"))
        if shape in squares:
            found.add(shape)
    assert not found


KERNELS = {"v": 4, "rv": 4, "r": 6, "gaussian": 2}
"""The number of kernels of a step by variant, for forward and backward pass.

They are for the dot products of the encoder and of cross-attention, and for Random in both stacks.
The decoder's own dot products are too small.
"""


@every
def test_attention_is_its_kernels(variant, name):
    assert compiled(variant, name).as_text().count('"tpu_custom_call"') == KERNELS[variant]


@pytest.mark.parametrize("name", ["v4:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
@pytest.mark.parametrize("variant", ["r", "rv"])
def test_kernels_compile_for_other_generations(variant, name):
    place = chips.parse_topology(name)
    kind = alignment(variant, head_dim=64)
    model = t5(Size(256, 1, 512, 4, 64), encoder=kind, dtype="bfloat16", scan=True)
    data = DataConfig("none", INPUTS, TARGETS, ROWS * place.devices)
    small = replace(recipe(variant, "v5e:2x4"), model=model, data=data, mesh=MeshShape())
    text = plan.compile_step(small, place).as_text()
    assert text.count('"tpu_custom_call"') == KERNELS[variant]


@pytest.mark.parametrize("name", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "tpu7x:2x2x1"])
@pytest.mark.parametrize("rows", [2, 3])
def test_static_kernels_fit_every_generation(name, rows):
    """Static kernels fit into the vector memory of every TPU generation.

    The test uses the longest supported rows, heads of width 128, and a length that is not a
    multiple of the register size.

    TPU v4 has half as much memory.
    """
    mesh = jax.sharding.Mesh(plan.devices_of(chips.parse_topology(name))[:1], ("data",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    longest, other = (512, 500) if name.startswith("v4") else (720, 700)
    n = longest if rows == 2 else other
    values = jax.ShapeDtypeStruct((rows, n, 2, 128), jnp.bfloat16)
    tables = (
        jax.ShapeDtypeStruct((2, n, n), jnp.float32),
        jax.ShapeDtypeStruct((2, 2 * n), jnp.float32),
    )

    def loss(tables, values, lengths):
        terms = static(tables[0]), relative(tables[1], first=1 - n)
        mask = Mask(key_lengths=lengths).for_self_attention()
        return attend(terms, values, mask=mask).astype(jnp.float32).sum()

    with jax.set_mesh(mesh):
        step = jax.jit(jax.grad(loss, (0, 1)), in_shardings=place, out_shardings=place)
        lengths = jax.ShapeDtypeStruct((rows,), jnp.int32)
        text = step.lower(tables, values, lengths).compile().as_text()
    assert text.count('"tpu_custom_call"') >= 2


@pytest.mark.parametrize("name", ["v4:2x2x1", "v5e:2x2", "tpu7x:2x2x1"])
@pytest.mark.parametrize("n", [500, 1024])
def test_kernels_with_a_pattern_and_capped_logits(name, n):
    """Kernels support a pattern and capped logits at the same time.

    The test covers one tile of queries, and several tiles, for which the gradient of the keys has a
    separate kernel.
    """
    mesh = jax.sharding.Mesh(plan.devices_of(chips.parse_topology(name))[:1], ("data",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    x = jax.ShapeDtypeStruct((2, n, 2, 64), jnp.bfloat16)

    def loss(x, allowed):
        terms = (low_rank(x, x, token_keys=True),)
        out = attend(terms, x, mask=Mask(allowed=allowed), soft_cap=30.0)
        return out.astype(jnp.float32).sum()

    with jax.set_mesh(mesh):
        step = jax.jit(jax.grad(loss), in_shardings=place, out_shardings=place)
        text = step.lower(x, jax.ShapeDtypeStruct((2, 1, n, n), bool)).compile().as_text()
    assert text.count('"tpu_custom_call"') == (2 if n == 500 else 3)


@pytest.mark.parametrize("name", ["v4:2x2x1", "v5e:2x2", "tpu7x:2x2x1"])
def test_merged_attention_has_kernels_for_both_kinds_of_keys(name):
    """Log sums need no kernels of their own, and their gradient is an input of the kernels."""
    mesh = jax.sharding.Mesh(plan.devices_of(chips.parse_topology(name))[:1], ("data",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    layer = MergedAttention(2, 64, alignment=DotProduct(rotary_base=10_000.0), num_kv_heads=1)
    x, memory = (jax.ShapeDtypeStruct((2, n, 128), jnp.bfloat16) for n in (256, INPUTS))
    masks = {"mask": Mask(causal=True), "memory_mask": Mask(key_lengths=jnp.array([INPUTS, 3]))}
    variables = jax.eval_shape(layer.init, jax.random.key(0), x, memory)

    def loss(variables, x, memory):
        return layer.apply(variables, x, memory, **masks).astype(jnp.float32).sum()

    with jax.set_mesh(mesh):
        step = jax.jit(jax.grad(loss, (0, 1, 2)), in_shardings=place, out_shardings=place)
        text = step.lower(variables, x, memory).compile().as_text()
    assert text.count('"tpu_custom_call"') == 4


@pytest.mark.parametrize(
    ("q", "k", "dtype"), [(16384, 16, "bfloat16"), (9, 1, "bfloat16"), (256, 256, "float16")]
)
def test_few_keys_and_half_precision(q, k, dtype):
    """Attention with few keys or in half precision compiles.

    A tile with few keys is padded to whole registers, a single key is not a matrix, and there are
    no kernels for float16.
    """
    mesh = jax.sharding.Mesh(plan.devices_of(chips.parse_topology("v5e:2x2"))[:1], ("data",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def shape(n):
        """Returns the shape and the dtype of an argument that has n tokens."""
        return jax.ShapeDtypeStruct((2, n, 2, 64), dtype)

    def loss(x, y):
        terms = (low_rank(x, y, token_keys=True),)
        return attend(terms, y, q_length=q, implementation="fused").astype(jnp.float32).sum()

    with jax.set_mesh(mesh):
        step = jax.jit(jax.grad(loss, (0, 1)), in_shardings=place).lower(shape(q), shape(k))
        kernels = step.compile().as_text().count('"tpu_custom_call"')
    assert (kernels > 0) == (dtype == "bfloat16")


@every
def test_memory_is_within_the_plan(variant, name):
    place = chips.parse_topology(name)
    needs = plan.make_plan(recipe(variant, name), place).needs
    memory = compiled(variant, name).memory_analysis()
    batch = 4 * ROWS * (INPUTS + 3 * TARGETS)
    given = needs.parameters + needs.optimizer + batch
    assert memory.argument_size_in_bytes == pytest.approx(given, rel=0.01)
    # The plan ignores that the mesh axis `tensor` shards most of the arrays that are kept for the
    # backward pass.
    assert 0.5 * needs.total <= memory.peak_memory_in_bytes <= needs.total
