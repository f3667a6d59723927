"""Attention weights and sharding metadata of the NNX modules, as in Flax's modules."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from synthesizer_jax import DotProduct, Mask, Mixture, Random, t5
from synthesizer_jax import nnx as snnx
from synthesizer_jax.models import Size
from synthesizer_jax.parameters import ACTIVATION_AXES, LOGICAL_AXES, abstract_variables

D, HEADS, LENGTH = 8, 2, 6
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, LENGTH, D)), jnp.float32)
TINY = t5(Size(d_model=D, layers=1, d_ff=6, heads=HEADS, head_dim=4), vocab_size=12)
TOKENS = jnp.array([[3, 4, 5, 1], [6, 2, 0, 0]])
DIVIDED = {"heads": "tensor", "mlp": "tensor", "vocab": "tensor", "embed": "fsdp"}
RULES = tuple((name, DIVIDED.get(name)) for name in (*LOGICAL_AXES, *ACTIVATION_AXES))


def make_attention(**options):
    alignment = options.pop("alignment", DotProduct())
    rngs = nnx.Rngs(0)
    return snnx.Attention(HEADS, D // HEADS, alignment, in_features=D, rngs=rngs, **options)


def test_weights_equal_flax():
    flax = nnx.MultiHeadAttention(HEADS, D, use_bias=False, decode=False, rngs=nnx.Rngs(0))
    layer = make_attention()
    layer.align["query"]["kernel"][...] = flax.query.kernel[...]
    layer.align["key"]["kernel"][...] = flax.key.kernel[...]
    layer.value["kernel"][...] = flax.value.kernel[...]
    layer.out["kernel"][...] = flax.out.kernel[...]
    mask = nnx.make_causal_mask(jnp.ones((2, LENGTH)))
    results = []
    for module, options in ((flax, {"mask": mask}), (layer, {"mask": Mask(causal=True)})):
        forward = nnx.capture(module, nnx.Intermediate)
        y, sown = forward(X, sow_weights=True, **options)
        assert list(sown) == ["attention_weights"]
        (weights,) = sown["attention_weights"]
        results.append((y, weights))
        y, sown = forward(X, **options)
        assert not sown
        np.testing.assert_allclose(y, results[-1][0], atol=1e-6)
    for actual, expected in zip(*results, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_weights_of_a_model_inside_a_compiled_function():
    model = snnx.to_nnx(TINY, rngs=nnx.Rngs(0))

    @nnx.jit
    def capture_weights(model):
        return nnx.capture(model, nnx.Intermediate)(TOKENS, TOKENS, sow_weights=True)

    logits, sown = capture_weights(model)
    variables = snnx.linen_variables(model)
    expected, updates = TINY.apply(variables, TOKENS, TOKENS, mutable=["intermediates"])
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    leaves = jax.tree_util.tree_leaves_with_path(updates["intermediates"])
    paths = ["/".join(key.key for key in path[:-1]) for path, _ in leaves]
    assert "encoder/layers_0/attention/attention_weights" in paths
    assert sorted(sown) == sorted(paths)
    for path, (_, weights) in zip(paths, leaves, strict=True):
        np.testing.assert_allclose(sown[path][0], weights, atol=1e-5)


def test_without_capture_weights_are_stored_in_the_module():
    layer = make_attention(alignment=Random(max_length=8))
    with pytest.warns(DeprecationWarning, match="nnx.capture"):
        layer(X, sow_weights=True)
    (weights,) = nnx.pop(layer, nnx.Intermediate)["attention_weights"]
    np.testing.assert_allclose(weights.sum(-1), np.ones_like(weights.sum(-1)), rtol=1e-5)
    assert set(snnx.linen_variables(layer)) == {"params"}


def test_sowing_weights_of_a_mixer_without_weights_is_an_error():
    layer = snnx.DynamicConvolution(3, in_features=D, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="DynamicConvolution: sow_weights=True, but"):
        layer(X, sow_weights=True)


def specs_of(module) -> dict[tuple, PartitionSpec]:
    specs = nnx.get_partition_spec(nnx.state(module, nnx.Param))
    return {path: spec.get_value() for path, spec in nnx.to_flat_state(specs)}


@pytest.mark.parametrize("scan", [False, True])
def test_every_parameter_has_logical_axes(scan):
    config = t5(
        Size(d_model=D, layers=2, d_ff=6, heads=HEADS, head_dim=4),
        encoder=Mixture((DotProduct(), Random(max_length=8))),
        vocab_size=12,
        scan=scan,
    )
    model = nnx.eval_shape(lambda: snnx.to_nnx(config, rngs=nnx.Rngs(0)))
    _, axes = abstract_variables(config, TOKENS, TOKENS)
    flat = jax.tree_util.tree_leaves_with_path(axes["params"], is_leaf=lambda x: type(x) is tuple)
    expected = {tuple(key.key for key in path): PartitionSpec(*names) for path, names in flat}
    assert specs_of(model) == expected
    with nnx.logical_axis_rules(RULES):
        mapped = specs_of(model)
    rules = dict(RULES) | {None: None}
    assert mapped == {p: PartitionSpec(*(rules[a] for a in s)) for p, s in expected.items()}


def test_axis_rules_cover_every_axis():
    rules = snnx.axis_rules(embed="fsdp", heads="tensor", mlp="tensor", vocab="tensor")
    assert dict(rules) == dict(RULES) and len(rules) == len(RULES)
    with pytest.raises(ValueError, match="'head', did you mean 'heads'"):
        snnx.axis_rules(head="tensor")


MESHES = {
    "auto": (AxisType.Auto,) * 2,
    "explicit": (AxisType.Explicit,) * 2,
}


@pytest.mark.parametrize("kind", MESHES)
def test_parameters_are_made_sharded_under_a_mesh_and_rules(kind):
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), MESHES[kind], devices=jax.devices()[:4])
    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        flax = nnx.Linear(
            D, D, kernel_metadata={"out_sharding": ("embed", "mlp")}, rngs=nnx.Rngs(0)
        )
        layer = nnx.jit(lambda: make_attention(alignment=Random(max_length=8)))()
        eager = make_attention(alignment=Random(max_length=8))
    assert flax.kernel[...].sharding.spec == PartitionSpec("fsdp", "tensor")
    for layer_in_mesh in (layer, eager):
        assert layer_in_mesh.out["kernel"][...].sharding.spec == PartitionSpec(
            "tensor", None, "fsdp"
        )
        table = layer_in_mesh.align["table"][...]
        assert table.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec("tensor")), 3)
    # A mesh alone, whose axes have other names, is no reason to fail.
    with jax.set_mesh(mesh):
        nnx.Optimizer(make_attention(), optax.sgd(1.0), wrt=nnx.Param)


def test_a_step_keeps_the_shardings_of_parameters_and_optimizer():
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), MESHES["auto"], devices=jax.devices()[:4])
    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        layer = make_attention(alignment=Random(max_length=8))
        optimizer = nnx.Optimizer(layer, optax.sgd(1.0, momentum=0.9), wrt=nnx.Param)

        @nnx.jit
        def step(layer, optimizer):
            optimizer.update(layer, nnx.grad(lambda layer: (layer(X) ** 2).sum())(layer))

        step(layer, optimizer)
    tables = [layer.align["table"][...], *jax.tree.leaves(nnx.state(optimizer))]
    shardings = [x.sharding for x in tables if x.shape == (HEADS, 8, 8)]
    assert len(shardings) == 2
    for sharding in shardings:
        assert sharding.is_equivalent_to(shardings[0], 3) and not sharding.is_fully_replicated


def test_tabulate_leaves_the_classes_as_they_were():
    for _ in range(2):
        assert "Attention Summary" in nnx.tabulate(make_attention(), X)


def test_abstract_models_have_shardings():
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), MESHES["auto"], devices=jax.devices()[:4])
    with nnx.logical_axis_rules(RULES), jax.set_mesh(mesh):
        abstract = nnx.as_abstract(nnx.eval_shape(lambda: snnx.to_nnx(TINY, rngs=nnx.Rngs(0))))
    kernel = abstract.encoder["layers_0"]["mlp"]["wo"]["kernel"].get_value()
    assert isinstance(kernel, jax.ShapeDtypeStruct)
    assert kernel.sharding.spec == PartitionSpec("tensor", "fsdp")


def test_layers_made_under_vmap_add_their_axis():
    @nnx.split_rngs(splits=3)
    @nnx.transform_metadata(in_axes=0, out_axes=0, partition="layers")
    @nnx.vmap(in_axes=0, out_axes=0)
    def create(rngs):
        return snnx.Attention(HEADS, 4, in_features=D, rngs=rngs)

    kernel = create(nnx.Rngs(0)).out["kernel"]
    assert kernel.shape[0] == 3
    assert kernel.get_metadata("out_sharding") == ("layers", "heads", "kv", "embed")
