"""Every mixture with the dot product starts as the model without it, and its other parts learn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax.alignments import (
    Dense,
    FactorizedDense,
    FactorizedRandom,
    Gaussian,
    GaussianBias,
    Mixture,
    Random,
    RelativeBias,
)
from synthesizer_jax.distillation.replacement import Replacement, student_model
from synthesizer_jax.distillation.transplant import STACKS, start_as, with_variants
from synthesizer_jax.models import Size, stack_layers, stacks_of, t5, unroll
from synthesizer_jax.models.zoo import VARIANTS, dot_product

N = 8
SIZE = Size(8, 2, 16, 2, 4)
TEACHER = t5(SIZE, vocab_size=16)
DOT = dot_product(4)
INPUTS = jnp.asarray([[5, 9, 3, 12, 7, 1, 0, 0], [4, 4, 8, 2, 6, 11, 13, 1]])
TARGETS = jnp.asarray([[0, 6, 3, 9, 1, 0, 0, 0], [0, 2, 15, 7, 3, 8, 5, 1]])

MIXTURES = {
    name: make(DOT, N) for name, make in VARIANTS.items() if isinstance(make(DOT, N), Mixture)
} | {
    "sum": Mixture((Random(N), DOT), weights="sum"),
    "sigmoid": Mixture((DOT, Dense(N)), weights="sigmoid"),
    "three": Mixture((FactorizedRandom(N), DOT, RelativeBias())),
    "shared query": Mixture((DOT, Dense(N)), weights="sum", share_query=True),
    "Gaussian": Mixture((DOT, GaussianBias(trainable=True)), weights="sum"),
    "nested": Mixture((Mixture((Random(N), FactorizedDense(N))), DOT)),
}
MIXTURES = {name: kind for name, kind in MIXTURES.items() if DOT in kind.parts}


@pytest.fixture(scope="module")
def variables():
    made = jax.jit(TEACHER.init)(jax.random.key(0), INPUTS, TARGETS)
    rng = np.random.default_rng(0)
    noisy = lambda x: x + 0.1 * rng.standard_normal(x.shape).astype(np.float32)
    return {"params": jax.tree.map(noisy, made["params"])}


def replaced(kind, place):
    return student_model(TEACHER, (Replacement(kind, place=place),))


@pytest.mark.parametrize("place", STACKS)
@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_starts_as_the_teacher_and_all_its_parts_learn(variables, name, place):
    model = replaced(MIXTURES[name], place)
    student, params = start_as(TEACHER, model, variables["params"])
    expected = TEACHER.apply(variables, INPUTS, TARGETS)
    found = student.apply({"params": params}, INPUTS, TARGETS)
    np.testing.assert_allclose(found, expected, atol=1e-5 * float(jnp.abs(expected).max()))
    fresh = jax.eval_shape(student.init, jax.random.key(0), INPUTS, TARGETS)["params"]
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, fresh)

    def loss(params):
        logits = student.apply({"params": params}, INPUTS, TARGETS)
        return -jax.nn.log_softmax(logits)[..., 3].sum()

    for _ in range(2):  # where two factors make a zero, the second moves after the first
        gradients = jax.grad(loss)(params)
        moved = jax.tree.map(lambda x, g: x - 0.1 * g, params, gradients)
        params, before = moved, params
    aligned = [tree[place]["layers_1"][STACKS[place]]["align"] for tree in (before, moved)]
    for path, difference in jax.tree.leaves_with_path(
        jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), *aligned)
    ):
        assert difference > 0, f"{jax.tree_util.keystr(path)} does not learn"


@pytest.mark.parametrize("name", ["rv", "fdv"])
def test_scanned_layers_start_as_the_teacher(variables, name):
    model = with_variants(TEACHER, encoder=name, decoder=name, max_length=N)
    student, params = start_as(TEACHER, model, variables["params"])
    scanned = student.copy(**{k: s.copy(scan=True) for k, s in stacks_of(student).items()})
    for stack in STACKS:
        params[stack] = stack_layers(stacks_of(scanned)[stack], params[stack])
    assert unroll(scanned) == unroll(student)
    found = scanned.apply({"params": params}, INPUTS, TARGETS)
    expected = TEACHER.apply(variables, INPUTS, TARGETS)
    np.testing.assert_allclose(found, expected, atol=1e-5 * float(jnp.abs(expected).max()))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Random(N), "Random does not contain the model's own DotProduct"),
        (Mixture((Random(N), Dense(N))), "Mixture does not contain"),
        (Mixture((DOT, GaussianBias())), "GaussianBias: no parameters of it scale its logits"),
        (Mixture((DOT, Random(N, trainable=False))), "tables that are not trained"),
        (Gaussian(), "Gaussian does not contain"),
    ],
)
def test_what_cannot_start_as_the_teacher_is_an_error(variables, kind, message):
    with pytest.raises(ValueError, match=message):
        start_as(TEACHER, replaced(kind, "encoder"), variables["params"])


def test_an_unknown_variant_is_an_error():
    with pytest.raises(
        ValueError, match=r"--encoder is 'frw', did you mean 'fr'\?; use v, d, r, fix"
    ):
        with_variants(TEACHER, encoder="frw", decoder=None, max_length=N)
