"""The moments of T5X's Adafactor come in as ours."""

import gzip

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization, traverse_util

from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.optimizers import Adafactor, Constant
from synthesizer_jax.parameters import abstract_variables
from synthesizer_jax.pretrained.architecture import Architecture
from synthesizer_jax.pretrained.convert import convert_checkpoint
from synthesizer_jax.pretrained.loading import open_pretrained, read_params
from synthesizer_jax.pretrained.t5x.names import Names
from synthesizer_jax.registry import replace
from synthesizer_jax.training.initial_parameters import initialize_from_checkpoint
from synthesizer_jax.training.run_directory import start_from_run
from synthesizer_jax.training.trainer import Trainer

ARCHITECTURE = Architecture(
    vocab_size=384,
    d_model=128,
    num_heads=2,
    head_dim=96,
    d_ff=130,
    num_layers=1,
    num_decoder_layers=1,
    activations=("gelu", "linear"),
    tied=False,
    scaled=False,
)


def slots_after_a_step(gradient):
    """Shazeer and Stern 2018, algorithm 4, as T5X stores it, by the larger dimension."""
    square = gradient.astype(np.float64) ** 2 + 1e-30
    if square.ndim < 2 or min(square.shape) < 128:
        return {"v": np.float32(square)}
    larger = 0 if square.shape[0] > square.shape[1] else 1
    return {"v_row": np.float32(square.mean(larger)), "v_col": np.float32(square.mean(1 - larger))}


@pytest.mark.slow
def test_they_are_those_that_our_adafactor_would_have(tmp_path):
    model = ARCHITECTURE.build()
    shapes, axes = abstract_variables(model, *model.example(1, 1))
    rng = np.random.default_rng(0)
    target, slots, gradients = {}, {}, {}
    for c in Names().find(model):
        gradient = rng.standard_normal(c.shape).astype(np.float32)
        gradients[c.path] = jnp.asarray(gradient)
        theirs = c.layout.from_ours(gradient)
        target[c.name] = np.ones_like(theirs)
        slots |= {f"{c.name}/{k}": x for k, x in slots_after_a_step(theirs).items()}
    state = {"step": np.int32(1), "param_states": traverse_util.unflatten_dict(slots, sep="/")}
    tree = {"target": traverse_util.unflatten_dict(target, sep="/"), "state": state}
    data = serialization.msgpack_serialize({"version": 3, "optimizer": tree})
    (tmp_path / "checkpoint_1").write_bytes(data)

    optimizer = Adafactor(Constant(1e-3)).build(axes["params"])
    params = jax.tree.map(lambda x: jnp.ones(x.shape), shapes["params"])
    gradients = traverse_util.unflatten_dict(gradients)
    _, expected = optimizer.update(gradients, optimizer.init(params), params)
    with open_pretrained(tmp_path / "checkpoint_1") as pretrained:
        found = jax.tree.map(lambda x: x.read(), pretrained.optimizer)
    assert found["updates"] == expected.updates == 1
    assert any("row" in path[-1].key for path, _ in jax.tree.leaves_with_path(found["moments"]))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), found["moments"], expected.moments
    )


def test_those_of_a_real_checkpoint_come_in_whole(real_data, tmp_path):
    source = real_data / "checkpoints" / "t5x_test_t5_tiny.checkpoint_0.gz"
    if not source.is_file():
        pytest.skip("the checkpoint of T5X is not on this machine")
    state = serialization.msgpack_restore(gzip.decompress(source.read_bytes()))["optimizer"][
        "state"
    ]
    with open_pretrained(source) as pretrained:
        found = jax.tree.map(lambda x: x.read(), pretrained.optimizer)
    theirs = traverse_util.flatten_dict(state["param_states"])
    values = lambda arrays: sorted(np.ravel(x).tobytes() for x in arrays)
    ours = jax.tree.leaves(found["moments"])
    assert len(ours) == 52 and found["updates"] == state["step"]
    assert values(ours) == values(x for path, x in theirs.items() if path[-1] == "v")


def test_without_all_moments_there_are_none(tmp_path):
    model = ARCHITECTURE.build()
    wanted = Names().find(model)
    target = {c.name: np.ones(c.their_shape, np.float32) for c in wanted}
    slots = {f"{c.name}/v": np.ones(c.their_shape, np.float32) for c in wanted}
    tree = {
        "target": traverse_util.unflatten_dict(target, sep="/"),
        "state": {"step": 3, "param_states": traverse_util.unflatten_dict(slots, sep="/")},
    }
    data = serialization.msgpack_serialize({"optimizer": tree})
    (tmp_path / "checkpoint_3").write_bytes(data)
    with open_pretrained(tmp_path / "checkpoint_3") as pretrained:
        assert pretrained.optimizer is None  # matrices are not factored there
        assert jax.tree.leaves(read_params(pretrained))
    convert_checkpoint(tmp_path / "checkpoint_3", tmp_path / "run", vocabulary=Bytes())


@pytest.mark.slow
def test_a_run_goes_on_with_them(real_data, tmp_path):
    source = real_data / "checkpoints" / "t5x_test_t5_tiny.checkpoint_0.gz"
    if not source.is_file():
        pytest.skip("the checkpoint of T5X is not on this machine")
    tree = serialization.msgpack_restore(gzip.decompress(source.read_bytes()))
    tree["optimizer"]["state"]["step"] = 7
    slots = tree["optimizer"]["state"]["param_states"]
    tree["optimizer"]["state"]["param_states"] = jax.tree.map(lambda x: x + 0.25, slots)
    (tmp_path / "checkpoint_7").write_bytes(serialization.msgpack_serialize(tree))
    convert_checkpoint(tmp_path / "checkpoint_7", tmp_path / "run", vocabulary=Bytes())
    recipe = replace(start_from_run(tmp_path / "run"), init_optimizer=True)
    recipe = replace(recipe, data=replace(recipe.data, inputs_length=8, targets_length=8))
    state = initialize_from_checkpoint(
        Trainer(recipe).init(), experiment=recipe, source=tmp_path / "run", report=lambda _: None
    )
    assert state.opt_state.updates == 7
    for x in jax.tree.leaves(state.opt_state.moments):
        np.testing.assert_array_equal(x, 0.25)
