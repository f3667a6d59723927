"""Rules by path, around every optimizer, against NumPy; looped and scanned layers; what is refused."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from synthesizer_jax.models import Size, alignment, stack_layers, stacks_of, t5, unroll_variables
from synthesizer_jax.optimizers import (
    Adafactor,
    AdamW,
    Constant,
    OptimizerRule,
    optax_optimizer,
)
from synthesizer_jax.optimizers.rules import build_optimizer, looped_paths
from synthesizer_jax.registry import from_json, replace, to_json
from synthesizer_jax.sharding import MeshShape
from synthesizer_jax.training.state import make_layout
from synthesizer_jax.training.trainer import Trainer
from tests.optimizers.test_adafactor import reference_updates
from tests.training.tiny import CopyStream, experiment

RATE, STEPS = 0.1, 4
MODEL = nn.Dense(1)  # has no stacks: paths are the parameters' own
AXES = dict.fromkeys("abcd", ("embed", "mlp"))
RULES = (
    OptimizerRule("a", learning_rate=0.5),
    OptimizerRule("b", learning_rate=2.0, weight_decay=0.3),
    OptimizerRule("c", frozen=True),
)
FACTORS = {"a": (0.5, 0.0), "b": (2.0, 0.3), "c": (0.0, 0.0), "d": (1.0, 0.0)}


def problem():
    rng = np.random.default_rng(0)
    make = lambda: {name: rng.normal(size=(3, 4)).astype(np.float32) for name in AXES}
    return make(), [make() for _ in range(STEPS)]


class Sgd:
    """The update of plain gradient descent; also of an optimizer of one's own."""

    def __call__(self, g, p, t):
        return -RATE * g


class Adam:
    def __init__(self):
        self.m = self.v = 0.0

    def __call__(self, g, p, t):
        self.m = 0.9 * self.m + 0.1 * g
        self.v = 0.999 * self.v + 0.001 * g**2
        return -RATE * (self.m / (1 - 0.9**t)) / (np.sqrt(self.v / (1 - 0.999**t)) + 1e-8)


class Lion:
    def __init__(self):
        self.m = 0.0

    def __call__(self, g, p, t):
        update = -RATE * np.sign(0.9 * self.m + 0.1 * g)
        self.m = 0.99 * self.m + 0.01 * g
        return update


class FullAdafactor:
    """Algorithm 5 of Shazeer and Stern 2018: the tables here are too small to be factored."""

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
    "adamw": (AdamW(SCHEDULE, clip_norm=None), Adam, None),
    "adamw, clipped": (AdamW(SCHEDULE, clip_norm=1.0), Adam, 1.0),
    "optax's lion": (optax_optimizer("lion", SCHEDULE, weight_decay=0.0), Lion, None),
    "optax's sgd, clipped": (optax_optimizer("sgd", SCHEDULE, clip_norm=0.5), Sgd, 0.5),
    "one's own": (Mine(), Sgd, None),
}


def train(optimizer, params, gradients):
    """Parameters after the updates, and the optimizer's state."""

    @jax.jit
    def update(params, state, g, step):
        g = optimizer.mask_gradients(optimizer.trained(g))
        return optimizer.update(g, state, params, step=step)

    state = optimizer.init(params)
    for step, g in enumerate(gradients):
        params, state = update(params, state, g, jnp.asarray(step))
    return params, state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_equals_numpy_under_rules(name):
    recipe, oracle, clip = OPTIMIZERS[name]
    params, gradients = problem()
    optimizer = build_optimizer(recipe, RULES, model=MODEL, params=params, axes=AXES)
    actual, state = train(optimizer, params, gradients)
    expected = {n: p.astype(np.float64) for n, p in params.items()}
    updates = {n: oracle() for n in params}
    for t, g in enumerate(gradients, 1):
        norm = np.sqrt(sum((x**2).sum() for n, x in g.items() if n != "c"))  # c has no part in it
        scale = 1.0 if clip is None else min(1.0, clip / norm)
        for n, (factor, decay) in FACTORS.items():
            p = expected[n]
            u = updates[n](g[n].astype(np.float64) * scale, p, t)
            expected[n] = p + factor * (u - RATE * decay * p)
    for n in params:
        # 1 − 0.999^t has four digits in float32.
        np.testing.assert_allclose(actual[n], expected[n], rtol=2e-5, atol=1e-5)
    assert np.asarray(actual["c"]).tobytes() == params["c"].tobytes()
    kept = {
        entry.key
        for path, _ in jax.tree.leaves_with_path(state)
        for entry in path
        if isinstance(entry, jax.tree_util.DictKey)
    }
    assert "c" not in kept, "a frozen parameter has no state"


