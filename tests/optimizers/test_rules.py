"""Compares optimizers that are chosen by name, and rules by path, with NumPy and optax.

The tests also cover rules for single layers, and errors.
"""

import dataclasses
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

from synthesizer_jax.base.registry import from_json, replace, to_json
from synthesizer_jax.cli.recipes import override
from synthesizer_jax.models import Size, alignment, stack_layers, stacks_of, t5, unroll_variables
from synthesizer_jax.optimizers import Adafactor, AdamW, Constant, optax_optimizer, optax_schedule
from synthesizer_jax.optimizers.adafactor import state_axes
from synthesizer_jax.optimizers.base import schedule_of
from synthesizer_jax.optimizers.rules import OptimizerRule, build_optimizer
from synthesizer_jax.primitives.parameters import is_axes
from synthesizer_jax.sharding import MeshShape
from synthesizer_jax.training.trainer import Trainer
from tests.training.tiny import CopyStream, experiment

RATE, STEPS = 0.1, 4
MODEL = nn.Dense(1)  # without stacks, paths in rules are parameter paths
AXES = dict.fromkeys("abcd", ("embed", "mlp"))
RULES = (
    OptimizerRule("a", learning_rate=0.5),
    OptimizerRule("b", learning_rate=2.0),
    OptimizerRule("c", frozen=True),
)
FACTORS = {"a": 0.5, "b": 2.0, "c": 0.0, "d": 1.0}


def problem():
    rng = np.random.default_rng(0)

    def make():
        """Returns a random array for every parameter."""
        return {name: rng.normal(size=(3, 4)).astype(np.float32) for name in AXES}

    return make(), [make() for _ in range(STEPS)]


class Sgd:
    """Plain gradient descent, with which a user's own optimizer is compared."""

    def __call__(self, g, p, t):
        return -RATE * g


class Adam:
    def __init__(self):
        self.m = self.v = 0.0

    def __call__(self, g, p, t):
        self.m = 0.9 * self.m + 0.1 * g
        self.v = 0.999 * self.v + 0.001 * g**2
        return -RATE * (self.m / (1 - 0.9**t)) / (np.sqrt(self.v / (1 - 0.999**t)) + 1e-8)


class FullAdafactor:
    """Algorithm 5 of Shazeer and Stern 2018, without factoring.

    The arrays in these tests are too small to be factored.
    """

    def __init__(self):
        self.v = 0.0

    def __call__(self, g, p, t):
        beta = 1 - t**-0.8
        self.v = beta * self.v + (1 - beta) * (g**2 + 1e-30)
        u = g / np.sqrt(self.v)
        u = u / max(1, np.sqrt(np.mean(u**2)))
        return -RATE * max(1e-3, np.sqrt(np.mean(p**2))) * u


SCHEDULE = Constant(RATE)


@dataclasses.dataclass(frozen=True)
class Mine:
    learning_rate: Constant = SCHEDULE

    def build(self, axes):
        assert set(axes) == set("abd"), "an optimizer sees what is trained, and nothing else"
        return optax.sgd(self.learning_rate.build())


OPTIMIZERS = {
    "adafactor": (Adafactor(SCHEDULE), FullAdafactor, None),
    "adamw, clipped": (AdamW(SCHEDULE, clip_norm=1.0), Adam, 1.0),
    "optax's sgd, clipped": (optax_optimizer("sgd", SCHEDULE, clip_norm=0.5), Sgd, 0.5),
    "one's own": (Mine(), Sgd, None),
}


def train(optimizer, params, gradients):
    """Returns the parameters after the updates, and the state of the optimizer."""

    @jax.jit
    def update(params, state, g):
        g = optimizer.mask_gradients(optimizer.trained(g))
        return optimizer.update(g, state, params)

    state = optimizer.init(params)
    for g in gradients:
        params, state = update(params, state, g)
    return params, state


