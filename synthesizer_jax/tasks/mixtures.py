"""T5's mixtures with their exact rates, as plain dictionaries."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from synthesizer_jax.tasks.definitions import sentinel_name


@dataclasses.dataclass(frozen=True)
class ExamplesRate:
    """A rate by a task's number of training examples: ``min(count · scale, ceiling) ^ (1/temperature)``.

    Raffel et al. 2020, section 3.5.2. The examples are rows of the data set: unlike T5 with cached
    tasks, one of ReCoRD with several answers counts once.

    Attributes:
      ceiling: the artificial limit of the data sets' sizes; None: no limit.
      temperature: 1 samples in proportion to the sizes; more samples more equally.
      scale: a factor of the count.
    """

    ceiling: float | None = None
    temperature: float = 1.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise ValueError(f"ExamplesRate.{field.name} is {value}; it must be positive")

    def __call__(self, count: int) -> float:
        """Returns the rate of a task with `count` training examples."""
        scaled = min(count * self.scale, float("inf") if self.ceiling is None else self.ceiling)
        return float(scaled ** (1 / self.temperature))


Rate: TypeAlias = float | ExamplesRate
Rates: TypeAlias = Mapping[str, Rate]
FixedRates: TypeAlias = Mapping[str, float]

GLUE_RATES: FixedRates = types.MappingProxyType(
    {
        "glue_cola_v002": 8_551.0,
        "glue_sst2_v002": 67_349.0,
        "glue_mrpc_v002": 3_668.0,
        "glue_qqp_v002": 363_849.0,
        "glue_stsb_v002": 5_749.0,
        "glue_mnli_v002": 392_702.0,
        "glue_qnli_v002": 104_743.0,
        "glue_rte_v002": 2_490.0,
        "glue_mnli_mismatched_v002": 0.0,
        "glue_mnli_matched_v002": 0.0,
        "glue_ax_v002": 0.0,
    }
)
"""Numbers of training examples. WNLI is left out; WSC and DPR are trained on instead."""

WSC_DPR_RATES: FixedRates = types.MappingProxyType(
    {
        "dpr_v001_simple": 1_322.0,
        "super_glue_wsc_v102_simple_train": 259.0,
        "super_glue_wsc_v102_simple_eval": 0.0,
    }
)

SUPER_GLUE_RATES: FixedRates = types.MappingProxyType(
    {
        **WSC_DPR_RATES,
        "super_glue_boolq_v102": 9_427.0,
        "super_glue_cb_v102": 250.0,
        "super_glue_copa_v102": 400.0,
        "super_glue_multirc_v102": 27_243.0,
        "super_glue_record_v102": 138_854.0,
        "super_glue_rte_v102": 2_490.0,
        "super_glue_wic_v102": 5_428.0,
        "super_glue_axb_v102": 0.0,
        "super_glue_axg_v102": 0.0,
    }
)


CO_TRAINED = (
    "cnn_dailymail_v002",
    "squad_v010_allanswers",
    "wmt_t2t_ende_v003",
    "wmt15_enfr_v003",
    "wmt16_enro_v003",
)
"""The supervised tasks that T5 trains together with GLUE, SuperGLUE and `C4`."""

C4 = "c4_v020_unsupervised"
UNSUPERVISED_RATE = 1e6
"""T5's default of ``rate_unsupervised``."""

_LARGE_TRANSLATION = ("wmt_t2t_ende_v003", "wmt15_enfr_v003")
_LARGE = (*_LARGE_TRANSLATION, "cnn_dailymail_v002")


def _frozen(rates: Mapping[str, Rate]) -> Rates:
    return types.MappingProxyType(dict(rates))


def _equal(names: Iterable[str]) -> Rates:
    return _frozen(dict.fromkeys(names, 1.0))


def _by_examples(names: Iterable[str]) -> dict[str, Rate]:
    return dict.fromkeys(names, ExamplesRate())


def _joint() -> dict[str, float]:
    """Returns the rates of both benchmarks together; RTE is in both, so each copy has half of its rate."""
    rates = {**GLUE_RATES, **SUPER_GLUE_RATES}
    for name in ("glue_rte_v002", "super_glue_rte_v102"):
        rates[name] /= 2
    return rates


_PROPORTIONAL: Rates = _frozen({**_joint(), **_by_examples([*CO_TRAINED, C4])})


def _leave_one_out() -> dict[str, Rates]:
    """Returns T5's mixtures of everything but one task, or but one benchmark.

    RTE has its whole rate if one of the benchmarks is left out.
    """
    others = _by_examples([*CO_TRAINED, C4])
    mixtures: dict[str, Rates] = {
        "glue_v002_proportional": _frozen({**SUPER_GLUE_RATES, **others}),
        "super_glue_v102_proportional": _frozen({**GLUE_RATES, **others}),
    }
    for left_out in CO_TRAINED:
        rates = {name: rate for name, rate in _PROPORTIONAL.items() if name != left_out}
        mixtures[left_out] = _frozen(rates)
    return {f"leave_one_out_{name}": rates for name, rates in mixtures.items()}


MIXTURES: dict[str, Rates] = {
    "glue_v002_proportional": GLUE_RATES,
    "super_glue_v102_proportional": SUPER_GLUE_RATES,
    "super_glue_v102_proportional_sentinel": _frozen(
        {sentinel_name(name): rate for name, rate in SUPER_GLUE_RATES.items()}
    ),
    "wsc_dpr_simple_proportional": WSC_DPR_RATES,
    "glue_mnli_and_dev_v002": _equal(name for name in GLUE_RATES if "mnli" in name),
    # Known to T5's authors: RTE counts twice, and SQuAD and QNLI overlap.
    "en_mix": _frozen(
        {
            C4: UNSUPERVISED_RATE,
            **_by_examples([*GLUE_RATES, *SUPER_GLUE_RATES, "squad_v010_allanswers"]),
        }
    ),
    "all_equal": _equal(_PROPORTIONAL),
    "all_proportional": _PROPORTIONAL,
    "all_mix": _frozen({**_PROPORTIONAL, C4: UNSUPERVISED_RATE}),
    **_leave_one_out(),
    "large_supervised_equal": _equal(_LARGE),
    "large_supervised_proportional": _frozen(_by_examples(_LARGE)),
    "large_translation_equal": _equal(_LARGE_TRANSLATION),
    "squad_trivia_qa_equal": _equal(("squad_v010_allanswers", "trivia_qa_v010")),
    # Not a mixture of T5: GLUE and SuperGLUE without C4 and SQuAD.
    "glue_super_glue_proportional": _frozen(_joint()),
}
"""Sampling weights by mixture and task; a task is drawn in proportion to its weight."""
