"""Every alignment and mixer keeps the contract; so does one that a user makes up."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax import ALIGNMENTS, MIXERS
from synthesizer_jax.alignments import Alignment
from synthesizer_jax.attention import relative
from synthesizer_jax.registry import register
from tests.layers import oracles
from tests.layers.cases import ALIGNMENT_CASES, CASES
from tests.layers.contract import CONTRACT, Case, Subject


@register
class Parity(Alignment):
    """A made-up alignment: every head likes even distances by a learned amount."""

    @nn.compact
    def __call__(self, queries, keys, context):
        amount = self.param("amount", nn.initializers.ones_init(), (context.num_heads,))
        first, last = context.distance_range
        even = jnp.asarray(np.arange(first, last + 1) % 2 == 0, amount.dtype)
        return (relative(amount[:, None] * even[None], first=first),)


def parity(layer, p, constants, x, seen):
    n = x.shape[1]
    even = np.array([[(j - i) % 2 == 0 for j in range(n)] for i in range(n)])
    logits = p["align"]["amount"][None, :, None, None] * even
    weights = oracles.masked_softmax(logits, seen[:, None])
    values = np.einsum("bkd,dhe->bkhe", x, p["value"]["kernel"])
    return np.einsum("bhqk,bkhe,hed->bqd", weights, values, p["out"]["kernel"])


ALL = CASES | {"made up": Case(Case.of(Parity()).layer, parity)}


@pytest.fixture(scope="module", params=ALL)
def subject(request):
    return Subject(ALL[request.param])


LONG = (
    "scanned_is_looped",
    "ragged_prompts_decode_as_each_alone",
    "sharded_is_single",
    "nothing_is_infinite",
)
"""Checks of more than half a second for each of forty layers; `make slow` runs them."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in LONG else ()) for n in CONTRACT]
)
def test_contract(subject, name):
    CONTRACT[name](subject)


def test_every_registered_variant_has_a_case():
    inside = {type(c.layer.alignment).__name__ for c in ALIGNMENT_CASES.values()}
    assert inside == set(ALIGNMENTS)
    assert {type(c.layer).__name__ for c in CASES.values()} == set(MIXERS)