def keys_of(tree):
    """Returns the keys of all nested dictionaries in a pytree."""
    paths = (path for path, _ in jax.tree.leaves_with_path(tree))
    return {
        entry.key for path in paths for entry in path if isinstance(entry, jax.tree_util.DictKey)
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_equals_numpy_under_rules(name):
    recipe, oracle, clip = OPTIMIZERS[name]
    params, gradients = problem()
    optimizer = build_optimizer(recipe, RULES, model=MODEL, params=params, axes=AXES)
    actual, state = train(optimizer, params, gradients)
    expected = {n: p.astype(np.float64) for n, p in params.items()}
    updates = {n: oracle() for n in params}
    for t, g in enumerate(gradients, 1):
        # The parameter c does not count for the gradient norm, because it is frozen.
        norm = np.sqrt(sum((x**2).sum() for n, x in g.items() if n != "c"))
        scale = 1.0 if clip is None else min(1.0, clip / norm)
        for n, factor in FACTORS.items():
            expected[n] += factor * updates[n](g[n].astype(np.float64) * scale, expected[n], t)
    for n in params:
        # In float32, 1 − 0.999^t has only about four correct digits.
        np.testing.assert_allclose(actual[n], expected[n], rtol=2e-5, atol=1e-5)
    assert np.asarray(actual["c"]).tobytes() == params["c"].tobytes()
    assert "c" not in keys_of(state), "a frozen parameter has no state"


def test_a_state_with_random_keys_is_saved_as_plain_arrays_and_continues():
    params, gradients = problem()
    recipe = optax_optimizer("noisy_sgd", 0.1, key=7)
    optimizer = build_optimizer(recipe, (), model=MODEL, params=params, axes=AXES)
    begun, state = train(optimizer, params, gradients[:2])
    plain = jax.tree.map(np.asarray, state)  # as restored from a checkpoint
    update = jax.jit(optimizer.update)
    for g in gradients[2:]:
        begun, plain = update(g, plain, begun)
    oracle = optax.noisy_sgd(0.1, key=7)
    expected = params
    theirs = oracle.init(params)
    for g in gradients:
        updates, theirs = jax.jit(oracle.update)(g, theirs)
        expected = optax.apply_updates(expected, updates)
    for n in params:
        np.testing.assert_allclose(begun[n], expected[n], rtol=1e-6, atol=1e-6)


REFUSED = {
    "no such path": (
        (OptimizerRule("A"),),
        AdamW(),
        r"'A' matches no parameter\. One of the paths is 'a'\.",
    ),
    "shadowed": (
        (OptimizerRule(".*"), OptimizerRule("a")),
        AdamW(),
        "'a' has no effect, because earlier patterns",
    ),
    "all frozen": ((OptimizerRule(".*", frozen=True),), AdamW(), "freeze every parameter"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_optimizers_and_rules_give_one_sentence(name):
    rules, recipe, message = REFUSED[name]
    params, _ = problem()
    with pytest.raises(ValueError, match=message) as error:
        build_optimizer(recipe, rules, model=MODEL, params=params, axes=AXES)
    assert "\n" not in str(error.value)


def test_a_pattern_without_a_match_is_answered_with_an_existing_path():
    with pytest.raises(ValueError, match=r"did you mean 'encoder/layers_0/.*'\? A pattern m"):
        tiny(rules=(OptimizerRule("encoder/layer_0/.*/table", frozen=True),))
    with pytest.raises(
        ValueError, match=r"training\.rules: '\(' is not a valid regular expression: "
    ):
        OptimizerRule("(")
    with pytest.raises(
        ValueError, match=r"rules\.0\.learning_rate is -1\.0, but it must be 0 or more"
    ):
        experiment(rules=(OptimizerRule("a", learning_rate=-1.0),))


def test_a_schedule_that_is_no_function_is_named():
    @dataclasses.dataclass(frozen=True)
    class Half:
        def build(self):
            return 0.5

    with pytest.raises(
        ValueError, match=r"Half\.build returns 0\.5, but it must return a function of the step"
    ):
        AdamW(Half()).build({})


def tiny(*, scan=False, **changes):
    """Returns a trainer for a model with two looped or scanned layers, without dropout."""
    model = t5(
        Size(8, 2, 16, 2, 4),
        encoder=alignment("rv", head_dim=4, max_length=8),
        vocab_size=16,
        scan=scan,
    )
    return Trainer(replace(experiment(**changes), model=model), jax.devices()[:1])


LAYER_RULES = (
    OptimizerRule("encoder/layers_0/.*", frozen=True),
    OptimizerRule(r"encoder/layers_1/.*kernel", learning_rate=0.25),
    OptimizerRule(r"decoder/.*", frozen=True),
    OptimizerRule("embedding", learning_rate=0.0),
)


@pytest.fixture(scope="module")
def looped_and_scanned():
    """A trainer for each layout, and the looped parameters before and after three steps."""
    results = []
    for scan in (False, True):
        optimizer = AdamW(learning_rate=Constant(0.01))
        trainer = tiny(scan=scan, rules=LAYER_RULES, optimizer=optimizer, micro_batches=2)
        state = trainer.init()
        if results:
            params = dict(jax.tree.map(jnp.asarray, results[0][1]))
            for name, stack in stacks_of(trainer.model).items():
                params[name] = stack_layers(stack, params[name])
            state = dataclasses.replace(state, params=params)

        def looped(state, model=trainer.model):
            """Returns the parameters of a state, converted to the layout of looped layers."""
            return jax.device_get(unroll_variables(model, state.variables)["params"])

        before = looped(state)
        stream = CopyStream()
        for _ in range(3):
            state, metrics = trainer.step(state, trainer.shard_batch(next(stream)))
        results.append((trainer, before, looped(state), float(metrics["gradient_norm"])))
    return results


def test_scanned_layers_are_told_apart_and_frozen_like_looped_ones(looped_and_scanned):
    (_, _, looped, norm), (_, _, scanned, other_norm) = looped_and_scanned
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), looped, scanned)
    assert norm == pytest.approx(other_norm, rel=1e-4)


def test_frozen_parameters_keep_every_bit_and_the_others_move(looped_and_scanned):
    names = keys_of(looped_and_scanned[0][0].layout.abstract.opt_state)
    assert "layers_1" in names and not names & {"layers_0", "decoder"}
    for _, before, after, _ in looped_and_scanned:
        differs = jax.tree.map(lambda a, b: a.tobytes() != b.tobytes(), before, after)
        moved = flatten_dict(differs, sep="/")
        still = ("encoder/layers_0/", "decoder/", "embedding")
        assert {n for n, m in moved.items() if not m} == {n for n in moved if n.startswith(still)}


def test_a_sharded_state_keeps_its_axes_under_rules():
    recipe = experiment(tiny().model, mesh=MeshShape(fsdp=2), rules=LAYER_RULES, ema=0.9)
    layout = Trainer(recipe, jax.devices()[:2]).layout
    assert any("fsdp" in x.sharding.spec for x in jax.tree.leaves(layout.abstract.opt_state))
    assert layout.shardings.ema == layout.shardings.params


def test_an_optimizer_by_name_equals_optax_and_is_sharded_like_the_parameters():
    params = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3)}
    axes = {"a": ("embed", "mlp"), "b": ("norm",)}
    named = optax_optimizer("lion", SCHEDULE, b1=0.8, weight_decay=0.1, clip_norm=1.0).build(axes)
    own = optax.chain(
        optax.clip_by_global_norm(1.0), optax.lion(SCHEDULE.build(), b1=0.8, weight_decay=0.1)
    )
    gradients = jax.tree.map(lambda p: 3.0 * p + 1.0, params)

    def first(t):
        """Returns the updates that an optax optimizer makes in its first step."""
        return jax.tree.leaves(t.update(gradients, t.init(params), params))

    for actual, expected in zip(first(named), first(own), strict=True):
        np.testing.assert_array_equal(actual, expected)
    found = state_axes(named.init(params), axes, params)

    def is_matrix(x):
        """Whether a parameter has the logical axes of the matrix."""
        return x == ("embed", "mlp")

    assert jax.tree.leaves(found, is_leaf=is_matrix).count(("embed", "mlp")) == 1


