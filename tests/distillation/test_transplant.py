"""Tests transplanting a model's dot product into a mixture.

The mixture initially gives the same outputs as the original model, and all its terms learn.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synthesizer_jax as sj
from synthesizer_jax.distillation.replacement import STACKS, Replacement, student_model
from synthesizer_jax.distillation.transplant import start_as, with_variants
from synthesizer_jax.models import LayerNorm, RMSNorm, Size, stack_layers, stacks_of, t5, unroll
from synthesizer_jax.models.zoo import VARIANTS, dot_product
from tests.layers.contract import general

N = 8
SIZE = Size(8, 2, 16, 2, 4)
TEACHER = t5(SIZE, vocab_size=16)
DOT = dot_product(4)
INPUTS = jnp.asarray([[5, 9, 3, 12, 7, 1, 0, 0], [4, 4, 8, 2, 6, 11, 13, 1]])
TARGETS = jnp.asarray([[0, 6, 3, 9, 1, 0, 0, 0], [0, 2, 15, 7, 3, 8, 5, 1]])

MIXTURES = {name: make(DOT, N) for name, make in VARIANTS.items()} | {
    "sum": sj.Mixture((sj.Random(N), DOT), weights="sum"),
    "sigmoid": sj.Mixture((DOT, sj.Dense(N)), weights="sigmoid"),
    "three": sj.Mixture((sj.FactorizedRandom(N), DOT, sj.RelativeBias())),
    "shared query": sj.Mixture((DOT, sj.Dense(N)), weights="sum", share_query=True),
    "Gaussian": sj.Mixture((DOT, sj.GaussianBias(trainable=True)), weights="sum"),
    "nested": sj.Mixture((sj.Mixture((sj.Random(N), sj.FactorizedDense(N))), DOT)),
}
MIXTURES = {name: kind for name, kind in MIXTURES.items() if DOT in getattr(kind, "parts", ())}


@pytest.fixture(scope="module")
def variables():
    made = jax.jit(TEACHER.init)(jax.random.key(0), INPUTS, TARGETS)
    rng = np.random.default_rng(0)

    def noisy(x):
        """Returns an array to which random numbers are added."""
        return x + 0.1 * rng.standard_normal(x.shape).astype(np.float32)

    return {"params": jax.tree.map(noisy, made["params"])}


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_starts_as_the_teacher_and_all_its_parts_learn(variables, name):
    """A mixture starts with the teacher's outputs, and all its terms learn.

    Encoder and decoder get different mixtures. Scanned layers give the same result.
    """
    names = list(MIXTURES)
    kinds = MIXTURES[name], MIXTURES[names[names.index(name) - 1]]
    pairs = zip(kinds, STACKS, strict=True)
    student = student_model(TEACHER, tuple(Replacement(kind, place=place) for kind, place in pairs))
    params = start_as(TEACHER, student, variables["params"])
    fresh = jax.eval_shape(student.init, jax.random.key(0), INPUTS, TARGETS)["params"]
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, fresh)
    scanned = student.copy(**{k: s.copy(scan=True) for k, s in stacks_of(student).items()})
    assert unroll(scanned) == unroll(student)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(params):
        stacked = {k: stack_layers(stacks_of(scanned)[k], params[k]) for k in STACKS}
        logits = scanned.apply({"params": {**params, **stacked}}, INPUTS, TARGETS)
        return -jax.nn.log_softmax(logits)[..., 3].sum(), logits

    (_, found), _ = loss(params)
    expected = jax.jit(TEACHER.apply)(variables, INPUTS, TARGETS)
    np.testing.assert_allclose(found, expected, atol=1e-5 * float(jnp.abs(expected).max()))
    # If the product of two factors is zero, one factor gets a gradient only after the other has
    # changed.
    for _ in range(2):
        before = params
        (_, gradients) = loss(params)
        params = jax.tree.map(lambda x, g: x - 0.1 * g, params, gradients)
    for place, mixer in STACKS.items():
        aligned = [tree[place]["layers_1"][mixer]["align"] for tree in (before, params)]
        differences = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), *aligned)
        for path, difference in jax.tree.leaves_with_path(differences):
            assert difference > 0, f"{jax.tree_util.keystr(path)} does not learn"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (sj.Random(N), "Random does not contain the model's own DotProduct"),
        (sj.Mixture((sj.Random(N), sj.Dense(N))), "Mixture does not contain"),
        (
            sj.Mixture((DOT, sj.GaussianBias())),
            "GaussianBias has no parameter that scales its logits",
        ),
        (sj.Mixture((DOT, sj.Random(N, trainable=False))), "tables that are not trained"),
        (sj.Gaussian(), "Gaussian does not contain"),
    ],
)
def test_what_cannot_start_as_the_teacher_is_an_error(variables, kind, message):
    with pytest.raises(ValueError, match=message):
        start_as(TEACHER, student_model(TEACHER, (Replacement(kind),)), variables["params"])


def test_each_layer_keeps_its_own_alignment():
    norms = (RMSNorm(offset=1.0), LayerNorm())
    own = [
        sj.DotProduct(normalize_qk=norm, rotary_base=base)
        for norm, base in zip(norms, (9.0, 2.0), strict=True)
    ]
    replacements = (Replacement(dot, layers=(i,)) for i, dot in enumerate(own))
    teacher = student_model(TEACHER, tuple(replacements))
    student = with_variants(teacher, encoder="rv", decoder=None, max_length=N)
    variables = general(teacher.init, INPUTS, TARGETS)
    params = start_as(teacher, student, variables["params"])
    found = jax.jit(student.apply)({"params": params}, INPUTS, TARGETS)
    expected = jax.jit(teacher.apply)(variables, INPUTS, TARGETS)
    np.testing.assert_allclose(found, expected, atol=1e-5 * float(jnp.abs(expected).max()))
