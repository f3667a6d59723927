"""Rows of a table differ in nothing but what the table compares."""

import pytest
from synthesizer_jax.recipes import translate

from synthesizer_jax import DotProduct
from synthesizer_jax.initializers import FanIn
from synthesizer_jax.models import stacks_of
from synthesizer_jax.registry import fields_of


def dot_products(mixer, width=None):
    """The dot products inside a mixer, and the width of a head of each."""
    fields = fields_of(mixer)
    if isinstance(mixer, DotProduct):
        return [(mixer, width)]
    width = fields.get("head_dim", width)
    parts = [fields.get("alignment"), *fields.get("parts", ())]
    return [found for part in parts if part is not None for found in dot_products(part, width)]


@pytest.mark.parametrize("recipe", translate.RECIPES.values(), ids=translate.RECIPES)
def test_translation_recipes_share_one_dot_product_and_one_rate_of_dropout(recipe):
    model = recipe().model
    blocks = [run.block for stack in stacks_of(model).values() for run in stack.runs]
    mixers = [m for b in blocks for m in (b.self_mixer, b.cross_mixer) if m is not None]
    assert {x.dropout_rate for x in (*mixers, *blocks)} == {translate.DROPOUT}
    found = [pair for mixer in mixers for pair in dot_products(mixer)]
    assert found, "no recipe is without a learned cross-attention"
    for dot, width in found:
        assert dot == DotProduct(scale=1.0, query_init=FanIn(1.0 / width))
