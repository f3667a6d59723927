"""Tests a base in 8 bits: its rounding, training with it, and the memory that it needs."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from flax.core import meta
from jax.extend.core import jaxprs_in_params

from synthesizer_jax.base.registry import replace
from synthesizer_jax.checkpoints.manager import restore_variables
from synthesizer_jax.inference import Decoding, decode_sequences
from synthesizer_jax.models import Size, alignment, stacks_of, t5, unroll_variables
from synthesizer_jax.models.adapters import Adapted
from synthesizer_jax.models.lora import LoRA
from synthesizer_jax.primitives.computed import Int8Array, quantize
from synthesizer_jax.sharding import MeshShape
from synthesizer_jax.training import plan
from synthesizer_jax.training.experiment import InitRule
from synthesizer_jax.training.initial_parameters import read_base, restore_run
from synthesizer_jax.training.run_directory import find_base, load_experiment
from synthesizer_jax.training.step import loss_sums
from synthesizer_jax.training.trainer import Trainer
from tests.training.tiny import VOCAB, CopyStream, close, damage, encoder, experiment, logged, save
from tests.training.tiny import run as train

LAYERS = 3
INT8 = LoRA(rank=3, targets=".*/(query|out|wo)/kernel|logits_kernel", base="int8")


def model_of(*, scan=False, remat=None, width=16, dtype="float32"):
    """Returns a T5 1.1 with three layers in each stack."""
    size = Size(width, LAYERS, 2 * width, 4, 4)
    model = t5(size, encoder=alignment("v", head_dim=4), vocab_size=VOCAB, dtype=dtype, scan=scan)
    return model.copy(**{k: s.copy(remat=remat) for k, s in stacks_of(model).items()})


def adapting(directory, *, lora=INT8, **changes):
    """Returns an experiment that trains adapters of the run in a directory."""
    recipe = load_experiment(directory)
    training = {k: changes.pop(k) for k in tuple(changes) if hasattr(recipe.training, k)}
    training = replace(recipe.training, adapters=lora, **training)
    return find_base(replace(recipe, training=training, init_from=str(directory), **changes))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The directory of a run with untrained parameters."""
    directory = tmp_path_factory.mktemp("source")
    save(directory, experiment(model_of(), seed=3))
    return directory


@pytest.mark.parametrize(
    ("axes", "channels"),
    [
        (("embed", "heads", "kv"), (1, 2)),
        (("heads", "kv", "embed"), (2,)),
        (("layers", "mlp", "embed"), (0, 2)),
        (("layers", "embed", "mlp"), (0, 2)),
        (("vocab", "embed"), (0,)),
        (("embed", "vocab"), (1,)),
    ],
)
def test_a_parameter_is_rounded_to_the_nearest_of_255_multiples(axes, channels):
    """Each channel is rounded to multiples of its largest absolute value, divided by 127."""
    rng = np.random.default_rng(0)
    shape = tuple(range(4, 4 + len(axes)))
    x = rng.standard_normal(shape) * np.exp(rng.standard_normal(shape[-1:]))
    zero = tuple(0 if i in channels else slice(None) for i in range(len(axes)))
    x[zero] = 0
    found = quantize(jnp.asarray(x, jnp.float32), axes)
    assert found.values.dtype == jnp.int8
    assert found.values.shape == shape

    for channel in np.ndindex(*(shape[i] for i in channels)):
        index = [slice(None)] * len(shape)
        for axis, position in zip(channels, channel, strict=True):
            index[axis] = position
        index = tuple(index)
        step = np.abs(x[index]).max() / 127
        np.testing.assert_allclose(np.unique(found.scale[index]), [step], rtol=1e-6)
        expected = np.zeros_like(x[index]) if step == 0 else np.round(x[index] / step)
        np.testing.assert_array_equal(found.values[index], expected)
        error = np.abs(np.asarray(found.unbox(), np.float64)[index] - x[index])
        assert error.max() <= step * (0.5 + 1e-4)


def gradients_of_updates(params, lora, adapters, batch):
    """Returns the gradients of low-rank updates, from the gradients of the updated kernels."""
    model = model_of()
    kernels = traverse_util.flatten_dict(params, sep="/")
    pairs = traverse_util.flatten_dict(adapters)
    scale = lora.alpha / lora.rank
    factors = {}
    for keys in {keys[:-1] for keys in pairs}:
        a, b = (np.asarray(pairs[*keys, name]) for name in ("lora_a", "lora_b"))
        factors["/".join(keys)] = a, b
        path = "/".join(keys)
        kernels[path] = kernels[path] + scale * np.tensordot(a, b, 1)

    def loss(kernels):
        variables = {"params": traverse_util.unflatten_dict(kernels, sep="/")}
        return loss_sums(model, variables, batch, z_loss=0.0, label_smoothing=0.0).loss

    gradients, found = jax.jit(jax.grad(loss))(kernels), {}
    for path, (a, b) in factors.items():
        gradient = np.asarray(gradients[path], np.float64)
        found[f"{path}/lora_a"] = scale * np.tensordot(
            gradient, b, (range(a.ndim - 1, gradient.ndim), range(1, b.ndim))
        )
        found[f"{path}/lora_b"] = scale * np.tensordot(a, gradient, (range(a.ndim - 1),) * 2)
    return found