def test_adafactor_factors_what_it_would_without_rules():
    params = {"a": np.random.default_rng(1).normal(size=(5, 7)).astype(np.float32), "c": np.ones(3)}
    axes = {"a": ("embed", "mlp"), "c": ("norm",)}
    gradients = [jax.tree.map(lambda p, i=i: np.sin(p + i), params) for i in range(3)]
    recipe = Adafactor(SCHEDULE, min_size=4)
    rules = (OptimizerRule("c", frozen=True),)
    optimizer = build_optimizer(recipe, rules, model=MODEL, params=params, axes=axes)
    actual, state = train(optimizer, params, gradients)
    expected = reference_updates(params["a"], [g["a"] for g in gradients], factored=True)
    np.testing.assert_allclose(actual["a"], expected, rtol=2e-5)
    assert set(state.moments["a"]) == {"row", "col"} and set(state.moments) == {"a"}


REFUSED = {
    "no such path": ((OptimizerRule("A"),), AdamW(), r"'A' matches no parameter, such as 'a'; a"),
    "shadowed": ((OptimizerRule(".*"), OptimizerRule("a")), AdamW(), r"earlier rules decide for"),
    "all frozen": ((OptimizerRule(".*", frozen=True),), AdamW(), "freeze every parameter"),
    "two decays": (
        RULES,
        AdamW(weight_decay=0.1),
        r"leave AdamW's own, 0\.1, as it is; set it to 0",
    ),
    "an exemption": (
        (OptimizerRule("a", weight_decay=0.0),),
        AdamW(weight_decay=0.1),
        r"own, 0\.1, as it is; set it to 0 and end the rules with one for '\.\*' with weight_decay=0\.1",
    ),
    "optax's default": (RULES, optax_optimizer("adamw"), r"leave Optax's own, 0\.0001, as it is"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_one_sentence(name):
    rules, recipe, message = REFUSED[name]
    params, _ = problem()
    with pytest.raises(ValueError, match=message) as error:
        build_optimizer(recipe, rules, model=MODEL, params=params, axes=AXES)
    assert "\n" not in str(error.value)


def test_a_rule_exempts_parameters_from_the_decay_of_a_later_rule():
    params, gradients = problem()
    rules = (OptimizerRule("a", weight_decay=0.0), OptimizerRule(".*", weight_decay=0.1))

    def trained(rules):
        optimizer = build_optimizer(AdamW(SCHEDULE), rules, model=MODEL, params=params, axes=AXES)
        return train(optimizer, params, gradients)[0]

    plain, ruled = trained(()), trained(rules)
    assert {n for n in params if (plain[n] == ruled[n]).all()} == {"a"}


def test_a_pattern_that_matches_nothing_is_told_a_path_that_is_there():
    with pytest.raises(ValueError, match=r"did you mean 'encoder/layers_0/.*'\?; a pattern m"):
        tiny(rules=(OptimizerRule("encoder/layer_0/.*/table", frozen=True),))


def test_a_rule_that_cannot_be_is_refused_when_it_is_made():
    with pytest.raises(ValueError, match=r"training\.rules: pattern '\(' is wrong: "):
        OptimizerRule("(")
    with pytest.raises(ValueError, match="is frozen and has a learning_rate or a weight_decay"):
        OptimizerRule("a", frozen=True, weight_decay=0.1)
    with pytest.raises(ValueError, match=r"rules\.0\.learning_rate is -1\.0; allowed: 0 or more"):
        experiment(rules=(OptimizerRule("a", learning_rate=-1.0),))
    rules = (OptimizerRule("a", 0.5), OptimizerRule("b", frozen=True))
    assert from_json(to_json(experiment(rules=rules))).training.rules == rules


def tiny(*, scan=False, **changes):
    """A trainer of two looped or scanned layers, without dropout."""
    model = t5(
        Size(8, 2, 16, 2, 4),
        encoder=alignment("rv", head_dim=4, max_length=8),
        vocab_size=16,
        scan=scan,
    )
    return Trainer(replace(experiment(**changes), model=model), jax.devices()[:1])


LAYER_RULES = (
    OptimizerRule("encoder/layers_0/.*", frozen=True),
    OptimizerRule(r"encoder/layers_1/.*kernel", learning_rate=0.25, weight_decay=0.1),
    OptimizerRule(r"decoder/.*", frozen=True),
    OptimizerRule("embedding", learning_rate=0.0),
)


@pytest.fixture(scope="module")
def looped_and_scanned():
    """Trainers, and the looped parameters before and after three steps in both layouts."""
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
        looped = lambda state, model=trainer.model: jax.device_get(
            unroll_variables(model, state.variables)["params"]
        )
        before, stream = looped(state), CopyStream()
        for _ in range(3):
            state, metrics = trainer.step(state, trainer.shard_batch(next(stream)))
        results.append((trainer, before, looped(state), float(metrics["gradient_norm"])))
    return results


def test_scanned_layers_are_told_apart_and_frozen_like_looped_ones(looped_and_scanned):
    (_, _, looped, norm), (_, _, scanned, other_norm) = looped_and_scanned
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), looped, scanned)
    assert norm == pytest.approx(other_norm, rel=1e-4)


