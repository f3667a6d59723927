"""Compares our NNX layers and models with our Linen modules, and with Flax's own NNX modules."""

import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import synthesizer_jax as sj
from synthesizer_jax import nnx as snnx
from synthesizer_jax.inference import decode
from synthesizer_jax.models import Memory, Size
from synthesizer_jax.primitives.parameters import ACTIVATION_AXES, LOGICAL_AXES, abstract_variables

D, HEADS, LENGTH, VOCAB = 8, 2, 6, 12
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, LENGTH, D)), jnp.float32)
INPUTS = jnp.array([[3, 4, 5, 1], [6, 2, 0, 0]])
TARGETS = jnp.array([[0, 7, 8], [0, 9, 0]])
SIZE = Size(d_model=D, layers=1, d_ff=6, heads=HEADS, head_dim=4)
TINY = sj.t5(SIZE, vocab_size=VOCAB, encoder=sj.Random(max_length=8), dropout_rate=0.5)
BLOCK = sj.Block(sj.Attention(2, 4, dropout_rate=0.5), sj.FeedForward(6))
STACK = sj.Stack((sj.Run(BLOCK, 2),), bias=sj.RelativeBias())
CROSS = sj.Block(sj.Attention(2, 4), None, cross_mixer=sj.Attention(2, 4, dropout_rate=0.5))
READER = sj.Encoder(vocab_size=VOCAB, d_model=D, encoder=STACK, outputs=3, pooler=True)
UNIVERSAL = sj.UniversalStack((sj.Run(BLOCK, 2),))
WRITER = sj.LanguageModel(vocab_size=VOCAB, d_model=D, decoder=UNIVERSAL, prefix=True)
REPLACED = sj.Block(sj.SentenceFeedForward(8, 4, causal=True), sj.FeedForward(6))
MERGED = sj.MergedAttention(
    2, 4, sj.Random(8, trainable=False), cross_alignment=sj.DotProduct(), dropout_rate=0.5
)
CAUSAL = {"mask": sj.Mask(causal=True)}
CASES = {
    "EncoderDecoder": (TINY, (INPUTS, TARGETS), {}),
    "LanguageModel": (WRITER, (INPUTS, TARGETS), {}),
    "Encoder": (READER, (INPUTS,), {}),
    "FeedForward": (sj.FeedForward(6, dropout_rate=0.5), (X,), {}),
    "Block": (CROSS, (X,), {"memory": Memory(X[:, :3], sj.Mask())}),
    "causal Block": (REPLACED, (X,), CAUSAL),
    "Stack": (sj.Stack((sj.Run(CROSS, 2),)), (X,), {"memory": Memory(X, sj.Mask())}),
    "UniversalStack": (UNIVERSAL, (X,), {}),
    "DynamicConvolution": (sj.DynamicConvolution(3, dropout_rate=0.5), (X,), {}),
    "Attention": (sj.Attention(2, 4, sj.Random(8, trainable=False)), (X,), CAUSAL),
    "MergedAttention": (MERGED, (X, X[:, :3]), CAUSAL),
    "merged Block": (sj.Block(MERGED, None), (X,), {"memory": Memory(X[:, :3], sj.Mask())}),
}