@pytest.mark.parametrize(
    ("scan", "remat", "mesh"),
    [
        (False, None, MeshShape()),
        (True, None, MeshShape()),
        (True, "dots", MeshShape()),
        (True, "full", MeshShape(2, 2, 2)),
    ],
)
def test_the_updates_of_a_rounded_base_are_trained(source, scan, remat, mesh):
    """The gradients equal those for the rounded kernels as plain arrays, in NumPy.

    The gradients do not depend on whether layers are scanned, on rematerialization or on the mesh.
    """
    model = model_of(scan=scan, remat=remat)
    recipe = adapting(source, model=model, mesh=mesh)
    trainer = Trainer(recipe, jax.devices()[: 8 if mesh.tensor > 1 else 1])
    for x, layout in zip(*map(jax.tree.leaves, (trainer.base, trainer.layout.base)), strict=True):
        assert x.sharding.is_equivalent_to(layout.sharding, x.ndim)

    adapters = jax.device_get(trainer.init().variables)
    rng = np.random.default_rng(1)
    adapters = jax.tree.map(lambda x: rng.normal(0, 0.1, x.shape).astype(x.dtype), adapters)
    batch = next(CopyStream())

    def loss(adapters, base):
        variables = trainer.trainable.merge(adapters, base)
        return loss_sums(model, variables, batch, z_loss=0.0, label_smoothing=0.0).loss

    found = jax.jit(jax.grad(loss))(adapters, trainer.base)["params"]

    def looped(params):
        return unroll_variables(model, {"params": params})["params"]

    base = jax.device_get(meta.unbox(looped(trainer.base["params"])))
    expected = gradients_of_updates(base, INT8, looped(adapters["params"]), batch)
    found = traverse_util.flatten_dict(looped(found), sep="/")
    assert found.keys() == expected.keys()
    largest = max(np.abs(x).max() for x in expected.values())
    for path, gradient in expected.items():
        np.testing.assert_allclose(found[path], gradient, atol=2e-6 * largest, err_msg=path)


def test_the_logits_of_a_rounded_base_are_close():
    """Rounding changes the logits of a bfloat16 model by less than 2% of their standard deviation.

    The channels of every kernel are multiplied by log-normal factors, so that their sizes are
    spread over more than an order of magnitude.
    """
    model = model_of(width=64, dtype="bfloat16")
    tokens = np.random.default_rng(0).integers(2, VOCAB, (2, 16, 8)).astype(np.int32)
    variables = model.init(jax.random.key(0), *tokens)
    rng = np.random.default_rng(1)
    adapted = Adapted(model, model.example(8, 8), INT8)
    axes = traverse_util.flatten_dict(adapted.abstract_base()[1])
    plain, rounded = traverse_util.flatten_dict(variables), {}
    for keys, x in plain.items():
        if isinstance(axes[keys], Int8Array):
            factors = np.exp(rng.standard_normal(x.shape[-1]))
            plain[keys] = x * (factors / np.sqrt(np.mean(factors**2))).astype(np.float32)
            rounded[keys] = quantize(plain[keys], axes[keys].values)
    assert len(rounded) == 2 + LAYERS * (7 + 11)

    logits = [
        np.asarray(model.apply(traverse_util.unflatten_dict(flat), *tokens))
        for flat in (plain, plain | rounded)
    ]
    difference = np.abs(logits[0] - logits[1]).mean() / logits[0].std()
    assert 0 < difference < 0.02, difference


