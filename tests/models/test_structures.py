"""Tests all models of the zoo in tiny sizes, and the parameter counts of published models.

Each model is tested with a single compiled program.
"""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax import ZOO, Encoder, UniversalStack
from synthesizer_jax.base.registry import fields_of, from_json, replace, to_json
from synthesizer_jax.costs.summary import _scan_runs, num_elements
from synthesizer_jax.models import Rows
from synthesizer_jax.primitives.parameters import abstract_variables, apply_method
from tests.environment import FAST_COMPILE
from tests.layers.contract import general

VOCAB, LENGTH, STEPS = 24, 7, 5
SMALL = {"d_model": 12, "embedding_scale": 2.0, "groups": 3, "head_dim": 6, "hidden_dim": 10}
SMALL |= {
    "max_length": 13,
    "num_heads": 2,
    "projected_length": 4,
    "repeats": 1,
    "separate_input": 5,
    "vocab_size": VOCAB,
}
STRUCTURES = (
    *("t5_small", "t5_1_1_small"),
    *(f"synthesizer_{variant}_small" for variant in ("fix", "fr", "rd", "rv", "fdv")),
    *("mesh_dense_base", "mesh_random_plus_alpha_base", "mesh_learned_dense_plus_base"),
    *("t5_1_1_th_base", "lightweight_convolution_base", "dynamic_convolution_base"),
    *("universal_transformer_base", "lm_rv_base", "prefix_lm_base"),
    *("hard_coded_base", "hard_coded_hc_sa", "hard_coded_hc_all", "hard_coded_sh_x"),
    *("t5gemma2_270m", "bert_large", "linformer_base", "alr_s", "alsr_s", "alrr_s", "elr_s"),
)
PACKED = (
    *("synthesizer_rv_small", "t5gemma2_270m", "mesh_learned_dense_plus_base"),
    *("lightweight_convolution_base", "universal_transformer_base"),
)


def tiny(value):
    """Returns a copy of a model, or of a part of a model, with tiny sizes."""
    if isinstance(value, tuple):
        return tuple(map(tiny, value))
    if not dataclasses.is_dataclass(value):
        return value
    small = {k: SMALL.get(k, tiny(v)) for k, v in fields_of(value).items() if v is not None}
    if isinstance(value, UniversalStack):
        small["runs"] = (dataclasses.replace(small["runs"][0], repeats=3),)
    return replace(value, **small)


def close(found, expected, bound=2e-4):
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound * np.abs(expected).max())


def texts():
    """Returns two examples in two versions that are padded differently, and targets.

    In the first version, the padding is at the end.

    In the second version, the padding is in front of tokens and between tokens.
    """
    rng = np.random.default_rng(0)
    source, target = (rng.integers(2, VOCAB, (2, n)) for n in (LENGTH, STEPS))
    source[1, 4:] = 0
    moved = np.stack([source[0], [0, *source[1, :2], 0, *source[1, 2:4], 0]])
    return np.concatenate([source, moved]), np.concatenate([target, target])


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_structure_of_the_zoo(name):
    """Tests one model: padding, decoding steps, packed rows and gradients.

    Padding may be anywhere. Decoding steps equal a full pass. Packed rows equal separate rows.

    All parameters have nonzero gradients.
    """
    model = tiny(ZOO[name]())
    source, target = texts()
    reads = isinstance(model, Encoder)
    arguments = (source,) if reads else (source, target)
    variables = general(model.init, *arguments)
    rest = {k: v for k, v in variables.items() if k != "params"}

    def loss(params):
        out = model.apply({"params": params, **rest}, *arguments)
        out = (out.pooled, out.token_logits[:, :4]) if reads else (out,)
        return sum((jnp.sin(jnp.arange(x.size)) * x.ravel()).sum() for x in out), out

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def run(variables):
        (_, out), gradient = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        if reads:
            return out, gradient, None, None
        cache = apply_method(model.init_cache, variables, source, max_length=STEPS)

        def step(cache, token):
            """Decodes one token."""
            return apply_method(model.extend, variables, token[:, None], cache)[::-1]

        _, states = jax.lax.scan(step, cache, jnp.asarray(target.T))
        stepped = apply_method(model.logits, variables, states[:, :, 0].swapaxes(0, 1))
        return out, gradient, stepped, packed(variables) if name in PACKED else None

    def packed(variables):
        row = np.concatenate([source[0], source[1, :4], [0, 0]])[None]
        targets = np.concatenate([target[0], target[1, :3], np.zeros(5, int)])[None]
        ids = [jnp.asarray(np.repeat([1, 2, 0], n))[None] for n in ((7, 4, 2), (5, 3, 5))]
        return model.apply(variables, row, targets, rows=Rows(tuple(ids)))

    out, gradient, stepped, together = run(variables)
    if reads:
        pooled, tokens = out
        close(pooled[2:], pooled[:2])
        close(tokens[2], tokens[0])
    else:
        (logits,) = out
        close(logits[2:], logits[:2])
        close(stepped, logits)
        if together is not None:
            close(together[0, :8], np.concatenate([logits[0], logits[1, :3]]))
    for path, x in jax.tree.leaves_with_path(gradient):
        assert np.all(np.isfinite(x)) and np.any(x != 0), jax.tree_util.keystr(path)


def test_named_models_round_trip_as_json():
    for make in ZOO.values():
        model = make()
        assert from_json(json.loads(json.dumps(to_json(model)))) == model


@functools.cache
def parameters(name):
    """Returns a model's number of parameters, which is computed without allocating them."""
    model = _scan_runs(ZOO[name]())  # scanned layers are faster to trace
    return num_elements(abstract_variables(model, *model.example(48, 32))[0]["params"])


MILLIONS = {
    # These numbers are from Narang et al. 2021 (table 2) and Tay et al. 2021.
    "mesh_random_base": 254,
    "mesh_factorized_base": 207,
    "mesh_dense_base": 224,
    "mesh_dense_plus_base": 243,
    "mesh_dense_plus_alpha_base": 243,
    "mesh_random_plus_base": 292,
    "mesh_random_plus_alpha_base": 292,
    "lightweight_convolution_base": 224,
    "dynamic_convolution_base": 256,
    # These numbers are from Bhojanapalli et al. 2020 (tables 1 to 3). They include the pooler and
    # the output head over tokens.
    "bert_large": 336,
    **dict(
        zip(
            (name for name in ZOO if re.match(r"bert_\d", name)),
            (168, 193, 218, 319, 130, 142, 218, 214, 252, 290, 327, 336, 336),
            strict=True,
        )
    ),
}


@pytest.mark.parametrize("name", MILLIONS)
def test_published_numbers_of_parameters(name):
    assert round(parameters(name) / 1e6) == MILLIONS[name]


def test_numbers_of_parameters_of_published_checkpoints():
    assert parameters("t5_1_1_base") == 247_577_856
    assert parameters("t5_base") == parameters("mesh_vanilla_base") == 222_903_552
    # The numbers of T5Gemma 2 do not include the vision tower. The technical report rounds them to
    # 370 M, 1.7 B and 7 B (Zhang et al. 2025).
    assert parameters("t5gemma2_270m") == 368_424_832
    assert parameters("t5gemma2_1b") == 1_697_783_168
    assert parameters("t5gemma2_4b") == 7_089_112_576
    biases, vectors = 2 * 32 * 8, 512 * 768  # a bias for each stack, and a shared position table
    assert parameters("mesh_learned_dense_base") - parameters("mesh_dense_base") == vectors - biases