def assert_trees_equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def differs(a, b) -> bool:
    return any(np.any(x != y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def to_nnx(config, **options):
    if not isinstance(config, sj.models.TokenModel):
        options["in_features"] = D
    return snnx.to_nnx(config, **{"rngs": nnx.Rngs(0), **options})


@pytest.mark.parametrize("name", CASES)
def test_a_module_equals_linen(name):
    config, inputs, options = CASES[name]
    module = to_nnx(config)
    assert type(module) is getattr(snnx, type(config).__name__)
    variables = snnx.linen_variables(module)
    key = jax.random.key(5)
    shapes = jax.eval_shape(config.init, jax.random.key(0), *inputs, **options)
    assert jax.tree.map(jnp.shape, variables) == jax.tree.map(jnp.shape, shapes)

    @nnx.jit
    def run(module, variables):
        def apply(**keys):
            """Applies the Linen module."""
            return config.apply(variables, *inputs, **options, **keys)

        noisy = module(*inputs, rngs=key, **options), apply(rngs={"dropout": key})
        return noisy, (module(*inputs, deterministic=True, **options), apply())

    noisy, plain = run(module, variables)
    assert_trees_equal(*noisy)
    assert_trees_equal(*plain)
    assert differs(noisy[0], plain[0]) == module.has_dropout


def test_every_mixer_has_an_nnx_class_and_users_mixers_have_that_of_their_superclass():
    assert set(sj.MIXERS) <= set(dir(snnx))

    class OwnAttention(sj.Attention):
        """A user's mixer."""

    module = to_nnx(OwnAttention(2, 4))
    assert type(module) is snnx.Attention and type(module.config) is OwnAttention


def test_fields_are_arguments_and_read_only_attributes():
    module = snnx.EncoderDecoder(
        vocab_size=VOCAB, d_model=D, encoder=TINY.encoder, decoder=TINY.decoder, rngs=nnx.Rngs(0)
    )
    assert module.config == TINY and module.d_model == D
    assert_trees_equal(nnx.state(module, nnx.Param), nnx.state(to_nnx(TINY), nnx.Param))
    assert isinstance(nnx.clone(module), snnx.EncoderDecoder)
    with pytest.raises(
        AttributeError, match="EncoderDecoder: d_model cannot be changed after construction"
    ):
        module.set_attributes(d_model=2)
    with pytest.raises(AttributeError, match="has no attribute 'heads'"):
        module.heads  # noqa: B018
    block = snnx.Block(sj.Attention(2, 4), None, in_features=D, rngs=nnx.Rngs(0))
    assert block.config == sj.Block(sj.Attention(2, 4), None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_head'"):
        snnx.Attention(num_head=2, in_features=D, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="Attention needs in_features"):
        snnx.to_nnx(sj.Attention(2, 4), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"Attention\.alignment is <class .*Random'>, but"):
        snnx.Attention(2, 4, alignment=sj.Random, in_features=D, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("name", [*snnx.layers.__all__, "MultiHeadAttention"])
def test_a_signature_names_the_fields_and_what_nnx_adds(name):
    cls = getattr(snnx, name)
    linen = cls.linen_class if name in snnx.layers.__all__ else nnx.MultiHeadAttention
    added = {"rngs", "alignment"} if linen is nnx.MultiHeadAttention else {"rngs", "in_features"}
    parameters = inspect.signature(cls).parameters
    fields = set(inspect.signature(linen.__init__).parameters) - {"self", "parent", "name"}
    assert fields | added <= set(parameters) and parameters["rngs"].kind.name == "KEYWORD_ONLY"


def test_methods_equal_linen():
    tiny = to_nnx(TINY, deterministic=True)
    variables = snnx.linen_variables(tiny)
    memory = tiny.encode_inputs(INPUTS)
    assert_trees_equal(tiny.encode(INPUTS), memory.encoded)
    assert_trees_equal(memory.encoded, TINY.apply(variables, INPUTS, method="encode"))
    hidden = tiny.decode(TARGETS, memory)
    assert_trees_equal(tiny.logits(hidden), tiny(INPUTS, TARGETS))
    cache = tiny.init_cache(INPUTS, max_length=3)
    for at in range(3):
        state, cache = tiny.extend(TARGETS[:, at : at + 1], cache)
    np.testing.assert_allclose(state[:, 0], hidden[:, 2], atol=1e-5)
    assert decode(variables, INPUTS, model=tiny.config, max_length=4).tokens.shape == (2, 4)
    noisy = nnx.view(tiny, deterministic=False)
    assert differs(noisy.encode(INPUTS), noisy.encode(INPUTS))
    assert not differs(noisy.encode(INPUTS, deterministic=True), memory.encoded)


def make_layer(rngs, **options):
    alignment = options.pop("alignment", sj.Mixture((sj.DotProduct(), sj.Random(max_length=8))))
    return snnx.Attention(HEADS, 4, alignment=alignment, in_features=D, rngs=rngs, **options)


@pytest.mark.parametrize("streams", [{"default": 0}, {"params": 0, "dropout": 1}])
def test_every_call_draws_a_new_mask_until_eval(streams):
    layer = make_layer(nnx.Rngs(**streams), dropout_rate=0.5)
    assert layer.deterministic is False and differs(layer(X), layer(X))
    assert not differs(layer(X, deterministic=True), layer(X, deterministic=True))
    view = nnx.view(layer, deterministic=True)
    layer.eval()
    assert not differs(layer(X), layer(X)) and not differs(layer(X), view(X))
    assert differs(layer(X, deterministic=False), layer(X))
    layer.train()
    assert differs(layer(X), layer(X))
    assert make_layer(nnx.Rngs(0), dropout_rate=0.0).rngs is None


def test_streams_of_the_call_override_those_of_the_module():
    rngs = nnx.Rngs(params=0, dropout=1)
    layer, second = (make_layer(rngs, dropout_rate=0.5, deterministic=False) for _ in range(2))
    assert differs(*(jax.random.key_data(m.rngs.key[...]) for m in (layer, second)))
    count = int(layer.rngs.count[...])
    outputs = [layer(X, rngs=nnx.Rngs(dropout=s)) for s in (1, 1, 2)]
    assert not differs(outputs[0], outputs[1]) and differs(outputs[0], outputs[2])
    stream = nnx.Rngs(dropout=1).dropout
    assert not differs(outputs[0], layer(X, rngs=stream)) and int(stream.count[...]) == 1
    assert int(layer.rngs.count[...]) == count


def test_missing_streams_and_attributes_are_errors():
    layer = make_layer(nnx.Rngs(0), dropout_rate=0.5, deterministic=None, keep_rngs=False)
    with pytest.raises(ValueError, match="deterministic"):
        layer(X)
    for silent in (layer, make_layer(nnx.Rngs(params=0), dropout_rate=0.5)):
        with pytest.raises(
            ValueError, match=r"Attention: dropout needs a random stream\. Pass rngs with"
        ):
            silent(X, deterministic=False)
    assert differs(layer(X, rngs=nnx.Rngs(1), deterministic=False), layer(X, deterministic=True))


class Net(nnx.Module):
    """A user's model."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(20, D, rngs=rngs)
        self.mix = make_layer(rngs, dropout_rate=0.5, deterministic=False)
        self.head = nnx.Linear(D, 20, rngs=rngs)

    def __call__(self, x):
        h = self.embed(x)
        return self.head(h + self.mix(h))


def test_a_users_model_trains_and_splits():
    net = Net(nnx.Rngs(0))
    x = jnp.arange(16).reshape(2, 8) % 7
    optimizer = nnx.Optimizer(net, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(net, optimizer):
        def loss(net):
            """Returns the mean cross-entropy."""
            return optax.softmax_cross_entropy_with_integer_labels(net(x), x).mean()

        value, gradients = nnx.value_and_grad(loss)(net)
        optimizer.update(net, gradients)
        return value

    losses = [float(step(net, optimizer)) for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0] and int(net.mix.rngs.count[...]) == 30
    # A clone and a merged copy continue the random streams from their current positions.
    copies = [nnx.clone(net), nnx.merge(*nnx.split(net, nnx.Param, ...))]
    np.testing.assert_array_equal(*(copy(x) for copy in copies))
    gradients = [
        nnx.grad(lambda layer, call=call: (call(layer, X) ** 2).sum())(nnx.clone(net.mix))
        for call in (nnx.remat(lambda layer, x: layer(x)), lambda layer, x: layer(x))
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *gradients)


def test_vmap_and_scan_over_layers():
    @nnx.split_rngs(splits=3)
    @nnx.transform_metadata(in_axes=0, out_axes=0, partition="layers")
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def create(rngs):
        return make_layer(rngs, dropout_rate=0.5, deterministic=False)

    layers = create(nnx.Rngs(0))
    metadata = layers.out["kernel"].get_metadata("out_sharding")
    assert metadata == ("layers", "heads", "kv", "embed")
    for _ in range(2):  # the classes do not change on conversion
        assert "Attention Summary" in nnx.tabulate(make_layer(nnx.Rngs(0)), X)

    @nnx.jit
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def forward(layer, x):
        return layer(x)

    assert differs(forward(layers, X), forward(layers, X))
    layers.eval()
    graph, state = nnx.split(layers)
    x = X
    for i in range(3):
        x = nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], state))(x)
    np.testing.assert_allclose(forward(layers, X), x, rtol=1e-5, atol=1e-5)


def test_weights_of_a_model_inside_a_compiled_function():
    model = to_nnx(TINY, deterministic=True)

    @nnx.jit
    def capture_weights(model):
        return nnx.capture(model, nnx.Intermediate)(INPUTS, TARGETS, sow_weights=True)

    _, sown = capture_weights(model)
    variables = snnx.linen_variables(model)
    _, updates = TINY.apply(variables, INPUTS, TARGETS, mutable=["intermediates"])
    leaves = jax.tree_util.tree_leaves_with_path(updates["intermediates"])
    expected = {"/".join(key.key for key in path[:-1]): leaf for path, leaf in leaves}
    assert "encoder/layers_0/attention/attention_weights" in expected
    assert sown.keys() == expected.keys()
    for path, weights in expected.items():
        np.testing.assert_allclose(sown[path][0], weights, atol=1e-5)
    layer = make_layer(nnx.Rngs(0))
    with pytest.warns(DeprecationWarning, match="nnx.capture"):
        layer(X, sow_weights=True)  # without `capture`, the module stores the weights
    assert len(nnx.pop(layer, nnx.Intermediate)["attention_weights"]) == 1
    assert set(snnx.linen_variables(layer)) == {"params"}
    with pytest.raises(ValueError, match="DynamicConvolution: sow_weights is True, but"):
        to_nnx(sj.DynamicConvolution(3))(X, sow_weights=True)


def test_losses_are_captured():
    universal = sj.UniversalStack((sj.Run(BLOCK, 3),), halting_threshold=0.6)
    config = sj.LanguageModel(vocab_size=VOCAB, d_model=D, decoder=universal)
    model = to_nnx(config, deterministic=True)
    logits, losses = nnx.capture(model, snnx.Loss)(INPUTS, TARGETS)
    variables = snnx.linen_variables(model)
    expected, updates = config.apply(variables, INPUTS, TARGETS, mutable=["losses"])
    assert_trees_equal(logits, expected)
    (actual,) = jax.tree.leaves(losses)
    assert actual == updates["losses"]["decoder"]["ponder"][0] > 0
    assert_trees_equal(
        nnx.to_pure_dict(pickle.loads(pickle.dumps(losses))), nnx.to_pure_dict(losses)
    )


def test_a_module_with_an_untrained_table_is_pickled():
    layer = to_nnx(sj.Attention(2, 6, sj.Random(8, trainable=False)), in_features=D)
    again = pickle.loads(pickle.dumps(layer))
    assert_trees_equal(snnx.linen_variables(again), snnx.linen_variables(layer))
    assert set(snnx.linen_variables(again)) == {"params", "constants"}
    assert list(nnx.to_flat_state(nnx.state(again, snnx.Constant)).paths) == [("align", "table")]
    assert_trees_equal(again(X), layer(X))


DIVIDED = {"heads": "tensor", "mlp": "tensor", "vocab": "tensor", "embed": "fsdp"}
RULES = tuple((name, DIVIDED.get(name)) for name in (*LOGICAL_AXES, *ACTIVATION_AXES))


def specs_of(module) -> dict[tuple, PartitionSpec]:
    specs = nnx.get_partition_spec(nnx.state(module, nnx.Param))
    return {path: spec.get_value() for path, spec in nnx.to_flat_state(specs)}


def test_every_parameter_has_logical_axes():
    encoder = sj.Mixture((sj.DotProduct(), sj.Random(max_length=8)))
    config = sj.t5(Size(D, 2, 6, HEADS, 4), encoder=encoder, vocab_size=12, scan=True)
    model = nnx.eval_shape(lambda: to_nnx(config))
    _, axes = abstract_variables(config, INPUTS, TARGETS)
    flat = jax.tree_util.tree_leaves_with_path(axes["params"], is_leaf=lambda x: type(x) is tuple)
    expected = {tuple(key.key for key in path): PartitionSpec(*names) for path, names in flat}
    assert specs_of(model) == expected
    with nnx.logical_axis_rules(RULES):
        mapped = specs_of(model)
    rules = dict(RULES) | {None: None}
    assert mapped == {p: PartitionSpec(*(rules[a] for a in s)) for p, s in expected.items()}
    assert dict(snnx.axis_rules(**DIVIDED)) == dict(RULES)
    with pytest.raises(ValueError, match="'head', did you mean 'heads'"):
        snnx.axis_rules(head="tensor")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_parameters_are_made_sharded_under_a_mesh_and_rules(kind):
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), (kind,) * 2, devices=jax.devices()[:4])

    def make():
        """Returns a layer with a learned table."""
        return make_layer(nnx.Rngs(0), alignment=sj.Random(max_length=8))

    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        for layer in (nnx.jit(make)(), make()):
            assert layer.out["kernel"][...].sharding.spec == PartitionSpec("tensor", None, "fsdp")
            expected = NamedSharding(mesh, PartitionSpec("tensor"))
            assert layer.align["table"][...].sharding.is_equivalent_to(expected, 3)
        abstract = nnx.as_abstract(nnx.eval_shape(lambda: to_nnx(TINY)))
        optimizer = nnx.Optimizer(layer, optax.sgd(1.0, momentum=0.9), wrt=nnx.Param)

        @nnx.jit
        def step(layer, optimizer):
            optimizer.update(layer, nnx.grad(lambda layer: (layer(X) ** 2).sum())(layer))

        step(layer, optimizer)
    tables = [layer.align["table"][...], *jax.tree.leaves(nnx.state(optimizer))]
    shardings = [x.sharding for x in tables if x.shape == (HEADS, 8, 8)]
    assert len(shardings) == 2 and all(s.is_equivalent_to(expected, 3) for s in shardings)
    kernel = abstract.encoder["layers_0"]["mlp"]["wo"]["kernel"].get_value()
    assert isinstance(kernel, jax.ShapeDtypeStruct)
    assert kernel.sharding.spec == PartitionSpec("tensor", "fsdp")
    # A mesh whose axes have unknown names must not cause an error.
    with jax.set_mesh(mesh):
        nnx.Optimizer(make(), optax.sgd(1.0), wrt=nnx.Param)
