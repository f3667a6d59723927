"""Compiles training steps and attention for GPUs on any machine. `make test-gpu` runs the tests."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest

from synthesizer_jax import Gaussian, MergedAttention, TalkingHeads
from synthesizer_jax.attention import Mask, attend, low_rank, relative, static
from synthesizer_jax.attention.routes import FEW_LOGITS
from synthesizer_jax.costs import chips
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.models import alignment, t5
from synthesizer_jax.models.zoo import T5_1_1
from synthesizer_jax.optimizers import Adafactor
from synthesizer_jax.training import plan
from synthesizer_jax.training.experiment import Experiment, Training

pytest.importorskip(
    "jax_cuda13_plugin", reason="JAX has no plugin for CUDA; make test-gpu installs it"
)
pytestmark = pytest.mark.gpu

INPUTS, TARGETS, ROWS = 512, 114, 8
SIZE = dataclasses.replace(T5_1_1["base"], layers=1)
HEADS, WIDTH = SIZE.heads, SIZE.head_dim

every_gpu = pytest.mark.parametrize("gpu", ["a100", "h100"])
every_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])


def shapes(text):
    """Returns the shapes of all arrays in a program.

    The axes of each shape are sorted, and axes of size one are left out.
    """
    found = re.findall(r"\[([\d,]+)\]", text)
    return {tuple(sorted(int(n) for n in sizes.split(",") if n != "1")) for sizes in found}


def kernels(text):
    """Returns the number of calls of Pallas kernels."""
    return text.count('"__gpu$xla.gpu.triton"')


def model(variant, dtype):
    common = {"dtype": dtype, "scan": True}
    dot = alignment("v", head_dim=WIDTH)
    if variant == "hc_sa":
        hard = {"encoder": Gaussian((-1, 1)), "decoder": Gaussian((-1, 0)), "relative_bias": False}
        return t5(SIZE, **hard, **common)
    if variant == "talking_heads":
        return t5(SIZE, encoder=TalkingHeads(HEADS, WIDTH, alignment=dot), **common)
    return t5(SIZE, encoder=alignment(variant, head_dim=WIDTH), **common)


@functools.cache
def compiled(variant, dtype, gpu):
    """Returns a compiled training step. The result is cached, because several tests use it."""
    data = DataConfig("none", INPUTS, TARGETS, ROWS)
    training = Training(steps=1, optimizer=Adafactor())
    step = Experiment(model=model(variant, dtype), data=data, training=training)
    return plan.compile_step(step, chips.parse_topology(f"{gpu}:1"))


KERNELS = {"v": 7, "rv": 7, "r": 3, "hc_sa": 3, "talking_heads": 3}
"""The number of kernels of a step by variant.

