"""A trained model on other devices than trained it: divided in truth, and with one device's answers."""

import jax
import numpy as np
import pytest

from synthesizer_jax.checkpoints.manager import restore_variables
from synthesizer_jax.checkpoints.placement import layout_over, place_variables
from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.evaluation.prediction import METHODS, Predictor, decoding_by
from synthesizer_jax.inference import Decoding
from synthesizer_jax.models import Size
from synthesizer_jax.models.zoo import language_model
from synthesizer_jax.sharding import MeshShape, make_mesh
from tests.evaluation import runs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    runs.write_run(directory, runs.experiment(), steps=(4,))
    return directory / "checkpoints"


def place(experiment, devices=None):
    return place_variables(experiment.model, experiment.example, experiment.mesh, devices=devices)


@pytest.mark.parametrize(
    ("trained", "devices", "expected"),
    [
        (MeshShape(), 8, (8, 1, 1)),
        (MeshShape(fsdp=4, tensor=2), 8, (1, 4, 2)),
        (MeshShape(data=16, fsdp=2), 8, (4, 2, 1)),
        (MeshShape(data=2, dcn_data=4, tensor=2), 8, (4, 1, 2)),
        (MeshShape(data=1, fsdp=-1, dcn_fsdp=2), 8, (1, 8, 1)),
        (MeshShape(fsdp=16), 8, (1, 8, 1)),
        (MeshShape(fsdp=32), 3, (3, 1, 1)),  # the widths do not divide by three
        (MeshShape(fsdp=4), 1, (1, 1, 1)),
    ],
)
def test_the_mesh_of_the_training_is_fitted_to_the_devices(trained, devices, expected):
    mesh, layout = place(runs.experiment(mesh=trained), jax.devices()[:devices])
    assert tuple(mesh.shape[axis] for axis in ("data", "fsdp", "tensor")) == expected
    assert {x.sharding.mesh for x in jax.tree.leaves(layout)} == {mesh}


def test_a_mesh_continues_texts_as_one_device_does():
    """The texts, one of them empty, do not fill the mesh."""
    model = language_model("rv", Size(16, 2, 32, 2, 8)).copy(vocab_size=259)
    nothing = np.zeros((1, 0), np.int32)
    variables = jax.jit(model.init)(jax.random.key(0), nothing, np.ones((1, 4), np.int32))
    found = []
    for shape, devices in ((MeshShape(), 1), (MeshShape(data=2, fsdp=2), 4)):
        mesh = make_mesh(shape, jax.devices()[:devices])
        layout = layout_over(model, model.example(0, 4), mesh)
        predictor = Predictor(
            model,
            jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), variables, layout),
            Bytes().build(),
            inputs_length=0,
            decoding=Decoding(max_length=6),
            batch_size=2,
            mesh=mesh,
        )
        texts = [predictor.encode(text) for text in ("", "a", "a few words")]
        found.append([text[0] for text in predictor.generate_texts(texts)])
    assert [one.text for one in found[0]] == [two.text for two in found[1]]
    for one, two in zip(*found, strict=True):
        assert one.score == pytest.approx(two.score, abs=1e-3)


@pytest.fixture(scope="module")
def answers(run):
    """Of one device."""
    mesh, layout = place(runs.experiment(), jax.devices()[:1])
    return answers_on(mesh, restore_variables(run, layout=layout)[1])


def answers_on(mesh, variables):
    experiment = runs.experiment()
    found = {}
    sample = Decoding(max_length=8, temperature=0.8, top_k=50, top_p=0.9)
    methods = {method: decoding_by(method, 8) for method in METHODS} | {"sample": sample}
    for method, decoding in methods.items():
        predictor = Predictor(
            experiment.model,
            variables,
            experiment.vocabulary.build(),
            inputs_length=32,
            decoding=decoding,
            ranks=method == "rank",
            batch_size=2,
            mesh=mesh,
        )
        inputs = [predictor.encode(text) for text in ("a b", "cola", "the dog sleeps")]
        found[method] = predictor.predict_with_scores(inputs, ("yes", "no"))
    targets = [np.array([5, 6, 1]), np.array([7, 1]), np.array([8, 9, 10, 1])]
    return found, predictor.log_probabilities(inputs, targets)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [MeshShape(fsdp=4, tensor=2), MeshShape(fsdp=8)])
def test_parameters_are_divided_and_answers_are_those_of_one_device(run, answers, shape):
    experiment = runs.experiment(mesh=shape)
    mesh, layout = place(experiment)
    _, variables = restore_variables(run, layout=layout)
    for leaf in jax.tree.leaves(variables):
        if leaf.ndim > 1 and leaf.size >= 512:
            parts = leaf.addressable_shards
            assert len({part.device for part in parts}) == 8
            assert max(part.data.size for part in parts) <= leaf.size // 2
    embedding = variables["params"]["embedding"]
    assert embedding.addressable_shards[0].data.size == embedding.size // 8
    found, losses = answers_on(mesh, variables)
    for method, expected in answers[0].items():
        assert found[method].texts == expected.texts
        np.testing.assert_allclose(found[method].scores, expected.scores, rtol=1e-4)
    np.testing.assert_allclose(losses, answers[1], rtol=1e-4)


def test_a_checkpoint_of_another_model_is_refused(run):
    _, layout = place(runs.experiment())
    layout["params"]["embedding"] = jax.ShapeDtypeStruct((5, 16), np.float32)
    with pytest.raises(
        ValueError, match=r"another model: params/embedding is \(384, 16\) there and"
    ):
        restore_variables(run, layout=layout)


def test_variables_without_a_layout_lie_on_one_device(run):
    step, variables = restore_variables(run)
    assert step == 4
    (device,) = {d for leaf in jax.tree.leaves(variables) for d in leaf.devices()}
    assert device == jax.local_devices()[0]
    assert make_mesh(MeshShape()).size == 8