@pytest.mark.parametrize("remat", [None, "dots", "full"])
def test_no_array_holds_the_kernels_of_all_layers(source, remat):
    """A training step computes no float array with the size of a kernel for all layers.

    The same is true if the base is not rounded and all kernels have updates.
    """
    for lora in (INT8, LoRA(rank=3, targets=".*")):
        recipe = adapting(source, lora=lora, model=model_of(scan=True, remat=remat))
        shapes, axes = map(
            traverse_util.flatten_dict, Adapted(recipe.model, recipe.example, INT8).abstract_base()
        )
        stacked = {
            x.values.size
            for keys, x in shapes.items()
            if isinstance(x, Int8Array) and axes[keys].values[0] == "layers"
        }
        trainer = Trainer(recipe, jax.devices()[:1])
        assert len(stacked) == 2

        def floats(jaxpr):
            """Yields all float arrays that a jaxpr and its sub-jaxprs compute."""
            for eqn in jaxpr.eqns:
                yield from (
                    v.aval for v in eqn.outvars if jnp.issubdtype(v.aval.dtype, jnp.floating)
                )
                for inner in jaxprs_in_params(eqn.params):
                    yield from floats(inner)

        found = {x.size for x in floats(trainer.trace().jaxpr.jaxpr)}
        assert found.isdisjoint(stacked), found & stacked
        residuals = plan._residuals(recipe, rows=5)
        assert not any(np.prod(shape) in stacked for shape, _ in residuals)


def test_a_run_with_a_rounded_base_continues_and_is_merged(source, tmp_path):
    recipe = adapting(source, model=model_of(scan=True), steps=2, save_every=1)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    end = train(whole, recipe)
    train(parts, replace(recipe, training=replace(recipe.training, steps=1)))
    jax.tree.map(np.testing.assert_array_equal, train(parts, recipe).params, end.params)
    assert logged(whole)[2] == logged(parts)[2]

    # The checkpoint contains only the updates, and the merged model is made from the rounded base.
    save(tmp_path / "saved", recipe, end)
    _, saved = restore_variables(tmp_path / "saved" / "checkpoints")
    names = {keys[-1] for keys in traverse_util.flatten_dict(saved)}
    assert names == {"lora_a", "lora_b"}
    _, found = restore_run(tmp_path / "saved")
    trainer = Trainer(recipe, jax.devices()[:1])
    evaluated = trainer.averaged_variables(end)
    # Evaluations during training read the 8 bits.
    assert isinstance(evaluated["params"]["embedding"], Int8Array)
    close(found, jax.jit(meta.unbox)(evaluated), atol=1e-6)

    tokens = next(CopyStream())["encoder_input_tokens"]
    decode = [
        decode_sequences(v, tokens, model=recipe.model, decoding=Decoding(max_length=4))
        for v in (found, evaluated)
    ]
    np.testing.assert_array_equal(decode[0].tokens, decode[1].tokens)
    # A run may start from the merged model, and its own base may be rounded again.
    second = find_base(load_experiment(tmp_path / "saved").starting_from(str(tmp_path / "saved")))
    again = read_base(second, None)["params"]["logits_kernel"]
    np.testing.assert_array_equal(
        again.values, quantize(found["params"]["logits_kernel"], ("embed", "vocab")).values
    )


def test_parameters_that_are_trained_whole_are_not_rounded(source, tmp_path):
    """Parameters that are trained as complete arrays are not rounded, even if they are kernels.

    The classifier is new, and the value projections are selected by a pattern.
    """
    model = encoder().copy(encoder=model_of().encoder, d_model=16)
    data = experiment(model).data
    lora = LoRA(base="int8", targets=".*/query/kernel", whole=".*/value/kernel", dora=True)
    recipe = adapting(
        source,
        lora=lora,
        model=model,
        data=data,
        init_rules=(InitRule("output_dense/.*", "fresh"),),
    )
    trainer = Trainer(recipe, jax.devices()[:1])
    state = trainer.init()
    found = traverse_util.flatten_dict(trainer.base["params"], sep="/")
    rounded = {path for path, x in found.items() if isinstance(x, Int8Array)}
    kernels = {path for path in found if path.endswith("kernel")}
    whole = {path for path in kernels if "/value/" in path or path == "output_dense/kernel"}
    assert len(whole) == LAYERS + 1
    assert rounded == (kernels - whole) | {"embedding"}

    # DoRA's magnitude begins at the norm of the rounded kernel, so nothing changes at the start.
    before = jax.jit(meta.unbox)(trainer.averaged_variables(state))
    close(before, jax.jit(meta.unbox)(trainer.base), rtol=1e-5, atol=1e-7)
    save(tmp_path, recipe, state)
    close(restore_run(tmp_path)[1], before, atol=1e-6)


def test_a_damaged_base_is_not_rounded(source, tmp_path):
    """Every array of the base is verified, although the arrays are rounded one by one."""
    shutil.copytree(source, tmp_path / "base")
    recipe = adapting(tmp_path / "base")
    damage(tmp_path / "base" / "checkpoints" / "0")
    with pytest.raises(ValueError, match="checkpoints/0 cannot be read"):
        read_base(recipe, None)


def test_other_bases_are_refused():
    with pytest.raises(ValueError, match=r"base is 'int4', but it must be 'int8'"):
        experiment(adapters=LoRA(base="int4"))