Cross-attention has three kernels: forward, and backward for queries and for keys and values. A bias
that examples share, as in the encoder, needs a fourth. `Random` has more kernels, which run if its
static route would lose digits. The dot products of the decoder are too small for kernels.
"""


@pytest.mark.parametrize("variant", KERNELS)
@every_dtype
@every_gpu
def test_a_step_has_its_kernels_and_no_array_of_all_logits(variant, dtype, gpu):
    text = compiled(variant, dtype, gpu).as_text()
    pairs = [(q, k) for q in (INPUTS, TARGETS) for k in (INPUTS, TARGETS) if q * k > FEW_LOGITS]
    squares = {tuple(sorted((ROWS, HEADS, *pair))) for pair in pairs}
    assert (squares & shapes(text) != set()) == (variant == "talking_heads")
    assert kernels(text) > KERNELS["r"] if variant == "r" else kernels(text) == KERNELS[variant]


def sublayer(form, dtype, gpu, rows=16):
    """Returns the compiled gradients of a call of `attend`."""
    mesh = jax.sharding.Mesh(plan.devices_of(chips.parse_topology(f"{gpu}:1")), ("data",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def array(*shape):
        """Returns the shape and dtype of an argument."""
        return jax.ShapeDtypeStruct(shape, dtype)

    row, table = array(rows, INPUTS, HEADS, WIDTH), array(HEADS, INPUTS, INPUTS)

    def loss(arrays, values, lengths):
        terms = {
            "v": lambda queries, keys: (low_rank(queries, keys, token_keys=True),),
            "v_bias": lambda queries, keys, bias: (
                low_rank(queries, keys, token_keys=True),
                relative(bias, first=1 - INPUTS),
            ),
            "rv": lambda queries, keys, table: (
                low_rank(queries, keys, token_keys=True),
                static(table),
            ),
            "r": lambda table: (static(table),),
        }[form](*arrays)
        mask = Mask(key_lengths=lengths)
        return attend(terms, values, mask=mask).astype(jnp.float32).sum()

    arrays = {
        "v": (row, row),
        "v_bias": (row, row, array(HEADS, 2 * INPUTS - 1)),
        "rv": (row, row, table),
    }
    arrays = arrays.get(form, (table,))
    with jax.set_mesh(mesh):
        step = jax.jit(jax.grad(loss, (0, 1)), in_shardings=place, out_shardings=place)
        lowered = step.lower(arrays, row, jax.ShapeDtypeStruct((rows,), jnp.int32))
        return lowered.compile(plan.GPU_OPTIONS)


@pytest.mark.parametrize(
    ("form", "count", "most"), [("v", 3, 5), ("v_bias", 4, 5), ("rv", 4, 5), ("r", None, 8)]
)
@every_dtype
@every_gpu
def test_a_sublayer_has_no_loop_and_few_temporaries(form, count, most, dtype, gpu):
    """An attention sub-layer on a GPU has no loop over examples, and needs little temporary memory.

    Without kernels, there would be such a loop. Its temporary arrays would need 6 to 9 times the
    bytes of the values, like those of the static route's matrix products.
    """
    program = sublayer(form, dtype, gpu)
    text = program.as_text()
    assert (HEADS, 16, INPUTS, INPUTS) not in shapes(text)
    assert text.count(" while(") == 0
    assert kernels(text) == count or (form == "r" and kernels(text) > 0)
    values = 16 * INPUTS * HEADS * WIDTH * jnp.dtype(dtype).itemsize
    assert program.memory_analysis().temp_size_in_bytes <= most * values


@every_dtype
@every_gpu
def test_merged_attention_has_kernels_for_both_kinds_of_keys(dtype, gpu):
    """Log sums need no kernels of their own, and their gradient is an input of the kernels."""
    mesh = jax.sharding.Mesh(plan.devices_of(chips.parse_topology(f"{gpu}:1")), ("data",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    layer = MergedAttention(HEADS, WIDTH, alignment=alignment("v", head_dim=WIDTH))
    x = jax.ShapeDtypeStruct((2, INPUTS, SIZE.d_model), dtype)
    masks = {"mask": Mask(causal=True), "memory_mask": Mask(key_lengths=jnp.array([INPUTS, 3]))}
    variables = jax.eval_shape(layer.init, jax.random.key(0), x, x)

    def loss(variables, x, memory):
        return layer.apply(variables, x, memory, **masks).astype(jnp.float32).sum()

    with jax.set_mesh(mesh):
        step = jax.jit(jax.grad(loss, (0, 1, 2)), in_shardings=place, out_shardings=place)
        text = step.lower(variables, x, x).compile(plan.GPU_OPTIONS).as_text()
    assert kernels(text) == 2 * 3
    assert text.count(" while(") == 0


def test_several_hosts_are_compiled_for():
    devices = plan.devices_of(chips.parse_topology("h200:16"))
    assert [d.process_index for d in devices] == [0] * 8 + [1] * 8
    assert {d.device_kind for d in devices} == {"NVIDIA H200"}
    assert math.isclose(chips.peak_flops(devices[0].device_kind, "bfloat16"), 989.5e12)
