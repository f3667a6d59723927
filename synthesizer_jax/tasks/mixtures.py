"""T5's mixtures with their exact rates, as plain dictionaries."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeAlias

from synthesizer_jax.tasks import synthetic
from synthesizer_jax.tasks.definitions import sentinel_name


@dataclasses.dataclass(frozen=True)
class ExamplesRate:
    """A rate that depends on the number of training examples of a task.

    The rate is ``min(count · scale, ceiling) ^ (1/temperature)`` (Raffel et al. 2020, section
    3.5.2). The count is the number of rows in the data set. If T5 uses cached tasks, it counts a
    row of ReCoRD once for each of its answers. This package counts each row of ReCoRD once.

    Attributes:
      ceiling: an artificial limit on the number of examples of a data set.
      temperature: the temperature in the formula. With a temperature of 1, tasks are sampled in
        proportion to their sizes. With a higher temperature, tasks are sampled more equally.
      scale: a factor by which the count is multiplied.
    """

    ceiling: float = float("inf")
    temperature: float = 1.0
    scale: float = 1.0

    def __call__(self, count: int) -> float:
        """Returns the rate of a task with `count` training examples."""
        return float(min(count * self.scale, self.ceiling) ** (1 / self.temperature))


Rates: TypeAlias = Mapping[str, float | ExamplesRate]
"""The rate of each task of a mixture, by the name of the task."""

GLUE_RATES: dict[str, float] = {
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
"""The rates of the tasks of GLUE, which are their numbers of training examples.

WNLI is left out, because WSC and DPR are used for training instead. Tasks with the rate 0 are only
evaluated.
"""

WSC_DPR_RATES: dict[str, float] = {
    "dpr_v001_simple": 1_322.0,
    "super_glue_wsc_v102_simple_train": 259.0,
    "super_glue_wsc_v102_simple_eval": 0.0,
}

SUPER_GLUE_RATES: dict[str, float] = {
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

_JOINT = GLUE_RATES | SUPER_GLUE_RATES
# RTE is part of GLUE and of SuperGLUE, so each of the two RTE tasks gets half of RTE's rate.
_JOINT |= dict.fromkeys(("glue_rte_v002", "super_glue_rte_v102"), 1_245.0)

LARGE_TRANSLATION = ("wmt_t2t_ende_v003", "wmt15_enfr_v003")
CO_TRAINED = ("cnn_dailymail_v002", "squad_v010_allanswers", *LARGE_TRANSLATION, "wmt16_enro_v003")
"""The supervised tasks that T5 trains together with GLUE, SuperGLUE and `C4`."""

C4 = "c4_v020_unsupervised"
UNSUPERVISED_RATE = 1e6
"""T5's default of ``rate_unsupervised``."""


def _by_examples(*names: str) -> Rates:
    """Returns rates that are equal to the tasks' numbers of training examples."""
    return dict.fromkeys(names, ExamplesRate())


_OTHERS = _by_examples(*CO_TRAINED, C4)
_PROPORTIONAL: Rates = {**_JOINT, **_OTHERS}

MIXTURES: dict[str, Rates] = {
    "glue_v002_proportional": GLUE_RATES,
    "super_glue_v102_proportional": SUPER_GLUE_RATES,
    "super_glue_v102_proportional_sentinel": {
        sentinel_name(name): rate for name, rate in SUPER_GLUE_RATES.items()
    },
    "wsc_dpr_simple_proportional": WSC_DPR_RATES,
    "glue_mnli_and_dev_v002": dict.fromkeys((name for name in GLUE_RATES if "mnli" in name), 1.0),
    # T5's authors know that RTE counts twice in this mixture, and that SQuAD and QNLI overlap.
    "en_mix": {
        C4: UNSUPERVISED_RATE,
        **_by_examples(*GLUE_RATES, *SUPER_GLUE_RATES, "squad_v010_allanswers"),
    },
    "all_equal": dict.fromkeys(_PROPORTIONAL, 1.0),
    "all_proportional": _PROPORTIONAL,
    "all_mix": {**_PROPORTIONAL, C4: UNSUPERVISED_RATE},
    # Each of the following mixtures leaves out one benchmark or one task. If GLUE or SuperGLUE is
    # left out, the RTE task of the other benchmark has the full rate of RTE.
    "leave_one_out_glue_v002_proportional": {**SUPER_GLUE_RATES, **_OTHERS},
    "leave_one_out_super_glue_v102_proportional": {**GLUE_RATES, **_OTHERS},
    **{
        f"leave_one_out_{left_out}": {n: r for n, r in _PROPORTIONAL.items() if n != left_out}
        for left_out in CO_TRAINED
    },
    "large_supervised_equal": dict.fromkeys((*LARGE_TRANSLATION, "cnn_dailymail_v002"), 1.0),
    "large_supervised_proportional": _by_examples(*LARGE_TRANSLATION, "cnn_dailymail_v002"),
    "large_translation_equal": dict.fromkeys(LARGE_TRANSLATION, 1.0),
    # T5 does not have this mixture, which consists of GLUE and SuperGLUE without C4 and SQuAD.
    "glue_super_glue_proportional": _JOINT,
    **synthetic.MIXTURES,
}
"""The rate of each task, by mixture and task. A task is drawn in proportion to its rate."""