WARM = {"init_value": 0.1, "peak_value": 0.4, "warmup_steps": 3, "decay_steps": 9}
JUMPS = {3: 0.5, 6: 0.1}
BY_NAME = {
    "warmup_cosine_decay_schedule": (WARM, optax.warmup_cosine_decay_schedule(**WARM)),
    "piecewise_constant_schedule": (
        {"init_value": 0.4, "boundaries_and_scales": JUMPS},
        optax.piecewise_constant_schedule(0.4, JUMPS),
    ),
    "sgdr_schedule": ({"cosine_kwargs": [WARM, WARM]}, optax.sgdr_schedule([WARM, WARM])),
    "join_schedules": (
        {
            "schedules": [Constant(0.2), optax_schedule("constant_schedule", value=1)],
            "boundaries": [4],
        },
        optax.join_schedules([optax.constant_schedule(0.2), optax.constant_schedule(1)], [4]),
    ),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_a_schedule_by_name_equals_optax_also_from_a_saved_recipe(name):
    arguments, own = BY_NAME[name]
    recipe = experiment(optimizer=AdamW(optax_schedule(name, **arguments)))
    saved = from_json(json.loads(json.dumps(to_json(recipe))))
    assert saved == recipe
    schedule = schedule_of(saved.training.optimizer)
    steps = range(20)
    np.testing.assert_allclose([schedule(s) for s in steps], [own(s) for s in steps], rtol=1e-6)


def test_state_of_another_shape_than_its_parameter_is_on_every_device():
    """Optimizer state with a different shape than its parameter is replicated on all devices.

    The factors of optax's own Adafactor are an example.
    """
    axes, params = {"a": ("embed", "mlp")}, {"a": jnp.ones((128, 256))}
    state = optax_optimizer("adafactor").build(axes).init(params)
    found = state_axes(state, axes, params)
    for x, names in zip(
        jax.tree.leaves(state), jax.tree.leaves(found, is_leaf=is_axes), strict=True
    ):
        assert names == (("embed", "mlp") if x.shape == (128, 256) else (None,) * x.ndim)


@pytest.mark.parametrize("kind", [AdamW, Adafactor, lambda rate: optax_optimizer("sgd", rate)])
def test_a_number_is_a_constant_schedule(kind):
    recipe = experiment(optimizer=kind(0.25))
    saved = from_json(json.loads(json.dumps(to_json(recipe))))
    assert saved == recipe == override(recipe, "training.optimizer.learning_rate=0.25")
    assert schedule_of(saved.training.optimizer)(7) == 0.25
    params = {"a": jnp.ones((2, 3))}
    updates = []
    for optimizer in (kind(0.25), kind(Constant(0.25))):
        built = optimizer.build({"a": ("embed", "mlp")})
        updates.append(built.update(params, built.init(params), params)[0]["a"])
    np.testing.assert_array_equal(*updates)
    with pytest.raises(ValueError, match=r"learning_rate is -1\.0, but it must be 0 or more"):
        experiment(optimizer=kind(-1.0))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: optax_optimizer("lyon"),
            r"optax has no function 'lyon' .*, did you mean 'lion'\?",
        ),
        (
            lambda: optax_optimizer("sgd", beta=1.0),
            r"optax\.sgd cannot .*: got an unexpected keyword argument",
        ),
        (lambda: optax_optimizer("chain"), "optax has no function 'chain'"),
        (
            lambda: optax_optimizer("lbfgs"),
            "optax has no function 'lbfgs'",
        ),  # this optimizer needs more than gradients
        (lambda: optax_schedule("cosine_decay"), "did you mean 'cosine_decay_schedule'"),
        (lambda: optax_schedule("constant_schedule"), "missing a required argument: 'value'"),
    ],
)
def test_unknown_names_and_arguments_are_errors(build, message):
    with pytest.raises(ValueError, match=message):
        build()
