"""Runs the contract's checks for all alignments and mixers."""

import json

import pytest

from synthesizer_jax import ALIGNMENTS, MIXERS
from synthesizer_jax.base.registry import from_json, to_json
from tests.layers.cases import ALIGNMENT_CASES, CASES
from tests.layers.contract import CONTRACT, FURTHER, Subject, eager_is_compiled_and_nothing_infinite

DISTINCT = {  # structures that shard, decode and round differently
    *("Dense", "DotProduct", "DotProduct, rotary", "DotProduct, grouped", "DynamicConvolution"),
    *("FactorizedDense", "FactorizedRandom", "Gaussian"),
    *("Linformer", "Mixture of everything", "PerHead of mixtures", "Random", "ALR of a decoder"),
    *("TalkingHeads", "TokenFeedForward"),
    *("MergedAttention, as in T5Gemma 2", "MergedAttention over Random"),
}
EAGER = {  # the check is slow, and these cases cover the operations of all other cases
    *(
        "DotProduct, grouped",
        "DynamicConvolution",
        "Gaussian",
        "Linformer",
        "Mixture of everything",
    ),
    *("ALR of a decoder", "TalkingHeads", "MergedAttention, as in T5Gemma 2"),
}
CHECKS = [(n, check) for n in CASES for check in CONTRACT + (FURTHER if n in DISTINCT else ())]
CHECKS += [(n, eager_is_compiled_and_nothing_infinite) for n in CASES if n in EAGER]
IDS = [f"{name}-{check.__name__}" for name, check in CHECKS]


@pytest.fixture(scope="module")
def subject(request):
    return Subject(CASES[request.param])


@pytest.mark.parametrize(
    ("subject", "check"), CHECKS, ids=IDS, indirect=["subject"], scope="module"
)
def test_contract(subject, check):
    check(subject)


def test_json_round_trips():
    for name, case in CASES.items():
        again = from_json(json.loads(json.dumps(to_json(case.layer))))
        assert again == case.layer and hash(again) == hash(case.layer), name


def test_every_registered_variant_has_a_case():
    inside = {type(c.layer.alignment).__name__ for c in ALIGNMENT_CASES.values()}
    assert inside == set(ALIGNMENTS)
    assert {type(c.layer).__name__ for c in CASES.values()} == set(MIXERS)
    assert set(CASES) >= DISTINCT
