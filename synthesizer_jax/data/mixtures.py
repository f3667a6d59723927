"""T5's mixtures of GLUE and SuperGLUE with their exact rates, as plain dictionaries."""

from __future__ import annotations

import types
from collections.abc import Mapping

from synthesizer_jax.data.definitions import sentinel_name

Rates = Mapping[str, float]

GLUE_RATES: Rates = types.MappingProxyType(
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

WSC_DPR_RATES: Rates = types.MappingProxyType(
    {
        "dpr_v001_simple": 1_322.0,
        "super_glue_wsc_v102_simple_train": 259.0,
        "super_glue_wsc_v102_simple_eval": 0.0,
    }
)

SUPER_GLUE_RATES: Rates = types.MappingProxyType(
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


def _joint() -> Rates:
    """Returns the rates of both benchmarks together (T5's ``all_proportional``).

    RTE is part of both benchmarks, so each copy has half of its rate.
    """
    rates = {**GLUE_RATES, **SUPER_GLUE_RATES}
    for name in ("glue_rte_v002", "super_glue_rte_v102"):
        rates[name] /= 2
    return types.MappingProxyType(rates)


MIXTURES: dict[str, Rates] = {
    "glue_v002_proportional": GLUE_RATES,
    "super_glue_v102_proportional": SUPER_GLUE_RATES,
    "super_glue_v102_proportional_sentinel": types.MappingProxyType(
        {sentinel_name(name): rate for name, rate in SUPER_GLUE_RATES.items()}
    ),
    "wsc_dpr_simple_proportional": WSC_DPR_RATES,
    "glue_mnli_and_dev_v002": types.MappingProxyType(
        dict.fromkeys(
            ("glue_mnli_v002", "glue_mnli_mismatched_v002", "glue_mnli_matched_v002"), 1.0
        )
    ),
    # Not a mixture of T5: GLUE and SuperGLUE without C4 and SQuAD.
    "glue_super_glue_proportional": _joint(),
}
"""Sampling weights by mixture and task; a task is drawn in proportion to its weight."""
