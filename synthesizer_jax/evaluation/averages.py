"""The averages of GLUE and SuperGLUE, in which every group of tasks has the same weight."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Results = Mapping[str, Mapping[str, float]]
"""Metrics by task name."""

GLUE_GROUPS: tuple[tuple[str, ...], ...] = (
    ("glue_cola_v002",),
    ("glue_sst2_v002",),
    ("glue_mrpc_v002",),
    ("glue_stsb_v002",),
    ("glue_qqp_v002",),
    ("glue_mnli_matched_v002", "glue_mnli_mismatched_v002"),
    ("glue_qnli_v002",),
    ("glue_rte_v002",),
)
"""The tasks of every group; the average does not include WNLI and AX."""

SUPER_GLUE_GROUPS: tuple[tuple[str, ...], ...] = (
    ("super_glue_boolq_v102",),
    ("super_glue_cb_v102",),
    ("super_glue_copa_v102",),
    ("super_glue_multirc_v102",),
    ("super_glue_record_v102",),
    ("super_glue_rte_v102",),
    ("super_glue_wic_v102",),
    ("super_glue_wsc_v102_simple_eval",),
)

BENCHMARKS = {"GLUE": GLUE_GROUPS, "SuperGLUE": SUPER_GLUE_GROUPS}


def averages(results: Results) -> dict[str, float]:
    """Returns the averages of the benchmarks of which all tasks have results."""
    return {
        name: _mean([_group_mean(results, group) for group in groups])
        for name, groups in BENCHMARKS.items()
        if _is_complete(results, groups)
    }


def _is_complete(results: Results, groups: Sequence[Sequence[str]]) -> bool:
    return all(results.get(task) for group in groups for task in group)


def _group_mean(results: Results, group: Sequence[str]) -> float:
    """Returns the mean over the tasks of a group of the mean of their metrics."""
    return _mean([_mean(list(results[task].values())) for task in group])


def _best_steps(by_step: Mapping[int, Results], benchmark: str) -> dict[tuple[str, ...], int]:
    """Returns the step with the highest mean of every group, as T5 selects it; the first of equal ones."""
    groups = BENCHMARKS[benchmark]
    steps = [s for s, results in sorted(by_step.items()) if _is_complete(results, groups)]
    best = {}
    for group in groups if steps else ():
        best[group] = _best({s: _group_mean(by_step[s], group) for s in steps})
    return best


def best_average(by_step: Mapping[int, Results], benchmark: str) -> float | None:
    """Returns the average of all groups, each at its own best step; None if no step has all tasks."""
    steps = _best_steps(by_step, benchmark)
    if not steps:
        return None
    return _mean([_group_mean(by_step[step], group) for group, step in steps.items()])


def best_single_step(by_step: Mapping[int, Results], benchmark: str) -> tuple[int, float] | None:
    """Returns the step with the highest average, and that average; None if no step has all tasks."""
    found = {s: averages(results).get(benchmark) for s, results in sorted(by_step.items())}
    whole = {s: value for s, value in found.items() if value is not None}
    if not whole:
        return None
    step = _best(whole)
    return step, whole[step]


def best_by_task(by_step: Mapping[int, Results]) -> dict[str, int]:
    """Returns the step with the highest mean of its metrics for every task, the first of equal ones."""
    means: dict[str, dict[int, float]] = {}
    for step, results in sorted(by_step.items()):
        for task, metrics in results.items():
            if metrics:
                means.setdefault(task, {})[step] = _mean(list(metrics.values()))
    return {task: _best(values) for task, values in means.items()}


def _best(values: Mapping[int, float]) -> int:
    """Returns the step with the highest value, the first of equal ones; NaN is less than any number."""
    return max(values, key=lambda step: (not math.isnan(values[step]), values[step]))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
