"""The tasks and mixtures that T5 0.9.4 registers in SeqIO, and which are not in this package."""

from __future__ import annotations

_GLUE = ("cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "mnli_matched", "mnli_mismatched", "qnli")
_SUPER_GLUE = ("boolq", "cb", "copa", "multirc", "record", "rte", "wic", "axb", "axg")
_WSC = "super_glue_wsc_v102_simple"

TASKS: tuple[str, ...] = (
    *(f"glue_{name}_v002" for name in (*_GLUE, "rte", "wnli", "ax")),
    "glue_wnli_v002_simple_eval",
    *(f"super_glue_{name}_v102" for name in _SUPER_GLUE),
    *(f"super_glue_{name}_v102_1_sentinel" for name in _SUPER_GLUE),
    *(f"{_WSC}_{split}" for split in ("train", "eval")),
    *(f"{_WSC}_1_sentinel_{split}" for split in ("train", "eval")),
    "dpr_v001_simple",
    "dpr_v001_simple_1_sentinel",
    "cnn_dailymail_v002",
    "wmt_t2t_ende_v003",
    "wmt14_ende_v003",
    "wmt14_enfr_v003",
    "wmt15_enfr_v003",
    "wmt16_enro_v003",
    "wmt19_ende_v003",
    "squad_v010",
    "squad_v010_allanswers",
    "squad_v010_allanswers_span",
    "squad_v010_context_free",
    "trivia_qa_v010",
    "c4_v220_span_corruption",
    "c4_v220_iid_denoising",
    "c4_v220_prefix_lm",
    "c4_v220_full_lm",
    *(f"c4{variant}_v020_unsupervised" for variant in ("", "_noclean", "_realnewslike")),
    "c4_webtextlike_v020_unsupervised",
    "c4_prefix_lm_objective_encoder_decoder_architecture",
    "c4_prefix_lm_objective_decoder_architecture",
    "wikipedia_20190301.en_v003_unsupervised",
)

MIXTURES: tuple[str, ...] = (
    "glue_v002_proportional",
    "super_glue_v102_proportional",
    "super_glue_v102_proportional_sentinel",
    "glue_mnli_and_dev_v002",
    "en_mix",
    "all_equal",
    "all_proportional",
    "all_mix",
    "leave_one_out_glue_v002_proportional",
    "leave_one_out_super_glue_v102_proportional",
    "leave_one_out_cnn_dailymail_v002",
    "leave_one_out_squad_v010_allanswers",
    "leave_one_out_wmt_t2t_ende_v003",
    "leave_one_out_wmt15_enfr_v003",
    "leave_one_out_wmt16_enro_v003",
    "large_supervised_equal",
    "large_supervised_proportional",
    "large_translation_equal",
    "squad_trivia_qa_equal",
    "wsc_dpr_simple_proportional",
)

MISSING = (
    "c4_v220_iid_denoising",
    "c4_prefix_lm_objective_encoder_decoder_architecture",
    "c4_prefix_lm_objective_decoder_architecture",
)
"""The tasks of T5 that this package does not have; docs/tasks.md says why."""
