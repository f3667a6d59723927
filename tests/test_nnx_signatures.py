"""Signatures, stubs and documentation of the NNX classes."""

import ast
import dataclasses
import inspect
import pathlib

import flax.linen as linen
import jax.numpy as jnp
import pytest
from flax import nnx

import synthesizer_jax
from synthesizer_jax import MIXERS, models
from synthesizer_jax import nnx as snnx
from synthesizer_jax.nnx import mixers as nnx_mixers
from synthesizer_jax.nnx import models as nnx_models
from tools.nnx_stubs import module_stub

LINEN = MIXERS | {
    cls.__name__: cls
    for cls in (
        models.Block,
        models.Encoder,
        models.EncoderDecoder,
        models.FeedForward,
        models.LanguageModel,
        models.Stack,
        models.UniversalStack,
    )
}
OPTIONS = {
    "cross": False,
    "deterministic": False,
    "in_features": inspect.Parameter.empty,
    "keep_rngs": True,
    "rngs": inspect.Parameter.empty,
}


@pytest.mark.parametrize("source", [nnx_mixers, nnx_models], ids=["mixers", "models"])
def test_the_stubs_are_current(source):
    stub = pathlib.Path(source.__file__).with_suffix(".pyi").read_text()
    is_current = ast.dump(ast.parse(stub)) == ast.dump(ast.parse(module_stub(source)))
    assert is_current, "run python -m tools.nnx_stubs"


@pytest.mark.parametrize("name", LINEN)
def test_a_class_has_the_linen_class_fields_types_and_documentation(name):
    cls, linen = getattr(snnx, name), LINEN[name]
    fields = {f.name: f for f in dataclasses.fields(linen) if f.name not in ("parent", "name")}
    parameters = dict(inspect.signature(cls).parameters)
    options = {k: parameters.pop(k).default for k in [*parameters] if k in OPTIONS}
    assert options == {k: OPTIONS[k] for k in options} and "rngs" in options
    assert ("in_features" in options) == (not issubclass(linen, models.TokenModel))
    assert list(parameters) == list(fields)
    for key, parameter in parameters.items():
        missing = fields[key].default is dataclasses.MISSING
        default = inspect.Parameter.empty if missing else fields[key].default
        assert (parameter.annotation, parameter.default) == (fields[key].type, default)
        assert (parameter.kind is inspect.Parameter.KEYWORD_ONLY) == fields[key].kw_only
    assert inspect.getdoc(cls).startswith(inspect.getdoc(linen))
    assert all(f"  {option}: " in inspect.getdoc(cls) for option in options)
    call = inspect.signature(cls.__call__).parameters
    linen_parameters = dict(inspect.signature(linen.__call__).parameters)
    assert list(call) == [
        *(k for k, p in linen_parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD),
        *("deterministic", "rngs", "sow_weights"),
        *(k for k, p in linen_parameters.items() if p.kind is inspect.Parameter.VAR_KEYWORD),
    ]


def test_instances_and_subclasses():
    layer = snnx.TalkingHeads(2, 4, in_features=8, rngs=nnx.Rngs(0))
    assert isinstance(layer, snnx.TalkingHeads) and not isinstance(layer, snnx.Attention)
    assert isinstance(layer, snnx.LinenModule) and isinstance(layer, nnx.Module)
    assert isinstance(nnx.clone(layer), snnx.TalkingHeads)
    assert list(inspect.signature(layer).parameters)[:2] == ["x", "kv"]

    class Mine(snnx.Attention):
        def __init__(self, width: int, rngs: nnx.Rngs):
            super().__init__(2, width // 2, in_features=width, rngs=rngs)

    assert Mine(8, nnx.Rngs(0)).head_dim == 4
    assert "num_heads" not in inspect.signature(Mine).parameters


def test_fields_are_read_only_attributes():
    layer = snnx.Attention(2, 4, dropout_rate=0.1, in_features=8, rngs=nnx.Rngs(0))
    assert (layer.num_heads, layer.dropout_rate) == (2, 0.1)
    assert layer.config == synthesizer_jax.Attention(2, 4, dropout_rate=0.1)
    with pytest.raises(AttributeError, match="Attention: dropout_rate is fixed at construction"):
        layer.set_attributes(dropout_rate=0.2)
    with pytest.raises(AttributeError, match="has no attribute 'heads'"):
        layer.heads  # noqa: B018


def test_a_users_linen_subclass():
    class OwnModule(synthesizer_jax.Attention):
        """A user's mixer."""

    layer = snnx.to_nnx(OwnModule(2, 4), in_features=8, rngs=nnx.Rngs(0))
    assert isinstance(layer, snnx.Attention) and type(layer).__name__ == "OwnModule"
    assert type(layer) is type(snnx.to_nnx(OwnModule(1, 2), in_features=8, rngs=nnx.Rngs(0)))


def test_errors():
    layer = snnx.Attention(2, 4, in_features=8, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="x has 7 features, but in_features=8"):
        layer(jnp.zeros((1, 3, 7)))
    for name in ("TalkingHeads", "EncoderDecoder"):
        cls = getattr(snnx, name)
        with pytest.raises(TypeError, match=rf"^{name}.__init__\(\) missing .*'rngs'"):
            cls(2, 4)
        assert list(inspect.signature(cls.__init__).parameters)[1:] == list(
            inspect.signature(cls).parameters
        )
    with pytest.raises(ValueError, match="Attention needs in_features"):
        snnx.to_nnx(synthesizer_jax.Attention(2, 4), rngs=nnx.Rngs(0))


def test_arguments_that_conflict_with_nnx_arguments_are_errors():
    class OwnModule(linen.Module):
        @linen.compact
        def __call__(self, x, deterministic=True):
            return x

    with pytest.raises(
        ValueError, match=r"OwnModule.__call__ has an argument 'deterministic', which NNX"
    ):
        snnx.to_nnx(OwnModule(), in_features=8, rngs=nnx.Rngs(0))


def test_the_nnx_form_of_multi_head_attention():
    linen_layer = synthesizer_jax.MultiHeadAttention(
        2, qkv_features=6, alignment=synthesizer_jax.Gaussian()
    )
    layer = snnx.to_nnx(linen_layer, in_features=8, rngs=nnx.Rngs(0), use_bias=False)
    assert isinstance(layer, snnx.MultiHeadAttention)
    assert (layer.qkv_features, layer.use_bias, layer.alignment) == (
        6,
        False,
        linen_layer.alignment,
    )
    assert layer(jnp.ones((1, 3, 8))).shape == (1, 3, 8)
    with pytest.raises(ValueError, match="no force_fp32_for_softmax in NNX; remove"):
        snnx.to_nnx(linen_layer.copy(force_fp32_for_softmax=True), in_features=8, rngs=nnx.Rngs(0))