def test_frozen_parameters_keep_every_bit_and_the_others_move(looped_and_scanned):
    for _, before, after, _ in looped_and_scanned:
        moved = {
            "/".join(entry.key for entry in path): old.tobytes() != new.tobytes()
            for (path, old), new in zip(
                jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True
            )
        }
        still = ("encoder/layers_0/", "decoder/", "embedding")
        assert {name for name, m in moved.items() if not m} == {
            name for name in moved if name.startswith(still)
        }


def test_the_state_and_the_plan_have_no_room_for_frozen_parameters(looped_and_scanned):
    trainer = looped_and_scanned[0][0]
    names = {
        entry.key
        for path, _ in jax.tree.leaves_with_path(trainer.layout.abstract.opt_state)
        for entry in path
        if isinstance(entry, jax.tree_util.DictKey)
    }
    assert "layers_1" in names and not names & {"layers_0", "decoder"}


def test_paths_are_those_of_looped_layers(looped_and_scanned):
    model = looped_and_scanned[1][0].model
    assert looped_paths(model, ("encoder", "run_0", "a", "table")) == [
        "encoder/layers_0/a/table",
        "encoder/layers_1/a/table",
    ]
    assert looped_paths(model, ("encoder", "final_norm", "scale")) == ["encoder/final_norm/scale"]


def test_a_sharded_state_keeps_its_axes_under_rules():
    model = tiny().model
    mesh = Trainer(replace(experiment(), mesh=MeshShape(fsdp=2)), jax.devices()[:2]).mesh
    _, layout = make_layout(
        model, AdamW(), tokens=model.example(8, 8), mesh=mesh, rules=LAYER_RULES, ema=True
    )
    sharded = [x for x in jax.tree.leaves(layout.abstract.opt_state) if "fsdp" in x.sharding.spec]
    assert sharded
    assert layout.shardings.ema == layout.shardings.params
